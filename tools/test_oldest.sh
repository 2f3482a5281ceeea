#!/usr/bin/env bash
# Run tests under the oldest Python here that the project supports, with the packages of an environment.
#
#   tools/test_oldest.sh VENV [TESTS...]        without TESTS: those that lean on the standard library
#
# An interpreter of the environment's own minor version (3.11.2 beside 3.11.7) runs them with the environment's
# packages, in VENV-oldest; for another one everything is installed there. Where there is only one Python, nothing runs.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=$1
shift
[ $# -gt 0 ] || set -- tests/runtime/test_kernel_cache.py tests/registry/test_plugins.py \
    tests/server/test_cache_command.py tests/models/test_loader.py tests/models/test_convert_safety.py \
    tests/models/test_config.py tests/models/test_checkpoint_files.py

version='import sys; print("%d.%d.%d" % sys.version_info[:3] if sys.version_info >= (3, 11) else "")'
ours=$("$venv/bin/python" -c "$version")

# Every python3 and python3.N on the path and where systems keep them, oldest first: version, then place.
oldest=$(
    IFS=:
    {
        echo "$ours $venv"
        for folder in $PATH /usr/local/bin /usr/bin; do
            for python in "$folder"/python3 "$folder"/python3.[0-9] "$folder"/python3.[0-9][0-9]; do
                [ -x "$python" ] || continue
                found=$("$python" -c "$version" 2>/dev/null) || continue
                [ -z "$found" ] || echo "$found $python"
            done
        done
    } | sort -V | head -n 1
)
if [ "${oldest%% *}" = "$ours" ]; then
    echo "test-oldest: skipped; no supported Python here is older than the environment's $ours"
    exit 0
fi
found=${oldest%% *}
python=${oldest#* }
echo "test-oldest: Python $found ($python); the environment has $ours"
if [ "${found%.*}" = "${ours%.*}" ]; then
    "$python" -m venv --clear --without-pip "$venv-oldest"
    packages='import sysconfig; print(sysconfig.get_path("purelib"))'
    # A .pth file, not PYTHONPATH: it holds for what tests start as well.
    printf '%s\n' "$PWD/src" "$PWD/models" "$PWD/server" "$("$venv/bin/python" -c "$packages")" \
        >"$("$venv-oldest/bin/python" -c "$packages")/shared.pth"
else
    PYTHON=$python bash tools/setup_env.sh "$venv-oldest" dev,server
fi
exec "$venv-oldest/bin/python" -m pytest -p no:cacheprovider -m "${CPU_TESTS:?}" "$@"
