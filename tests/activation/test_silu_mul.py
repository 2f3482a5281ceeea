"""SiluAndMul against Hugging Face's MLPs, and its errors."""

from __future__ import annotations

import pytest
import torch
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MLP

from fastlayers.activation.silu_mul.layer import SiluAndMul
from fastlayers.errors import ArgumentError


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_hugging_faces_mlp(dtype: torch.dtype) -> None:
    mlp = DeepseekV3MLP(DeepseekV3Config(hidden_size=64, intermediate_size=200)).to(dtype)
    x = torch.randn(17, 64, dtype=dtype)
    fused = torch.cat((mlp.gate_proj(x), mlp.up_proj(x)), -1)
    y, (gate, up) = SiluAndMul(200, backend="torch")(fused), fused.chunk(2, -1)
    assert torch.equal(y, mlp.act_fn(gate) * up)
    # torch's fp32 exp is one ulp apart between the vectorised body and the tail of a loop, so views of one
    # tensor and separate tensors agree to rounding only.
    tolerance = 1e-6 if dtype == torch.float32 else 0.0
    torch.testing.assert_close(mlp.down_proj(y), mlp(x), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_tails(backend: str) -> None:
    gate = torch.tensor([[-200.0, -88.0, 0.0, 88.0, 200.0]])
    y = SiluAndMul(5, backend=backend)(torch.cat((gate, torch.full((1, 5), 2.0)), -1))
    torch.testing.assert_close(y, torch.tensor([[0.0, 0.0, 0.0, 176.0, 400.0]]))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_leading_dimensions(backend: str) -> None:
    act, x = SiluAndMul(6, backend=backend), torch.randn(2, 3, 12)
    assert act(x).shape == (2, 3, 6)
    assert torch.equal(act(x).view(6, 6), act(x.view(6, 12)))


def test_errors() -> None:
    act = SiluAndMul(4)
    for bad in (torch.zeros(2, 4), torch.zeros(2, 8).double(), torch.zeros(8, 2).t()):
        with pytest.raises(ArgumentError) as caught:
            act(bad)
        assert (caught.value.layer, caught.value.argument) == ("SiluAndMul", "x")
    with pytest.raises(ArgumentError, match="size"):
        SiluAndMul(0)
