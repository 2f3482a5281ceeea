"""kv_write's cases, inputs and cost."""

from __future__ import annotations

from typing import Any

import torch

from fastlayers.attention.kv_write.layer import KVWriteConfig
from fastlayers.registry.spec import Case, Cost, LayerSpec, exact, giving

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn


def write_case(
    name: str, tokens: int, cfg: Any, dtype: torch.dtype, pages: tuple[int, int], small: bool = True, **more: Any
) -> Case:
    """A case of rows that are written into a cache of ``pages``: their number and size."""
    return Case(name, cfg, {"num_tokens": tokens, "dtype": dtype, "pages": pages, "padded": 0, **more}, small)


CASES = (
    write_case("qwen3_8b_decode", 3, KVWriteConfig(8, 128, 128, BF16), BF16, (4, 16)),
    write_case("fp8", 5, KVWriteConfig(2, 64, 64, FP8), BF16, (3, 16), padded=2),
    write_case("fp32_to_fp8", 4, KVWriteConfig(2, 16, 16, FP8), FP32, (8, 1)),
    write_case("other_v_dim", 4, KVWriteConfig(3, 48, 32, FP32), FP32, (3, 16), index=torch.int32),
    write_case("strided", 6, KVWriteConfig(2, 32, 32, FP16), FP16, (2, 64), padded=3, strided=True),
    write_case("narrower_cache", 3, KVWriteConfig(2, 16, 16, BF16), FP32, (3, 16)),
    write_case("empty", 0, KVWriteConfig(2, 16, 16, BF16), BF16, (2, 16)),
    write_case("qwen3_8b_prefill", 4096, KVWriteConfig(8, 128, 128, BF16), BF16, (80, 64), False, strided=True),
)  # fmt: skip


def make_loc(shape: Any, generator: torch.Generator) -> torch.Tensor:
    """Distinct slots outside page 0 in random order; the last ``padded`` rows all go to slot 0."""
    pages, page_size = shape["pages"]
    loc = (torch.randperm((pages - 1) * page_size, generator=generator) + page_size)[: shape["num_tokens"]]
    if shape["padded"]:
        loc[-shape["padded"] :] = 0
    return loc.to(shape.get("index", torch.int64))


def make_cache(shape: Any, row: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """A cache that holds something already, so that a row written elsewhere shows."""
    return torch.randn(*shape["pages"], *row, generator=generator).to(dtype)


def make_inputs(case: Case, device: torch.device, seed: int) -> dict[str, Any]:
    """Values from far below e4m3's smallest step to far above its largest."""
    generator = torch.Generator().manual_seed(seed)
    shape, cfg = case.shape, case.cfg
    tokens, heads, wide = shape["num_tokens"], cfg.num_kv_heads, cfg.head_dim + cfg.v_head_dim
    scale = torch.exp(torch.linspace(6.5, -5.0, shape["num_tokens"]))[:, None]
    fused = (torch.randn(tokens, heads * wide, generator=generator) * scale).to(device, shape["dtype"])
    k, v = fused.split((heads * cfg.head_dim, heads * cfg.v_head_dim), -1)
    k, v = k.unflatten(-1, (heads, cfg.head_dim)), v.unflatten(-1, (heads, cfg.v_head_dim))
    if not shape.get("strided"):
        k, v = k.contiguous(), v.contiguous()
    caches = [make_cache(shape, (heads, d), cfg.kv_dtype, generator).to(device) for d in (cfg.head_dim, cfg.v_head_dim)]
    loc = make_loc(shape, generator).to(device)
    return {"k": k, "v": v, "k_cache": caches[0], "v_cache": caches[1], "loc": loc}


call = giving("k", "v", "k_cache", "v_cache", "loc")


def run(impl: Any, inputs: dict[str, Any], context: Any) -> dict[str, torch.Tensor]:
    """Write, then read everything but page 0."""
    call(impl, inputs, context)
    return {name: inputs[name][1:].float() for name in ("k_cache", "v_cache")}


def cost(case: Case) -> Cost:
    """Memory bound: every row once in, once out."""
    cfg = case.cfg
    elements = case.shape["num_tokens"] * cfg.num_kv_heads * (cfg.head_dim + cfg.v_head_dim)
    moved = elements * (case.shape["dtype"].itemsize + cfg.kv_dtype.itemsize) + 8 * case.shape["num_tokens"]
    return Cost(0.0, moved, moved)


# A write moves or rounds once.
bounds = exact("k_cache", "v_cache")
SPEC = LayerSpec(
    CASES, make_inputs, run, cost, bounds=bounds, mutates=("k_cache", "v_cache"), call=call, unknown="the cache"
)
