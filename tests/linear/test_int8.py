"""Int8Linear: exact sums, rounding, conversions, fused parts, shards, errors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fastlayers as fl
from fastlayers.comm.parallel import ParallelSpec
from fastlayers.errors import ArgumentError
from fastlayers.linear.int8.layer import Int8Linear, Int8LinearConfig, quantize_channel_weight
from fastlayers.linear.int8.torch import TorchInt8Linear, exact_float_mm
from fastlayers.linear.int8.triton import TritonInt8Linear
from fastlayers.weights import slots

BACKENDS = ("torch", "triton", "reference")


@pytest.mark.parametrize("backend", BACKENDS)
def test_by_hand(backend: str) -> None:
    """Scales of 1 and 0.5, so that codes and sums are known integers."""
    weight = torch.tensor([[127, -1, 2, 0], [-128, 3, 0, 1]], dtype=torch.int8)
    layer = Int8Linear.from_checkpoint(
        weight, torch.tensor([0.5, 2.0]), torch.tensor([1.0, -1.0]), dtype=torch.float32, backend=backend
    )
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5], [63.5, 1.0, 0.0, 0.25]])
    # Codes [127, 0, 2, -2] with scale 1 and [127, 2, 0, 0] with scale 0.5: halves go to even.
    sums = torch.tensor([[127 * 127 + 4.0, -128 * 127 - 2.0], [127 * 127 - 2.0, -128 * 127 + 6.0]])
    expected = sums * torch.tensor([[1.0], [0.5]]) * torch.tensor([0.5, 2.0]) + torch.tensor([1.0, -1.0])
    assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("k", [64, 1024, 1025, 5000])
def test_sums_are_exact_at_the_largest_values(k: int) -> None:
    codes = torch.full((3, k), 127, dtype=torch.int8)
    codes[1] = -127
    codes[2] = torch.randint(-127, 128, (k,))
    weight = torch.full((4, k), -128, dtype=torch.int8)
    weight[1:] = torch.randint(-128, 128, (3, k))
    exact = codes.double() @ weight.double().T
    assert torch.equal(exact_float_mm(codes, weight).double(), exact)
    assert torch.equal(TorchInt8Linear(Int8LinearConfig(k, 4)).multiply(codes, weight).double(), exact)


@pytest.mark.parametrize("backend", BACKENDS)
def test_zero_token_and_broken_token(backend: str) -> None:
    layer = Int8Linear.from_linear(nn.Linear(40, 6), backend=backend)
    x = torch.randn(4, 40)
    x[1] = 0.0
    x[2, 3] = float("nan")
    x[3, 3] = float("inf")
    y = layer(x)
    assert torch.equal(y[1], layer.bias)
    assert y[0].isfinite().all() and y[2:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_from_linear_is_close_and_leaves_the_source_alone(dtype: torch.dtype) -> None:
    dense = nn.Linear(96, 33).to(dtype)
    before = dense.weight.detach().clone()
    layer = Int8Linear.from_linear(dense)
    x = torch.randn(2, 5, 96, dtype=dtype)
    y, expected = layer(x), dense(x).detach()
    assert y.shape == (2, 5, 33) and y.dtype == dtype
    assert float((y - expected).float().norm() / expected.float().norm()) < 0.02
    assert torch.equal(dense.weight, before)
    assert {p.dtype for p in layer.parameters()} == {torch.int8, torch.float32, dtype}


def test_channel_scales() -> None:
    weight = torch.randn(5, 32) * 10.0 ** torch.arange(-2, 3)[:, None]
    weight[3] = 0
    codes, scale = quantize_channel_weight(weight)
    assert scale[3] == 1 and not codes[3].any()
    live = [0, 1, 2, 4]
    assert codes[live].abs().amax(1).tolist() == [127] * 4
    assert ((codes * scale[:, None] - weight).abs() <= scale[:, None] * 0.5001).all()


@pytest.mark.parametrize("kind", ["replicated", "column", "row"])
def test_fused_parts_and_shards_read_their_slices(kind: str) -> None:
    checkpoint = {}
    for name, rows in (("q", 8), ("k", 4)):
        checkpoint[f"a.{name}.weight"], checkpoint[f"a.{name}.weight_scale"] = quantize_channel_weight(
            torch.randn(rows, 16)
        )
        checkpoint[f"a.{name}.bias"] = torch.randn(rows)
    x, outputs = torch.randn(3, 16), []
    ranks = 1 if kind == "replicated" else 2
    for rank in range(ranks):
        spec = ParallelSpec.grid(ranks, rank)
        shard = {"column": spec.column(), "row": spec.row(), "replicated": fl.Shard()}[kind]
        layer = Int8Linear(16, [8, 4], bias=True, names=["../q", "../k"], shard=shard, dtype=torch.float32)
        for name, slot in slots(layer, "a.self"):
            assert tuple(checkpoint[name].shape) == slot.shape
            slot.fill(name, checkpoint[name][slot.index])
        outputs.append(layer(x[:, layer.row_slice]).split(layer.part_sizes, -1))
    for part, name in enumerate(("q", "k")):
        pieces = [o[part] for o in outputs]
        joined = sum(pieces) if kind == "row" else torch.cat(pieces, -1)
        wide = checkpoint[f"a.{name}.weight"] * checkpoint[f"a.{name}.weight_scale"][:, None]
        expected = x @ wide.T + checkpoint[f"a.{name}.bias"]
        torch.testing.assert_close(joined, expected, rtol=0.03, atol=0.05)


@pytest.mark.parametrize(
    ("build", "argument"),
    [
        (lambda: Int8Linear(0, 4), "in_features"),
        (lambda: Int8Linear(200_000, 4, device="meta"), "in_features"),
        (lambda: Int8Linear(8, 4, dtype=torch.float64), "dtype"),
        (lambda: Int8Linear.from_checkpoint(torch.zeros(4, 8), torch.ones(4)), "weight is"),
        (
            lambda: Int8Linear.from_checkpoint(torch.zeros(4, 8, dtype=torch.int8), torch.ones(5)),
            "weight_scale",
        ),
        (
            lambda: Int8Linear.from_checkpoint(torch.zeros(4, 8, dtype=torch.int8), torch.ones(4, 2)),
            "weight_scale",
        ),
        (lambda: quantize_channel_weight(torch.zeros(2, 2, 2)), "weight"),
        (lambda: fl.Int8Linear(8, 4)(torch.zeros(1, 8)), "x is"),
    ],
)
def test_bad_arguments_are_named(build, argument: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ArgumentError, match=argument):
        build()


def test_scale_of_shape_n_1_is_accepted() -> None:
    weight, scale = quantize_channel_weight(torch.randn(4, 8))
    one, two = (Int8Linear.from_checkpoint(weight, s, dtype=torch.float32) for s in (scale, scale[:, None]))
    x = torch.randn(2, 8)
    assert torch.equal(one(x), two(x))


@pytest.mark.parametrize("shared", [0, 2])
def test_experts_scales_of_shape_n_1_are_accepted(shared: int) -> None:
    """Layers over tensors written either way hold the same parameters."""
    made = [fl.FusedMoE(8, 4, 2, 1, num_shared=shared, quant=fl.QuantSpec("int8"), dtype=torch.float32) for _ in "ab"]
    for name, slot in slots(made[0], "x.experts"):
        codes = name.endswith(".weight")
        full = torch.randint(-9, 9, slot.shape, dtype=torch.int8) if codes else torch.rand(slot.shape) + 0.5
        for layer, value in zip(made, (full, full if codes else full[:, None]), strict=True):
            other = dict(slots(layer, "x.experts"))[name]
            other.fill(name, value[other.index])
    for left, right in zip(made[0].parameters(), made[1].parameters(), strict=True):
        assert torch.equal(left, right) and bool((left != 0).any())


def test_config_factory_and_compile() -> None:
    cfg = Int8LinearConfig(16, 8, True, torch.float16)
    assert eval(repr(cfg)) == cfg
    layer = fl.linear(16, 8, True, quant=fl.QuantSpec("int8"), dtype=torch.float32)
    assert isinstance(layer, Int8Linear)
    assert torch._dynamo.explain(layer)(torch.randn(4, 16)).graph_break_count == 0


@pytest.mark.parametrize("in_features", [1, 2, 3])
def test_few_features(in_features: int) -> None:
    layer = fl.Int8Linear(in_features, 33, dtype=torch.float32)
    layer.weight.copy_(torch.randint(-127, 128, (33, in_features)))
    x = torch.full((5, in_features), 127.0)
    for _ in range(3):  # memory of what ran before
        torch.full((5, 33), 123456, dtype=torch.int32)
        assert torch.equal(layer(x), layer.weight.float().sum(1).mul(127.0).expand(5, 33))


@pytest.mark.parametrize("rows", [3, 70])
def test_every_tile_that_a_tuner_tries_gives_the_same_bits(rows: int) -> None:
    """Sums of int8 are exact, however K is split; the rule's own tile comes first."""
    cfg = Int8LinearConfig(1100, 40, True, torch.float32)
    codes, scale = quantize_channel_weight(torch.randn(40, 1100))
    x, bias = torch.randn(rows, 1100), torch.randn(40)
    tried = TritonInt8Linear.candidates(cfg, rows)
    assert len(tried) > 3 and len({tuple(each.items()) for each in tried}) == len(tried)
    assert rows > 64 or {1, 2} <= {each["SPLITS"] for each in tried}
    wanted = TritonInt8Linear(cfg)(x, codes, scale, bias)
    for config in tried:
        assert torch.equal(TritonInt8Linear(cfg, config)(x, codes, scale, bias), wanted), config


def test_tiles_fit_a_gpu_and_a_bad_one_is_named() -> None:
    wide = Int8LinearConfig(4096, 21888)
    for rows in (1, 4, 16, 64, 512, 8192):
        tried = TritonInt8Linear.candidates(wide, rows)
        assert 4 <= len(tried) <= 20
        # 227 KiB of shared memory hold the stages of both operands.
        assert all((c["BLOCK_M"] + c["BLOCK_N"]) * 128 * c["num_stages"] <= 227 * 1024 for c in tried)
    with pytest.raises(ArgumentError, match="the keys BLOCK_M, BLOCK_N, num_warps, num_stages, SPLITS"):
        TritonInt8Linear(wide, {"BLOCK_M": 16})
