"""What a checkpoint's ``quantization_config`` says against what its tensors are."""

from __future__ import annotations

import re
from collections.abc import Collection

from fastlayers.errors import ArgumentError
from fastlayers.quant.block_quant import grid_of
from fastlayers.quant.spec import QuantSpec
from fastlayers_models.checkpoint import Checkpoint

# Format -> (dtype of its codes as safetensors spells it, endings of the names of its scales).
_EXPECTED = {
    "fp8_block": ("F8_E4M3", ("_scale_inv",)),
    "fp8_tensor": ("F8_E4M3", ("_scale_inv", "_scale")),
    "fp8_channel": ("F8_E4M3", ("_scale_inv", "_scale")),
    "int8": ("I8", ("_scale",)),
}
# Weights by their names; GPT-OSS stacks those of all experts, as one tensor or as MXFP4's blocks.
_WEIGHT = re.compile(r"\.weight$|\.experts\.(?:gate_up|down)_proj(?:_blocks)?$")
_CODES = ("F8_E4M3", "F8_E5M2", "I8")
# Codes of 4 and 8 bits in words, as AWQ, GPTQ and compressed-tensors call them.
_WORDS = re.compile(r"\.(?:qweight|qzeros|weight_packed|weight_zero_point)$")


def wrong_words(checkpoint: Checkpoint, name: str) -> str | None:
    """Return what is wrong with a tensor that holds codes in words of 32 bits; other tensors are not looked at."""
    dtype = checkpoint.dtype(name)
    return f"{name} is {dtype}, its codes are read from I32 words" if _WORDS.search(name) and dtype != "I32" else None


def check_quantization(checkpoint: Checkpoint, quantised: Collection[str]) -> list[str]:
    """Return a sentence for each kind of contradiction, naming the configuration's words and the first tensor.

    ``quantised`` are the tensors that a model built from this configuration wants as codes. Only headers are read.
    MXFP4 weights are looked for by their names, ``…_blocks``.
    """
    config = checkpoint.config.get("quantization_config")
    try:
        spec = QuantSpec.from_config(config)
    except ArgumentError:
        return []
    said = (
        f"quantization_config says quant_method {config['quant_method']!r}"
        if config
        else "there is no quantization_config"
    )
    found: dict[str, list[tuple[str, str]]] = {}
    for name in checkpoint.in_file_order(n for n in checkpoint.names() if _WEIGHT.search(n)):
        if not name.endswith(".weight"):
            kind = _mxfp4(checkpoint, spec, name)
        else:
            kind = None if spec.format == "mxfp4" else _contradiction(checkpoint, spec, name, name in quantised)
        if kind is not None:
            found.setdefault(kind[0], []).append((name, kind[1]))
    return [
        f"{said}{words}, but {tensors[0][0]} {tensors[0][1]}"
        + (f" (and {len(tensors) - 1} more)" if len(tensors) > 1 else "")
        + f", see {checkpoint.file_of[tensors[0][0]].name}"
        for words, tensors in found.items()
    ]


def _mxfp4(checkpoint: Checkpoint, spec: QuantSpec, name: str) -> tuple[str, str] | None:
    """Return the same as :func:`_contradiction` for the stacked weights of experts, packed or not."""
    dtype, format = checkpoint.dtype(name), spec.for_module(name.rpartition(".")[0]).format
    if not name.endswith("_blocks"):
        return (" (U8 blocks for experts)", f"is {dtype}") if format == "mxfp4" else None
    if format != "mxfp4":
        return "", f"is {dtype}, in MXFP4"
    scales = name.removesuffix("_blocks") + "_scales"
    if scales not in checkpoint.file_of:
        return " (U8 blocks with scales)", f"has no {scales}"
    if dtype != "U8":
        return " (U8 blocks)", f"is {dtype}"
    if checkpoint.dtype(scales) != "U8":
        return " (U8 scales)", f"has scales that are {checkpoint.dtype(scales)}"
    wanted, given = checkpoint.shape(name)[:-1], checkpoint.shape(scales)
    return (
        (" (a scale for each block)", f"has scales {list(given)} instead of {list(wanted)}")
        if given != wanted
        else None
    )


def _contradiction(checkpoint: Checkpoint, spec: QuantSpec, name: str, quantised: bool) -> tuple[str, str] | None:
    """Return (what the configuration says, what the tensor is) where they do not go together."""
    dtype, module = checkpoint.dtype(name), name.removesuffix(".weight")
    own = spec.for_module(module)
    if own.format == "none":
        skipped = " and keeps this module out of it" if spec.format != "none" else ""
        return (skipped, f"is {dtype}") if dtype in _CODES else None
    if own.format not in _EXPECTED:
        # Weights alone have names of their own layouts: what lacks is listed as missing.
        return None
    code, endings = _EXPECTED[own.format]
    scale = next((name + ending for ending in endings if name + ending in checkpoint.file_of), None)
    if dtype in _CODES and dtype != code:
        return f" ({code} codes)", f"is {dtype}"
    if dtype == code and scale is None:
        return f" ({code} with scales)", f"has no {name}{endings[0]}"
    if dtype not in _CODES:
        return (f" ({code} codes)", f"is {dtype}") if scale is not None or quantised else None
    shape = checkpoint.shape(name)
    if own.format == "fp8_block" and scale is not None and len(shape) == 2:
        wanted, given = grid_of(*shape, own.block_size), checkpoint.shape(scale)
        if given != wanted:
            blocks = f" with weight_block_size {list(own.block_size)}"
            return blocks, f"{list(shape)} has scales {list(given)} instead of {list(wanted)}"
    return None
