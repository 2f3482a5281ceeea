"""Attention cores on an extend that is padded to a bucket: real rows as without padding, whatever the padding holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastlayers.attention.buckets import ExtendBucket
from fastlayers.attention.gqa.config import GQA, GQAConfig
from fastlayers.attention.meta import AttentionBatch, AttentionMeta, AttentionState, whole_pages
from fastlayers.attention.mla.config import MLA, MLAConfig
from fastlayers.errors import ArgumentError

PAGE = 16
MIXTURES = [
    # new tokens and cached ones of each request, and the bucket
    ((7, 1, 4), (0, 20, 5), ExtendBucket(16, 4)),
    ((16,), (33,), ExtendBucket(16, 1)),
    ((3,), (0,), ExtendBucket(16, 2)),
    ((15, 17), (2, 0), ExtendBucket(32, 2)),
    # drafts: the bound is what one request may bring
    ((4, 2, 1), (30, 20, 0), ExtendBucket(16, 4, 4)),
]


def steps(
    new: tuple[int, ...], cached: tuple[int, ...], bucket: ExtendBucket, starts: tuple[int, ...] = (), pages: int = 4
) -> tuple[AttentionMeta, AttentionMeta]:
    """Return the step as it is, and padded; as a captured graph knows it, without a batch on the host."""
    table = whole_pages([a + b for a, b in zip(new, cached, strict=True)], PAGE)
    batch = AttentionBatch(new, cached, table, starts)
    plain = AttentionState(4, 64, pages, PAGE).plan(batch)
    state = AttentionState(4, 64, pages, PAGE)
    captured = state.plan(AttentionBatch((), (), []), bucket=bucket)
    state.plan(batch, bucket=bucket)
    return plain, captured


def close(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.allclose(got[: wanted.shape[0]], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("extras", [{}, dict(window=6, sinks=True), dict(softcap=5.0)], ids=["plain", "sinks", "cap"])
@pytest.mark.parametrize(("new", "cached", "bucket"), MIXTURES)
def test_gqa(backend: str, extras: dict[str, Any], new: Any, cached: Any, bucket: ExtendBucket) -> None:
    cfg = GQAConfig(
        4, 2, 16, 0.25, page_size=PAGE, dtype=torch.float32, kv_dtype=torch.float32, phase="extend", **extras
    )
    check_gqa(cfg, backend, steps(new, cached, bucket))


def check_gqa(cfg: GQAConfig, backend: str, metas: tuple[AttentionMeta, AttentionMeta]) -> None:
    plain, captured = metas
    random = torch.Generator().manual_seed(0)
    caches = [torch.randn(40, PAGE, 2, 16, generator=random) for _ in range(2)]
    for cache in caches:
        cache[0] = torch.nan  # where padding is written
    q = torch.randn(captured.num_tokens, 4, 16, generator=random)
    sinks = torch.randn(4, generator=random) if cfg.sinks else None
    wanted, _ = GQA.choose(cfg, "cpu", "torch").build().pick(1)(q[: plain.num_tokens], *caches, plain, sinks)
    q[plain.num_tokens :] = torch.nan
    captured_cfg = GQAConfig(**{**vars(cfg), "captured": True})
    core = GQA.choose(captured_cfg, "cpu", backend).build().pick(1)
    got, _ = core(q, *caches, captured, sinks)
    assert got.shape == q.shape and close(got, wanted)


@pytest.mark.parametrize("extras", [{}, dict(window=300, sinks=True)], ids=["plain", "sinks"])
@pytest.mark.parametrize("bucket", [ExtendBucket(16, 1), ExtendBucket(16, 3), ExtendBucket(16, 3, 4)])
def test_gqa_of_few_keys_where_the_bounds_allow_many(extras: dict[str, Any], bucket: ExtendBucket) -> None:
    """Keys are split for the capacity: most splits are empty, and what they do not write is not read."""
    cfg = GQAConfig(
        4, 2, 16, 0.25, page_size=PAGE, dtype=torch.float32, kv_dtype=torch.float32, phase="extend", **extras
    )
    new, cached = ((5,), (310,)) if bucket.requests == 1 else ((4, 2), (520, 5))
    check_gqa(cfg, "triton", steps(new, cached, bucket, pages=64))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_gqa_with_left_padding(backend: str) -> None:
    cfg = GQAConfig(4, 2, 16, 0.25, page_size=PAGE, dtype=torch.float32, kv_dtype=torch.float32, phase="padded")
    check_gqa(cfg, backend, steps((5, 3), (9, 2), ExtendBucket(16, 2), starts=(8, 0)))


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(("new", "cached", "bucket"), MIXTURES)
def test_mla(backend: str, new: Any, cached: Any, bucket: ExtendBucket) -> None:
    plain, captured = steps(new, cached, bucket)
    assert captured.path == "mqa" and plain.path == ""
    cfg = MLAConfig(2, 32, 16, 16, 16, 0.2, page_size=PAGE, dtype=torch.float32, kv_dtype=torch.float32, phase="ragged")
    random = torch.Generator().manual_seed(0)
    cache = torch.randn(18, PAGE, 48, generator=random)
    cache[0] = torch.nan
    q = torch.randn(captured.num_tokens, 2, 48, generator=random)
    wanted, _ = MLA.choose(cfg, "cpu", "torch").build().pick(1).decode(q[: plain.num_tokens], cache, plain)
    q[plain.num_tokens :] = torch.nan
    core = MLA.choose(MLAConfig(**{**vars(cfg), "captured": True}), "cpu", backend).build().pick(1)
    got, _ = core.decode(q, cache, captured)
    assert got.shape == (*q.shape[:2], 32) and close(got, wanted)


def test_what_a_bucket_holds() -> None:
    state = AttentionState(4, 64, 4, PAGE)
    meta = state.plan(AttentionBatch((3, 2), (17, 0), [[5, 6], [9]]), bucket=ExtendBucket(8, 4))
    assert meta.is_extend_bucket and not meta.is_decode and (meta.max_query_len, meta.max_seq_len) == (8, 64)
    assert meta.cu_seqlens_q.tolist() == [0, 3, 5, 5, 5] and meta.seq_lens.tolist() == [20, 2, 1, 1]
    assert meta.positions.tolist() == [17, 18, 19, 0, 1, 0, 0, 0]
    assert meta.out_cache_loc.tolist() == [97, 98, 99, 144, 145, 0, 0, 0]
    assert meta.request_of_token.tolist() == [0, 0, 0, 1, 1, 0, 0, 0]
    assert meta.page_table[2:].tolist() == [[0] * 4] * 2
    # One address for all steps of a bucket, and nothing left of the step before.
    state.plan(AttentionBatch((8,), (0,), [[3]], (2,)), bucket=ExtendBucket(8, 4))
    assert meta.starts.tolist() == [2, 0, 0, 0] and meta.cu_seqlens_q.tolist() == [0, 8, 8, 8, 8]
    state.plan(AttentionBatch((), (), []), bucket=ExtendBucket(8, 4))
    assert meta.cu_seqlens_q.tolist() == [0] * 5 and not meta.out_cache_loc.any() and not meta.page_table.any()


def test_the_longest_request_of_a_bucket() -> None:
    batch, state = AttentionBatch((3,), (30,), [[1, 2, 3]]), AttentionState(4, 64, 4, PAGE)
    for longest, bound in ((0, 4 * PAGE), (33, 33), (10 * PAGE, 4 * PAGE)):
        assert state.plan(batch, bucket=ExtendBucket(8, 2, longest=longest)).max_seq_len == bound
    with pytest.raises(ArgumentError, match="longest >= 33, or 0"):
        state.plan(batch, bucket=ExtendBucket(8, 2, longest=32))
    with pytest.raises(ArgumentError, match="longest is -1; accepted: 0, or the most tokens"):
        ExtendBucket(8, 2, longest=-1)


@pytest.mark.parametrize("bucket", [ExtendBucket(4, 2), ExtendBucket(8, 1), ExtendBucket(128, 2), ExtendBucket(8, 5)])
def test_a_bucket_that_does_not_fit(bucket: ExtendBucket) -> None:
    accepted = r"at least 5 tokens and 2 requests, at most ExtendBucket\(tokens=64, requests=4\)"
    with pytest.raises(ArgumentError, match=accepted):
        AttentionState(4, 64, 4, PAGE).plan(AttentionBatch((3, 2), (0, 0), [[1], [2]]), bucket=bucket)
