"""Cells of the cache behind a request's last key, and pages that are nobody's, reach no product: not a bit differs.

A server hands freed pages out as they are, before it knows whether the logits of a step are finite that was launched
before its request's end was known. So a page may hold NaN where its new owner has not written, and 0 · NaN is NaN.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastlayers.attention.gqa.config import GQA, GQAConfig
from fastlayers.attention.meta import AttentionBatch, AttentionMeta, AttentionState, whole_pages
from fastlayers.attention.mla.config import MLA, MLAConfig

STEPS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {  # new tokens and cached ones of each request
    "decode": ((1, 1, 1), (0, 36, 270)),
    "ragged": ((5, 1, 17), (3, 20, 0)),
}
FILLS = (7.0, torch.nan)


def step_of(name: str, page: int) -> tuple[AttentionMeta, torch.Tensor]:
    """Return a step's metadata, and which cells ``[pages, page]`` its requests own."""
    new, cached = STEPS[name]
    lengths = [a + b for a, b in zip(new, cached, strict=True)]
    table = whole_pages(lengths, page)
    meta = AttentionState(4, 64, max(map(len, table)) + 1, page, "cpu").plan(AttentionBatch(new, cached, table))
    owned = torch.zeros(max(map(max, table)) + 2, page, dtype=torch.bool)
    for pages, length in zip(table, lengths, strict=True):
        place = torch.arange(length)
        owned[torch.tensor(pages)[place // page], place % page] = True
    return meta, owned


def same_bits(run: Any, owned: torch.Tensor, *caches: torch.Tensor) -> None:
    """Demand that what is in cells without an owner changes nothing."""
    found = []
    raw = [cache.view(torch.uint8) if cache.element_size() == 1 else cache for cache in caches]  # torch fills no e4m3
    for fill in FILLS:
        for cache, cells in zip(caches, raw, strict=True):
            cells[~owned] = torch.tensor([fill]).to(cache.dtype).view(cells.dtype)
        found.append([part.clone() for part in run()])
    assert all(part.isfinite().all() for part in found[0])
    for got in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(got, found[0], strict=True))
    own = owned.nonzero()[0].tolist()
    raw[-1][own[0], own[1]] = torch.tensor([torch.nan]).to(caches[-1].dtype).view(raw[-1].dtype)
    assert not torch.equal(run()[0], found[0][0]), "a request's own cell is not read either"


EXTRAS: tuple[dict[str, Any], ...] = ({}, dict(window=6, sinks=True), dict(softcap=5.0, kv_dtype=torch.float8_e4m3fn))


@pytest.mark.parametrize("backend", ["torch", "triton", "reference"])
@pytest.mark.parametrize("extras", EXTRAS, ids=["plain", "window", "e4m3"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("page", [16, 64])
def test_gqa(backend: str, extras: dict[str, Any], step: str, page: int) -> None:
    meta, owned = step_of(step, page)
    given: dict[str, Any] = dict(dtype=torch.float32, kv_dtype=torch.float32, phase=meta.phase) | extras
    cfg = GQAConfig(4, 2, 16, 0.25, page_size=page, **given)
    random = torch.Generator().manual_seed(page)
    caches = [torch.randn(*owned.shape, 2, 16, generator=random).to(cfg.kv_dtype) for _ in range(2)]
    q = torch.randn(meta.num_tokens, 4, 16, generator=random)
    sinks = torch.randn(4, generator=random) if cfg.sinks else None
    core = GQA.choose(cfg, "cpu", backend).build().pick(1)
    same_bits(lambda: core(q, *caches, meta, sinks), owned, *caches)


@pytest.mark.parametrize("backend", ["torch", "triton", "reference"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("page", [16, 64])
def test_mla(backend: str, step: str, page: int) -> None:
    meta, owned = step_of(step, page)
    cfg = MLAConfig(
        3, 32, 16, 16, 16, 0.2, page_size=page, dtype=torch.float32, kv_dtype=torch.float32, phase=meta.phase
    )
    random = torch.Generator().manual_seed(page)
    cache = torch.randn(*owned.shape, 48, generator=random)
    q = torch.randn(meta.num_tokens, 3, 48, generator=random)
    core = MLA.choose(cfg, "cpu", backend).build().pick(1)
    same_bits(lambda: core.decode(q, cache, meta), owned, cache)
