"""gqa's cases, inputs and cost. A step's lengths and pages are tensors: a replay can be given others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from fastlayers.attention.examples import step_examples
from fastlayers.attention.gqa.config import GQAConfig
from fastlayers.attention.meta import AttentionBatch, AttentionMeta, AttentionState
from fastlayers.registry.spec import Case, Cost, LayerSpec

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn


def _case(
    name: str,
    cfg: GQAConfig,
    query_lens: tuple[int, ...],
    prefix_lens: tuple[int, ...],
    starts: tuple[int, ...] = (),
    bucket: int | None = None,
    small: bool = True,
) -> Case:
    shape = {"query_lens": query_lens, "prefix_lens": prefix_lens, "starts": starts, "bucket": bucket}
    phase = AttentionBatch(query_lens, prefix_lens, ((),) * len(query_lens), starts).phase
    return Case(name, replace(cfg, phase=phase), shape, small)


def _cfg(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, page_size: int, **more: Any) -> GQAConfig:
    return GQAConfig(heads, kv_heads, dim, dim**-0.5, page_size=page_size, dtype=dtype, **{"kv_dtype": dtype, **more})


_GPT_OSS: dict[str, Any] = {"window": 128, "sinks": True}
_OSS_LENS = (127, 9, 128, 4000, 300)
_MIXED = ((1024, 1, 700, 33, 1, 2048), (0, 4000, 1500, 129, 63, 0))
CASES = (
    _case("decode", _cfg(4, 2, 32, BF16, 16), (1, 1, 1), (0, 36, 99)),
    _case("decode_splits", _cfg(2, 1, 16, FP32, 64, softcap=8.0), (1, 1), (290, 4)),
    _case("decode_splits_sinks", _cfg(4, 2, 16, BF16, 16, sinks=True), (1, 1), (270, 0)),
    _case("decode_bucket", _cfg(3, 1, 64, FP16, 1), (1, 1, 1), (9, 30, 2), bucket=5),
    _case("decode_window", _cfg(4, 2, 64, BF16, 16, window=8, sinks=True), (1, 1, 1), (7, 8, 70)),
    _case("decode_fp8", _cfg(4, 2, 32, BF16, 64, kv_dtype=FP8), (1, 1), (40, 66)),
    _case("extend_ragged", _cfg(6, 2, 32, FP32, 16), (5, 0, 17, 1), (3, 20, 0, 40)),
    _case("extend_left_padded", _cfg(2, 2, 16, FP32, 16), (9, 20), (0, 0), (4, 0)),
    _case("extend_window", _cfg(4, 1, 40, BF16, 1, window=5, sinks=True), (12, 3), (0, 30), (7, 0)),
    _case("extend_softcap_fp8", _cfg(2, 1, 16, FP32, 16, softcap=4.0, kv_dtype=FP8), (7, 2), (0, 90)),
    _case("decode_left_padded", _cfg(2, 1, 32, FP16, 16, window=16), (1, 1), (20, 50), (18, 3)),
    _case("decode_no_lse", _cfg(8, 2, 64, BF16, 16, lse=False), (1, 1, 1, 1), (5, 63, 0, 200), bucket=6),
    _case("decode_no_lse_sinks", _cfg(4, 2, 64, BF16, 16, window=40, sinks=True, lse=False), (1, 1), (30, 90)),
    _case("extend_no_lse", _cfg(4, 2, 64, BF16, 16, lse=False), (5, 1, 0, 30), (11, 20, 7, 0)),
    _case("extend_full", _cfg(2, 2, 20, FP32, 16, causal=False, lse=False), (12, 4, 20, 8), (0, 8, 0, 0)),
    _case("extend_full_splits", _cfg(2, 1, 16, BF16, 16, causal=False), (5, 300), (290, 0)),
    _case("few_window", _cfg(4, 2, 32, BF16, 16, window=9, sinks=True), (4, 1, 0, 3), (20, 3, 5, 60)),
    _case("few_splits", _cfg(8, 2, 16, BF16, 64, sinks=True), (4, 2), (700, 9)),
    _case("few_added_at_once", _cfg(4, 1, 16, FP16, 16, softcap=8.0), (8, 3), (150, 40)),
    _case("few_left_padded", _cfg(6, 2, 32, BF16, 1, window=16), (2, 5), (20, 50), (18, 3)),
    _case("few_fp32", _cfg(4, 2, 16, FP32, 64), (5, 8, 1), (0, 33, 70)),
    _case("empty", _cfg(2, 1, 16, BF16, 16), (0, 0), (3, 0)),
    _case("qwen3_8b_decode", _cfg(32, 8, 128, BF16, 64), (1,) * 24, (4095,) * 8 + (700,) * 16, small=False),
    _case("qwen3_8b_decode_long", _cfg(32, 8, 128, BF16, 64), (1,), (32000,), bucket=2, small=False),
    _case("qwen3_8b_prefill", _cfg(32, 8, 128, BF16, 64), *_MIXED, small=False),
    _case("qwen3_30b_prefill", _cfg(32, 4, 128, BF16, 64, lse=False), (512, 300), (0, 77), small=False),
    _case("qwen3_8b_fp8", _cfg(32, 8, 128, BF16, 64, kv_dtype=FP8, lse=False), *_MIXED, small=False),
    _case("qwen3_8b_drafts", _cfg(32, 8, 128, BF16, 64, lse=False), (4, 3, 1, 4), (2048, 4095, 0, 127), small=False),
    _case("gpt_oss_drafts", _cfg(64, 8, 64, BF16, 64, **_GPT_OSS), (4,) * 5, _OSS_LENS, small=False),
    _case("gpt_oss_decode", _cfg(64, 8, 64, BF16, 64, **_GPT_OSS), (1,) * 16, (4095,) * 16, small=False),
    _case("qwen3_30b_decode", _cfg(32, 4, 128, BF16, 64, lse=False), (1,) * 3, (511, 0, 129), bucket=4, small=False),
    _case("gpt_oss_no_lse", _cfg(64, 8, 64, BF16, 64, lse=False, **_GPT_OSS), (1,) * 5, _OSS_LENS, (), 8, False),
    _case("gpt_oss_full_no_lse", _cfg(64, 8, 64, BF16, 64, lse=False, sinks=True), (1,) * 2, (700, 9000), small=False),
    _case("gpt_oss_full_prefill", _cfg(64, 8, 64, BF16, 64, sinks=True), *_MIXED, small=False),
    _case("gpt_oss_prefill", _cfg(64, 8, 64, BF16, 16, lse=False, **_GPT_OSS), *_MIXED, small=False),
    _case("gemma2_9b", _cfg(16, 8, 256, BF16, 64, window=512, softcap=50.0, lse=False), *_MIXED, small=False),
    _case("qwen25_vl_tower", _cfg(16, 16, 80, BF16, 4, causal=False, lse=False), (1064,), (0,), small=False),
    _case("llama_fp32_prefill", _cfg(32, 8, 128, FP32, 64), (100, 300), (500, 0), small=False),
)  # fmt: skip


def make_inputs(case: Case, device: torch.device, seed: int) -> dict[str, Any]:
    """Requests in another order for every seed, on shuffled pages; keys and values of each head another size.

    With a bucket the lengths vary too. Rows of the cache that belong to nobody hold NaN.
    """
    generator = torch.Generator().manual_seed(seed)
    cfg, shape = case.cfg, case.shape
    count = len(shape["query_lens"])
    order = torch.randperm(count, generator=generator)
    query, prefix = torch.tensor(shape["query_lens"])[order], torch.tensor(shape["prefix_lens"])[order]
    starts = torch.tensor(shape["starts"] or (0,) * count)[order]
    if shape["bucket"] is not None:
        prefix = (prefix - torch.randint(0, 3, (count,), generator=generator)).clamp_min(0)
    longest = max(p + q for p, q in zip(shape["prefix_lens"], shape["query_lens"], strict=True))
    width = -(-max(longest, 1) // cfg.page_size)
    pages = count * width + 1
    table = (torch.randperm(pages - 1, generator=generator) + 1).view(count, width)
    caches = [torch.full((pages, cfg.page_size, cfg.num_kv_heads, cfg.head_dim), torch.nan) for _ in "kv"]
    sizes = 0.5 + torch.arange(cfg.num_kv_heads)[:, None]
    for cache in caches:
        cache[0] = 0.0
    for b, length in enumerate((query + prefix).tolist()):
        place = torch.arange(length)
        for cache in caches:
            rows = torch.randn(length, cfg.num_kv_heads, cfg.head_dim, generator=generator) * sizes
            cache[table[b, place // cfg.page_size], place % cfg.page_size] = rows
    rows = shape["bucket"] if shape["bucket"] is not None else sum(shape["query_lens"])
    q = 2.0 * torch.randn(rows, cfg.num_heads, cfg.head_dim, generator=generator)
    sinks = torch.randn(cfg.num_heads, generator=generator) + 1.0 if cfg.sinks else None
    return {
        "q": q.to(device, cfg.dtype),
        "k_cache": caches[0].to(device, cfg.kv_dtype),
        "v_cache": caches[1].to(device, cfg.kv_dtype),
        "sinks": sinks if sinks is None else sinks.to(device),
        "query_lens": query,
        "prefix_lens": prefix,
        "starts": starts,
        "page_table": table,
        "bucket": shape["bucket"],
        "lse": cfg.lse,
    }


@dataclass
class Context:
    """A planned step: the state with its static buffers, its metadata, and how many rows are real."""

    state: AttentionState
    meta: AttentionMeta
    valid: int


def _batch(inputs: dict[str, Any]) -> AttentionBatch:
    query, prefix, starts = (tuple(inputs[name].tolist()) for name in ("query_lens", "prefix_lens", "starts"))
    return AttentionBatch(query, prefix, inputs["page_table"].tolist(), starts)


def prepare(impl: Any, inputs: dict[str, Any]) -> Context:
    """Plan the step."""
    batch, bucket, q = _batch(inputs), inputs["bucket"], inputs["q"]
    requests = bucket if bucket is not None else len(batch.query_lens)
    pages = inputs["page_table"].shape[1]
    state = AttentionState(requests, max(1, q.shape[0]), pages, inputs["k_cache"].shape[1], q.device)
    return Context(state, state.plan(batch, bucket=bucket), batch.num_tokens)


def refresh(impl: Any, inputs: dict[str, Any], context: Context) -> None:
    """Plan another step into the same buffers."""
    meta = context.state.plan(_batch(inputs), bucket=inputs["bucket"])
    # Without a bucket the plans of backends follow at the next call, which a replay is not.
    meta.plans.refresh(meta)


def run(impl: Any, inputs: dict[str, Any], context: Context) -> dict[str, torch.Tensor]:
    """Attend; padded rows are cut off. Without ``cfg.lse`` nobody reads the LSE."""
    o, lse = impl(inputs["q"], inputs["k_cache"], inputs["v_cache"], context.meta, inputs["sinks"])
    o = o[: context.valid]
    return {"o": o, "lse": lse[: context.valid]} if inputs["lse"] else {"o": o}


def cost(case: Case) -> Cost:
    """Two products over the visible keys; compulsory: visible keys and values, q and o, once."""
    cfg, pairs, keys = case.cfg, 0, 0
    window = cfg.window or 2**60
    for query, prefix in zip(case.shape["query_lens"], case.shape["prefix_lens"], strict=True):
        pairs += sum(min(prefix + i + 1, window) for i in range(query))
        keys += min(prefix + query, window + query - 1) if query else 0
    tokens = sum(case.shape["query_lens"])
    moved = 2.0 * tokens * cfg.num_heads * cfg.head_dim * cfg.dtype.itemsize + 4.0 * tokens * cfg.num_heads
    moved += 2.0 * keys * cfg.num_kv_heads * cfg.head_dim * cfg.kv_dtype.itemsize
    return Cost(4.0 * pairs * cfg.num_heads * cfg.head_dim, moved, moved)


def at_tokens(shape: dict[str, Any], cfg: Any, tokens: int, context: int) -> dict[str, Any]:
    """Return a case's shape: in decode so many requests with a context, else one prompt of so many tokens."""
    decode = getattr(cfg, "phase", "") == "decode"
    query, prefix = ((1,) * tokens, (context - 1,) * tokens) if decode else ((tokens,), (0,))
    return shape | {"query_lens": query, "prefix_lens": prefix, "starts": ()}


SPEC = LayerSpec(CASES, make_inputs, run, cost, prepare, refresh, examples=step_examples, at_tokens=at_tokens, heavy=5)
