"""Casts that would lose weights raise before anything is cast: by dtype, by value, from state dicts and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fastlayers as fl
from fastlayers.errors import ArgumentError
from fastlayers.layer import Layer, check_move

F16, F32 = torch.float16, torch.float32
LARGE = 70000.0
MAKERS: dict[str, Callable[..., nn.Module]] = {
    "VocabEmbedding": lambda **o: fl.VocabEmbedding(4, 8, **o),
    "RMSNorm": lambda **o: fl.RMSNorm(8, **o),
    "LMHead": lambda **o: fl.LMHead(8, 4, **o),
    "TopKRouter": lambda **o: fl.TopKRouter(8, 4, 2, logits_dtype=None, **o),
}
CASTS: dict[str, Callable[[nn.Module], Any]] = {
    "half": lambda m: m.half(),
    "to": lambda m: m.to(F16),
    "to device and dtype": lambda m: m.to("cpu", F16),
}


def with_a_value(layer: nn.Module, value: float) -> nn.Module:
    layer.weight.fill_(1.0)
    layer.weight.view(-1)[1] = value
    return layer


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("given", [F32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", MAKERS)
def test_values_that_fp16_cannot_hold_are_named_and_nothing_is_cast(name: str, given: torch.dtype, cast: str) -> None:
    layer = with_a_value(MAKERS[name](dtype=given), LARGE)
    if getattr(layer, "fixed_dtype", None) is not None:  # refuses every cast, whatever its values
        with pytest.raises(ArgumentError, match="dtype"):
            CASTS[cast](layer)
    else:
        with pytest.raises(ArgumentError, match=f"{name}: weight is up to 7.*; accepted: values below 65520"):
            CASTS[cast](layer)
    assert layer.weight.dtype == given and layer.weight.isfinite().all()


@pytest.mark.parametrize("value", [65504.0, 65519.0, -65519.0, float("inf"), float("nan")])
def test_values_that_it_can_hold_are_cast(value: float) -> None:
    layer = with_a_value(fl.VocabEmbedding(4, 8), value).half()
    assert torch.equal(layer.weight.view(-1)[1], torch.tensor(value, dtype=F16)) or value != value
    assert layer.weight.isfinite().all() == torch.tensor(value).isfinite()


def test_what_a_layer_holds_is_asked_before_anything_is_cast() -> None:
    class Block(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = fl.VocabEmbedding(4, 8), with_a_value(fl.RMSNorm(8), LARGE)

    block = Block()
    with pytest.raises(ArgumentError, match="RMSNorm: weight is up to 70000"):
        block.half()
    assert {p.dtype for p in block.parameters()} == {F32}


@pytest.mark.parametrize("name", MAKERS)
def test_a_state_dict_that_fp16_cannot_hold_is_an_error_that_names_the_tensor(name: str) -> None:
    large, layer = with_a_value(MAKERS[name](dtype=F32), LARGE).state_dict(), MAKERS[name](dtype=F16)
    before = layer.weight.clone()
    with pytest.raises(RuntimeError, match=r"0\.weight: up to 70000, which float16 cannot hold"):
        nn.Sequential(layer).load_state_dict({f"0.{key}": value for key, value in large.items()})
    assert torch.equal(layer.weight, before)
    layer.load_state_dict({key: value / 2 for key, value in large.items()})
    assert layer.weight.max() == LARGE / 2
    layer.load_state_dict(large, assign=True)
    assert layer.weight.dtype == F32 and layer.weight.max() == LARGE


def test_a_checkpoints_bias_that_fp16_cannot_hold_is_named() -> None:
    weight, bias = torch.zeros(8, 16, dtype=torch.int8), torch.full((8,), LARGE)
    with pytest.raises(ArgumentError, match=r"Int8Linear: bias is up to 70000; accepted: values that float16 can hold"):
        fl.Int8Linear.from_checkpoint(weight, torch.ones(8), bias, dtype=F16)


def test_a_plain_container_is_asked_first_by_check_move() -> None:
    plain = nn.Sequential(fl.VocabEmbedding(4, 8), fl.Linear(8, 8, dtype=F32))

    def half(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.half()

    with pytest.raises(ArgumentError, match=r"Linear: dtype is torch\.float16; accepted: torch\.float32, as constr"):
        check_move(plain, half)
    assert {p.dtype for p in plain.parameters()} == {F32}
    # torch goes child by child: documented, and why check_move can be called before.
    with pytest.raises(ArgumentError, match="Linear: dtype"):
        plain.half()
    assert [p.dtype for p in plain.parameters()] == [F16, F32]
    check_move(plain[0], half)
    check_move(plain, lambda tensor: tensor.cpu())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integers_that_fp16_cannot_hold_are_not_loaded(dtype: torch.dtype) -> None:
    layer = fl.RMSNorm(8, dtype=F16)
    layer.weight.fill_(1.0)
    with pytest.raises(RuntimeError, match=r"weight: up to 100000, which float16 cannot hold"):
        layer.load_state_dict({"weight": torch.full((8,), -100000, dtype=dtype)})
    assert (layer.weight == 1).all()
    layer.load_state_dict({"weight": torch.full((8,), 3, dtype=dtype)})
    assert (layer.weight == 3).all()
