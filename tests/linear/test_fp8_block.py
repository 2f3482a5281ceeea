"""FP8BlockLinear: ragged blocks, fused parts, shards, conversions, accuracy, errors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fastlayers as fl
from fastlayers.comm.parallel import ParallelSpec
from fastlayers.errors import ArgumentError
from fastlayers.linear.fp8_block.layer import FP8BlockLinear, FP8LinearConfig
from fastlayers.quant.block_quant import (
    decode_e4m3,
    dequantize_block_weight,
    grid_of,
    quantize_block_weight,
)
from fastlayers.weights import slots

E4M3 = torch.float8_e4m3fn


def blocky(rows: int, columns: int) -> torch.Tensor:
    """Return a weight whose 128×128 blocks differ in size by orders of magnitude."""
    i, j = torch.arange(rows) // 128, torch.arange(columns) // 128
    return torch.randn(rows, columns) * 4.0 ** ((3 * i[:, None] + 5 * j[None, :]) % 7)


def rel_rms(actual: torch.Tensor, expected: torch.Tensor) -> float:
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm())


def checkpoint_of(parts: dict[str, int], columns: int, bias: bool = False) -> dict[str, torch.Tensor]:
    found = {}
    for name, rows in parts.items():
        found[f"a.{name}.weight"], found[f"a.{name}.weight_scale_inv"] = quantize_block_weight(blocky(rows, columns))
        if bias:
            found[f"a.{name}.bias"] = torch.randn(rows)
    return found


def fill(layer: nn.Module, checkpoint: dict[str, torch.Tensor]) -> None:
    """Fill a layer as the loader does; every checkpoint tensor must be read."""
    names = set()
    for name, slot in slots(layer, "a.self"):
        tensor = checkpoint[name]
        assert tuple(tensor.shape) == slot.shape, name
        slot.fill(name, tensor[slot.index] if slot.index else tensor)
        names.add(name)
    assert names == set(checkpoint)


def test_decode_equals_torch_on_every_code() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3)
    torch.testing.assert_close(decode_e4m3(codes), codes.float(), rtol=0, atol=0, equal_nan=True)
    assert decode_e4m3(codes).isnan().sum() == 2


@pytest.mark.parametrize("shape", [(576, 256), (128, 128), (1, 1), (130, 300), (2, 260, 140)])
def test_blocks_round_trip(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape) * 10
    q, s = quantize_block_weight(weight)
    assert q.shape == weight.shape and s.shape == (*shape[:-2], *grid_of(shape[-2], shape[-1]))
    for i in range(shape[-2]):
        block = weight[..., i // 128 * 128 : i // 128 * 128 + 128, :128]
        torch.testing.assert_close(s[..., i // 128, 0] * 448, block.abs().amax((-2, -1)))
    back = dequantize_block_weight(q, s)
    by_hand = q.float() * s[..., torch.arange(shape[-2]) // 128, :][..., torch.arange(shape[-1]) // 128]
    assert torch.equal(back, by_hand)
    assert rel_rms(back, weight) < 0.04
    assert torch.equal(dequantize_block_weight(q, s, dtype=torch.bfloat16), by_hand.bfloat16())


def test_576_rows_have_5_scale_rows_of_128() -> None:
    weight = blocky(576, 256)
    q, s = quantize_block_weight(weight)
    assert s.shape == (5, 2)
    # Blocks of 115 rows (576 / 5) would put rows 115..127 under the second scale.
    assert rel_rms(dequantize_block_weight(q, s)[115:128], weight[115:128]) < 0.04
    layer = FP8BlockLinear.from_checkpoint(q, s, dtype=torch.float32)
    x = torch.randn(4, 256)
    assert rel_rms(layer(x)[:, 115:128], x @ weight[115:128].T) < 0.06
    assert layer.weight.data_ptr() == q.data_ptr()


def test_zero_blocks_have_scale_one_and_ue8m0_scales_are_powers_of_two() -> None:
    weight = torch.randn(256, 128)
    weight[128:] = 0
    q, s = quantize_block_weight(weight, scale_fmt="ue8m0")
    assert s[1].item() == 1.0 and not q[128:].float().any()
    plain = quantize_block_weight(weight)[1]
    assert torch.frexp(s)[0].eq(0.5).all() and (s >= plain).all() and (s[0] < 2 * plain[0]).all()


def test_fused_parts_concatenate_scale_rows() -> None:
    checkpoint = checkpoint_of({"q_a": 384, "kv_a": 192}, 256, bias=True)
    layer = FP8BlockLinear(256, [384, 192], bias=True, names=["../q_a", "../kv_a"], dtype=torch.float32)
    assert layer.weight_scale_inv.shape == (3 + 2, 2)
    fill(layer, checkpoint)
    x = torch.randn(3, 256)
    for name, y in zip(("q_a", "kv_a"), layer(x).split(layer.part_sizes, -1), strict=True):
        tensors = [checkpoint[f"a.{name}.{p}"] for p in ("weight", "weight_scale_inv", "bias")]
        torch.testing.assert_close(y, FP8BlockLinear.from_checkpoint(*tensors, dtype=torch.float32)(x))


def test_deepseek_v3_fused_latent_projection_has_17_scale_rows() -> None:
    layer = FP8BlockLinear(7168, [1536, 576], names=["../q_a_proj", "../kv_a_proj_with_mqa"], device="meta")
    assert tuple(layer.weight.shape) == (2112, 7168) and tuple(layer.weight_scale_inv.shape) == (17, 56)
    shapes = {name: slot.shape for name, slot in slots(layer, "self_attn.qkv")}
    assert shapes["self_attn.kv_a_proj_with_mqa.weight_scale_inv"] == (5, 56)
    starts = {n: tuple(slot.dest.shape) for n, slot in slots(layer, "self_attn.qkv")}
    assert starts["self_attn.q_a_proj.weight_scale_inv"] == (12, 56)


@pytest.mark.parametrize("kind", ["column", "row"])
def test_shards_make_up_the_whole(kind: str) -> None:
    checkpoint = checkpoint_of({"gate": 512, "up": 256}, 512, bias=True)
    sizes, names = [512, 256], ["../gate", "../up"]
    whole = FP8BlockLinear(512, sizes, bias=True, names=names, dtype=torch.float32)
    fill(whole, checkpoint)
    x = torch.randn(3, 512)
    expected = whole(x).split(whole.part_sizes, -1)
    found = []
    for rank in range(2):
        spec = ParallelSpec.grid(2, rank)
        shard = spec.column() if kind == "column" else spec.row()
        layer = FP8BlockLinear(512, sizes, bias=True, names=names, shard=shard, dtype=torch.float32)
        fill(layer, checkpoint)
        assert layer.weight_scale_inv.shape == layer.cfg.grid
        found.append(layer(x[:, layer.row_slice]).split(layer.part_sizes, -1))
    for part in range(2):
        pieces = [ranks[part] for ranks in found]
        joined = torch.cat(pieces, -1) if kind == "column" else sum(pieces)
        torch.testing.assert_close(joined, expected[part], rtol=1e-4, atol=1e-2)


def test_outliers_cost_less_with_blocks_than_with_one_scale() -> None:
    """Why activations are quantised 1×128: one outlier must not cost the other groups their precision."""
    x, dense = torch.randn(8, 512), nn.Linear(512, 64, bias=False)
    x[:, 5] = 3e4
    x[:, 128:] *= 1e-2
    dense.weight.data[:, :128] *= 1e-5
    exact = x @ dense.weight.T
    by_block = FP8BlockLinear.from_linear(dense)(x)
    scale = x.abs().amax() / 448
    by_tensor = ((x / scale).to(E4M3).float() * scale) @ dense.weight.T
    assert rel_rms(by_block, exact) < 0.06 < 0.15 < rel_rms(by_tensor, exact)


def test_sum_is_not_rounded_between_blocks() -> None:
    """Partial sums stay in fp32; bf16 ones would lose the small block."""
    weight = torch.zeros(1, 256)
    weight[0, 0], weight[0, 128], weight[0, 129] = 448.0, 1.0, -1.0
    layer = FP8BlockLinear.from_linear(_dense(weight))
    x = torch.zeros(1, 256, dtype=torch.bfloat16)
    x[0, 0], x[0, 128] = 1.0, 0.25
    assert layer.cfg.dtype == torch.float32
    assert layer(x.float()).item() == pytest.approx(448.25, abs=1e-3)


def _dense(weight: torch.Tensor) -> nn.Linear:
    dense = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    dense.weight.data = weight
    return dense


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_from_linear_is_close_and_leaves_the_source_alone(dtype: torch.dtype) -> None:
    dense = nn.Linear(200, 136).to(dtype)
    before = dense.weight.clone()
    layer = FP8BlockLinear.from_linear(dense)
    x = torch.randn(2, 5, 200, dtype=dtype)
    y = layer(x)
    assert y.shape == (2, 5, 136) and y.dtype == dtype
    assert rel_rms(y, dense(x)) < 0.06
    assert torch.equal(dense.weight, before)
    assert {p.dtype for p in layer.parameters()} == {E4M3, torch.float32, dtype}


def test_nan_is_not_hidden() -> None:
    layer = FP8BlockLinear.from_linear(nn.Linear(128, 4, bias=False))
    x = torch.ones(2, 128)
    x[1, 7] = float("nan")
    y = layer(x)
    assert y[0].isfinite().all() and y[1].isnan().all()


@pytest.mark.parametrize(
    ("build", "argument"),
    [
        (lambda: FP8BlockLinear(256, [192, 128], names=["../a", "../b"]), r"out_features\[0\]"),
        (lambda: FP8BlockLinear(256, 384, shard=ParallelSpec.grid(2, 0).column()), r"out_features\[0\]"),
        (lambda: FP8BlockLinear(384, 256, shard=ParallelSpec.grid(2, 0).row()), "in_features"),
        (lambda: FP8BlockLinear(256, 256, block_size=(128, 100)), "block_size"),
        (lambda: FP8BlockLinear(256, 256, dtype=torch.float64), "dtype"),
        (lambda: FP8BlockLinear(256, 256, scale_fmt="e8m0"), "scale_fmt"),
        (
            lambda: FP8BlockLinear.from_checkpoint(torch.zeros(576, 256).to(E4M3), torch.ones(4, 2)),
            "weight_scale_inv",
        ),
        (lambda: FP8BlockLinear.from_checkpoint(torch.zeros(576, 256), torch.ones(5, 2)), "weight is"),
        (lambda: dequantize_block_weight(torch.zeros(576, 256).to(E4M3), torch.ones(5, 3)), "scale"),
        (lambda: dequantize_block_weight(torch.zeros(576, 256), torch.ones(5, 2)), "weight"),
        (lambda: quantize_block_weight(torch.zeros(5, 5, dtype=torch.int32)), "weight"),
    ],
)
def test_bad_arguments_are_named(build, argument: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ArgumentError, match=argument):
        build()


def test_bad_input_is_named() -> None:
    layer = fl.FP8BlockLinear(128, 64)
    with pytest.raises(ArgumentError, match=r"FP8BlockLinear: x is float32.*accepted: bfloat16\[\.\.\., 128\]"):
        layer(torch.zeros(2, 128))


def test_who_runs_where() -> None:
    rows = {r.name: r for r in fl.backends("fp8_linear", device="A100")}
    assert not rows["triton"].hardware and "sm_89" in rows["triton"].reason
    assert {r.name: r.hardware for r in fl.backends("fp8_linear", device="H200")}["triton"]
    assert fl.FP8BlockLinear(128, 128).choice.name == "torch"


def test_config_evaluates_to_itself() -> None:
    cfg = FP8LinearConfig(200, 136, True, torch.float16, (64, 32), "ue8m0")
    assert eval(repr(cfg)) == cfg
    assert cfg.grid == (3, 7) and cfg.padded_in == 224


def test_factory_follows_the_format_and_skips() -> None:
    quant = fl.QuantSpec("fp8_block", (64, 32), "ue8m0", skip=("gate",))
    layer = fl.linear(96, 128, True, quant=quant, dtype=torch.bfloat16)
    assert isinstance(layer, FP8BlockLinear) and layer.cfg.block_size == (64, 32) and layer.cfg.scale_fmt == "ue8m0"
    assert isinstance(fl.linear(96, 128, quant=quant.for_module("mlp.gate")), fl.Linear)


def test_compiles_without_graph_breaks() -> None:
    layer = FP8BlockLinear.from_linear(nn.Linear(200, 136))
    explained = torch._dynamo.explain(layer)(torch.randn(4, 200))
    assert explained.graph_break_count == 0


def test_slabs_that_are_parts_of_a_block_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastlayers.linear.fp8_block import torch as backend

    layer, x = FP8BlockLinear.from_linear(_dense(blocky(300, 200))), torch.randn(3, 200)
    whole = layer(x)
    for elements, rows in ((200 * 40, 32), (200 * 128, 128), (1, 1)):
        monkeypatch.setitem(backend.SLAB_ELEMENTS, "cpu", elements)
        assert layer.ladder.single.slab_rows("cpu") == rows
        assert rel_rms(layer(x), whole) < 1e-6


def _refusals(cfg: FP8LinearConfig, device: str) -> dict[str, str | None]:
    from fastlayers.device import as_device
    from fastlayers.registry import registry

    found = as_device(device)
    return {row.name: row.refusal(cfg, found) for row in registry("fp8_linear").ranked}


@pytest.mark.parametrize(
    ("cfg", "device", "words"),
    [
        (FP8LinearConfig(7168, 2112), "H200", None),
        (FP8LinearConfig(7168, 2112), "A100", "needs sm_90, this is sm_80"),
        (FP8LinearConfig(7168, 2112), "B200", "needs sm_90, this is sm_100"),
        (FP8LinearConfig(7168, 2112), "cpu", "needs sm_90, this is cpu"),
        (FP8LinearConfig(7168, 2112, dtype=torch.float32), "H200", "writes bfloat16 only"),
        (FP8LinearConfig(7168, 2112, block_size=(64, 128)), "H200", "is not (128, 128)"),
        (FP8LinearConfig(200, 2112), "H200", "in_features 200 is not a multiple of 128"),
        (FP8LinearConfig(256, 100), "H200", "out_features 100 is not a multiple of"),
    ],
)
def test_guards_of_the_packages(cfg: FP8LinearConfig, device: str, words: str | None) -> None:
    refusals = _refusals(cfg, device)
    for name in ("deep_gemm", "flashinfer", "cublas"):
        assert refusals[name] is None if words is None else words in str(refusals[name]), name


class _FakeGemm:
    """A package's GEMM: notes what it is given and multiplies in fp32."""

    def __init__(self) -> None:
        self.seen: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def __call__(self, q: torch.Tensor, s: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        self.seen.append((tuple(q.shape), s.stride()))
        x = q.float() * s.repeat_interleave(128, 1)
        # Rows beyond the tokens are whatever was in memory.
        return (x @ dequantize_block_weight(weight, scale).T).bfloat16()


@pytest.mark.parametrize(("tokens", "row_multiple", "layout"), [(5, 1, "col_tma4"), (5, 16, "col"), (0, 16, "col")])
def test_packages_get_codes_and_scales_as_they_read_them(tokens: int, row_multiple: int, layout: str) -> None:
    from fastlayers.linear.fp8_block.package_gemm import PackageGemm

    fake = _FakeGemm()

    class Wrapped(PackageGemm):
        scale_layout = layout

        def gemm(self, *operands: torch.Tensor) -> torch.Tensor:
            return fake(*operands)

    Wrapped.row_multiple = row_multiple
    source = nn.Linear(256, 192).bfloat16()
    layer = FP8BlockLinear.from_linear(source)
    x = torch.randn(tokens, 2, 256).bfloat16()
    y = Wrapped(layer.cfg)(x, layer.weight, layer.weight_scale_inv, layer.bias)
    rows = -(-2 * tokens // row_multiple) * row_multiple
    stride = -(-rows // 4) * 4 if layout == "col_tma4" else rows
    assert fake.seen == [((rows, 256), (1, stride))] if tokens else fake.seen[0][0] == (0, 256)
    assert y.shape == (tokens, 2, 192) and y.is_contiguous()
    if tokens:
        assert rel_rms(y, layer(x)) < 5e-3


@pytest.mark.parametrize("spread", [3, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("tokens", [1, 5, 16, 70])
def test_every_candidate_of_the_tuner_computes_the_same(tokens: int, spread: int) -> None:
    from fastlayers.linear.fp8_block.triton import TritonFP8Linear

    layer = FP8BlockLinear.from_linear(nn.Linear(1152, 72).bfloat16())
    x = torch.randn(tokens, 1152).bfloat16()
    expected = layer(x)
    candidates = TritonFP8Linear.candidates(layer.cfg, tokens)
    assert 5 <= len(candidates) <= 40
    assert len({tuple(sorted(c.items())) for c in candidates}) == len(candidates)
    # The interpreter is slow: the rule's own, and a spread of the rest.
    for config in candidates[:: max(1, len(candidates) // spread)]:
        y = TritonFP8Linear(layer.cfg, config)(x, layer.weight, layer.weight_scale_inv, layer.bias)
        assert rel_rms(y, expected) < 5e-3, config


def test_a_few_tokens_take_one_kernel_that_quantises() -> None:
    from fastlayers.linear.fp8_block.triton import default_config

    cfg = FP8LinearConfig(7168, 2112)
    assert default_config(cfg, 1)["fused"] == 1
    assert "parts" in default_config(cfg, 8) and "parts" not in default_config(cfg, 4096)
    for other in (FP8LinearConfig(7168, 2112, dtype=torch.float32), FP8LinearConfig(96, 80, block_size=(32, 32))):
        assert "parts" not in default_config(other, 1)


@pytest.mark.parametrize("format", ["none", "int8", "mxfp4", "fp8_tensor", "fp8_channel"])
def test_powers_of_two_are_for_blocks(format: str) -> None:
    """FusedMoE obeyed it with int8, Int8Linear did not."""
    with pytest.raises(ArgumentError, match=f"QuantSpec: scale_fmt is 'ue8m0' with {format}; accepted: 'float'"):
        fl.QuantSpec(format, scale_fmt="ue8m0")
