"""Bmm's cases, inputs and cost."""

from __future__ import annotations

from typing import Any

import torch

from fastlayers.linear.bmm.layer import BmmConfig
from fastlayers.linear.case_inputs import normal
from fastlayers.linear.fp8_scaled.layer import quantize_scaled_weight
from fastlayers.quant.block_quant import quantize_block_weight
from fastlayers.registry.spec import Case, Cost, LayerSpec, place_of

FP16, FP32 = torch.float16, torch.float32


def _case(name: str, tokens: int, cfg: BmmConfig, small: bool = True, views: bool = False) -> Case:
    return Case(name, cfg, {"num_tokens": tokens, "views": views}, small)


CASES = (
    _case("plain", 3, BmmConfig(2, 64, 48)),
    _case("plain_views", 5, BmmConfig(3, 48, 40), views=True),
    _case("plain_odd_fp32", 5, BmmConfig(2, 37, 21, dtype=FP32)),
    _case("plain_fp16_two_row_tiles", 70, BmmConfig(1, 64, 72, dtype=FP16)),
    _case("tensor", 4, BmmConfig(2, 128, 64, "fp8_tensor")),
    _case("tensor_views_ragged", 3, BmmConfig(3, 192, 72, "fp8_tensor"), views=True),
    _case("tensor_fp32", 2, BmmConfig(2, 130, 24, "fp8_tensor", FP32)),
    _case("block", 4, BmmConfig(2, 256, 128, "fp8_block")),
    _case("block_views_ragged", 3, BmmConfig(2, 200, 136, "fp8_block"), views=True),
    _case("block_fp32", 2, BmmConfig(2, 256, 136, "fp8_block", FP32)),
    _case("empty", 0, BmmConfig(2, 128, 64, "fp8_tensor")),
    _case("empty_block_views", 0, BmmConfig(2, 128, 64, "fp8_block"), views=True),
    *(
        _case(f"deepseek_v3_{name}_{format}_{tokens}", tokens, BmmConfig(128, k, n, format), small=False, views=True)
        for format in ("none", "fp8_tensor", "fp8_block")
        for name, k, n, tokens in (("absorb_q", 128, 512, 1), ("absorb_v", 512, 128, 129), ("absorb_q", 128, 512, 1024))
    ),
)


def make_inputs(case: Case, device: torch.device, seed: int) -> dict[str, Any]:
    """Heads, tokens and rows of different size. With views: [T, H, …] storage, transposed weights, ``out`` inside."""
    random = normal(device, seed)
    cfg, tokens, views = case.cfg, case.shape["num_tokens"], case.shape["views"]
    h, n, k = cfg.heads, cfg.out_features, cfg.in_features
    x = random(tokens, h, k + 16) * torch.exp(0.7 * random(tokens, h, 1)) * torch.exp(0.7 * random(1, 1, k + 16))
    x = x.to(cfg.dtype)[..., :k].transpose(0, 1)
    dense = random(h, n, k) * torch.exp(random(h, n, 1)) / k**0.5
    scale = None
    if cfg.format == "none":
        weight = dense.to(cfg.dtype)
    elif cfg.format == "fp8_tensor":
        weight, scale = quantize_scaled_weight(dense, "tensor")
    else:
        weight, scale = quantize_block_weight(dense)
    buffer = None
    if views:
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
        if scale is not None and cfg.format == "fp8_block":
            scale = scale.transpose(1, 2).contiguous().transpose(1, 2)
        buffer = random(tokens, h, n + 16).to(cfg.dtype)
    else:
        x = x.contiguous()
    return {"x": x, "weight": weight, "weight_scale": scale, "buffer": buffer}


def run(impl: Any, inputs: dict[str, Any], context: Any) -> dict[str, torch.Tensor]:
    """Call the backend; what lies beside ``out`` in its buffer is an output, too."""
    operands = (inputs["x"], inputs["weight"], inputs["weight_scale"])
    buffer = inputs["buffer"]
    if buffer is None:
        return {"y": impl(*operands)}
    n = operands[1].shape[1]
    y = impl(*operands, buffer[..., :n].transpose(0, 1))
    return {"y": y, "beside": buffer[..., n:]}


def cost(case: Case) -> Cost:
    """Operands once in, y once out; a whole-call scale reads x twice."""
    cfg, tokens = case.cfg, case.shape["num_tokens"]
    h, n, k = cfg.heads, cfg.out_features, cfg.in_features
    moved = h * n * k * cfg.weight_dtype.itemsize + cfg.dtype.itemsize * h * tokens * (k + n)
    again = cfg.dtype.itemsize * h * tokens * k if cfg.format == "fp8_tensor" else 0
    return Cost(2.0 * h * tokens * k * n, moved, moved + again)


def examples(layer: Any, count: int) -> list[tuple[Any, ...]]:
    """Return operands next to each other, and the views of MLA: tokens outside heads, a transposed weight."""
    cfg, device = layer.cfg, place_of(layer)
    heads, rows, features = cfg.heads, cfg.out_features, cfg.in_features
    x = torch.zeros(count, heads, features, dtype=cfg.dtype, device=device)
    weight = torch.zeros(heads, rows, features, device=device).to(cfg.weight_dtype)
    grid = {"none": None, "fp8_tensor": (heads,), "fp8_block": (heads, -(-rows // 128), -(-features // 128))}
    shape = grid[cfg.format]
    scale = None if shape is None else torch.ones(shape, device=device)
    turned = weight.transpose(1, 2).contiguous().transpose(1, 2)
    return [(x.transpose(0, 1).contiguous(), weight, scale), (x.transpose(0, 1), turned, scale)]


SPEC = LayerSpec(CASES, make_inputs, run, cost, mutates=("buffer",), examples=examples)
