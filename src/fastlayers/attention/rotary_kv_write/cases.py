"""rotary_kv_write's cases, inputs and cost."""

from __future__ import annotations

from typing import Any

import torch

from fastlayers.attention.kv_write.cases import make_cache, make_loc
from fastlayers.attention.kv_write.cases import write_case as _case
from fastlayers.attention.rotary_kv_write.layer import RotaryKVWriteConfig
from fastlayers.registry.spec import EXACT, Bound, Case, Cost, LayerSpec

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
Config = RotaryKVWriteConfig

_V3, _V2 = (True, False, True), (True, True, True)  # interleaved in, interleaved out, latent
# Of Qwen2.5-VL, half as wide; and of Qwen3-VL's kind, where frequencies take turns.
_VL: dict[str, Any] = {"mrope_section": (8, 12, 12)}
_TURNS: dict[str, Any] = {"mrope_section": (6, 3, 3), "mrope_interleaved": True}
CASES = (
    _case("qwen3_8b_decode", 3, Config(8, 2, 128, 128, 128), BF16, (3, 16), padded=1),
    _case("partial", 4, Config(3, 1, 48, 32, 20, kv_dtype=FP32), FP32, (9, 1), index=torch.int32),
    _case("strided_fp8", 4, Config(4, 2, 64, 64, 64, kv_dtype=FP8), BF16, (2, 64), padded=1, strided=True),
    _case("interleaved", 4, Config(2, 2, 32, 32, 32, True, True, kv_dtype=FP16), FP16, (3, 16)),
    _case("deepseek_v3", 3, Config(4, 1, 64, 512, 64, *_V3), BF16, (2, 64), strided=True),
    _case("deepseek_v2_fp32", 3, Config(3, 1, 16, 40, 16, *_V2, kv_dtype=FP32), FP32, (3, 16), padded=1),
    _case("deepseek_v3_fp8", 3, Config(2, 1, 64, 128, 64, *_V3, kv_dtype=FP8), FP32, (3, 16)),
    _case("norms", 5, Config(6, 2, 64, 64, 64, qk_norm=1e-6), BF16, (2, 64), padded=1, strided=True),
    _case("norms_partial", 3, Config(3, 1, 48, 32, 20, kv_dtype=FP32, qk_norm=1e-2), FP32, (9, 1)),
    _case("norms_interleaved_fp8", 4, Config(2, 2, 32, 32, 24, True, True, False, FP8, 1e-5), FP16, (3, 16)),
    _case("into", 3, Config(3, 1, 64, 512, 64, *_V3), BF16, (2, 64), strided=True, into=40),
    _case("into_interleaved", 4, Config(2, 2, 32, 32, 24, True, True, kv_dtype=FP32), FP32, (3, 16), into=24),
    _case("axes", 4, Config(4, 2, 64, 64, 64, **_VL), BF16, (2, 64), padded=1, strided=True, axes=3),
    _case("axes_norms", 3, Config(3, 1, 32, 16, 24, qk_norm=1e-6, kv_dtype=FP32, **_TURNS), FP32, (9, 1), axes=3),
    _case("axes_of_text", 3, Config(4, 2, 64, 64, 64, **_VL), BF16, (2, 64)),
    _case("empty", 0, Config(4, 2, 64, 64, 64), BF16, (2, 16)),
    _case("qwen3_8b_prefill", 4096, Config(32, 8, 128, 128, 128), BF16, (80, 64), False, strided=True),
    _case("qwen3_30b_norms", 1, Config(32, 4, 128, 128, 128, qk_norm=1e-6), BF16, (80, 64), False, strided=True),
    _case("qwen3_8b_norms", 4096, Config(32, 8, 128, 128, 128, qk_norm=1e-6), BF16, (80, 64), False, strided=True),
    _case("qwen25_vl_decode", 8, Config(28, 4, 128, 128, 128, mrope_section=(16, 24, 24)), BF16, (80, 64), False,
          strided=True, axes=3),
    _case("deepseek_into", 64, Config(128, 1, 64, 512, 64, *_V3), BF16, (80, 64), False, strided=True, into=512),
    _case("gpt_oss_decode", 64, Config(64, 8, 64, 64, 64), BF16, (80, 64), False, strided=True),
    _case("deepseek_prefill", 4096, Config(128, 1, 64, 512, 64, *_V3), BF16, (80, 64), False, strided=True),
)  # fmt: skip


