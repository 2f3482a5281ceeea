"""The README of a converted checkpoint: what it is, from what and by which command, and who can read it.

The original's README describes other weights. It goes along as ``README.original.md``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from fastlayers import __version__

ORIGINAL = "README.original.md"
# Stands in every README that is made here.
MARK = "<!-- fastlayers convert -->"
# Why matrices of linear layers are left as they are, by the reasons of ``convert``.
WHY = {
    "ragged": "not a multiple of 128; stock transformers misreads ragged blocks (--ragged is for our loader)",
    "absorbed": "multiplied into queries and outputs by MLA",
    "stacked": "all experts in one tensor, for which the format has no spelling",
    "encoder": "vision or audio",
}
_STORED = {
    "fp8-block": "e4m3 with one fp32 scale per 128×128 block (`weight_scale_inv`)",
    "int8": "int8 with one fp32 scale per output channel (`weight_scale`)",
}
_BOTH = "stock transformers and `fastlayers_models`"
_OURS = "`fastlayers_models` only; stock transformers refuses it, or loads it as other weights"


def quantised_readme(
    source: Path, target: Path, format: str, ragged: bool, quantised: int, kept: Mapping[str, Sequence[str]],
    sizes: tuple[int, int],
) -> str:  # fmt: skip
    """Return the README of a quantised checkpoint; ``sizes``: bytes of all tensors before and after."""
    before, after = (f"{size / 1e9:.3g} GB" for size in sizes)
    facts = [
        f"**Weights**: {quantised} matrices of linear layers and experts are {_STORED[format]}; {before} became "
        f"{after}. Embeddings, norms, routers, biases and the vocabulary head are as they were.",
    ]
    for reason, modules in kept.items():
        alike = Counter(re.sub(r"\.\d+(?=\.)", ".*", name) for name in modules)
        listed = ", ".join(f"`{name}` ({count})" for name, count in alike.items())
        facts.append(f"**Also as they were**, {WHY[reason]}: {listed}.")
    facts.append(f"**Read by**: {_OURS if ragged or format == 'int8' else _BOTH}.")
    command = f"fastlayers convert {_name(source)} {_name(target)} --format {format}{' --ragged' if ragged else ''}"
    return _readme(source, target, command, facts)


def dequantised_readme(source: Path, target: Path, format: str, dtype: torch.dtype) -> str:
    """Return the README of a checkpoint that was multiplied out from ``format`` to ``dtype``."""
    word = str(dtype).removeprefix("torch.")
    facts = [
        f"**Weights**: what was quantised ({format}) is multiplied out and rounded to {word}; nothing that "
        "quantisation lost comes back. All other tensors are as they were.",
        f"**Read by**: {_BOTH}.",
    ]
    command = f"fastlayers convert {_name(source)} {_name(target)} --format bf16"
    if dtype != torch.bfloat16:
        command = f'fastlayers_models.convert.dequantize_checkpoint("{_name(source)}", "{_name(target)}", {dtype})'
    return _readme(source, target, command, facts)


def originals_readme(source: Path) -> Path | None:
    """Return the README of the unconverted checkpoint: the source's own, unless the source is a conversion too."""
    found = {file.name.lower(): file for file in source.iterdir() if file.is_file()}
    kept, own = found.get(ORIGINAL.lower()), found.get("readme.md")
    if kept is not None or own is None or MARK in own.read_text(errors="replace"):
        return kept
    return own


def _readme(source: Path, target: Path, command: str, facts: list[str]) -> str:
    if originals_readme(source) is not None:
        facts.append(
            f"**The original**: its README is [{ORIGINAL}]({ORIGINAL}); see there for licence and terms. What "
            "is measured there was measured with the original's weights."
        )
    listed = "\n".join(f"- {fact}" for fact in facts)
    made = f"Converted from {_name(source)} with fastlayers {__version__}, and not by the original's authors:"
    return f"# {_name(target)}\n\n{made}\n\n```\n{command}\n```\n\n{listed}\n\n{MARK}\n"


def _name(folder: Path) -> str:
    """Return a directory's name, or the one that a snapshot of the hub has there."""
    resolved = folder.resolve()
    for parent in resolved.parents:
        if parent.name.startswith("models--"):
            return parent.name.removeprefix("models--").replace("--", "/", 1)
    return resolved.name
