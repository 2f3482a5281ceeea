"""The bump allocator: zeros, alignment, disjoint slots, overflow, stable addresses."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch

import fastlayers as fl
from fastlayers.allocator import BumpAllocator
from fastlayers.errors import AllocatorOverflowError, ArgumentError

REQUESTS = [
    ("a", (3,), torch.float32),
    ("b", (5,), torch.int8),
    ("c", (2, 3), torch.float64),
    ("d", (), torch.bfloat16),
]


def step(allocator: BumpAllocator) -> list[torch.Tensor]:
    allocator.begin_step()
    return [allocator.alloc(*request) for request in REQUESTS]


def test_zeroed_aligned_and_stable() -> None:
    allocator, addresses = BumpAllocator(256), None
    for _ in range(3):
        slots = step(allocator)
        for slot, (_, shape, dtype) in zip(slots, REQUESTS, strict=True):
            assert (slot.shape, slot.dtype, slot.is_contiguous()) == (shape, dtype, True)
            assert slot.data_ptr() % 16 == 0
            assert not slot.any()
            slot.fill_(1)
        assert addresses in (None, [slot.data_ptr() for slot in slots])
        addresses = [slot.data_ptr() for slot in slots]


def test_slots_are_disjoint() -> None:
    slots = step(BumpAllocator(256))
    for index, slot in enumerate(slots):
        slot.fill_(index + 1)
    for index, slot in enumerate(slots):
        assert (slot == index + 1).all()


def test_a_shorter_step_still_zeroes_what_a_longer_one_left() -> None:
    allocator = BumpAllocator(64)
    allocator.alloc("long", (16,)).fill_(7.0)
    allocator.begin_step()
    allocator.alloc("short", (4,)).fill_(7.0)
    allocator.begin_step()
    assert not allocator.alloc("long", (16,)).any()


def test_ledger() -> None:
    allocator = BumpAllocator(256)
    step(allocator)
    assert allocator.ledger() == {"a": 16, "b": 16, "c": 48, "d": 16}
    allocator.alloc("a", (1,))
    assert allocator.ledger()["a"] == 32
    assert (allocator.used, allocator.left) == (112, 144)
    allocator.begin_step()
    assert (allocator.ledger(), allocator.left, allocator.high_water) == ({}, 256, 112)


def test_overflow_names_everything_and_changes_nothing() -> None:
    allocator = BumpAllocator(60)  # 64 after rounding up
    first = allocator.alloc("layers.0.absmax", (8,))
    with pytest.raises(AllocatorOverflowError) as caught:
        allocator.alloc("layers.1.absmax", (9,))
    for part in ("layers.1.absmax asks for 48 bytes", "32 of 64 are left", "32  layers.0.absmax"):
        assert part in str(caught.value)
    assert allocator.used == 32
    assert allocator.alloc("layers.2.absmax", (8,)).data_ptr() == first.data_ptr() + 32
    with pytest.raises(AllocatorOverflowError):
        allocator.alloc("one more", (1,))
    assert allocator.alloc("nothing", (0,)).numel() == 0


def test_errors() -> None:
    with pytest.raises(ArgumentError, match="capacity_bytes"):
        BumpAllocator(0)
    with pytest.raises(ArgumentError, match="shape"):
        BumpAllocator(16).alloc("a", (-1,))


@pytest.mark.gpu
def test_replays_start_at_zero() -> None:
    allocator, graph = BumpAllocator(4096, "cuda"), torch.cuda.CUDAGraph()
    out = torch.empty(300, device="cuda")
    with torch.cuda.graph(graph):
        allocator.begin_step()
        slot = allocator.alloc("counter", (300,))
        slot.add_(1.0)
        out.copy_(slot)
    for _ in range(3):
        graph.replay()
    assert torch.equal(out.cpu(), torch.ones(300))


def test_arguments_of_the_wrong_type_are_named() -> None:
    allocator, pool = fl.BumpAllocator(64), fl.PagePool(4, 4)
    wrong: list[tuple[Any, str]] = [
        (lambda: allocator.alloc("x", 3), "BumpAllocator: shape is 3; accepted: a tuple of integers"),  # type: ignore[arg-type]
        (lambda: allocator.alloc("x", (1.5,)), "BumpAllocator: shape is"),  # type: ignore[arg-type]
        (lambda: allocator.alloc("x", "ab"), "BumpAllocator: shape is 'ab'"),  # type: ignore[arg-type]
        (lambda: allocator.alloc("x", (2,), "float32"), "BumpAllocator: dtype is 'float32'"),  # type: ignore[arg-type]
        (lambda: allocator.alloc([], (2,)), "BumpAllocator: name is"),  # type: ignore[arg-type]
        (lambda: pool.extend([], 5.5, "x"), "PagePool.extend: length is 5.5; accepted: an integer, 0 or more"),  # type: ignore[arg-type]
        (lambda: pool.extend([], float("nan"), "x"), "PagePool.extend: length is nan"),  # type: ignore[arg-type]
        (lambda: pool.extend([], -1, "x"), "PagePool.extend: length is -1"),
        (lambda: pool.extend((), 5, "x"), "PagePool.extend: pages is .*; accepted: a list"),  # type: ignore[arg-type]
        (lambda: pool.release(None), "PagePool.release: pages is None"),  # type: ignore[arg-type]
        (lambda: pool.release([[]]), "PagePool.release: pages is"),  # type: ignore[list-item]
    ]
    for call, words in wrong:
        with pytest.raises(ArgumentError, match=words):
            call()
    assert allocator.used == 0 and pool.free_pages == 3
    assert pool.extend([], np.int64(5), "x") == [1, 2] and allocator.alloc("x", torch.Size([np.int64(2)])).shape == (2,)  # type: ignore[arg-type]


def test_sizes_may_be_numpys_integers() -> None:
    n = np.int64
    rotary = fl.RotaryEmbedding(16, max_position=64, interleaved_in=True)
    layers: list[tuple[Any, tuple[int, ...]]] = [
        (fl.Linear(n(128), n(8), dtype=torch.float32), (2, 8)),
        (fl.FP8BlockLinear(n(128), n(8), dtype=torch.float32), (2, 8)),
        (fl.Int8Linear(n(128), n(8), dtype=torch.float32), (2, 8)),
        (fl.FP8ScaledLinear(n(128), n(8), dtype=torch.float32), (2, 8)),
        (fl.LMHead(n(128), n(9), dtype=torch.float32), (2, 9)),
    ]
    for layer, shape in layers:
        assert layer(torch.zeros(2, 128)).shape == shape
        assert eval(repr(layer.cfg), vars(importlib.import_module(type(layer.cfg).__module__))) == layer.cfg
    attention = fl.Attention(n(32), n(2), n(1), n(16), rotary=rotary, page_size=n(16))
    sizes = {"kv_lora_rank": n(32), "qk_nope_head_dim": n(16), "qk_rope_head_dim": n(16), "v_head_dim": n(16)}
    latent = fl.MLAAttention(n(32), n(2), q_lora_rank=None, rotary=rotary, page_size=n(16), **sizes)  # type: ignore[arg-type]
    assert attention.o_proj.weight.shape == latent.o_proj.weight.shape == (32, 32)
