"""Cache layout and page pool."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fastlayers as fl
from fastlayers.attention.kv_cache.spec import KVCacheSpec
from fastlayers.errors import AllocatorOverflowError, ArgumentError


class _Layer(nn.Module):
    def __init__(self, row: tuple[int, ...]) -> None:
        super().__init__()
        self.kv_row = row
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))


def test_spec_of_a_model() -> None:
    model = nn.Sequential(_Layer((576,)), nn.ReLU(), _Layer((8, 128)))
    spec = fl.kv_cache_spec(model, page_size=16)
    assert spec == KVCacheSpec(((576,), (8, 128)), 16, torch.bfloat16)
    assert spec.bytes_per_token == 2 * (576 + 2 * 8 * 128)
    latent, pair = spec.allocate(3)
    assert latent.keys.shape == (3, 16, 576) and latent.values is None and latent.num_pages == 3
    assert pair.values is not None and pair.keys.shape == pair.values.shape == (3, 16, 8, 128)
    assert fl.kv_cache_spec(model, dtype=torch.float8_e4m3fn).bytes_per_token == 576 + 2 * 8 * 128


def test_spec_errors() -> None:
    with pytest.raises(ArgumentError, match="a model with attention layers"):
        fl.kv_cache_spec(nn.Linear(2, 2))
    with pytest.raises(ArgumentError, match="rows"):
        KVCacheSpec(((1, 2, 3),), 16, torch.float32)
    with pytest.raises(ArgumentError, match="dtype"):
        KVCacheSpec(((1,),), 16, torch.int8)
    with pytest.raises(ArgumentError, match="page_size"):
        KVCacheSpec(((1,),), 0, torch.float32)


def test_pool_hands_out_every_page_but_0_once() -> None:
    pool, first, second = fl.PagePool(5, 4), [], []
    assert pool.extend(first, 5, "a") is first and len(first) == 2
    pool.extend(second, 8, "b")
    assert sorted(first + second) == [1, 2, 3, 4] and pool.free_pages == 0
    pool.extend(first, 8, "a")  # still fits into its pages
    assert len(first) == 2


def test_pool_overflow_names_the_requester_and_hands_out_nothing() -> None:
    pool = fl.PagePool(3, 4)
    pages = pool.extend([], 4, "a")
    with pytest.raises(AllocatorOverflowError, match="request 7 needs 2 more pages for 9 tokens; 1 of 2 are free"):
        pool.extend(pages, 9, "request 7")
    assert len(pages) == 1 and pool.free_pages == 1


def test_pool_release() -> None:
    pool = fl.PagePool(4, 4)
    pages = pool.extend([], 12, "a")
    copy = list(pages)
    pool.release(pages)
    assert pages == [] and pool.free_pages == 3
    for wrong in (copy, [0], [99]):
        with pytest.raises(ArgumentError, match="not yet released"):
            pool.release(list(wrong))
    assert pool.free_pages == 3 and pool.extend([], 12, "b") == copy
    with pytest.raises(ArgumentError):
        pool.release([copy[0], copy[0]])
    assert pool.free_pages == 0
