"""Making a quantised checkpoint from a bf16 one, and back, shard by shard.

What is quantised: matrices of linear layers and of experts that are stored one by one, found by name and shape, so any
family will do. Embeddings, norms, routers, biases, convolutions and the vocabulary head stay as they are. What else
stays is listed with its reason and named in ``modules_to_not_convert``:

=============  ========================================================================================
``ragged``     FP8-block: rows or columns not a multiple of 128. Stock transformers infers the block size
               from the scale grid and misreads them; our loader does not (``include_ragged``).
``absorbed``   INT8: MLA multiplies ``kv_b_proj`` into queries and outputs, in the model's dtype.
``stacked``    Experts stored as one three-dimensional tensor (GPT-OSS): neither format has a spelling for them.
``encoder``    Vision and audio towers.
=============  ========================================================================================

INT8 checkpoints are for our loader only: stock transformers does not know the format and reads the codes as weights.

An interrupted conversion is taken up where it stopped, by the same call. Until the last file, ``config.json``, is
there, nothing can load the directory.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fastlayers.errors import ArgumentError, CheckpointError, check_choice
from fastlayers.linear.int8.layer import quantize_channel_weight
from fastlayers.quant.block_quant import dequantize_block_weight, quantize_block_weight
from fastlayers.quant.mxfp4.codes import dequantize_mxfp4
from fastlayers.quant.spec import QuantSpec
from fastlayers.weights import wrong_exponent, wrong_scale
from fastlayers_models.check_quantization import check_quantization
from fastlayers_models.checkpoint import Checkpoint
from fastlayers_models.convert.readme import dequantised_readme, quantised_readme
from fastlayers_models.convert.shard_writer import ShardWriter, Tensors
from fastlayers_models.convert.weights_alone import packed_format, unpacked
from fastlayers_models.loading import FLOATS

BLOCK = 128
FORMATS = ("fp8-block", "int8")
# Modules that no checkpoint quantises.
KEPT = ("embed_tokens", "lm_head", "gate", "router", "shared_expert_gate", "eh_proj", "shared_head.head")
ENCODERS = ("visual", "vision_tower", "vision_model", "audio_tower", "multi_modal_projector")
# Other spellings of embeddings and norms, whose weights may be matrices.
_TABLES = re.compile(r"embed|norm|^wte$|^wpe$")
_FLOATS = ("BF16", "F16", "F32")
_SCALES = ("_scale_inv", "_scale")
# MXFP4 stores NAME as two tensors.
_PACKED = ("_blocks", "_scales")
Progress = Callable[[str], Any]


@dataclass(frozen=True)
class Conversion:
    """What :func:`convert_checkpoint` did.

    Parameters
    ----------
    format : str
    source, target : Path
    quantised : int
        How many matrices.
    kept : dict[str, list[str]]
        Reason -> modules that stayed in their dtype though they are matrices of linear layers.
    bytes_before, bytes_after : int
        Of all tensors.
    shards, resumed : int
        Files, and how many of them an earlier, interrupted run had finished.
    seconds : float
    """

    format: str
    source: Path
    target: Path
    quantised: int
    kept: dict[str, list[str]] = field(default_factory=dict)
    bytes_before: int = 0
    bytes_after: int = 0
    shards: int = 0
    resumed: int = 0
    seconds: float = 0.0


def quantisable(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a checkpoint tensor is the matrix of a linear layer or an expert, by its name and shape."""
    module = name.removesuffix(".weight")
    return (
        name.endswith(".weight")
        and len(shape) == 2
        and not any(module == k or module.endswith("." + k) for k in KEPT)
        and not _TABLES.search(module.rpartition(".")[2])
    )


def ragged(shape: tuple[int, ...]) -> bool:
    """Whether a matrix has a last block of fewer than 128 rows or columns."""
    return any(size % BLOCK for size in shape)


def why_kept(name: str, shape: tuple[int, ...], format: str, include_ragged: bool) -> str | None:
    """Return why the matrix of a linear layer is not quantised (see the file's head), or ``None``."""
    if _encoder(name) is not None:
        return "encoder"
    if len(shape) == 3:
        return "stacked"
    if format == "fp8-block" and not include_ragged and ragged(shape):
        return "ragged"
    if format == "int8" and name.endswith("kv_b_proj.weight"):
        return "absorbed"
    return None


