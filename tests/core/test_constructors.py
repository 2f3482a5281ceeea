"""Constructors say in words what they do not accept, before anything is made."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastlayers as fl
from fastlayers.errors import ArgumentError
from fastlayers.layer import Layer


def rotary(width: int = 64, **options: Any) -> fl.RotaryEmbedding:
    return fl.RotaryEmbedding(width, max_position=16, **options)


def mla(**options: Any) -> Layer:
    given = {"q_lora_rank": 32, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32}
    return fl.MLAAttention(64, 2, **(given | {"rotary": rotary()} | options))


def attention(**options: Any) -> Layer:
    return fl.Attention(64, 2, 2, 64, **({"rotary": rotary()} | options))


MAKERS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "FusedMoE": (fl.FusedMoE, lambda **o: fl.FusedMoE(64, 128, num_experts=4, top_k=2, **o)),
    "MLAAttention": (fl.MLAAttention, mla),
    "Attention": (fl.Attention, attention),
    "linear": (fl.linear, lambda **o: fl.linear(128, 128, **o)),
    "Linear": (fl.Linear, lambda **o: fl.Linear(128, 128, **o)),
    "FP8BlockLinear": (fl.FP8BlockLinear, lambda **o: fl.FP8BlockLinear(128, 128, **o)),
    "FP8ScaledLinear": (fl.FP8ScaledLinear, lambda **o: fl.FP8ScaledLinear(128, 128, **o)),
    "Int8Linear": (fl.Int8Linear, lambda **o: fl.Int8Linear(128, 128, **o)),
    "WeightOnlyLinear": (fl.WeightOnlyLinear, lambda **o: fl.WeightOnlyLinear(128, 128, **o)),
    "LMHead": (fl.LMHead, lambda **o: fl.LMHead(64, 64, **o)),
    "RMSNorm": (fl.RMSNorm, lambda **o: fl.RMSNorm(64, **o)),
    "TopKRouter": (fl.TopKRouter, lambda **o: fl.TopKRouter(64, 8, 2, **o)),
    "VocabEmbedding": (fl.VocabEmbedding, lambda **o: fl.VocabEmbedding(64, 64, **o)),
    "QuantSpec": (fl.QuantSpec, lambda **o: fl.QuantSpec("fp8_block", **o)),
}
BAD: dict[str, tuple[Any, ...]] = {
    "quant": ("fp8", None, 3),
    "axis": (2, None),
    "ep": (2,),
    "tp": ("x",),
    "shard": ("x", None),
    "rotary": (None, "x"),
    "dtype": ("float32", int, torch.int8),
    "block_size": (128, (128,), ("a", "b"), (0, 128), None),
    "names": (3, "x", (1,)),
    "num_shared": ("1", -1),
    "qk_norm": ("x",),
    "softcap": ("x", 0),
    "softmax_scale": ("x", 0.0, -0.5),
    "norm_eps": ("x",),
    "alpha": ("x",),
    "limit": ("x",),
    "tied_to": (3,),
}
CASES = [
    (layer, argument, value)
    for layer, (signed, _) in MAKERS.items()
    for argument in inspect.signature(signed).parameters
    for value in BAD.get(argument, ())
]


@pytest.mark.parametrize(("layer", "argument", "value"), CASES, ids=lambda v: str(v).replace(" ", ""))
def test_a_bad_argument_is_named(layer: str, argument: str, value: Any) -> None:
    make = MAKERS[layer][1]
    make()
    with pytest.raises(ArgumentError, match=rf": {argument} is .*; accepted: ."):
        make(**{argument: value})


@pytest.mark.parametrize("make", [mla, attention])
def test_a_rotary_of_another_width_is_refused_at_once(make: Callable[..., Layer]) -> None:
    with pytest.raises(ArgumentError, match=r"rotary\.head_dim is 32; accepted: (qk_rope_)?head_dim 64"):
        make(rotary=rotary(32))


def test_a_rotary_that_turns_half_a_head_does_for_plain_attention_only() -> None:
    half = rotary(64, rotary_dim=32)
    assert attention(rotary=half).rotary is half
    with pytest.raises(ArgumentError, match=r"rotary\.rotary_dim is 32; accepted: qk_rope_head_dim 64"):
        mla(rotary=half)


def test_blocks_are_checked_wherever_they_are_given() -> None:
    dense = torch.nn.Linear(128, 128)
    made = fl.FP8BlockLinear.from_linear(dense)
    for bad in (128, (128,)):
        with pytest.raises(ArgumentError, match="block_size"):
            fl.FP8BlockLinear.from_linear(dense, block_size=bad)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="block_size"):
            fl.FP8BlockLinear.from_checkpoint(made.weight, made.weight_scale_inv, block_size=bad)  # type: ignore[arg-type]


def test_what_quantised_linears_are_made_of() -> None:
    dense = fl.Linear(64, 32)
    for kind, wrong in ((fl.FP8ScaledLinear, 0.5), (fl.Int8Linear, [1.0] * 32), (fl.FP8BlockLinear, None)):
        made: Any = kind.from_linear(dense)  # type: ignore[attr-defined]
        with pytest.raises(ArgumentError, match=rf"{made.kind}: {made.scale_name} is "):
            kind.from_checkpoint(made.weight, wrong)  # type: ignore[attr-defined]
        with pytest.raises(ArgumentError, match=rf"{made.kind}: source\.weight is of shape \[0, 64\]"):
            kind.from_linear(torch.nn.Linear(64, 0))  # type: ignore[attr-defined]
    with pytest.raises(ArgumentError, match=r"FP8ScaledLinear: input_scale is 0\.01; accepted: a Tensor"):
        fl.FP8ScaledLinear.from_linear(dense, activation_scale="static", input_scale=0.01)  # type: ignore[arg-type]
    static = fl.FP8ScaledLinear.from_linear(dense, activation_scale="static", input_scale=torch.tensor(0.01))
    assert static(torch.ones(2, 64)).shape == (2, 32)
