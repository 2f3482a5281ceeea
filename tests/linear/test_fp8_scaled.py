"""FP8ScaledLinear: by hand, saturation, conversions, fused parts, shards, checkpoints' spellings, errors."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import fastlayers as fl
from fastlayers.comm.parallel import ParallelSpec
from fastlayers.errors import ArgumentError, CheckpointError
from fastlayers.linear.fp8_scaled.layer import FP8ScaledLinear, FP8ScaledLinearConfig, quantize_scaled_weight
from fastlayers.quant.spec import QuantSpec
from fastlayers.weights import scale_slot, slots

BACKENDS = ("torch", "triton", "reference")
E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["token", "tensor", "static"])
def test_by_hand(backend: str, kind: str) -> None:
    """Powers of two as scales, so that codes and sums are known: halves between two codes go to even."""
    weight = torch.tensor([[448.0, -1, 2, 0], [-448, 3, 0, 1]]).to(E4M3)
    static = torch.tensor(0.5) if kind == "static" else None
    layer = FP8ScaledLinear.from_checkpoint(
        weight, torch.tensor([0.5, 2.0]), torch.tensor([1.0, -1.0]), static, activation_scale=kind, dtype=torch.float32,
        backend=backend,
    )  # fmt: skip
    x = torch.tensor([[448.0, 17.0, 19.0, -2.5], [112.0, 1.0, 0.0, 0.25]])
    # 17 lies between 16 and 18, 19 between 18 and 20: even codes are 16 and 20. 0.25 / 0.25 is 1.
    codes = {
        "token": [[448.0, 16, 20, -2.5], [448.0, 4, 0, 1]],
        "tensor": [[448.0, 16, 20, -2.5], [112.0, 1, 0, 0.25]],
        # Scale 0.5: 896 saturates, 34 lies between 32 and 36, 38 between 36 and 40.
        "static": [[448.0, 32, 40, -5], [224.0, 2, 0, 0.5]],
    }[kind]
    scale = {"token": [[1.0], [0.25]], "tensor": [[1.0], [1.0]], "static": [[0.5], [0.5]]}[kind]
    sums = torch.tensor(codes) @ weight.float().T
    expected = sums * torch.tensor(scale) * torch.tensor([0.5, 2.0]) + torch.tensor([1.0, -1.0])
    assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_zero_and_broken_tokens(backend: str) -> None:
    layer = FP8ScaledLinear.from_linear(nn.Linear(40, 6), backend=backend)
    x = torch.randn(4, 40)
    x[1] = 0.0
    x[2, 3] = float("nan")
    x[3, 3] = float("inf")
    y = layer(x)
    assert torch.equal(y[1], layer.bias)
    assert y[0].isfinite().all() and y[2:].isnan().all()
    whole = FP8ScaledLinear.from_linear(nn.Linear(40, 6), activation_scale="tensor", backend=backend)
    assert whole(x).isnan().all() and whole(x[:2]).isfinite().all()


@pytest.mark.parametrize("weight_scale", ["tensor", "channel"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_from_linear_is_close_and_leaves_the_source_alone(dtype: torch.dtype, weight_scale: str) -> None:
    torch.manual_seed(0)
    dense = nn.Linear(96, 33).to(dtype)
    before = dense.weight.detach().clone()
    layer = FP8ScaledLinear.from_linear(dense, weight_scale=weight_scale)
    x = torch.randn(2, 5, 96, dtype=dtype)
    y, expected = layer(x), dense(x).detach()
    assert y.shape == (2, 5, 33) and y.dtype == dtype and torch.equal(dense.weight, before)
    # Two roundings of 2.6% each.
    error = float((y - expected).float().norm() / (expected - dense.bias.detach()).float().norm())
    assert 0.02 < error < 0.05
    wide = layer.dequantized()
    assert 0.02 < float((wide - before).norm() / before.float().norm()) < 0.03


def test_scales_of_weights() -> None:
    weight = torch.randn(5, 32) * 10.0 ** torch.arange(-2, 3)[:, None]
    weight[3] = 0
    codes, scale = quantize_scaled_weight(weight)
    assert scale[3] == 1 and not codes[3].float().any()
    assert codes.float().abs().amax(1)[[0, 1, 2, 4]].tolist() == [448] * 4
    codes, scale = quantize_scaled_weight(weight, "tensor")
    assert scale.shape == () and float(codes.float().abs().max()) == 448
    heads, scales = quantize_scaled_weight(torch.randn(3, 4, 8), "tensor")
    assert scales.shape == (3,) and heads.shape == (3, 4, 8)


def fill(layer: Any, checkpoint: dict[str, torch.Tensor], prefix: str = "a.self") -> set[str]:
    """Load ``layer`` as the loader does and return the names it asked for."""
    asked = set()
    for name, slot in slots(layer, prefix):
        slot.fill(name, checkpoint[name][slot.index] if slot.index else checkpoint[name])
        asked.add(name)
    return asked


@pytest.mark.parametrize("scale", ["tensor", "channel", "column of channels"])
@pytest.mark.parametrize("kind", ["replicated", "column", "row"])
def test_fused_parts_and_shards_read_their_slices(kind: str, scale: str) -> None:
    torch.manual_seed(0)
    checkpoint = {}
    for name, rows in (("q", 8), ("k", 4)):
        dense = torch.randn(rows, 16) * (1 if name == "q" else 20)
        codes, s = quantize_scaled_weight(dense, scale.split()[0] if scale == "tensor" else "channel")
        checkpoint[f"a.{name}.weight"], checkpoint[f"a.{name}.weight_scale"] = codes, s
        if scale == "column of channels":
            checkpoint[f"a.{name}.weight_scale"] = s[:, None]
        checkpoint[f"a.{name}.input_scale"] = torch.tensor([0.01 if name == "q" else 0.005])
    x, outputs = torch.randn(3, 16), []
    ranks = 1 if kind == "replicated" else 2
    for rank in range(ranks):
        spec = ParallelSpec.grid(ranks, rank)
        shard = {"column": spec.column(), "row": spec.row(), "replicated": fl.Shard()}[kind]
        layer = FP8ScaledLinear(
            16, [8, 4], names=["../q", "../k"], shard=shard, dtype=torch.float32, activation_scale="static",
            weight_scale="tensor" if scale == "tensor" else "channel",
        )  # fmt: skip
        assert fill(layer, checkpoint) == set(checkpoint)
        outputs.append(layer(x[:, layer.row_slice]).split(layer.part_sizes, -1))
    # The larger of the two input scales holds for both parts.
    rounded = (x / 0.01).to(E4M3).float() * 0.01
    for part, name in enumerate(("q", "k")):
        pieces = [o[part] for o in outputs]
        joined = sum(pieces) if kind == "row" else torch.cat(pieces, -1)
        wide = checkpoint[f"a.{name}.weight"].float() * checkpoint[f"a.{name}.weight_scale"].reshape(-1, 1)
        torch.testing.assert_close(joined, rounded @ wide.T, rtol=1e-4, atol=1e-4)


HF = {"quant_method": "fp8", "weight_block_size": None, "modules_to_not_convert": ["lm_head"]}
GROUP: dict[str, Any] = {
    "weights": {"type": "float", "num_bits": 8, "strategy": "channel"},
    "input_activations": {"type": "float", "num_bits": 8, "strategy": "token", "dynamic": True},
}


@pytest.mark.parametrize(
    ("config", "format", "activation", "names"),
    [
        (HF, "fp8_tensor", "token", ("weight_scale_inv", "activation_scale")),
        (HF | {"activation_scheme": "static"}, "fp8_tensor", "static", ("weight_scale_inv", "activation_scale")),
        ({"quant_method": "fbgemm_fp8"}, "fp8_channel", "token", ("weight_scale", "input_scale")),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"group_0": GROUP}, "ignore": ["lm_head"]},
            "fp8_channel", "token", ("weight_scale", "input_scale"),
        ),
    ],
)  # fmt: skip
def test_configurations_of_checkpoints(config: Any, format: str, activation: str, names: tuple[str, str]) -> None:
    spec = QuantSpec.from_config(config)
    assert (spec.format, spec.activation_scale, spec.scale_names) == (format, activation, names)
    assert eval(repr(spec)) == spec
    layer = fl.linear(16, 8, quant=spec.for_module("model.layers.0.mlp.down_proj"), dtype=torch.float32)
    assert isinstance(layer, FP8ScaledLinear)
    asked = {name for name, _ in slots(layer, "x")}
    assert asked == {"x.weight", f"x.{names[0]}"} | ({f"x.{names[1]}"} if activation == "static" else set())
    if "lm_head" in str(config):
        assert spec.for_module("lm_head").format == "none"
    # A block size that is not said is 128×128, as in Hugging Face.
    assert QuantSpec.from_config({"quant_method": "fp8"}).format == "fp8_block"


@pytest.mark.parametrize(
    ("build", "argument"),
    [
        (lambda: FP8ScaledLinear(0, 4), "in_features"),
        (lambda: FP8ScaledLinear(8, 4, dtype=torch.float64), "dtype"),
        (lambda: FP8ScaledLinear(8, 4, weight_scale="block"), "weight_scale"),
        (lambda: FP8ScaledLinear(8, 4, activation_scale="row"), "activation_scale"),
        (lambda: FP8ScaledLinear.from_checkpoint(torch.zeros(4, 8), torch.ones(4)), "weight is"),
        (lambda: FP8ScaledLinear.from_checkpoint(torch.zeros(4, 8).to(E4M3), torch.ones(5)), "weight_scale"),
        (
            lambda: FP8ScaledLinear.from_checkpoint(
                torch.zeros(4, 8).to(E4M3), torch.ones(4), activation_scale="static"
            ),
            "input_scale is None",
        ),
        (
            lambda: FP8ScaledLinear.from_checkpoint(torch.zeros(4, 8).to(E4M3), torch.ones(4), None, torch.ones(1)),
            "input_scale",
        ),
        (lambda: quantize_scaled_weight(torch.zeros(2)), "weight"),
        (lambda: fl.FP8ScaledLinear(8, 4)(torch.zeros(1, 8)), "x is"),
        (lambda: QuantSpec.from_config({"quant_method": "compressed-tensors", "config_groups": {}}), "config_groups"),
        (lambda: QuantSpec.from_config(HF | {"activation_scheme": "odd"}), "activation_scheme"),
    ],
)
def test_bad_arguments_are_named(build: Any, argument: str) -> None:
    with pytest.raises(ArgumentError, match=argument):
        build()


def test_config_compile_and_absorbed_weights() -> None:
    cfg = FP8ScaledLinearConfig(16, 8, True, torch.float16, "static")
    assert eval(repr(cfg)) == cfg
    layer = fl.FP8ScaledLinear(16, 8, True, dtype=torch.float32)
    assert torch._dynamo.explain(layer)(torch.randn(4, 16)).graph_break_count == 0
    mla = fl.MLAAttention(
        32, 2, q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16,
        rotary=fl.RotaryEmbedding(16, max_position=64, interleaved_in=True), page_size=16, dtype=torch.float32,
        quant=QuantSpec("fp8_channel"),
    )  # fmt: skip
    dense = torch.randn(64, 32)
    codes, scale = quantize_scaled_weight(dense)
    mla.kv_b_proj.weight.copy_(codes)
    mla.kv_b_proj.weight_scale.copy_(scale)
    mla.finalize()
    w_kc, w_vc = mla.absorbed_weights()
    expected = (codes.float() * scale[:, None]).view(2, 32, 32)
    assert torch.equal(w_kc, expected[:, :16]) and torch.equal(w_vc, expected[:, 16:])


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    ("build", "some"),
    [
        (lambda: fl.FP8BlockLinear(256, 128), {"weight_scale_inv"}),
        (lambda: fl.Int8Linear(32, 8), {"weight_scale"}),
        (lambda: FP8ScaledLinear(32, 8), {"weight_scale"}),
        (
            lambda: FP8ScaledLinear(32, 8, weight_scale="tensor", activation_scale="static"),
            {"weight_scale", "input_scale"},
        ),
        (lambda: fl.WeightOnlyLinear(64, 32, group_size=32, layout="awq", zero_point=True), {"scales"}),
        (lambda: fl.WeightOnlyLinear(64, 32, group_size=32), {"weight_scale"}),
        (lambda: fl.WeightOnlyLinear(64, 32, format="w8a16", group_size=0, layout="plain"), {"weight_scale"}),
        (lambda: fl.WeightOnlyLinear(9, 8, format="fp8_w8a16", group_size=0, layout="plain_tensor"), {"weight_scale"}),
        (lambda: fl.FusedMoE(128, 128, 1, 1, quant=QuantSpec("int8")), set()),
        (lambda: fl.FusedMoE(128, 128, 1, 1, quant=QuantSpec("fp8_block")), set()),
    ],
)  # fmt: skip
def test_scales_that_are_no_numbers_are_refused_by_name(build: Any, some: set[str], broken: float) -> None:
    found = {name.removeprefix("x.y."): slot for name, slot in slots(build(), "x.y") if "scale" in name}
    assert found.keys() == some if some else len(found) == 3
    for name, slot in found.items():
        values = torch.ones(slot.shape)
        slot.fill(name, values[slot.index])
        before = slot.dest.clone()
        values.view(-1)[-1] = broken
        with pytest.raises(CheckpointError, match=rf"^{re.escape(name)}: a scale is NaN or infinite; accepted: finite"):
            slot.fill(name, values[slot.index])
        assert torch.equal(slot.dest, before)
        values.view(-1)[-1] = 0.0
        if name == "input_scale":
            with pytest.raises(CheckpointError, match="input_scale: an input's scale is not above 0"):
                slot.fill(name, values[slot.index])
        else:  # of a block or a channel of zeros
            slot.fill(name, values[slot.index])
            assert bool((slot.dest == 0).any())


@pytest.mark.parametrize(
    "build",
    [
        lambda: fl.Int8Linear(32, 8),
        lambda: FP8ScaledLinear(32, 8),
        lambda: fl.WeightOnlyLinear(64, 8, format="w8a16", group_size=0, layout="plain"),
    ],
)
def test_a_scale_a_row_is_read_from_either_shape_in_one_way(build: Any) -> None:
    layer, values = build(), torch.rand(8) + 0.5
    (slot,) = [slot for name, slot in slots(layer) if name == "weight_scale"]
    like = scale_slot(slot.dest, 8, slice(0, 8))
    assert (slot.shape, slot.index, slot.wrong) == (like.shape, like.index, like.wrong)
    assert slot.convert is not None and slot.convert.__code__ is like.convert.__code__  # type: ignore[union-attr]
    for stored in (values, values[:, None]):
        slot.dest.fill_(1.0)
        slot.fill("a.weight_scale", stored)
        assert torch.equal(slot.dest, values)
    with pytest.raises(CheckpointError, match=r"a\.weight_scale: shape \(16,\) does not fit \(8,\)"):
        slot.fill("a.weight_scale", torch.ones(8, 2))