def convert_checkpoint(
    source: str | Path,
    target: str | Path,
    format: str,
    *,
    include_ragged: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Write a quantised version of a checkpoint, holding about one shard in memory.

    Parameters
    ----------
    source : str or Path
        Directory of a bf16, fp16 or fp32 checkpoint of any family.
    target : str or Path
        Directory to make: new, empty, or left by an interrupted run of the same conversion.
    format : str
        ``"fp8-block"``: e4m3 with an fp32 scale per 128×128 block (``weight_scale_inv``); stock transformers loads
        it. ``"int8"``: one fp32 scale per output channel (``weight_scale``), for our loader only: stock transformers
        takes the codes for weights.
    include_ragged : bool
        FP8-block: quantise ragged matrices too: ``fastlayers_models`` reads them, stock transformers does not.
    progress : callable, optional
        Called with each tensor's name, also for shards that an earlier run finished.

    Returns
    -------
    Conversion

    Raises
    ------
    ArgumentError
        Another format; the source is quantised already; or the target is neither empty nor an unfinished conversion
        of this source to this format.
    CheckpointError
        The source cannot be read, has quantised tensors that its ``config.json`` does not speak of, or a matrix holds
        NaN or infinity.
    """
    check_choice("convert", "format", format, FORMATS)
    started, checkpoint = time.perf_counter(), Checkpoint(source)
    config = checkpoint.config
    if config.get("quantization_config"):
        method = QuantSpec.from_config(config["quantization_config"]).format
        accepted = "an unquantised checkpoint (dequantize_checkpoint, or convert --format bf16, makes one)"
        raise ArgumentError("convert", "source", f"{source}, quantised already ({method})", accepted)
    _check_words(checkpoint)

    def quantise(name: str) -> tuple[Tensors, dict[str, str]]:
        shape, value = checkpoint.shape(name), checkpoint.read(name)
        if checkpoint.dtype(name) not in _FLOATS or not (quantisable(name, shape) or _stack(name, shape)):
            return {name: value}, {}
        reason, module = why_kept(name, shape, format, include_ragged), name.removesuffix(".weight")
        if reason is not None:
            return {name: value}, {module: reason}
        return _quantised(name, value, format), {module: ""}

    writer = ShardWriter(checkpoint, target, f"{format}{' with ragged blocks' if include_ragged else ''}")
    kept: dict[str, list[str]] = {}
    with writer.held():
        notes = writer.write(quantise, progress)
        for module, reason in sorted(notes.items()):
            if reason:
                kept.setdefault(reason, []).append(module)
        quantised = sum(not reason for reason in notes.values())
        readme = quantised_readme(
            checkpoint.path, Path(target), format, include_ragged, quantised, kept,
            (writer.bytes_before, writer.bytes_after),
        )  # fmt: skip
        writer.finish(config | {"quantization_config": _description(format, kept)}, readme)
    return Conversion(
        format, Path(source), Path(target), quantised, kept,
        writer.bytes_before, writer.bytes_after, len(writer.files), writer.resumed, time.perf_counter() - started,
    )  # fmt: skip


def _check_words(checkpoint: Checkpoint) -> None:
    """Raise :class:`CheckpointError` where the tensors are not in the format that ``config.json`` says."""
    found = check_quantization(checkpoint, ())
    if found:
        raise CheckpointError(f"{checkpoint.path} cannot be converted; {'; '.join(found)}")


def _description(format: str, kept: dict[str, list[str]]) -> dict[str, Any]:
    """Return the ``quantization_config`` of what was made."""
    skip = sorted({*KEPT, *(rule for reason, modules in kept.items() for m in modules for rule in _rules(m, reason))})
    common = {"modules_to_not_convert": skip}
    if format == "fp8-block":
        blocks = {"fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
        return {"quant_method": "fp8", **blocks, **common}
    return {"quant_method": "int8", **common}


def _quantised(name: str, value: torch.Tensor, format: str) -> Tensors:
    if format == "fp8-block":
        codes, scale = quantize_block_weight(value)
        scale_name = f"{name}_scale_inv"
    else:
        codes, scale = quantize_channel_weight(value)
        scale_name = f"{name}_scale"
    if not bool(scale.isfinite().all()):
        raise CheckpointError(f"{name}: holds NaN or infinity, which cannot be quantised")
    return {name: codes, scale_name: scale}


def _encoder(name: str) -> str | None:
    """Return the prefix of ``name`` up to a vision or audio tower."""
    parts = name.split(".")
    found = [i for i, part in enumerate(parts) if part in ENCODERS]
    return ".".join(parts[: found[0] + 1]) if found else None


def _stack(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and ".experts." in name and not name.endswith("bias")


def _rules(module: str, reason: str) -> list[str]:
    """Return the entries of ``modules_to_not_convert`` for one kept module."""
    if reason == "encoder":
        return [_encoder(module) or module]
    # Stock transformers holds all experts of a block in one module and looks for that module's name.
    experts = re.match(r"(.*\.experts)\.", module)
    return [module, experts.group(1)] if experts else [module]


def convert_to_fp8_block(
    source: str | Path, target: str | Path, *, include_ragged: bool = False, progress: Progress | None = None
) -> list[str]:
    """Write an FP8-block version of a checkpoint and return the modules kept because they are ragged.

    See :func:`convert_checkpoint`.
    """
    done = convert_checkpoint(source, target, "fp8-block", include_ragged=include_ragged, progress=progress)
    return done.kept.get("ragged", [])


def dequantize_checkpoint(
    source: str | Path,
    target: str | Path,
    dtype: torch.dtype = torch.bfloat16,
    *,
    progress: Progress | None = None,
) -> None:
    """Write the checkpoint whose weights are those of a quantised one, multiplied out to ``dtype``.

    Parameters
    ----------
    source : str or Path
        Directory of an FP8 checkpoint (scales per block, tensor or channel), an INT8 one, GPT-OSS in MXFP4, or one of
        AWQ, GPTQ or compressed-tensors.
    target, progress
        As for :func:`convert_checkpoint`.
    dtype : torch.dtype

    Raises
    ------
    ArgumentError
        The source has another format, or the target is neither empty nor an unfinished run of this call.
    CheckpointError
        The source cannot be read, or a quantised matrix has no scales, or none that fit it.
    """
    checkpoint = Checkpoint(source)
    config = checkpoint.config
    spec = QuantSpec.from_config(config.get("quantization_config"))
    if spec.format == "none":
        raise ArgumentError(
            "convert", "source", f"{source}, format none",
            "an FP8-block checkpoint, or one with FP8 scales per tensor or channel, INT8, MXFP4, AWQ or GPTQ",
        )  # fmt: skip
    _check_words(checkpoint)

    def multiply_out(name: str) -> tuple[Tensors, dict[str, str]]:
        if _owner(name, checkpoint) is not None:
            return {}, {}
        if packed_format(spec):
            return unpacked(name, checkpoint, spec, dtype), {}
        if spec.format == "mxfp4":
            return _unpacked(name, checkpoint, dtype), {}
        value = checkpoint.read(name)
        if name.endswith((".weight_scale", ".weight_scale_inv")):
            raise CheckpointError(f"{name}: there is no {name[: name.rindex('_scale')]}, which these are the scales of")
        if checkpoint.dtype(name) not in ("F8_E4M3", "I8"):
            return {name: value}, {}
        scale = next((name + ending for ending in _SCALES if name + ending in checkpoint.file_of), None)
        if scale is None:
            raise CheckpointError(f"{name}: {checkpoint.dtype(name)} without {name}_scale_inv or {name}_scale")
        return {name: _multiplied(name, value, scale, checkpoint, spec, dtype)}, {}

    writer = ShardWriter(checkpoint, target, f"dequantised to {str(dtype).removeprefix('torch.')}")
    with writer.held():
        writer.write(multiply_out, progress)
        readme = dequantised_readme(checkpoint.path, Path(target), spec.format, dtype)
        writer.finish({k: v for k, v in config.items() if k != "quantization_config"}, readme)


def _multiplied(
    name: str, codes: torch.Tensor, scale: str, checkpoint: Checkpoint, spec: QuantSpec, dtype: torch.dtype
) -> torch.Tensor:
    """Return codes times their scales, or raise :class:`CheckpointError` where these are none of this matrix."""
    if checkpoint.dtype(scale) not in FLOATS:
        raise CheckpointError(f"{scale} is {checkpoint.dtype(scale)}; scales are read from {', '.join(FLOATS)}")
    factors = checkpoint.read(scale)
    if (words := wrong_scale(factors)) is not None:
        raise CheckpointError(f"{scale}: {words}")
    if spec.format == "fp8_block":
        return dequantize_block_weight(codes, factors, spec.block_size, dtype)
    if codes.dim() != 2 or factors.numel() not in (1, len(codes)):
        given = f"{list(factors.shape)} for {name} {list(codes.shape)}"
        raise CheckpointError(f"{scale}: {given}; accepted: one number for a matrix, or one for each of its rows")
    return (codes.float() * factors.float().reshape(-1, 1)).to(dtype)


def _unpacked(name: str, checkpoint: Checkpoint, dtype: torch.dtype) -> Tensors:
    """Return what one tensor of an MXFP4 checkpoint is in an unquantised one: matrices lie the other way round."""
    blocks, scales = _PACKED
    if not name.endswith(blocks):
        return {name: checkpoint.read(name)}
    stem = name.removesuffix(blocks)
    exponents = checkpoint.read(stem + scales)
    if (words := wrong_exponent(exponents)) is not None:
        raise CheckpointError(f"{stem}{scales}: {words}")
    weight = dequantize_mxfp4(checkpoint.read(name), exponents, dtype)
    return {stem: weight.transpose(-2, -1).contiguous()}


def _owner(name: str, checkpoint: Checkpoint) -> str | None:
    """Return the quantised tensor that ``name`` is a scale of, or ``None``."""
    for ending in (".activation_scale", ".input_scale"):
        if name.endswith(ending) and name.removesuffix(ending) + ".weight" in checkpoint.file_of:
            return name.removesuffix(ending) + ".weight"
    for ending in _SCALES:
        if name.endswith(ending) and name.removesuffix(ending) in checkpoint.file_of:
            return name.removesuffix(ending)
    blocks, scales = _PACKED
    if name.endswith(scales) and name.removesuffix(scales) + blocks in checkpoint.file_of:
        return name.removesuffix(scales) + blocks
    return None
