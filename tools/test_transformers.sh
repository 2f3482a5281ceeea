#!/usr/bin/env bash
# test_transformers.sh VENV SOURCE: transformers' own tests of the patched families, on patched models.
# SOURCE is a checkout of transformers at the tag of the installed version; nothing of it is kept here.
set -euo pipefail
venv=$1 source=${2:-} root=$(cd "$(dirname "$0")/.." && pwd)
python=$root/$venv/bin/python
[ -x "$python" ] || python=$venv/bin/python

skip() { echo "skipped: $1"; exit 0; }

[ -n "$source" ] || skip "no source of transformers; make test-transformers SOURCE=path/to/transformers"
[ -d "$source" ] || { echo "SOURCE=$source is not a directory"; exit 2; }
version=$("$python" -c 'from importlib.metadata import version; print(version("transformers"))')
here=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' "$source/src/transformers/__init__.py" 2>/dev/null || true)
[ "$here" = "$version" ] || { echo "SOURCE is transformers ${here:-without a version}, installed is $version"; exit 2; }
for file in tests/test_modeling_common.py tests/generation/test_utils.py; do
    [ -f "$source/$file" ] || skip "$source has no $file: a checkout of the tag v$version is needed, not the archive of the package"
done
for package in parameterized datasets; do
    "$python" -c "import $package" 2>/dev/null || skip "the package $package is not installed, which transformers' tests import"
done

files=()
for family in llama qwen2 qwen2_moe qwen3 qwen3_moe deepseek_v2 deepseek_v3 gpt_oss; do
    files+=("tests/models/$family/test_modeling_$family.py")
done
cd "$source"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONPATH="$root/src:$root/tools${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m pytest -p transformers_suite -q -p no:cacheprovider "${files[@]}" "${@:3}"
