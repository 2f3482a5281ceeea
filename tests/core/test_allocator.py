"""The bump allocator: zeros, alignment, disjoint slots, overflow, stable addresses."""

from __future__ import annotations

import pytest
import torch

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
