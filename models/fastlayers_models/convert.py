"""Making an FP8-block checkpoint from a bf16 one, and back, shard by shard.

What is quantised: matrices of linear layers and experts. Embeddings, norms, routers, biases and the vocabulary head
stay as they are. Matrices with ragged last blocks (rows or columns not a multiple of 128) stay too unless asked for,
because stock transformers infers the block size from the scale grid and misreads them; they are listed in
``modules_to_not_convert``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fastlayers.errors import ArgumentError
from fastlayers.quant.fp8_linear.blocks import dequantize_block_weight, quantize_block_weight
from fastlayers.quant.spec import QuantSpec
from fastlayers_models.checkpoint import INDEX, Checkpoint

BLOCK = 128
# Modules that no DeepSeek checkpoint quantises.
KEPT = ("embed_tokens", "lm_head", "gate", "eh_proj", "shared_head.head")


def quantisable(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a checkpoint tensor is the matrix of a linear that FP8 checkpoints quantise."""
    module = name.removesuffix(".weight")
    return (
        name.endswith(".weight") and len(shape) == 2 and not any(module == k or module.endswith("." + k) for k in KEPT)
    )


def ragged(shape: tuple[int, ...]) -> bool:
    """Whether a matrix has a last block of fewer than 128 rows or columns."""
    return any(size % BLOCK for size in shape)


def convert_to_fp8_block(
    source: str | Path,
    target: str | Path,
    *,
    include_ragged: bool = False,
    progress: Callable[[str], Any] | None = None,
) -> list[str]:
    """Write an FP8-block version of a checkpoint.

    Parameters
    ----------
    source : str or Path
        Directory of a bf16, fp16 or fp32 checkpoint.
    target : str or Path
        Directory to make; must not exist or be empty. ``config.json`` is written last, so that an interrupted
        conversion does not look finished.
    include_ragged : bool
        Quantise ragged matrices too: ``fastlayers_models`` reads them, stock transformers does not.
    progress : callable, optional
        Called with each tensor's name.

    Returns
    -------
    list[str]
        Modules left unquantised because they are ragged.

    Raises
    ------
    ArgumentError
        The source is quantised already, or the target is not empty.
    CheckpointError
        The source cannot be read.
    """
    checkpoint, target = Checkpoint(source), Path(target)
    if checkpoint.config.get("quantization_config"):
        raise ArgumentError(
            "convert_to_fp8_block", "source", f"{source}, quantised already", "an unquantised checkpoint"
        )
    _make_empty(target)
    kept: list[str] = []
    weight_map: dict[str, str] = {}
    total = 0
    for file in sorted(set(checkpoint.file_of.values())):
        tensors: dict[str, torch.Tensor] = {}
        for name in sorted(n for n, f in checkpoint.file_of.items() if f == file):
            if progress is not None:
                progress(name)
            value, shape = checkpoint.read(name), checkpoint.shape(name)
            quantise = quantisable(name, shape) and (include_ragged or not ragged(shape))
            if quantisable(name, shape) and not quantise:
                kept.append(name.removesuffix(".weight"))
            if quantise:
                tensors[name], tensors[f"{name}_scale_inv"] = quantize_block_weight(value)
            else:
                tensors[name] = value
        save_file(tensors, target / file.name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file.name)
        total += sum(t.numel() * t.element_size() for t in tensors.values())
    _write_index(target, weight_map, total)
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": sorted([*KEPT, *kept]),
    }
    _copy_the_rest(checkpoint, target, checkpoint.config | {"quantization_config": quantization})
    return kept


def dequantize_checkpoint(source: str | Path, target: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the checkpoint whose weights are those of an FP8-block checkpoint, multiplied out to ``dtype``.

    Parameters
    ----------
    source, target : str or Path
        As for :func:`convert_to_fp8_block`.
    dtype : torch.dtype

    Raises
    ------
    ArgumentError
        The source is not FP8-block, or the target is not empty.
    CheckpointError
        The source cannot be read.
    """
    checkpoint, target = Checkpoint(source), Path(target)
    spec = QuantSpec.from_config(checkpoint.config.get("quantization_config"))
    if spec.format != "fp8_block":
        raise ArgumentError(
            "dequantize_checkpoint", "source", f"{source}, format {spec.format}", "an FP8-block checkpoint"
        )
    _make_empty(target)
    weight_map: dict[str, str] = {}
    total = 0
    for file in sorted(set(checkpoint.file_of.values())):
        tensors: dict[str, torch.Tensor] = {}
        for name in sorted(n for n, f in checkpoint.file_of.items() if f == file and not n.endswith("_scale_inv")):
            value, scale = checkpoint.read(name), f"{name}_scale_inv"
            if scale in checkpoint.file_of:
                value = dequantize_block_weight(value, checkpoint.read(scale), spec.block_size, dtype)
            tensors[name] = value
        save_file(tensors, target / file.name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file.name)
        total += sum(t.numel() * t.element_size() for t in tensors.values())
    _write_index(target, weight_map, total)
    _copy_the_rest(checkpoint, target, {k: v for k, v in checkpoint.config.items() if k != "quantization_config"})


def _make_empty(target: Path) -> None:
    if target.exists() and any(target.iterdir()):
        raise ArgumentError("convert", "target", f"{target}, not empty", "a new or empty directory")
    target.mkdir(parents=True, exist_ok=True)


def _write_index(target: Path, weight_map: dict[str, str], total: int) -> None:
    if len(set(weight_map.values())) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (target / INDEX).write_text(json.dumps(index, indent=2))


def _copy_the_rest(checkpoint: Checkpoint, target: Path, config: dict[str, Any]) -> None:
    for file in checkpoint.path.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and file.name not in (INDEX, "config.json"):
            shutil.copyfile(file, target / file.name)
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
