"""kv_write and mla_kv_write: against plain indexing, saturation, dtypes, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastlayers.attention.kv_write.layer import KVWrite, KVWriteConfig
from fastlayers.attention.kv_write.torch import to_cache_dtype
from fastlayers.attention.mla_kv_write.layer import MLAKVWrite, MLAKVWriteConfig
from fastlayers.errors import ArgumentError, NoBackendError

FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_kv_write_equals_indexing(index: torch.dtype) -> None:
    fused = torch.randn(4, 2 * 3 + 2 * 5)
    k, v = fused[:, :6].unflatten(-1, (2, 3)), fused[:, 6:].unflatten(-1, (2, 5))
    k_cache, v_cache = torch.randn(3, 4, 2, 3), torch.randn(3, 4, 2, 5)
    expected = [k_cache.clone(), v_cache.clone()]
    places = [(2, 3), (1, 0), (1, 3), (2, 0)]
    for row, (page, offset) in enumerate(places):
        expected[0][page, offset], expected[1][page, offset] = k[row], v[row]
    loc = torch.tensor([4 * page + offset for page, offset in places], dtype=index)
    KVWrite(2, 3, 5, kv_dtype=torch.float32)(k, v, k_cache, v_cache, loc)
    assert torch.equal(k_cache, expected[0]) and torch.equal(v_cache, expected[1])


def test_mla_kv_write_equals_indexing() -> None:
    fused = torch.randn(3, 9)
    cache = torch.randn(2, 4, 7, dtype=torch.float32)
    expected = cache.clone()
    expected.view(8, 7)[[5, 7, 4]] = torch.cat([fused[:, 1:6], fused[:, 7:]], -1)
    MLAKVWrite(5, 2, kv_dtype=torch.float32)(fused[:, 1:6], fused[:, 7:], cache, torch.tensor([5, 7, 4]))
    assert torch.equal(cache, expected)


def test_padded_rows_touch_slot_0_only() -> None:
    cache = torch.zeros(2, 2, 3)
    rows = torch.ones(5, 2), torch.ones(5, 1)
    MLAKVWrite(2, 1, kv_dtype=torch.float32)(*rows, cache, torch.tensor([2, 0, 0, 0, 0]))
    assert cache[0, 0].tolist() == [1.0] * 3 and cache[1, 0].tolist() == [1.0] * 3
    assert not cache[:, 1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_e4m3_saturates_and_rounds_to_even(dtype: torch.dtype) -> None:
    values = torch.tensor([500.0, -1e4, 448.0, 17.0, 19.0, 0.0, torch.inf], dtype=dtype)
    stored = to_cache_dtype(values, FP8).float()
    assert stored.tolist() == [448.0, -448.0, 448.0, 16.0, 20.0, 0.0, 448.0]
    assert to_cache_dtype(torch.tensor([torch.nan]), FP8).float().isnan().all()


def test_kv_write_e4m3_cache() -> None:
    k = torch.full((1, 1, 4), 1000.0)
    k_cache, v_cache = torch.zeros(2, 1, 1, 4, dtype=FP8), torch.zeros(2, 1, 1, 4, dtype=FP8)
    KVWrite(1, 4, kv_dtype=FP8)(k, -k, k_cache, v_cache, torch.tensor([1]))
    assert k_cache[1].float().unique().tolist() == [448.0] and v_cache[1].float().unique().tolist() == [-448.0]


def test_errors_name_the_argument_and_change_nothing() -> None:
    write = KVWrite(2, 4, kv_dtype=torch.float32)
    k, loc = torch.ones(3, 2, 4), torch.tensor([1, 2, 3])
    cache, other = torch.zeros(2, 4, 2, 4), torch.zeros(2, 4, 2, 4)
    for call, words in (
        ((k[:, :1], k, cache, other, loc), "KVWrite: k "),
        ((k, k.half(), cache, other, loc), "KVWrite: v "),
        ((k, k, cache.half(), other, loc), "KVWrite: k_cache "),
        ((k, k, cache, other[:1], loc), "KVWrite: v_cache "),
        ((k, k, cache, other.transpose(0, 1).contiguous().transpose(0, 1), loc), "v_cache .*contiguous"),
        ((k, k, cache, other, loc[:2]), "KVWrite: loc "),
        ((k, k, cache, other, loc.float()), "KVWrite: loc "),
    ):
        with pytest.raises(ArgumentError, match=words):
            write(*call)
    assert not cache.any() and not other.any()
    with pytest.raises(ArgumentError, match="MLAKVWrite: rope "):
        MLAKVWrite(4, 2, kv_dtype=torch.float32)(torch.ones(1, 4), torch.ones(1, 3), torch.zeros(1, 1, 6), loc[:1])


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("bad", [-1, 8])
def test_slots_outside_the_cache_are_named_on_a_cpu_and_nothing_is_written(bad: int, backend: str) -> None:
    """An index below zero is torch's for the end of a tensor: another request's page."""
    keys, values, latents, loc = torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 12), [1, bad]
    rows, at = torch.ones(2, 1, 8), torch.tensor(loc)
    words = rf"loc is slots from {min(loc)} to {max(loc)}; accepted: slots in \[0, 8\)"
    with pytest.raises(ArgumentError, match=f"KVWrite: {words}"):
        KVWrite(1, 8, kv_dtype=torch.float32, backend=backend)(rows, rows, keys, values, at)
    with pytest.raises(ArgumentError, match=f"MLAKVWrite: {words}"):
        MLAKVWrite(8, 4, kv_dtype=torch.float32, backend=backend)(torch.ones(2, 8), torch.ones(2, 4), latents, at)
    assert not keys.any() and not values.any() and not latents.any()


def test_slots_are_checked_in_debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTLAYERS_DEBUG", "1")
    cache = torch.zeros(2, 4, 3)
    write = MLAKVWrite(2, 1, kv_dtype=torch.float32)
    for bad in (8, -1):
        with pytest.raises(ArgumentError, match=r"loc is slots from .* slots in \[0, 8\)"):
            write(torch.ones(2, 2), torch.ones(2, 1), cache, torch.tensor([5, bad]))
    assert not cache.any()


def test_triton_refuses_e4m3_on_old_gpus() -> None:
    from fastlayers.attention.kv_write.layer import KV_WRITE

    with pytest.raises(NoBackendError, match="e4m3 caches need sm_89 or newer, this is sm_80"):
        KV_WRITE.choose(KVWriteConfig(2, 64, 64, FP8), "A100", "triton")


@pytest.mark.parametrize("cfg", [KVWriteConfig(2, 64, 32, FP8), MLAKVWriteConfig(512, 64, torch.float16)])
def test_config_round_trips(cfg: Any) -> None:
    assert eval(repr(cfg)) == cfg
