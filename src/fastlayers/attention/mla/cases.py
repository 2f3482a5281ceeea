"""Cases of the MLA core: decode and extend over pages, ragged prefill over expanded keys and values.

The lengths of a step live in an int64 host tensor among the inputs, so that a replay can be planned from them. They
vary with the seed only where a replay may: never in what the host bounds depend on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from fastlayers.attention.examples import step_examples
from fastlayers.attention.meta import AttentionBatch, AttentionMeta, AttentionState
from fastlayers.attention.mla.config import MLAConfig, RaggedLengths
from fastlayers.attention.mla.launch_config import NOMINAL_SM_COUNT, decode_config, num_splits, prefill_config
from fastlayers.registry.spec import BOUNDS, Bound, Case, Cost, LayerSpec, Oracle

_REAL, _TINY, _WIDE = (512, 64, 128, 128), (32, 16, 16, 16), (64, 16, 32, 16)
_BF16, _FP16, _FP32, _E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn


def _config(
    heads: int, dims: tuple[int, int, int, int], page: int, dtype: torch.dtype, kv_dtype: torch.dtype | None,
    phase: str, fp8_math: bool = False, lse: bool = True,
) -> MLAConfig:  # fmt: skip
    rank, rope, nope, value = dims
    # The unabsorbed head's scale with a YaRN factor of 1.3: neither (N+R)^-0.5 nor (L+R)^-0.5 alone.
    scale = 1.3 * (nope + rope) ** -0.5
    kv_dtype = kv_dtype if kv_dtype is not None else dtype
    return MLAConfig(heads, rank, rope, nope, value, scale, page, dtype, kv_dtype, phase, fp8_math=fp8_math, lse=lse)


def _decode(
    name: str, heads: int, dims: tuple[int, int, int, int], page: int, dtype: torch.dtype, seq_lens: tuple[int, ...], *,
    query_lens: tuple[int, ...] | None = None, starts: tuple[int, ...] = (), kv_dtype: torch.dtype | None = None,
    bucket: int | None = None, replanned: bool = False, small: bool = True, fp8_math: bool = False,
    lse: bool = True,
) -> Case:  # fmt: skip
    shape = {
        "mode": "decode" if query_lens is None else "extend", "query_lens": query_lens or (1,) * len(seq_lens),
        "seq_lens": seq_lens, "starts": starts or (0,) * len(seq_lens), "bucket": bucket, "replanned": replanned,
    }  # fmt: skip
    phase = "padded" if any(starts) else "decode" if query_lens is None else "ragged"
    return Case(name, _config(heads, dims, page, dtype, kv_dtype, phase, fp8_math, lse), shape, small)


def _prefill(
    name: str, heads: int, dims: tuple[int, int, int, int], dtype: torch.dtype, q_lens: tuple[int, ...],
    k_lens: tuple[int, ...], *, causal: bool = True, need_lse: bool = True, strided: bool = False, small: bool = True,
) -> Case:  # fmt: skip
    shape = {
        "mode": "prefill",
        "q_lens": q_lens,
        "k_lens": k_lens,
        "causal": causal,
        "need_lse": need_lse,
        "strided": strided,
    }
    return Case(name, _config(heads, dims, 64, dtype, None, "extend"), shape, small)


_UNEVEN = (9000, *(1 + 37 * i for i in range(50)))

CASES = (
    _decode("decode_page16", 4, _TINY, 16, _BF16, (45, 1, 17)),
    _decode("decode_page1_fp32", 3, _TINY, 1, _FP32, (21, 5), replanned=True),
    _decode("decode_page64_split", 4, _WIDE, 64, _FP32, (300, 7)),
    _decode("decode_fp16_heads20", 20, _TINY, 16, _FP16, (33,)),
    _decode("decode_padded_left", 2, _TINY, 16, _FP32, (40, 19, 9), starts=(5, 0, 8)),
    _decode("decode_page64_padded_left", 4, _TINY, 64, _BF16, (150, 90), starts=(70, 3)),
    _decode("decode_bucket", 4, _TINY, 16, _BF16, (30, 12, 4), bucket=4),
    _decode("decode_e4m3", 4, _TINY, 16, _BF16, (38, 3), kv_dtype=_E4M3),
    _decode("decode_empty", 4, _TINY, 16, _BF16, ()),
    _decode("extend_ragged", 3, _TINY, 16, _BF16, (25, 4, 9, 14), query_lens=(4, 4, 0, 1)),
    _decode("extend_padded_left", 4, _TINY, 16, _FP32, (20, 12), query_lens=(12, 3), starts=(10, 2)),
    _decode("extend_split", 2, _TINY, 64, _FP32, (290, 12), query_lens=(9, 2)),
    _decode("decode_heads72_split", 72, _TINY, 16, _BF16, (270, 30)),
    _prefill("prefill_two_blocks", 1, _TINY, _BF16, (150,), (190,)),
    _prefill("prefill_ragged", 2, _TINY, _BF16, (21, 0, 5), (21, 0, 5)),
    _prefill("prefill_prefix", 2, _WIDE, _FP32, (6, 3, 1), (39, 3, 17)),
    _prefill("prefill_full", 2, _TINY, _FP32, (7, 4, 2), (19, 0, 33), causal=False),
    _prefill("prefill_blind_rows", 2, _TINY, _FP16, (9, 4), (3, 6)),
    _prefill("prefill_strided", 2, (32, 16, 24, 24), _BF16, (18,), (18,), strided=True),
    _prefill("prefill_no_lse", 2, _TINY, _FP32, (5, 8), (5, 20), need_lse=False),
    _prefill("prefill_empty", 2, _TINY, _BF16, (), ()),
    _decode("deepseek_tp8_decode", 16, _REAL, 64, _BF16, (4096, 100, 1, 777, 2048, 64, 65, 3000), small=False),
    _decode("deepseek_dp_decode", 128, _REAL, 64, _BF16, (4096, 31, 1500, 4095), bucket=8, small=False),
    _decode("deepseek_page1", 16, _REAL, 1, _BF16, (1000, 3), bucket=2, small=False),
    _decode("deepseek_page16_heads32", 32, _REAL, 16, _FP16, (2000, 999), small=False),
    _decode("deepseek_e4m3", 128, _REAL, 64, _BF16, (4096, 513), kv_dtype=_E4M3, small=False),
    _decode("deepseek_tp8_e4m3", 16, _REAL, 64, _BF16, (1025, 513), kv_dtype=_E4M3, bucket=4, small=False),
    _decode("deepseek_e4m3_math", 128, _REAL, 64, _BF16, (4096, 513, 70), kv_dtype=_E4M3, small=False, fp8_math=True),
    _decode(
        "deepseek_tp8_e4m3_math",
        16,
        _REAL,
        64,
        _BF16,
        (1025, 513),
        kv_dtype=_E4M3,
        bucket=4,
        small=False,
        fp8_math=True,
    ),
    _decode("deepseek_no_lse_decode", 16, _REAL, 64, _BF16, (4000, 5, 64, 900), bucket=8, small=False, lse=False),
    _decode("deepseek_no_lse_dp", 128, _REAL, 1, _FP16, (513, 4096, 30), small=False, lse=False),
    _decode("deepseek_no_lse_ragged", 128, _REAL, 64, _BF16, (70, 500), query_lens=(7, 90), small=False, lse=False),
    _decode("deepseek_fp32", 16, _REAL, 64, _FP32, (1500, 40), small=False),
    _decode("deepseek_single", 1, _REAL, 64, _BF16, (8192,), small=False),
    _decode("deepseek_many", 16, _REAL, 64, _BF16, tuple(64 + 7 * i for i in reversed(range(200))), small=False),
    _decode("deepseek_uneven", 16, _REAL, 64, _BF16, _UNEVEN, bucket=64, small=False),
    _decode("deepseek_uneven_e4m3", 16, _REAL, 64, _BF16, _UNEVEN, kv_dtype=_E4M3, bucket=64, small=False),
    _decode("deepseek_uneven_dp", 128, _REAL, 64, _BF16, _UNEVEN, small=False),
    _decode("deepseek_verify", 16, _REAL, 64, _BF16, (1024, 300, 77), query_lens=(4, 4, 4), small=False),
    _decode("deepseek_extend", 128, _REAL, 64, _BF16, (2000, 70), query_lens=(65, 33), starts=(3, 40), small=False),
    _decode("deepseek_ragged", 128, _REAL, 64, _BF16, (700, 5, 330), query_lens=(140, 1, 30), small=False),
    _decode("deepseek_ragged_e4m3", 16, _REAL, 64, _BF16, (500, 9), query_lens=(8, 3), kv_dtype=_E4M3, small=False),
    _prefill("deepseek_prefill", 16, _REAL, _BF16, (2000, 1, 517), (2000, 1, 517), strided=True, small=False),
    _prefill("deepseek_one_shot", 128, _REAL, _BF16, (130, 64), (1500, 64), small=False),
    _prefill("deepseek_chunk", 16, _REAL, _BF16, (300, 129), (1024, 0), causal=False, small=False),
    _prefill("deepseek_blind_rows", 16, _REAL, _BF16, (150, 4, 9), (5, 6, 0), small=False),
    _prefill("deepseek_no_lse", 128, _REAL, _BF16, (1000, 24), (1000, 24), need_lse=False, small=False),
    _prefill("deepseek_prefill_fp32", 16, _REAL, _FP32, (200, 77), (300, 77), small=False),
)


@dataclass
class Step:
    """What a run needs besides the inputs: the state and metadata of decode, or the lengths of prefill."""

    state: AttentionState | None = None
    meta: AttentionMeta | None = None
    lens: RaggedLengths | None = None


def _pages(case: Case) -> tuple[int, int]:
    """Return pages of the longest request, and of the cache; seeds never change them."""
    longest = max(1, *(-(-length // case.cfg.page_size) for length in (*case.shape["seq_lens"], 1)))
    return longest, 1 + longest * max(1, len(case.shape["seq_lens"])) + 2


def _lengths(case: Case, generator: torch.Generator) -> torch.Tensor:
    """Return ``[B, 3]``: new tokens, cached tokens, start. The longest request keeps its length at every seed."""
    shape = case.shape
    longest = max(shape["seq_lens"], default=0)
    rows = []
    for query, total, start in zip(shape["query_lens"], shape["seq_lens"], shape["starts"], strict=True):
        prefix, cut = total - query, int(torch.randint(0, 8, (1,), generator=generator))
        prefix = prefix if total == longest else max(min(prefix, start), prefix - cut)
        rows.append((query, prefix, start))
    return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), 3)


def make_inputs(case: Case, device: torch.device, seed: int) -> dict[str, Any]:
    """Latents of different size by row and column; NaN in every cached row that no request may read."""
    generator = torch.Generator().manual_seed(seed)
    make = _prefill_inputs if case.shape["mode"] == "prefill" else _decode_inputs
    return {"case": case, **make(case, device, generator)}


def _random(generator: torch.Generator, *size: int) -> torch.Tensor:
    """Rows, heads and columns of different size: a swap or a wrong offset shows."""
    x = torch.randn(*size, generator=generator)
    return x * torch.exp(0.4 * torch.randn(*size[:-1], 1, generator=generator)) + 0.3 * torch.linspace(-1, 1, size[-1])


def _sharpness(cfg: MLAConfig, width: int) -> float:
    """Return the size of queries that gives scores a spread of about 2: neither uniform nor one-hot weights."""
    return 2.0 / (cfg.softmax_scale * math.sqrt(width))


def _decode_inputs(case: Case, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    cfg, shape = case.cfg, case.shape
    tokens, width = sum(shape["query_lens"]), cfg.latent_width
    per_request, total = _pages(case)
    lengths = _lengths(case, generator)
    order = 1 + torch.randperm(total - 1, generator=generator)
    pages = order[: per_request * lengths.shape[0]].view(lengths.shape[0], per_request)
    rows = _random(generator, total, cfg.page_size, width)
    stale = torch.ones(total, cfg.page_size, dtype=torch.bool)
    for (query, prefix, start), table in zip(lengths.tolist(), pages, strict=True):
        position = torch.arange(start, prefix + query)
        stale[table[position // cfg.page_size], position % cfg.page_size] = False
    cache = rows.clamp(-448, 448).to(cfg.kv_dtype)
    # Bytes of 0xFF are NaN in every format we cache.
    cache.view(torch.uint8)[stale] = 255
    # Padding of a bucket needs query rows, too.
    rows_of_q = shape["bucket"] or tokens
    q = _random(generator, rows_of_q, cfg.num_heads, width) * _sharpness(cfg, width)
    return {"q": q.to(device, cfg.dtype), "cache": cache.to(device), "lengths": lengths, "pages": pages}


def _prefill_inputs(case: Case, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    cfg, shape = case.cfg, case.shape
    queries, keys, heads = sum(shape["q_lens"]), sum(shape["k_lens"]), cfg.num_heads
    width = cfg.qk_nope_head_dim + cfg.qk_rope_head_dim
    q, k = _random(generator, queries, heads, width) * _sharpness(cfg, width), _random(generator, keys, heads, width)
    v = _random(generator, keys, heads, cfg.qk_nope_head_dim + cfg.v_head_dim).to(device, cfg.dtype)
    # As the layer passes them: values are the tail of the expanded rows.
    v = v[..., cfg.qk_nope_head_dim :] if shape["strided"] else v[..., cfg.qk_nope_head_dim :].contiguous()
    return {"q": q.to(device, cfg.dtype), "k": k.to(device, cfg.dtype), "v": v}


def _plan(case: Case, state: AttentionState, lengths: torch.Tensor, pages: torch.Tensor) -> AttentionMeta:
    query, prefix, start = (tuple(column) for column in lengths.T.tolist()) if len(lengths) else ((), (), ())
    batch = AttentionBatch(query, prefix, pages.tolist(), start)
    return state.plan(batch, bucket=case.shape["bucket"])


def prepare(impl: Any, inputs: dict[str, Any]) -> Step:
    """Plan the step; in a "replanned" case a call on another batch goes first, through the same state."""
    case: Case = inputs["case"]
    shape, device = case.shape, inputs["q"].device
    if shape["mode"] == "prefill":
        return Step(lens=RaggedLengths.of(shape["q_lens"], shape["k_lens"], shape["causal"], device))
    lengths, pages = inputs["lengths"], inputs["pages"]
    requests, tokens = max(1, len(lengths), shape["bucket"] or 0), max(1, inputs["q"].shape[0])
    state = AttentionState(requests, tokens, _pages(case)[0], case.cfg.page_size, device)
    if shape["replanned"]:
        other = lengths.clone()
        other[:, 1] //= 2
        impl.decode(inputs["q"], inputs["cache"], _plan(case, state, other, pages.flip(0)))
    return Step(state, _plan(case, state, lengths, pages))


def refresh(impl: Any, inputs: dict[str, Any], step: Step) -> None:
    """Plan the new lengths and pages into the buffers that a captured call reads."""
    if step.state is not None:
        meta = _plan(inputs["case"], step.state, inputs["lengths"], inputs["pages"])
        # Without a bucket the plans of backends follow at the next call, which a replay is not.
        meta.plans.refresh(meta)


def run(impl: Any, inputs: dict[str, Any], step: Step) -> dict[str, torch.Tensor]:
    """Call the form that the case is for; rows of padding are cut off."""
    shape = inputs["case"].shape
    if shape["mode"] == "prefill":
        o, lse = impl.prefill(inputs["q"], inputs["k"], inputs["v"], step.lens, need_lse=shape["need_lse"])
        return {"o": o} if lse is None else {"o": o, "lse": lse}
    o, lse = impl.decode(inputs["q"], inputs["cache"], step.meta)
    tokens = sum(shape["query_lens"])
    return {"o": o[:tokens], "lse": lse[:tokens]} if inputs["case"].cfg.lse else {"o": o[:tokens]}


def cost(case: Case) -> Cost:
    """Decode: each cached row once. Prefill: q, k, v and o once; this dataflow reads k and v once per query block."""
    cfg, shape, heads, size = case.cfg, case.shape, case.cfg.num_heads, case.cfg.dtype.itemsize
    if shape["mode"] == "prefill":
        width, pairs, again = cfg.qk_nope_head_dim + cfg.qk_rope_head_dim, 0, 0
        block = prefill_config(cfg.dtype).block_m
        for q_len, k_len in zip(shape["q_lens"], shape["k_lens"], strict=True):
            seen = [max(0, min(k_len, k_len - q_len + i + 1)) if shape["causal"] else k_len for i in range(q_len)]
            pairs, again = (
                pairs + sum(seen),
                again + sum(seen[min(i + block, q_len) - 1] for i in range(0, q_len, block)),
            )
        outer = sum(shape["q_lens"]) * heads * ((width + cfg.v_head_dim) * size + 4 * shape["need_lse"])
        per_key = heads * (width + cfg.v_head_dim) * size
        flops = 2.0 * pairs * heads * (width + cfg.v_head_dim)
        return Cost(flops, outer + sum(shape["k_lens"]) * per_key, outer + again * per_key)
    tokens, longest = sum(shape["query_lens"]), max(shape["seq_lens"], default=0)
    rows, pairs = 0, 0
    for query, total, start in zip(shape["query_lens"], shape["seq_lens"], shape["starts"], strict=True):
        rows += max(0, total - start) if query else 0
        pairs += sum(max(0, total - query + i + 1 - start) for i in range(query))
    outer = tokens * heads * ((cfg.latent_width + cfg.kv_lora_rank) * size + 4)
    cached = rows * cfg.latent_width * cfg.kv_dtype.itemsize
    config = decode_config(heads * max(shape["query_lens"], default=0), cfg.dtype, cfg.kv_dtype, cfg.page_size)
    blocks = max(1, -(-heads * max(shape["query_lens"], default=0) // config.block_m))
    splits = num_splits(max(1, len(shape["seq_lens"])) * blocks, longest, config, NOMINAL_SM_COUNT)
    # Partial results are written and read in fp32.
    partial = 2.0 * splits * tokens * heads * (cfg.kv_lora_rank + 1) * 4 if splits > 1 else 0.0
    return Cost(2.0 * pairs * heads * (cfg.latent_width + cfg.kv_lora_rank), outer + cached, outer + cached + partial)


# What bf16's bounds are to its rounding (2^-9), to that of e4m3 (2^-5).
E4M3_MATH = Bound(BOUNDS[torch.bfloat16].rel_rms * 16, BOUNDS[torch.bfloat16].row_max * 16)


def bounds(case: Case) -> dict[str, Bound]:
    """Products of e4m3 are as exact as that format; everything else as its output's."""
    return {"o": E4M3_MATH, "lse": E4M3_MATH} if case.cfg.fp8_math else {}


def oracle(backend: str) -> Oracle | None:
    """FlashMLA rounds queries where ``fp8_math`` allows it; what it does then is held against the same queries."""
    return Oracle("fastlayers.attention.mla.reference:RoundedQueries", bounds) if backend == "flashmla" else None


def at_tokens(shape: dict[str, Any], cfg: Any, tokens: int, context: int) -> dict[str, Any]:
    """Return a case's shape: in decode so many requests with a context, else one prompt of so many tokens."""
    if getattr(cfg, "phase", "") == "decode":
        return {
            "mode": "decode", "query_lens": (1,) * tokens, "seq_lens": (context,) * tokens, "starts": (0,) * tokens,
            "bucket": None, "replanned": False,
        }  # fmt: skip
    lengths = (tokens,)
    return {"mode": "prefill", "q_lens": lengths, "k_lens": lengths, "causal": True, "need_lse": False, "strided": True}


SPEC = LayerSpec(
    CASES,
    make_inputs,
    run,
    cost,
    prepare,
    refresh,
    bounds,
    oracle=oracle,
    examples=step_examples,
    at_tokens=at_tokens,
    heavy=4,
)
