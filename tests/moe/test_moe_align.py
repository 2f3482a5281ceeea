"""The alignment by hand, its capacity, and its static shapes."""

from __future__ import annotations

import pytest
import torch

from fastlayers.errors import ArgumentError, NoBackendError
from fastlayers.moe.align.layer import MOE_ALIGN, MoEAlignConfig, num_blocks


@pytest.mark.parametrize("backend", ["torch", "triton", "reference"])
def test_the_example_of_the_legend(backend: str) -> None:
    ids = torch.tensor([[0, 2], [2, -1]], dtype=torch.int32)
    sorted_ids, expert_ids, total = MOE_ALIGN.named(backend).load()(MoEAlignConfig(3, 2))(ids)
    assert total.tolist() == [4]
    assert sorted_ids[:4].tolist() == [0, 4, 1, 2] and expert_ids[:2].tolist() == [0, 2]


def test_capacity_is_enough_and_tight() -> None:
    for experts, block in ((3, 4), (8, 16), (5, 1)):
        for pairs in range(0, 40):
            most = 0
            for _ in range(20):
                counts = torch.bincount(torch.randint(0, experts, (pairs,)), minlength=experts)
                most = max(most, int(((counts + block - 1) // block).sum()))
            assert most <= num_blocks(pairs, experts, block)
    worst = torch.tensor([1, 1, 6])  # two experts with one pair, the rest in one
    assert int(((worst + 3) // 4).sum()) == num_blocks(8, 3, 4)


def test_capacity_never_exceeds_the_padded_worst_case_of_every_expert() -> None:
    assert num_blocks(8, 256, 16) == 8
    assert num_blocks(0, 256, 16) == 0
    assert num_blocks(1024, 4, 16) * 16 <= 1024 + 5 * 15


def test_shapes_do_not_depend_on_ids() -> None:
    impl = MOE_ALIGN.named("torch").load()(MoEAlignConfig(4, 8))
    shapes = {tuple(t.shape for t in impl(torch.full((5, 2), e, dtype=torch.int32))) for e in (-1, 0, 3, 99)}
    assert len(shapes) == 1


def test_triton_refuses_an_odd_block_in_words() -> None:
    with pytest.raises(NoBackendError, match="block 12 is not a power of two"):
        MOE_ALIGN.choose(MoEAlignConfig(4, 12), "cpu", "triton")


def test_bad_config_is_named() -> None:
    with pytest.raises(ArgumentError) as error:
        MoEAlignConfig(0, 16)
    assert error.value.argument == "num_experts"


@pytest.mark.parametrize("tokens, top_k, experts, block", [(1200, 8, 257, 16), (2049, 4, 40, 64), (4000, 2, 7, 4)])
def test_many_pairs_keep_their_order(tokens: int, top_k: int, experts: int, block: int) -> None:
    """Several parts and steps a part, an expert with most pairs, dropped pairs, and experts without any."""
    ids = torch.randint(-1, experts + 1, (tokens, top_k), dtype=torch.int32)
    ids[ids % 5 == 0] = experts // 2
    ids[ids == 3] = 2
    own, oracle = (
        MOE_ALIGN.named(name).load()(MoEAlignConfig(experts, block))(ids) for name in ("triton", "reference")
    )
    used = int(oracle[2])
    assert int(own[2]) == used > tokens * top_k // 2
    assert torch.equal(own[0][:used], oracle[0][:used])
    assert torch.equal(own[1][: used // block], oracle[1][: used // block])
