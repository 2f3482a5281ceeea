"""torch.compile's view of the Triton linears: one graph, and fakes that tell the truth about shapes and strides."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fastlayers.linear.dense.layer import Linear
from fastlayers.linear.fp8_block.layer import FP8BlockLinear
from fastlayers.linear.int8.layer import Int8Linear
from fastlayers.linear.weight_only.layer import WeightOnlyLinear
from fastlayers.quant.group_quant.layer import GroupQuant

LAYERS: dict[str, Callable[[str], nn.Module]] = {
    "linear": lambda backend: Linear.from_linear(nn.Linear(64, 24), backend=backend),
    "fp8_linear": lambda backend: FP8BlockLinear.from_linear(nn.Linear(64, 24), backend=backend),
    "int8_linear": lambda backend: Int8Linear.from_linear(nn.Linear(64, 24), backend=backend),
    "weight_only_linear": lambda backend: WeightOnlyLinear.from_linear(
        nn.Linear(64, 24), group_size=32, zero_point=True, backend=backend
    ),
    "group_quant": lambda backend: GroupQuant(16, scale_layout="col_tma4", backend=backend),
}


# Torch's own, whose programs are traced whole, tests/core/test_public_layers.py compiles, too.
TRACED = [(name, "triton") for name in LAYERS] + [("linear", "torch"), ("fp8_linear", "torch")]
TRACED += [pytest.param(name, "torch", marks=pytest.mark.slow) for name in LAYERS if (name, "torch") not in TRACED]


@pytest.mark.parametrize(("name", "backend"), TRACED)
def test_compiled_equals_eager(name: str, backend: str) -> None:
    torch._dynamo.reset()  # all linears share one forward, of which so many programs are kept
    layer = LAYERS[name](backend)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.inference_mode():
        for tokens in (5, 9):
            x = torch.randn(tokens, 64)
            for eager, traced in zip(_as_tuple(layer(x)), _as_tuple(compiled(x)), strict=True):
                assert traced.stride() == eager.stride() and traced.dtype == eager.dtype
                torch.testing.assert_close(traced.float(), eager.float())


def _as_tuple(result: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)
