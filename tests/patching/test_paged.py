"""The cache of captured decoding: pages, copies, the pool that lends them; and the static tensors of a step."""

from __future__ import annotations

import copy
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from fastlayers.attention.gqa.config import GQAConfig
from fastlayers.attention.gqa.launch_config import NUMBERS, decode_config
from fastlayers.attention.rotary_kv_write.layer import RotaryKVWriteConfig
from fastlayers.errors import CaptureError
from fastlayers.patching.cache import PAGE
from fastlayers.patching.paged import CacheLease, CachePool, CacheStore, PagedCache, active_step, capacity_bucket
from fastlayers.patching.step import DecodeStep

sys.path.insert(0, str(Path(__file__).parent))
from tiny import build


def paged(capacity: int = 256, layers: int = 2, latent: bool = False, pool: CachePool | None = None) -> PagedCache:
    return PagedCache(CacheLease(pool, capacity), [latent] * layers)


def rows(tokens: int, batch: int = 3, heads: int = 2, width: int = 8, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, heads, tokens, width, generator=torch.Generator().manual_seed(seed))


def fill(cache: Any, sizes: tuple[int, ...] = (40, 1, 3), latent: bool = False, layers: int = 2) -> list[Any]:
    returned = []
    for layer in range(layers):
        for index, size in enumerate(sizes):
            heads, width = (1, 6) if latent else (2, 8)
            keys = rows(size, heads=heads, seed=10 * layer + index)
            values = rows(size, heads=heads, width=width, seed=100 + 10 * layer + index)
            returned.append(cache.update(keys, values, layer))
    return returned


def test_capacities_are_few_whole_pages_and_at_most_half_too_large() -> None:
    found = [capacity_bucket(n) for n in (1, 256, 257, 384, 385, 512, 513, 769, 1025, 40000)]
    assert found == [256, 256, 384, 384, 512, 512, 768, 1024, 1536, 49152]
    for tokens in range(1, 9000, 7):
        bucket = capacity_bucket(tokens)
        assert tokens <= bucket and bucket % PAGE == 0
        assert bucket <= max(256, 1.5 * tokens)


