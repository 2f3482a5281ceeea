#!/usr/bin/env bash
# Run the CPU tests against other versions of what the library stands on. Use it through `make test-matrix`.
#
#   tools/test_matrix.sh VENV "TESTS" [COLUMN ...]
#
# A column is an environment under .venv-matrix/ that holds only the package under test; everything else comes
# from VENV, which stays as it is.
set -euo pipefail

base=$(cd "$1" && pwd)
read -ra tests <<<"$2"
shift 2
cd "$(dirname "$0")/.."
columns=("$@")
[ ${#columns[@]} -gt 0 ] ||
    columns=(triton-newest transformers-5.15 transformers-newest kernels-old kernels-new kernels-broken)

site_packages() {
    "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

# Make .venv-matrix/COLUMN; packages named after it are installed there and nowhere else.
layered_env() {
    local env=.venv-matrix/$1
    shift
    if [ ! -x "$env/bin/python" ]; then
        "$base/bin/python" -m venv "$env"
        # addsitedir, not a bare path: the base's own .pth files (the editable install) count too.
        echo "import site; site.addsitedir('$(site_packages "$base")')" >"$(site_packages "$env")/_base.pth"
    fi
    if [ $# -gt 0 ]; then
        # The newest of everything would replace torch as well.
        grep -E '^(torch|numpy)' "$base/constraints.txt" >"$env/constraints.txt"
        "$env/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade \
            --constraint "$env/constraints.txt" "$@"
    fi
}

run_column() {
    local column=$1 env=.venv-matrix/$1 path=
    case $column in
    triton-newest) layered_env "$column" triton ;;
    transformers-newest) layered_env "$column" transformers ;;
    transformers-*) layered_env "$column" "transformers==${column#transformers-}.*" ;;
    kernels-old | kernels-new | kernels-broken)
        layered_env "$column"
        path=$env/stubs
        "$env/bin/python" tools/stub_packages.py "${column#kernels-}" "$path"
        ;;
    *)
        echo "test_matrix: unknown column $column" >&2
        return 2
        ;;
    esac
    echo "== $column: $("$env/bin/python" -c '
from importlib.metadata import version
print(*(f"{name} {version(name)}" for name in ("torch", "triton", "transformers")), sep=", ")')"
    TRITON_INTERPRET=1 PYTHONPATH=${path:+$PWD/$path} "$env/bin/python" -m pytest -m "$CPU_TESTS" \
        -n "$WORKERS" --dist loadfile "${tests[@]}"
}

failed=()
for column in "${columns[@]}"; do
    # Not `run_column || ...`: that would switch off set -e inside it.
    set +e
    (set -e; run_column "$column")
    status=$?
    set -e
    [ $status -eq 0 ] || failed+=("$column")
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "test-matrix: failed: ${failed[*]}"
    exit 1
fi
echo "test-matrix: all passed: ${columns[*]}"
