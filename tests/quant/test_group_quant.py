"""Group quantisation: formula against an independent table of codes, edge values, layouts, errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fastlayers.errors import ArgumentError
from fastlayers.quant.group_quant.layer import (
    GroupQuant,
    GroupQuantConfig,
    packed_bytes,
    quantize_groups,
    unpacked_scales,
)

BACKENDS = ("torch", "triton")
CODES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().double()


def nearest_code(value: float) -> float:
    """Return the e4m3 value nearest to ``value``, ties to the code with an even mantissa."""
    value = max(-448.0, min(448.0, value))
    finite = [(float(v), i) for i, v in enumerate(CODES.tolist()) if not math.isnan(v)]
    return min(finite, key=lambda entry: (abs(entry[0] - value), entry[1] % 2))[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_value_takes_the_nearest_code(backend: str) -> None:
    x = torch.randn(2, 64) * 37.0
    q, s = quantize_groups(x, 32, backend=backend)
    for row in range(2):
        for column in range(64):
            block = x[row, column // 32 * 32 : column // 32 * 32 + 32]
            scale = torch.tensor(float(block.abs().max())) / 448
            assert s[row, column // 32] == scale
            assert q[row, column].float().item() == nearest_code(float(x[row, column] / scale))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_zero_tiny_huge_and_subnormal_groups(backend: str, dtype: torch.dtype) -> None:
    largest = 127.0 if dtype == torch.int8 else 448.0
    x = torch.zeros(1, 64)
    x[0, 16:32] = 1e-40  # subnormal
    x[0, 32] = 3e38
    x[0, 48] = -2e-10
    q, s = quantize_groups(x, 16, dtype=dtype, backend=backend)
    smallest = torch.tensor(1e-10) / largest
    assert s[0, :2].tolist() == [smallest.item()] * 2
    assert not q[0, :32].float().any()
    assert q[0, 32].item() == largest and s[0, 2] == torch.tensor(3e38) / largest
    assert q[0, 48].item() == -largest
    assert s.isfinite().all() and q.float().isfinite().all()


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_a_group_that_is_not_finite_has_scale_nan_and_codes_zero(backend: str, bad: float, dtype: torch.dtype) -> None:
    x = torch.ones(2, 32)
    x[1, 20] = bad
    q, s = quantize_groups(x, 16, dtype=dtype, backend=backend)
    assert s.isnan().tolist() == [[False, False], [False, True]]
    assert not q[1, 16:].float().any() and q[1, :16].float().all() and q[0].float().all()


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
def test_ue8m0_is_the_next_power_of_two_and_never_below(backend: str) -> None:
    edges = torch.tensor([448.0, 448.0 * (1 + 2**-22), 447.9, 896.0, 1e-3, 7.0])
    x = torch.zeros(len(edges), 16)
    x[:, 3] = edges
    q, s = quantize_groups(x, 16, scale_fmt="ue8m0", backend=backend)
    expected = [2.0 ** math.ceil(math.log2(float(e / 448))) for e in edges.double()]
    assert s[:, 0].tolist() == expected
    assert (s[:, 0] >= edges / 448).all()
    mantissa, _ = torch.frexp(s)
    assert (mantissa == 0.5).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_int8_rounds_to_even(backend: str) -> None:
    x = torch.zeros(1, 16)
    x[0, :7] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5])
    q, s = quantize_groups(x, 16, dtype=torch.int8, backend=backend)
    assert s.item() == 1.0
    assert q[0, :7].tolist() == [127, 0, 2, 2, 0, -2, 126]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("layout", "strides"),
    [("row", (3, 1)), ("col", (1, 6)), ("col_tma4", (1, 8))],
    ids=["row", "col", "col_tma4"],
)
def test_layouts_hold_the_same_scales(backend: str, layout: str, strides: tuple[int, int]) -> None:
    x = torch.randn(2, 3, 48)
    q, s = quantize_groups(x, 16, scale_layout=layout, backend=backend)
    plain_q, plain_s = quantize_groups(x, 16, backend=backend)
    assert s.shape == (6, 3) and s.stride() == strides and s.dtype == torch.float32
    assert torch.equal(s, plain_s) and torch.equal(q.view(torch.uint8), plain_q.view(torch.uint8))
    assert q.shape == x.shape and q.is_contiguous()


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_exponents_by_hand(backend: str) -> None:
    """Scales 1, 2, 1/4, 2^-30, and a fifth group that is not finite: bytes from the lowest on, four an integer."""
    x = torch.tensor([448.0, 896.0, 112.0, 448.0 * 2**-30, float("inf"), 448.0]).repeat_interleave(16)[None]
    q, s = quantize_groups(x, 16, scale_fmt="ue8m0", scale_layout="packed_tma4", backend=backend)
    first = 127 | 128 << 8 | 125 << 16 | 97 << 24
    assert s.dtype == torch.int32 and s.shape == (1, 2) and s.tolist() == [[first, 255 | 127 << 8]]
    plain_q, plain = quantize_groups(x, 16, scale_fmt="ue8m0", backend=backend)
    torch.testing.assert_close(unpacked_scales(s, 6), plain, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(q.view(torch.uint8), plain_q.view(torch.uint8))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("rows", "groups"), [(6, 5), (1, 4), (9, 3), (4, 9)])
def test_packed_scales_are_those_of_the_other_layouts(backend: str, rows: int, groups: int) -> None:
    x = torch.randn(rows, 32 * groups) * torch.exp(3 * torch.randn(rows, 1))
    _, s = quantize_groups(x, 32, scale_fmt="ue8m0", scale_layout="packed_tma4", backend=backend)
    _, plain = quantize_groups(x, 32, scale_fmt="ue8m0", backend=backend)
    assert s.shape == (rows, -(-groups // 4)) and (rows == 1 or s.stride() == (1, -(-rows // 4) * 4))
    assert torch.equal(unpacked_scales(s, groups), plain)
    assert not packed_bytes(s)[:, groups:].any()


def test_only_powers_of_two_are_packed() -> None:
    with pytest.raises(ArgumentError, match=r"scale_layout is 'packed_tma4' with 'float' scales; accepted: 'ue8m0'"):
        GroupQuantConfig(scale_layout="packed_tma4")


def test_input_is_left_alone_and_strided_rows_are_read() -> None:
    wide = torch.randn(4, 96)
    before = wide.clone()
    q, s = quantize_groups(wide[:, :64], 32)
    other_q, other_s = quantize_groups(wide[:, :64].contiguous(), 32)
    assert torch.equal(q.view(torch.uint8), other_q.view(torch.uint8)) and torch.equal(s, other_s)
    assert torch.equal(wide, before)


@pytest.mark.parametrize(
    ("x", "group", "accepted"),
    [
        (torch.zeros(2, 100), 128, "a multiple of 128"),
        (torch.zeros(2, 0), 16, "a multiple of 16"),
        (torch.tensor(1.0), 16, "a multiple of 16"),
        (torch.zeros(2, 128, dtype=torch.int32), 128, "bfloat16 or float16 or float32"),
        (torch.zeros(2, 128), 100, "one of 16, 32, 64, 128"),
    ],
)
def test_errors_name_what_is_accepted(x: torch.Tensor, group: int, accepted: str) -> None:
    with pytest.raises(ArgumentError, match="GroupQuant") as caught:
        quantize_groups(x, group)
    assert accepted in str(caught.value)


@pytest.mark.parametrize(
    "fields", [{"dtype": torch.float16}, {"scale_fmt": "e8"}, {"scale_layout": "column"}, {"eps": 0.0}]
)
def test_bad_configuration(fields: dict[str, object]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(fields))):
        GroupQuantConfig(**fields)  # type: ignore[arg-type]


def test_config_evaluates_to_itself() -> None:
    cfg = GroupQuantConfig(64, torch.int8, "ue8m0", "col_tma4", 1e-4)
    assert eval(repr(cfg)) == cfg


def test_module_compiles_without_graph_breaks() -> None:
    explained = torch._dynamo.explain(GroupQuant(16, scale_layout="col_tma4"))(torch.randn(5, 32))
    assert explained.graph_break_count == 0


@pytest.mark.parametrize(
    ("cfg", "device", "words"),
    [
        (GroupQuantConfig(exact=False), "H200", None),
        (GroupQuantConfig(), "H200", "ask for exact=False"),
        (GroupQuantConfig(exact=False), "A100", "needs sm_90, this is sm_80"),
        (GroupQuantConfig(exact=False), "cpu", "needs sm_90"),
        (GroupQuantConfig(dtype=torch.int8, exact=False), "H200", "truncates"),
        (GroupQuantConfig(scale_fmt="ue8m0", exact=False), "H200", "ue8m0"),
        (GroupQuantConfig(eps=1e-4, exact=False), "H200", "1e-10 only"),
    ],
)
def test_guards_of_sgl_kernel(cfg: GroupQuantConfig, device: str, words: str | None) -> None:
    from fastlayers.device import as_device
    from fastlayers.registry import registry

    why = registry("group_quant").named("sgl_kernel").refusal(cfg, as_device(device))
    assert why is None if words is None else words in str(why)


def test_sgl_kernel_says_which_dtypes_it_takes() -> None:
    from fastlayers.quant.group_quant.sgl_kernel import SglKernelGroupQuant

    with pytest.raises(ArgumentError, match="bfloat16 or float16"):
        SglKernelGroupQuant(GroupQuantConfig(exact=False))(torch.zeros(2, 128))


def test_rows_are_padded_where_a_gemm_wants_it() -> None:
    from fastlayers.quant.group_quant.triton import TritonGroupQuant

    x = torch.randn(5, 256)
    q, s = TritonGroupQuant(GroupQuantConfig(scale_layout="col"))(x)
    padded_q, padded_s = TritonGroupQuant(GroupQuantConfig(scale_layout="col")).padded(x, 16)
    assert padded_q.shape == (16, 256) and padded_s.shape == (16, 2) and padded_s.stride() == (1, 16)
    assert torch.equal(padded_q[:5].view(torch.uint8), q.view(torch.uint8)) and torch.equal(padded_s[:5], s)


def _once_corrected(x: torch.Tensor, scale: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """``x / scale`` in fp32 as the kernel finds it with one correction; fp64 holds what a fused step holds."""
    first = x * inverse
    remainder = (x.double() - first.double() * scale.double()).float()
    return (first.double() + remainder.double() * inverse.double()).float()


@pytest.mark.parametrize("bits, largest, step", [(8, 448.0, 1), (8, 127.0, 1), (11, 448.0, 37), (11, 127.0, 37)])
def test_one_correction_is_enough_for_16_bit_inputs(bits: int, largest: float, step: int) -> None:
    """Every mantissa of a bf16 value and of its group's maximum, down to codes of 0; of fp16 every 37th maximum."""

    def codes(ratio: torch.Tensor) -> torch.Tensor:
        return ratio.round() if largest == 127.0 else ratio.to(torch.float8_e4m3fn).float()

    mantissas = torch.arange(1 << (bits - 1), 1 << bits, dtype=torch.float32)
    x = (mantissas[:, None] * 2.0 ** -torch.arange(22.0)).flatten()
    uncorrected = 0
    for absmax in mantissas[::step]:
        inside = x[x <= absmax]
        scale = absmax / torch.tensor(largest)
        expected = codes(inside / scale)
        nearest = (1.0 / scale.double()).float()
        # The kernel's reciprocal may be a unit off.
        for inverse in (nearest, nearest.nextafter(torch.tensor(0.0)), nearest.nextafter(torch.tensor(2.0**20))):
            assert torch.equal(codes(_once_corrected(inside, scale, inverse)), expected)
            uncorrected += int((codes(inside * inverse) != expected).sum())
    assert uncorrected > 0  # without a correction some codes are wrong: the test can see it


@pytest.mark.parametrize(
    "field", [{"eps": None}, {"eps": "a"}, {"group": "a"}, {"dtype": "int8"}, {"scale_fmt": 3}, {"exact": 3}]
)
def test_fields_of_the_wrong_type_are_named(field: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=f"GroupQuant: {next(iter(field))} is "):
        GroupQuant(**field)


def test_a_compiler_keeps_the_layout_of_scales() -> None:
    layer, x = GroupQuant(16, scale_layout="col_tma4"), torch.randn(5, 32)
    targets: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    q, s = torch.compile(layer, backend=backend, fullgraph=True)(x)
    assert s.stride() == (1, 8) and torch.equal(s, layer(x)[1]) and torch.equal(q.float(), layer(x)[0].float())
    assert any("group_scales_laid_out" in target for target in targets)  # an operator: its strides are a promise