@pytest.mark.parametrize("latent", [False, True])
def test_update_returns_what_a_dynamic_cache_returns(latent: bool) -> None:
    cache, stock = paged(latent=latent), DynamicCache()
    for ours, theirs in zip(fill(cache, latent=latent), fill(stock, latent=latent), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert cache.get_seq_length() == stock.get_seq_length() == 44
    assert cache.get_mask_sizes(5, 0) == stock.get_mask_sizes(5, 0)
    assert cache.attached and not cache.is_compileable and cache.is_sliding == [False, False]
    if latent:
        both = torch.cat((stock.layers[1].keys, stock.layers[1].values), -1)[:, 0]
        assert torch.equal(cache.layers[1].rows(), both)
        assert cache.layers[1].pages().shape == (3 * 256 // PAGE, PAGE, 14)
    else:
        keys, values = cache.layers[1].paged()
        assert keys.shape == values.shape == (3 * 256 // PAGE, PAGE, 2, 8)
        assert torch.equal(keys[4, 5], stock.layers[1].keys[1, :, 5]), "row 1 begins at page 4"


def test_crop_and_reset_stay_in_the_pages() -> None:
    cache, stock = paged(), DynamicCache()
    fill(cache), fill(stock)
    for amount in (-4, 30):
        # transformers 5.23 takes negative numbers only.
        cache.crop(amount), stock.crop(amount if amount < 0 else amount - stock.get_seq_length())
        assert cache.get_seq_length() == stock.get_seq_length()
        assert torch.equal(cache.layers[0].keys, stock.layers[0].keys)
    assert cache.attached
    cache.reset()
    assert cache.get_seq_length() == 0
    fill(cache)
    assert cache.get_seq_length() == 44 and cache.attached


@pytest.mark.parametrize("what", ["reorder", "repeat", "select", "overflow"])
def test_what_rebinds_rows_makes_ordinary_layers(what: str) -> None:
    cache, stock = paged(), DynamicCache()
    fill(cache), fill(stock)
    for one in (cache, stock):
        if what == "reorder":
            one.reorder_cache(torch.tensor([2, 0, 1]))
        elif what == "repeat":
            one.batch_repeat_interleave(2)
        elif what == "select":
            one.batch_select_indices(torch.tensor([2, 0]))
        else:
            fill(one, (230,))
    batch = stock.layers[0].keys.shape[0]
    ours, theirs = (one.update(rows(1, batch, seed=5), rows(1, batch, seed=6), 0) for one in (cache, stock))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert cache.get_seq_length() == stock.get_seq_length()
    assert not cache.attached and not cache.layers[0].attached


@pytest.mark.parametrize("how", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
@pytest.mark.parametrize("latent", [False, True])
def test_copies_are_plain_dynamic_caches_with_rows_of_their_own(how: Any, latent: bool) -> None:
    cache = paged(latent=latent)
    fill(cache, latent=latent)
    twin = how(cache)
    assert type(twin) is DynamicCache and twin.get_seq_length() == 44
    kept = twin.layers[1].keys.clone()
    assert torch.equal(kept, cache.layers[1].keys)
    cache.lease.store.layers[1][0].fill_(0)
    assert torch.equal(twin.layers[1].keys, kept)


def test_update_in_the_middle_of_a_step_is_an_error() -> None:
    cache = paged()
    fill(cache)
    cache.step = object()
    assert active_step(cache) is cache.step and active_step(DynamicCache()) is None
    with pytest.raises(CaptureError, match="layer 1 left the fast path"):
        cache.update(rows(1), rows(1), 1)


def test_a_pool_lends_a_store_again_only_when_its_cache_is_gone() -> None:
    dropped: list[Any] = []
    pool = CachePool(1 << 30, dropped.append)
    first = paged(pool=pool)
    fill(first)
    store = first.lease.store
    address = store.layers[0][0].data_ptr()
    second = paged(pool=pool)
    fill(second)
    assert second.lease.store is not store and dropped == [store.key]
    kept = first.layers[0].keys.clone()
    fill(second, (5,))
    assert torch.equal(first.layers[0].keys, kept), "the rows of a cache that lives are its own"
    again = second.lease.store
    del second
    third = paged(pool=pool)
    fill(third)
    assert third.lease.store is again and len(pool) == 1 and address == store.layers[0][0].data_ptr()


def test_a_pool_drops_what_was_used_longest_ago() -> None:
    dropped: list[Any] = []
    one = CacheStore(3, 256)
    one.layer(0, rows(0), rows(0), False)
    pool = CachePool(2 * one.nbytes + 10, dropped.append)
    keys = []
    for capacity in (256, 256, 384):
        cache = paged(capacity, layers=1, pool=pool)
        fill(cache, layers=1)
        keys.append(cache.lease.store.key)
        del cache
    assert keys[0] == keys[1] and dropped == []
    cache = paged(512, layers=1, pool=pool)
    fill(cache, layers=1)
    pool.shrink(cache.lease.store)
    assert dropped == [keys[0], keys[2]] and len(pool) == 1, "the one in use stays, however large"
    pool.clear()
    assert len(pool) == 0 and dropped[-1] == cache.lease.store.key


def test_a_step_counts_on_the_device_and_can_be_set_back() -> None:
    step = DecodeStep(3, 256, torch.device("cpu"), "torch")
    step.set_length(40)
    step.begin()
    meta = step.meta
    assert meta.seq_lens.tolist() == [41] * 3 and meta.positions.tolist() == [40] * 3
    assert meta.out_cache_loc.tolist() == [40, 296, 552]
    assert meta.batch.prefix_lens == (40,) * 3 and meta.is_decode and meta.max_seq_len == 256
    addresses = [t.data_ptr() for t in (meta.seq_lens, meta.positions, meta.out_cache_loc)]
    for _ in range(3):
        step.begin()
    assert step.meta.out_cache_loc.tolist() == [43, 299, 555]
    step.set_length(40)
    step.begin()
    assert step.meta.seq_lens.tolist() == [41] * 3 and step.meta.out_cache_loc.tolist() == [40, 296, 552]
    assert addresses == [t.data_ptr() for t in (step.meta.seq_lens, step.meta.positions, step.meta.out_cache_loc)]


def test_hugging_face_passes_the_mask_of_a_step_on_as_it_is() -> None:
    model, step = build("gpt_oss"), DecodeStep(3, 256, torch.device("cpu"), "torch")
    fl_cache = paged(layers=2)
    for make in (create_causal_mask, create_sliding_window_causal_mask):
        mask = make(
            config=model.config, inputs_embeds=torch.zeros(3, 1, 64), attention_mask=step.mask, past_key_values=fl_cache
        )
        assert mask is step.mask
    step.meta.starts.copy_(torch.tensor([0, 6, 3]))
    assert step.mask.flatten().tolist() == [0, 6, 3]


def test_rotary_tables_are_made_once_a_step() -> None:
    step = DecodeStep(2, 256, torch.device("cpu"), "torch")
    cos, sin = torch.randn(2, 1, 8).bfloat16(), torch.randn(2, 1, 8).bfloat16()
    first = step.tables((cos, sin), 4)
    assert all(torch.equal(table, given[:, 0, :4].float()) for table, given in zip(first, (cos, sin), strict=True))
    assert step.tables((cos, sin), 4)[0] is first[0]
    step.begin()
    assert step.tables((cos, sin), 4)[0] is not first[0]
    one = step.tables((cos[:1].clone(), sin[:1].clone()), 4)[0]
    assert one.shape == (2, 4) and torch.equal(one[0], one[1]), "positions that all rows share"


def test_cores_are_shared_and_need_no_host_work() -> None:
    cfg = GQAConfig(32, 4, 128, 0.1, phase="decode", captured=True)
    step = DecodeStep(2, 256, torch.device("cpu"), "torch")
    assert step.pick(cfg) is step.pick(replace(cfg)) and step._rung(cfg).backend.name == "torch"
    # Under the interpreter Triton runs anywhere; its choice of programs is the same as on a GPU.
    rungs = {c: DecodeStep(16, c, torch.device("cpu"), "triton")._rung(cfg) for c in (256, 384)}
    assert all(rung.backend.name == "triton" for rung in rungs.values())
    numbers = {c: rungs[c].build(cfg)._decode_numbers(16, c) for c in rungs}
    programs = {c: dict(zip(NUMBERS, found, strict=True))["PROGRAMS"] for c, found in numbers.items()}
    assert programs[256] == 64 and programs[384] == decode_config(cfg, 16)["PROGRAMS"] != 64
    write = RotaryKVWriteConfig(32, 4, 128, 128, 128)
    assert DecodeStep(16, 256, torch.device("cpu"), "triton")._rung(write).config == ()


def test_a_short_cache_gives_the_same_attention_by_one_program_a_row() -> None:
    cfg = GQAConfig(4, 2, 16, 0.25, dtype=torch.float32, kv_dtype=torch.float32, phase="decode", captured=True)
    q = torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(0))
    pages = torch.randn(2, 3 * 256 // PAGE, PAGE, 2, 16, generator=torch.Generator().manual_seed(1))
    found = []
    for core in ("torch", "triton"):
        step = DecodeStep(3, 256, torch.device("cpu"), core)
        step.set_length(130)
        step.meta.starts.copy_(torch.tensor([0, 100, 7]))
        step.begin()
        found.append(step.pick(cfg)(q, pages[0], pages[1], step.meta, None)[0])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
