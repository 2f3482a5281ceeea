"""Scales of an FP8 cache that checkpoints carry (``k_scale``, ``v_scale``), folded into weights when they are read.

    k / s is cached, q · s is multiplied     grouped queries: rows of q and k, or the weights of their norms
    v / t is cached, the sum times t         rows of v, and o_proj
    latent / s and k_pe / s are cached       latent attention: the latent's norm, rows of k_pe, queries and o_proj

Rotations and softmax see what they saw, so no kernel knows of a scale. A scale is taken as the next power of two:
weights, their scales and what they give are then multiplied exactly, and e4m3 rounds relative to a value, so that what
is cached is as exact as under the scale itself and saturates no earlier. Other caches hold such values as they are, and
their checkpoints' scales are passed over.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator

import torch
from torch import nn

import fastlayers as fl
from fastlayers.errors import CheckpointError
from fastlayers.linear.base import LinearBase
from fastlayers.linear.fp8_block.layer import FP8BlockLinear
from fastlayers_models.checkpoint import Checkpoint

log = logging.getLogger(__name__)

# As vLLM's, ModelOpt's and compressed-tensors' checkpoints call them, below an attention layer.
NAMES = {
    "k": ("k_scale", "attn.k_scale", "k_proj.k_scale", "k_proj.output_scale"),
    "v": ("v_scale", "attn.v_scale", "v_proj.v_scale", "v_proj.output_scale"),
}


def attention_layers(model: nn.Module) -> Iterator[tuple[str, fl.Attention | fl.MLAAttention]]:
    """Yield the layers that write a cache, with their names in checkpoints."""
    for name, module in model.named_modules(prefix=getattr(model, "checkpoint_name", "")):
        if isinstance(module, fl.Attention | fl.MLAAttention):
            yield name, module


def scale_names(model: nn.Module) -> set[str]:
    """Return the names under which a checkpoint may have scales of this model's cache."""
    layers = [name for name, _ in attention_layers(model)]
    return {f"{layer}.{name}" for layer in layers for names in NAMES.values() for name in names}


def fold_cache_scales(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Fold a checkpoint's scales into the weights of layers with an e4m3 cache; mutates them.

    Raises
    ------
    CheckpointError
        A scale is not one positive number, is there under two names with two values, or lacks the other of keys and
        values; or a layer's weights are of a format that holds none. The tensor is named.
    """
    scaled, plain = list[str](), list[str]()
    for layer, module in attention_layers(model):
        if module.cfg.kv_dtype != torch.float8_e4m3fn:
            continue
        names = {part: _present(checkpoint, layer, part) for part in "kv"}
        (scaled if names["k"] or names["v"] else plain).append(layer)
        latent = isinstance(module, fl.MLAAttention)  # which has no values of their own
        if bool(names["k"]) != bool(names["v"]) and not (latent and names["k"]):
            there, lacking = (names["k"], "v_scale") if names["k"] else (names["v"], "k_scale")
            raise CheckpointError(f"{checkpoint.path}: there is {there[0]}, but no {lacking} of {layer}")
        keys, values = (_read(checkpoint, names[part]) for part in "kv")
        if isinstance(module, fl.MLAAttention):
            if keys != 1.0:
                _fold_latent(layer, module, keys)
        elif (keys, values) != (1.0, 1.0):
            _fold_grouped(layer, module, keys, values)
    if scaled and plain:
        count = f"{len(plain)} of {len(plain) + len(scaled)}"
        log.warning(
            "%s: %s layers have no scales of an FP8 cache, first %s: taken as 1", checkpoint.path, count, plain[0]
        )


def _present(checkpoint: Checkpoint, layer: str, part: str) -> list[str]:
    return [name for each in NAMES[part] if (name := f"{layer}.{each}") in checkpoint.file_of]


def _read(checkpoint: Checkpoint, names: list[str]) -> float:
    """Return the next power of two of the scale under these names, which all say the same; 1 without one."""
    scales = list[float]()
    for name in names:
        found = checkpoint.read(name).double().flatten()
        if found.numel() != 1 or not 2.0**-100 < float(found[0]) < 2.0**100:
            given = f"{found.numel()} numbers" if found.numel() != 1 else f"{float(found[0]):g}"
            raise CheckpointError(f"{checkpoint.path}: {name} is {given}; a cache's scale is one positive number")
        scales.append(float(found[0]))
        if scales[-1] != scales[0]:
            raise CheckpointError(f"{checkpoint.path}: {names[0]} is {scales[0]:g}, but {name} is {scales[-1]:g}")
    return float(2.0 ** math.ceil(math.log2(scales[0]))) if scales else 1.0


def _fold_latent(layer: str, module: fl.MLAAttention, scale: float) -> None:
    rank, width = module.cfg.kv_lora_rank, module.cfg.latent_width
    module.kv_a_layernorm.weight.mul_(1 / scale)
    if module.fused_a:
        begin = module.qkv_a_proj.part_sizes[0]
        _scale(f"{layer}.kv_a_proj_with_mqa", module.qkv_a_proj, 1 / scale, begin + rank, begin + width)
    else:
        _scale(f"{layer}.kv_a_proj_with_mqa", module.kv_a_proj_with_mqa, 1 / scale, rank, width)
    if module.q_lora_rank is None:
        _scale(f"{layer}.q_proj", module.q_proj, scale)
    else:
        module.q_a_layernorm.weight.mul_(scale)
    _scale(f"{layer}.o_proj", module.o_proj, scale, bias=False)


def _fold_grouped(layer: str, module: fl.Attention, keys: float, values: float) -> None:
    norms = module.q_norm, module.k_norm
    factors = {"q_proj": keys, "k_proj": 1 / keys, "v_proj": 1 / values}
    if norms[0] is not None and norms[1] is not None:
        norms[0].weight.mul_(keys)
        norms[1].weight.mul_(1 / keys)
        factors |= {"q_proj": 1.0, "k_proj": 1.0}
    begin = 0
    for (name, factor), index in zip(factors.items(), range(3), strict=True):
        if not module.fused:
            _scale(f"{layer}.{name}", getattr(module, name), factor)
            continue
        end = begin + module.qkv_proj.part_sizes[index]
        _scale(f"{layer}.{name}", module.qkv_proj, factor, begin, end)
        begin = end
    _scale(f"{layer}.o_proj", module.o_proj, values, bias=False)


def _scale(name: str, linear: LinearBase, factor: float, begin: int = 0, end: int = 0, *, bias: bool = True) -> None:
    """Multiply some of a linear's output features (default: all), by its weight or its scales."""
    if factor == 1.0:
        return
    end = end or linear.local_out
    held = getattr(linear, linear.scale_name) if linear.scale_name else linear.weight
    if isinstance(linear, fl.WeightOnlyLinear):
        held = held.t()  # groups of input features first
    step = linear.cfg.block_size[0] if isinstance(linear, FP8BlockLinear) else 1
    if held.shape[0] != -(-linear.local_out // step) or begin % step or (end % step and end != linear.local_out):
        raise CheckpointError(f"{name}: {type(linear).__name__} cannot take up the scale of an FP8 cache")
    held[begin // step : -(-end // step)].mul_(factor)
    if bias and linear.bias is not None:
        linear.bias[begin:end].mul_(factor)
