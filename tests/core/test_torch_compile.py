"""The option to compile small operators: what runs inside, what is put back, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fastlayers as fl
from fastlayers.attention.meta import AttentionBatch, AttentionMeta, AttentionState
from fastlayers.errors import ArgumentError
from fastlayers.torch_compile import CompiledBlocks


class Block(nn.Module):
    """A norm and an MLP without products."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = fl.RMSNorm(8, backend="reference")
        self.act = fl.SiluAndMul(4, backend="reference")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[T, 4]``."""
        y: torch.Tensor = self.act(self.norm(x))
        return y


def compiled_of(blocks: list[Any], **options: Any) -> CompiledBlocks:
    return CompiledBlocks(blocks, fl.TorchCompile(backend="aot_eager", **options))


def graphs_since(function: Any) -> int:
    counters = torch._dynamo.utils.counters
    counters.clear()
    function()
    return int(counters["stats"]["unique_graphs"])


def test_compiled_inside_and_as_before_outside() -> None:
    blocks = [Block(), Block()]
    compiled, x = compiled_of(blocks, operators=("rms_norm",)), torch.randn(3, 8)
    wanted = [block(x) for block in blocks]
    ladders = [(block.norm.ladder, block.act.ladder) for block in blocks]

    def both() -> None:
        with compiled.applied():
            assert all(block.norm.ladder.choice.name == "torch" for block in blocks)
            assert all(block.act.ladder.choice.name == "reference" for block in blocks)
            for block, y in zip(blocks, wanted, strict=True):
                torch.testing.assert_close(block(x), y)

    with torch.inference_mode():
        assert graphs_since(both) == 1  # alike: compiled once
        assert graphs_since(both) == 0
    assert [(block.norm.ladder, block.act.ladder) for block in blocks] == ladders
    assert all("forward" not in vars(block) for block in blocks)


def test_more_shapes_than_torch_allows_a_function_by_itself() -> None:
    block = Block()
    compiled = compiled_of([block])
    limit = 2  # for torch's own eight, ten are compiled
    with torch.inference_mode(), torch._dynamo.config.patch(recompile_limit=limit):
        for rows in range(1, limit + 3):
            with compiled.applied():
                assert block(torch.ones(rows, 8)).shape == (rows, 4)
        assert torch._dynamo.config.recompile_limit == limit


class Planned(nn.Module):
    """Asks for its plan of the step, as attention backends do."""

    def forward(self, x: torch.Tensor, meta: AttentionMeta) -> torch.Tensor:
        """Return ``[T]``."""
        plan = meta.plan_of("a backend", Offset)
        return x + plan.offset


class Offset:
    """A plan: the number of the step on the device."""

    def __init__(self, meta: AttentionMeta) -> None:
        self.offset = torch.zeros(1)

    def plan(self, meta: AttentionMeta) -> None:
        """Refresh it in place."""
        self.offset.fill_(float(meta.step))


def test_a_buckets_plan_is_found_without_compiling_again() -> None:
    block, state = Planned(), AttentionState(2, 8, 2, 16, "cpu")
    compiled, x = compiled_of([block]), torch.zeros(2)

    def step() -> None:
        meta = state.plan(AttentionBatch((), (), []), bucket=2)
        assert block(x, meta).tolist() == [meta.step] * 2
        with compiled.applied():
            assert block(x, meta).tolist() == [meta.step] * 2

    with torch.inference_mode():
        assert [graphs_since(step) for _ in range(3)] == [1, 0, 0]


def test_a_forward_of_somebodys_own_comes_back() -> None:
    block = Block()
    own = block.forward
    block.forward = lambda x: own(x) + 1.0  # type: ignore[method-assign]
    compiled, x = compiled_of([block]), torch.randn(2, 8)
    wanted = block(x)
    with compiled.applied():
        torch.testing.assert_close(block(x), wanted)
    assert torch.equal(block(x), wanted)


def test_what_cannot_be_traced_raises_and_leaves_nothing() -> None:
    class Talks(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return super().forward(x)

    block = Talks()
    ladder = block.norm.ladder
    with pytest.raises(torch._dynamo.exc.Unsupported), compiled_of([block]).applied():
        block(torch.ones(2, 8))
    assert block.norm.ladder is ladder and "forward" not in vars(block)
    assert block(torch.ones(2, 8)).shape == (2, 4)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("max_batch", 0), ("mode", "reduce-overhead"), ("mode", None), ("backend", "nobody"),
        ("backend", "cudagraphs"), ("backend", 3), ("operators", ("rms_nrm",)), ("operators", "rms_norm"),
        ("operators", ("fp8_linear",)), ("operators", (["rms_norm"],)), ("operators", ("rotary_kv_write",)),
    ],
)  # fmt: skip
def test_refused_values(argument: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=rf"TorchCompile: {argument} is "):
        fl.TorchCompile(**{argument: value})


def test_a_mode_is_inductors() -> None:
    with pytest.raises(ArgumentError, match=r"mode is 'max-autotune-no-cudagraphs' with backend 'eager'"):
        fl.TorchCompile(mode="max-autotune-no-cudagraphs", backend="eager")