def make_inputs(case: Case, device: torch.device, seed: int) -> dict[str, Any]:
    """Rows and heads of different size, positions all over the table, every frequency another angle."""
    generator = torch.Generator().manual_seed(seed)
    shape, cfg = case.shape, case.cfg
    tokens, max_position = shape["num_tokens"], 97
    heads = (cfg.num_heads, cfg.num_kv_heads, cfg.num_kv_heads)
    dims = (cfg.head_dim, cfg.head_dim, cfg.v_head_dim)
    sizes = [h * d for h, d in zip(heads, dims, strict=True)]
    scale = torch.exp(torch.linspace(4.0, -4.0, tokens))[:, None]
    fused = (torch.randn(tokens, sum(sizes), generator=generator) * scale).to(device, shape["dtype"])
    parts = [p.unflatten(-1, (h, d)) for p, h, d in zip(fused.split(sizes, -1), heads, dims, strict=True)]
    if not shape.get("strided"):
        parts = [part.contiguous() for part in parts]
    half = cfg.rotary_dim // 2
    angles = torch.outer(torch.arange(max_position).float(), 100.0 ** -(torch.arange(half) / half))
    row = (cfg.v_head_dim + cfg.head_dim,) if cfg.latent else (cfg.num_kv_heads, cfg.head_dim)
    keys = make_cache(shape, row, cfg.kv_dtype, generator).to(device)
    value_row = (cfg.num_kv_heads, cfg.v_head_dim)
    positions = (3, tokens) if shape.get("axes") else (tokens,)
    # ``out`` is a part of wider rows: what lies beside it belongs to somebody else.
    wide = cfg.head_dim + shape.get("into", 0)
    buffer = torch.randn(tokens, cfg.num_heads, wide, generator=generator).to(device, shape["dtype"])
    values = None if cfg.latent else make_cache(shape, value_row, cfg.kv_dtype, generator).to(device)
    return {
        **dict(zip("qkv", parts, strict=True)),
        # 1.2: YaRN multiplies its attention factor into the tables.
        "cos": 1.2 * angles.cos().to(device),
        "sin": 1.2 * angles.sin().to(device),
        "positions": torch.randint(1, max_position, positions, generator=generator).to(device),
        "keys": keys,
        "values": values,
        "loc": make_loc(shape, generator).to(device),
        "buffer": buffer if shape.get("into") else None,
        **{
            name: (1.0 + 0.5 * torch.randn(cfg.head_dim, generator=generator)).to(device, shape["dtype"])
            if cfg.qk_norm is not None
            else None
            for name in ("q_weight", "k_weight")
        },
    }


def call(impl: Any, inputs: dict[str, Any], context: Any) -> Any:
    """Call the backend."""
    names = ("q", "k", "v", "cos", "sin", "positions", "keys", "values", "loc", "q_weight", "k_weight")
    given, buffer = [inputs[name] for name in names], inputs["buffer"]
    if buffer is None:
        return impl(*given)
    return impl(*given, buffer[..., buffer.shape[-1] - inputs["q"].shape[-1] :])


def run(impl: Any, inputs: dict[str, Any], context: Any) -> dict[str, torch.Tensor]:
    """Turn and write, then read all but page 0; what is only moved is judged apart from what is turned."""
    q = call(impl, inputs, context)
    keys, values = inputs["keys"][1:], inputs["values"]
    if values is None:
        rank = inputs["v"].shape[-1]
        keys, values = keys[..., rank:], keys[..., :rank]
    else:
        values = values[1:]
    wide = torch.float32 if keys.dtype == FP8 else keys.dtype
    found = {"q": q, "k": keys.to(wide), "v": values.to(wide)}
    if inputs["buffer"] is not None:
        width = inputs["buffer"].shape[-1] - q.shape[-1]
        found |= {"q": inputs["buffer"][..., width:], "beside": inputs["buffer"][..., :width]}
    return found


def cost(case: Case) -> Cost:
    """Memory bound: q, k, v once in, once out."""
    cfg, tokens = case.cfg, case.shape["num_tokens"]
    q, kv = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * (cfg.head_dim + cfg.v_head_dim)
    item = case.shape["dtype"].itemsize
    moved = tokens * (2 * q * item + kv * (item + cfg.kv_dtype.itemsize) + 4 * cfg.rotary_dim + 16)
    return Cost(3.0 * tokens * (cfg.num_heads + cfg.num_kv_heads) * cfg.rotary_dim, moved, moved)


def bounds(case: Case) -> dict[str, Bound]:
    """Values are moved or rounded once: bit-exact. A turned key may round the other way at a tie of e4m3."""
    one_step = {"k": Bound(5e-3, 2.0**-3)} if case.cfg.kv_dtype == FP8 else {}
    return {"v": EXACT, "beside": EXACT, **one_step}


SPEC = LayerSpec(
    CASES, make_inputs, run, cost, bounds=bounds, mutates=("keys", "values", "buffer"), call=call, unknown="the cache"
)
