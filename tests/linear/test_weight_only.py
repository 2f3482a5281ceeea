"""Weight-only linears: layouts by hand, shards, what configurations say, special codes, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fastlayers as fl
from fastlayers.comm.parallel import ParallelSpec
from fastlayers.device import DESCRIBED
from fastlayers.errors import ArgumentError, CheckpointError
from fastlayers.linear.weight_only.layer import WEIGHT_ONLY_LINEAR, WeightOnlyLinearConfig, quantize_weight_only
from fastlayers.quant.block_quant import E4M3
from fastlayers.quant.packed_codes import pack_nibbles, pack_words, unpack_nibbles, unpack_words
from fastlayers.quant.spec import QuantSpec
from fastlayers.weights import slots

FP32 = torch.float32
BACKENDS = ["reference", "torch", "triton"]


def signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def test_words_by_hand() -> None:
    """Codes 1 to 8: one after the other from the lowest bits, or as AutoAWQ deals them out."""
    codes = torch.arange(1, 9)[None]
    assert pack_words(codes, 4, 1).tolist() == [[signed(0x87654321)]]
    # Fields hold codes 0, 2, 4, 6, 1, 3, 5, 7 of the eight.
    assert pack_words(codes, 4, 1, awq=True).tolist() == [[signed(0x86427531)]]
    assert pack_words(codes, 8, 1).tolist() == [[0x04030201, 0x08070605]]
    for bits, awq in ((4, False), (4, True), (8, False)):
        for dim, shape in ((0, (16, 24)), (1, (16, 24)), (0, (8, 1)), (1, (1, 8))):
            codes = torch.randint(0, 2**bits, shape)
            packed = pack_words(codes, bits, dim, awq=awq)
            for each in (packed, packed.t().contiguous().t(), torch.stack((packed, packed), -1)[..., 1]):
                assert torch.equal(unpack_words(each, bits, dim, awq=awq), codes.int())
    codes = torch.randint(0, 16, (3, 64))
    packed = pack_nibbles(codes)
    assert torch.equal(unpack_nibbles(packed), codes.to(torch.uint8))
    assert packed[1, 16 + 5] == codes[1, 32 + 5] + 16 * codes[1, 48 + 5]


@pytest.mark.parametrize("backend", BACKENDS)
def test_awq_by_hand(backend: str) -> None:
    """One code apart from its zero point in each output feature: y is a scale times one x."""
    k, n = 64, 8
    codes = torch.full((k, n), 5)
    where = torch.tensor([0, 1, 15, 16, 31, 32, 47, 63])
    codes[where, torch.arange(n)] = torch.arange(6, 14)
    tensors = {
        "qweight": pack_words(codes, 4, 1, awq=True), "qzeros": pack_words(torch.full((2, n), 5), 4, 1, awq=True),
        "scales": torch.stack((torch.full((n,), 0.5), torch.full((n,), 2.0))).half(),
    }  # fmt: skip
    layer = fl.WeightOnlyLinear.from_checkpoint(
        tensors, k, n, layout="awq", group_size=32, dtype=FP32, backend=backend
    )  # fmt: skip
    x = torch.randn(3, k)
    scale = torch.where(where < 32, 0.5, 2.0)
    torch.testing.assert_close(layer(x), x[:, where] * torch.arange(1, 9) * scale)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_e4m3_code(backend: str) -> None:
    """All 256 codes, subnormals and both NaN among them, come out as the value that torch reads."""
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3)
    layer = fl.WeightOnlyLinear(16, 256, format="fp8_w8a16", group_size=0, layout="plain", dtype=FP32, backend=backend)
    for place, rows in ((0, 1), (5, 20)):  # the vector kernel, and tiles
        layer.weight.zero_()
        layer.weight.view(torch.uint8)[:, place] = codes.view(torch.uint8)
        y = layer(torch.eye(16)[place].expand(rows, 16).contiguous())
        # A NaN times zero is one too, but only its own row has it.
        torch.testing.assert_close(y[-1], codes.float(), rtol=0, atol=0, equal_nan=True)


def gptq_tensors(n: int, k: int, group: int, seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (k, n), generator=generator)
    zeros = torch.randint(1, 15, (k // group, n), generator=generator)
    scales = torch.rand(k // group, n, generator=generator).half()
    rows = torch.arange(k) // group
    tensors = {
        "qweight": pack_words(codes, 4, 0), "qzeros": pack_words(zeros - 1, 4, 1), "scales": scales,
        "g_idx": rows.to(torch.int32), "bias": torch.randn(n, generator=generator),
    }  # fmt: skip
    return tensors, ((codes - zeros[rows]) * scales[rows].float()).t()


@pytest.mark.parametrize("kind", ["replicated", "column", "row"])
def test_fused_parts_and_shards_read_their_slices(kind: str) -> None:
    checkpoint: dict[str, torch.Tensor] = {}
    weights: dict[str, torch.Tensor] = {}
    for seed, (name, n) in enumerate((("q", 32), ("k", 16))):
        tensors, weights[name] = gptq_tensors(n, 128, 32, seed)
        checkpoint |= {f"a.{name}.{key}": value for key, value in tensors.items()}
    ranks = 1 if kind == "replicated" else 2
    x, outputs = torch.randn(5, 128), []
    for rank in range(ranks):
        spec = ParallelSpec.grid(ranks, rank)
        shard = {"column": spec.column(), "row": spec.row(), "replicated": fl.Shard()}[kind]
        layer = fl.WeightOnlyLinear(
            128, [32, 16], True, group_size=32, zero_point=True, layout="gptq", names=["../q", "../k"], shard=shard,
            dtype=FP32,
        )  # fmt: skip
        asked = set()
        for name, slot in slots(layer, "a.qk"):
            part = checkpoint[name][slot.index] if slot.index else checkpoint[name]
            assert tuple(checkpoint[name].shape) == slot.shape
            slot.fill(name, part)
            asked.add(name)
        assert asked == set(checkpoint)
        outputs.append(layer(x[:, layer.row_slice]).split(layer.part_sizes, -1))
    for part, name in enumerate(("q", "k")):
        pieces = [o[part] for o in outputs]
        joined = sum(pieces) if kind == "row" else torch.cat(pieces, -1)
        torch.testing.assert_close(joined, x @ weights[name].T + checkpoint[f"a.{name}.bias"], rtol=1e-4, atol=1e-4)


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "GEMM"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True, "checkpoint_format": "gptq_v2"}


def compressed(packing: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", "num_bits": 4} | weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": packing, "config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (AWQ, ("w4a16", "awq", 128, True, False)),
        (AWQ | {"group_size": -1}, ("w4a16", "awq", 0, True, False)),
        (GPTQ, ("w4a16", "gptq_v2", 64, True, True)),
        (GPTQ | {"bits": 8, "group_size": -1}, ("w8a16", "gptq_v2", 0, True, False)),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, ("w4a16", "gptq", 32, True, False)),
        (compressed(strategy="group", group_size=32), ("w4a16", "packed", 32, False, False)),
        (compressed(num_bits=8, strategy="channel", symmetric=False), ("w8a16", "packed", 0, True, False)),
        (
            compressed(strategy="group", group_size=64, actorder="weight"), ("w4a16", "packed", 64, False, False),
        ),
        (
            compressed("float-quantized", type="float", num_bits=8, strategy="tensor"),
            ("fp8_w8a16", "plain_tensor", 0, False, False),
        ),
        (compressed("int-quantized", num_bits=8, strategy="channel"), ("w8a16", "plain", 0, False, False)),
    ],
)  # fmt: skip
def test_configurations_of_checkpoints(config: Any, expected: tuple[Any, ...]) -> None:
    spec = QuantSpec.from_config(config)
    assert (spec.format, spec.layout, spec.group_size, spec.zero_point, spec.act_order) == expected
    assert eval(repr(spec)) == spec
    layer = fl.linear(128, 32, quant=spec.for_module("model.layers.0.mlp.down_proj"), dtype=FP32)
    assert isinstance(layer, fl.WeightOnlyLinear) and layer.cfg.format == spec.format
    if config["quant_method"] != "compressed-tensors":
        assert spec.for_module("lm_head").format == "none"


def test_gptqmodels_rules_leave_modules_out() -> None:
    spec = QuantSpec.from_config(GPTQ | {"dynamic": {r"-:.*\.gate$": {}}, "lm_head": True})
    assert spec.for_module("model.layers.3.mlp.gate").format == "none"
    assert spec.for_module("model.layers.3.mlp.gate_proj").format == spec.for_module("lm_head").format == "w4a16"


@pytest.mark.parametrize(
    ("config", "argument"),
    [
        (AWQ | {"bits": 3}, r"bits is 3; accepted: 4"),
        (AWQ | {"version": "gemv"}, r"version is 'gemv'"),
        (AWQ | {"zero_point": False}, "zero_point"),
        (AWQ | {"group_size": 48}, r"group_size is 48; accepted: -1 or a multiple of 32"),
        (GPTQ | {"bits": 2}, r"bits is 2; accepted: 4 or 8"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format"),
        (GPTQ | {"dynamic": {r"+:.*\.18\.": {"bits": 8}}}, "dynamic"),
        (GPTQ | {"desc_act": "yes"}, "desc_act"),
        (compressed(strategy="block"), "strategy"),
        (compressed("marlin-24", strategy="channel"), r"format is 'marlin-24'"),
        (compressed(strategy="group", group_size=32, num_bits=2), "num_bits"),
        (compressed("float-quantized", type="float", num_bits=8, strategy="channel", symmetric=False), "symmetric"),
    ],
)
def test_what_is_not_read_is_named(config: Any, argument: str) -> None:
    with pytest.raises(ArgumentError, match=argument):
        QuantSpec.from_config(config)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (
            lambda: QuantSpec("int8", zero_point=True),
            "zero_point is True with int8; accepted: False: it is for w",
        ),
        (lambda: QuantSpec("fp8_block", group_size=32), "group_size is 32 with fp8_block; accepted: 0"),
        (lambda: QuantSpec("none", act_order=True), "act_order is True with none; accepted: False"),
        (lambda: QuantSpec("mxfp4", layout="packed"), "layout is 'packed' with mxfp4; accepted: 'plain'"),
        (lambda: QuantSpec("w4a16", layout="foo"), "layout is 'foo'; accepted: one of 'plain', 'awq', 'gptq'"),
        (lambda: QuantSpec("fp8_w8a16", layout="awq"), "layout is 'awq'; accepted: one of 'plain', 'plain_tensor'"),
    ],
)
def test_a_spec_has_no_fields_of_other_formats(build: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        build()


@pytest.mark.parametrize(
    ("build", "argument"),
    [
        (lambda: fl.WeightOnlyLinear(48, 8), "group_size is 128"),
        (lambda: fl.WeightOnlyLinear(48, 8, group_size=0), "in_features is 48"),
        (lambda: fl.WeightOnlyLinear(64, 8, group_size=32, format="w3a16"), "format"),
        (lambda: fl.WeightOnlyLinear(64, 8, group_size=32, layout="plain"), "layout"),
        (lambda: fl.WeightOnlyLinear(64, 12, group_size=32, layout="awq"), "whole words"),
        (lambda: fl.WeightOnlyLinear(64, 8, group_size=0, act_order=True), "act_order"),
        (lambda: fl.WeightOnlyLinear(64, 8, group_size=32, format="fp8_w8a16", layout="plain"), "format is fp8_w8a16"),
        (
            lambda: fl.WeightOnlyLinear(
                128, 8, group_size=32, act_order=True, shard=ParallelSpec.grid(2, 0).row()
            ),
            "each rank needs all groups",
        ),
        (
            lambda: fl.WeightOnlyLinear(128, 8, group_size=128, shard=ParallelSpec.grid(2, 0).row()),
            "group_size is 128",
        ),
        (lambda: fl.WeightOnlyLinear.from_checkpoint({}, 64, 8, layout="awq", group_size=32), "with qweight"),
        (lambda: fl.FusedMoE(64, 32, 4, 2, quant=QuantSpec("w4a16", group_size=32)), "layout is 'plain'"),
        (
            lambda: QuantSpec("w4a16", group_size=33, layout="awq"),
            r"^QuantSpec: group_size is 33; accepted: 0 \(a scale per channel\) or a multiple of 32$",
        ),
        (lambda: QuantSpec("w8a16", group_size=-1), "^QuantSpec: group_size is -1"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(build: Any, argument: str) -> None:
    with pytest.raises(ArgumentError, match=argument):
        build()


@pytest.mark.parametrize(
    ("weight", "options", "words"),
    [
        (torch.zeros(8, 128), {"group_size": 96}, "group_size is 96; .* a multiple of 32 that divides in_features 128"),
        (torch.zeros(8, 128), {"group_size": -1}, "group_size is -1"),
        (torch.zeros(8, 128), {"group_size": 32.0}, r"group_size is 32\.0; accepted: an integer"),
        (
            torch.zeros(8, 48),
            {"group_size": 0},
            r"weight is float32\[8, 48\] on cpu; accepted: K a multiple of 32",
        ),
        (torch.zeros(8, 128), {"format": "fp8_w8a16", "group_size": 32}, "format is fp8_w8a16 with group_size 32"),
        (torch.zeros(8, 128), {"zero_point": 1}, "zero_point is 1; accepted: True or False"),
        (torch.zeros(128), {}, r"weight is float32\[128\] on cpu; accepted: a floating tensor \[N, K\]"),
        (torch.zeros(8, 0), {}, r"weight is float32\[8, 0\]"),
        (torch.zeros(8, 128).to(torch.int8), {}, r"weight is int8\[8, 128\]"),
        (None, {}, "weight is None"),
    ],
)
def test_weights_that_have_no_such_codes_are_named(weight: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=f"^quantize_weight_only: {words}"):
        quantize_weight_only(weight, **options)


def test_groups_that_are_not_there_are_refused() -> None:
    tensors, _ = gptq_tensors(16, 64, 32, 0)
    tensors["g_idx"][3] = 2
    with pytest.raises(CheckpointError, match=r"groups 0 to 2, but there are 2"):
        fl.WeightOnlyLinear.from_checkpoint(tensors, 64, 16, layout="gptq", group_size=32, act_order=True)


@pytest.mark.parametrize("format", ["w4a16", "w8a16", "fp8_w8a16"])
@pytest.mark.parametrize("zero", [False, True])
def test_quantising_takes_the_nearest_code(format: str, zero: bool) -> None:
    if zero and format == "fp8_w8a16":
        return
    torch.manual_seed(0)
    dense = fl.Linear(128, 24, dtype=FP32)
    dense.weight.copy_(torch.randn(24, 128) + zero)
    group = 0 if format == "fp8_w8a16" else 32
    layer = fl.WeightOnlyLinear.from_linear(dense, format=format, group_size=group, zero_point=zero)
    step = layer.weight_scale.t().repeat_interleave(128 // layer.cfg.groups, 1)
    if format == "fp8_w8a16":  # half a step of three bits of mantissa
        step = dense.weight.abs() / 8 + step * 2**-9
    assert bool(((layer.dequantized() - dense.weight).abs() <= step * 0.5001).all())
    x = torch.randn(3, 128)
    torch.testing.assert_close(layer(x), x @ layer.dequantized().T, rtol=1e-4, atol=1e-4)
    codes, scale, zeros = quantize_weight_only(dense.weight, format, group, zero)
    assert torch.equal(codes.view(torch.uint8), layer.weight.view(torch.uint8)) and (zeros is None) == (not zero)
    assert scale.shape == (layer.cfg.groups, 24)


def test_absorbed_weights_compile_and_who_runs() -> None:
    mla = fl.MLAAttention(
        32, 2, q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16,
        rotary=fl.RotaryEmbedding(16, max_position=64, interleaved_in=True), page_size=16, dtype=FP32,
        quant=QuantSpec("w4a16", group_size=32, layout="packed"),
    )  # fmt: skip
    projection = mla.kv_b_proj
    assert isinstance(projection, fl.WeightOnlyLinear)
    projection.weight.random_(0, 256)
    w_kc, w_vc = mla.absorbed_weights()
    assert torch.equal(torch.cat((w_kc, w_vc), 1).reshape(64, 32), projection.dequantized())
    layer = fl.WeightOnlyLinear.from_linear(fl.Linear(64, 32, dtype=FP32), group_size=32)
    assert torch._dynamo.explain(layer)(torch.randn(4, 64)).graph_break_count == 0
    with pytest.raises(ArgumentError, match="requires a gradient"):
        layer(torch.randn(2, 64, requires_grad=True))
    cfg = WeightOnlyLinearConfig(4096, 4096)
    for device in ("A100", "L40S", "H200", "B200"):
        assert WEIGHT_ONLY_LINEAR.choose(cfg, DESCRIBED[device], built_only=False).rungs[0].backend.name == "triton"
