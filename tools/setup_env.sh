#!/usr/bin/env bash
# Make a virtual environment with this project in it, in editable mode.
#
#   tools/setup_env.sh VENV [EXTRAS]        EXTRAS as in "dev,server"
#
# PYTHON  the interpreter to make it with (default: the first python3 that is new enough)
# TORCH   what pip is to install as torch (the Makefile has a default); pip options may follow the requirement
#
# Torch comes first and alone: from then on its version is pinned, so nothing that is installed later can
# replace a CPU build by several GB of CUDA packages.
set -euo pipefail

venv=$1
extras=${2:-}
torch=${TORCH:?set TORCH to a requirement, such as torch==2.13.0}
cd "$(dirname "$0")/.."

new_enough='import sys; sys.exit(sys.version_info < (3, 11))'

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11; do
        if "$candidate" -c "$new_enough" 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    echo "setup: no Python 3.11 or newer found; name one with PYTHON=..." >&2
    return 1
}

pip_install() {
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    echo "setup: $venv with $("$python" --version)"
    if ! "$python" -m venv "$venv"; then
        echo "setup: $python cannot make a virtual environment (Debian: apt-get install python3-venv)" >&2
        exit 1
    fi
fi

# The constraints of everything but torch and triton, which belong together.
grep -vE '^(torch|triton)=' constraints.txt >"$venv/constraints.txt"
echo "setup: $torch"
# Not quoted: TORCH may carry pip options.
# shellcheck disable=SC2086
if ! pip_install --constraint "$venv/constraints.txt" $torch 2>"$venv/torch.log"; then
    if [[ $torch != *+cpu ]]; then
        cat "$venv/torch.log" >&2
        exit 1
    fi
    # pip knows no CPU build: the default build works too, it is only large.
    echo "setup: pip found no $torch; installing ${torch%+cpu}, which may fetch several GB of CUDA packages." >&2
    echo "  A CPU build is much smaller. Tell pip where one is:  PIP_FIND_LINKS=FOLDER make ..." >&2
    echo "  or name an index that has one:                       make ... TORCH='$torch --index-url URL'" >&2
    # shellcheck disable=SC2086
    pip_install --constraint "$venv/constraints.txt" ${torch%+cpu}
fi

"$venv/bin/python" - constraints.txt >>"$venv/constraints.txt" <<'PY'
"""Pin the torch that was installed; pin our Triton only where torch does not bring its own."""
import pathlib
import re
import sys
from importlib import metadata

print(f"torch=={metadata.version('torch')}")
own_triton = any(re.match(r"triton\b(?!-)", r) and "extra ==" not in r for r in metadata.requires("torch") or [])
if not own_triton:
    lines = pathlib.Path(sys.argv[1]).read_text().splitlines()
    print(*(line for line in lines if line.startswith("triton=")), sep="\n")
PY

target=.
[ -z "$extras" ] || target=".[$extras]"
echo "setup: fastlayers${extras:+ with $extras}"
pip_install --constraint "$venv/constraints.txt" --editable "$target"
