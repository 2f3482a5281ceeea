"""Experts by other packages: who refuses what, and our side of them against the oracle with stand-ins."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fastlayers as fl
from fastlayers import env
from fastlayers.errors import ArgumentError
from fastlayers.moe.fused_moe.layer import FUSED_MOE, FusedMoEConfig
from fastlayers.registry.spec import BOUNDS
from fastlayers.testing.parity import check_parity
from fastlayers.testing.spec import spec_of

_found = importlib.util.spec_from_file_location("fake_packages", Path(__file__).with_name("fake_packages.py"))
assert _found is not None and _found.loader is not None
fakes = importlib.util.module_from_spec(_found)
_found.loader.exec_module(fakes)

V3 = FusedMoEConfig(7168, 256, 256, 8, num_shared=1, quant="fp8_block", dtype=torch.bfloat16)
QWEN = FusedMoEConfig(2048, 768, 128, 8, dtype=torch.bfloat16)
OSS = FusedMoEConfig(
    2880, 2880, 32, 4, quant="mxfp4", activation="swiglu_oai", bias=True, interleaved=True, dtype=torch.bfloat16
)
interpreted = pytest.mark.skipif(not env.triton_interpret(), reason="our kernels run in Triton's interpreter here")


def reason(backend: str, cfg: FusedMoEConfig, device: str = "H200") -> str | None:
    """Return what the row's ``refuse`` says on a described device."""
    from fastlayers.device import as_device

    return FUSED_MOE.named(backend).refuse(cfg, as_device(device))


@pytest.mark.parametrize(
    ("backend", "cfg"),
    [
        ("deep_gemm", V3),
        ("deep_gemm", QWEN),
        ("deep_gemm", replace(V3, dtype=None)),
        ("deep_gemm_masked", V3),
        ("deep_gemm_gathered", V3),
        ("sgl_kernel", V3),
        ("torch_grouped", QWEN),
        ("triton_kernels", OSS),
    ],
)
def test_runs_on_hopper_only(backend: str, cfg: FusedMoEConfig) -> None:
    assert reason(backend, cfg) is None
    for device, sm in (("A100", "sm_80"), ("L40S", "sm_89"), ("B200", "sm_100")):
        assert reason(backend, cfg, device) == f"needs sm_90, this is {sm}"
    assert "sm_90" in str(reason(backend, cfg, "cpu"))


@pytest.mark.parametrize(
    ("backend", "cfg", "words"),
    [
        ("deep_gemm", OSS, "quant 'mxfp4' is not one of"),
        ("deep_gemm", replace(V3, quant="int8"), "quant 'int8'"),
        ("deep_gemm", replace(V3, intermediate_size=160), "intermediate_size 160 is not a multiple of 128"),
        ("deep_gemm", replace(QWEN, hidden_size=2000), "hidden_size 2000 is not a multiple of 64"),
        ("deep_gemm", replace(V3, dtype=torch.float16), "dtype float16"),
        ("deep_gemm_masked", QWEN, "quant 'none'"),
        ("deep_gemm_gathered", QWEN, "quant 'none'"),
        ("deep_gemm_gathered", replace(V3, bias=True, num_shared=0), "biases"),
        ("deep_gemm_gathered", replace(V3, activation="swiglu_oai"), "activation"),
        ("sgl_kernel", QWEN, "quant 'none'"),
        ("sgl_kernel", replace(V3, bias=True, num_shared=0), "biases"),
        ("sgl_kernel", replace(V3, activation="swiglu_oai"), "activation"),
        ("torch_grouped", V3, "quant 'fp8_block'"),
        ("torch_grouped", replace(QWEN, dtype=None), "dtype (unknown)"),
        ("torch_grouped", replace(QWEN, dtype=torch.float32), "dtype float32"),
        ("triton_kernels", V3, "quant 'fp8_block'"),
        ("triton_kernels", replace(OSS, interleaved=False), "interleaved"),
        ("triton_kernels", replace(OSS, activation="silu"), "clamped"),
        ("triton_kernels", replace(OSS, dtype=torch.float16), "dtype float16"),
        ("triton_kernels", replace(OSS, hidden_size=96), "hidden_size 96"),
    ],
)
def test_refuses_in_words(backend: str, cfg: FusedMoEConfig, words: str) -> None:
    assert words in str(reason(backend, cfg))


def test_mxfp4_kernels_want_sm_90() -> None:
    """Their inline instructions do not assemble for older cards, where torch serves."""
    for device in ("A100", "L40S"):
        assert "decoded by instructions of sm_90" in str(reason("triton", OSS, device))
        assert reason("torch", OSS, device) is None
    assert reason("triton", OSS) is None and reason("triton", OSS, "B200") is None
    assert reason("triton", replace(OSS, quant="none"), "A100") is None


def test_packages_that_are_absent_are_named() -> None:
    rows = {row.name: row.reason for row in fl.backends("fused_moe", device="H200", cfg=V3)}
    if importlib.util.find_spec("deep_gemm") is None:
        assert "deep_gemm is not installed" in rows["deep_gemm"]
    assert "rounds the first product" in rows["sgl_kernel"]


def test_keys_of_tuned_tables_tell_dtypes_apart() -> None:
    keys = {replace(QWEN, dtype=dtype).tuning_key() for dtype in (torch.bfloat16, torch.float16, torch.float32)}
    assert len(keys) == 3
    assert QWEN.tuning_key() == replace(QWEN, dtype=None).tuning_key()


def test_ranked_first_only_for_mxfp4() -> None:
    assert FUSED_MOE.ranked[0].name == "triton_kernels"
    for cfg in (V3, QWEN, replace(V3, quant="int8")):
        assert reason("triton_kernels", cfg) is not None


def simulate(backend: str, case: str) -> dict[str, float]:
    """Check a row on the CPU as if its hardware and package were here."""
    row = FUSED_MOE.named(backend)
    return check_parity("fused_moe", replace(row, needs=(), refuse=lambda cfg, device: None), case)


FP8_CASES = ("fp8", "fp8_ue8m0", "fp8_shared", "fp8_none")


@interpreted
@pytest.mark.parametrize("case", [*FP8_CASES, "bf16_shared", "gpt_oss_bf16", "empty"])
def test_deep_gemm_simulated(case: str) -> None:
    package = fakes.FakeDeepGemm()
    with fakes.modules(deep_gemm=package):
        assert simulate("deep_gemm", case)
    assert package.tile == 128, "the process-wide setting is put back"
    assert case == "empty" or set(package.used) == {64}


@interpreted
def test_deep_gemm_tile_is_tuned() -> None:
    from fastlayers.moe.fused_moe.packages.deep_gemm import DeepGemmFusedMoE

    case, package = spec_of("fused_moe").case("fp8"), fakes.FakeDeepGemm()
    first, other = DeepGemmFusedMoE.candidates(case.cfg, 9), DeepGemmFusedMoE.candidates(case.cfg, 4096)
    assert [c["align"] for c in first] == [64, 128]
    assert [c["align"] for c in other] == [128, 64]
    row = FUSED_MOE.named("deep_gemm")
    tuned = replace(
        row, needs=(), refuse=lambda cfg, device: None, target=lambda cfg: DeepGemmFusedMoE(cfg, {"align": 128})
    )
    with fakes.modules(deep_gemm=package):
        assert check_parity("fused_moe", tuned, case)
    assert set(package.used) == {128}


@interpreted
@pytest.mark.parametrize("case", FP8_CASES)
def test_deep_gemm_masked_simulated(case: str) -> None:
    with fakes.modules(deep_gemm=fakes.FakeDeepGemm()):
        assert simulate("deep_gemm_masked", case)


@interpreted
@pytest.mark.parametrize("case", FP8_CASES)
def test_deep_gemm_gathered_simulated(case: str) -> None:
    package = fakes.FakeDeepGemm()
    with fakes.modules(deep_gemm=package):
        # Sums are exact here: what single tokens may be off on tensor cores is none of it.
        assert simulate("deep_gemm_gathered", case)["y"] < BOUNDS[torch.bfloat16].rel_rms
    assert package.tile == 128, "the process-wide setting is put back"


@interpreted
@pytest.mark.parametrize("plan", [{"m": 64, "warps": 8, "stages": 3}, {"m": 128, "warps": 4, "stages": 2}])
def test_a_gathered_plan_reaches_the_kernel(plan: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    from fastlayers.moe.fused_moe.packages import deep_gemm_gathered

    seen, product = [], deep_gemm_gathered.gathered_gate_up
    monkeypatch.setattr(deep_gemm_gathered, "gathered_gate_up", lambda *given: (seen.append(given), product(*given))[1])
    row = FUSED_MOE.named("deep_gemm_gathered")
    tuned = replace(
        row, needs=(), refuse=lambda cfg, device: None,
        target=lambda cfg: deep_gemm_gathered.DeepGemmGatheredFusedMoE(cfg, plan),
    )  # fmt: skip
    with fakes.modules(deep_gemm=fakes.FakeDeepGemm()):
        assert check_parity("fused_moe", tuned, spec_of("fused_moe").case("fp8"))
    assert seen and all(given[5]._asdict() == plan for given in seen)


@interpreted
@pytest.mark.parametrize("case", FP8_CASES)
def test_sgl_kernel_simulated(case: str) -> None:
    library = fakes.define_sgl_kernel()
    try:
        assert simulate("sgl_kernel", case)
    finally:
        library._destroy()


@interpreted
@pytest.mark.parametrize("case", ["tiny_bf16", "bf16_shared", "gpt_oss_bf16"])
def test_torch_grouped_simulated(case: str) -> None:
    assert simulate("torch_grouped", case)


def test_token_numbers_are_not_divided_by_one() -> None:
    """The package divides them by the experts a row, one, in a launch of its own."""
    from fastlayers.moe.fused_moe.packages.openai_triton_kernels import TokenNumbers

    plain = torch.tensor([3, 0, -7, 2], dtype=torch.int32)
    given = plain.as_subclass(TokenNumbers)
    found = torch.div(given, 1, rounding_mode="trunc")
    assert type(found) is torch.Tensor and found.data_ptr() == plain.data_ptr() and torch.equal(found, plain)
    assert given.shape == plain.shape and given.data_ptr() == plain.data_ptr()
    assert torch.div(given, 2, rounding_mode="trunc").tolist() == [1, 0, -3, 1]
    assert torch.div(given, 1).dtype == torch.float32
    assert torch.div(given, torch.ones(4, dtype=torch.int32), rounding_mode="trunc").data_ptr() != plain.data_ptr()


@interpreted
def test_triton_kernels_simulated() -> None:
    with fakes.modules(**fakes.triton_kernels()):
        assert simulate("triton_kernels", "mxfp4_bf16")


@interpreted
@pytest.mark.parametrize(
    ("backend", "case"),
    [
        ("deep_gemm", "fp8_shared"),
        ("deep_gemm", "gpt_oss_bf16"),
        ("sgl_kernel", "fp8_shared"),
        ("torch_grouped", "bf16_shared"),
    ],
)
def test_activation_by_blocks_simulated(backend: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a prompt, whatever the number of rows."""
    from fastlayers.moe.fused_moe.triton import activation

    monkeypatch.setattr(activation, "takes_blocks", lambda *_: True)
    monkeypatch.setattr(activation, "by_pairs", None)
    library = fakes.define_sgl_kernel()
    try:
        with fakes.modules(deep_gemm=fakes.FakeDeepGemm()):
            assert simulate(backend, case)
    finally:
        library._destroy()


@interpreted
@pytest.mark.parametrize(("tokens", "shared", "align"), [(1, 0, 1), (37, 2, 4), (700, 1, 64)])
def test_rows_are_ordered_and_disjoint(tokens: int, shared: int, align: int) -> None:
    from fastlayers.moe.fused_moe.triton import permute

    torch.manual_seed(tokens)
    experts, top_k = 5, 3
    ids = torch.stack([torch.randperm(experts + 1)[:top_k] for _ in range(tokens)]).int()
    ids[ids == experts - 2] = -1
    rows = permute.place(ids, experts, shared, align=align, tokens_of_rows=True, sizes=(256, 128))
    valid = (ids >= 0) & (ids < experts)
    used = valid.any(-1, keepdim=True).expand(-1, shared)
    every = torch.cat([torch.where(valid, ids, -1), torch.where(used, torch.arange(shared) + experts, -1)], 1).flatten()
    row_of, start = rows.row_of.tolist(), 0
    for expert in range(experts + shared):
        pairs = torch.nonzero(every == expert).flatten().tolist()
        assert [row_of[p] for p in pairs] == list(range(start, start + len(pairs)))
        assert rows.groups[:, expert].tolist() == [len(pairs), start, start + len(pairs)]
        assert rows.sizes[:, expert].tolist() == [[len(pairs), 256, 256], [len(pairs), 256, 128]]
        assert rows.token_of[start : start + len(pairs)].tolist() == [p // (top_k + shared) for p in pairs]
        start = -(-(start + len(pairs)) // align) * align
    assert start <= rows.total
    assert {row_of[p] for p in torch.nonzero(every < 0).flatten().tolist()} <= {-1}
    assert rows.strides.tolist() == [[256] * (experts + shared), [256] * (experts + shared), [128] * (experts + shared)]


@pytest.mark.parametrize("experts", [3, 19])
def test_swizzled_a_few_experts_at_a_time(experts: int) -> None:
    class Layout:
        def __init__(self, shape: Any, **options: int) -> None:
            assert shape[0] <= 8 and options == {"mx_axis": 1}

        def swizzle_data(self, data: torch.Tensor) -> torch.Tensor:
            return (data + 1).mT.contiguous().mT

    from fastlayers.moe.fused_moe.packages.openai_triton_kernels import _swizzle

    data = torch.randint(0, 200, (experts, 6, 64), dtype=torch.uint8)
    out = _swizzle(data, Layout, mx_axis=1)
    assert out.stride(-2) == 1
    assert torch.equal(out, data.mT + 1)


@interpreted
def test_own_layout_replaces_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastlayers.quant.spec import QuantSpec

    here = replace(FUSED_MOE.named("triton_kernels"), needs=(), refuse=lambda cfg, device: None)
    monkeypatch.setattr(FUSED_MOE, "ranked", [here, *(row for row in FUSED_MOE.ranked if row.name != here.name)])
    torch.manual_seed(0)
    options: dict[str, Any] = {"quant": QuantSpec("mxfp4"), "activation": "swiglu_oai", "bias": True}
    options |= {"interleaved": True, "dtype": torch.bfloat16}
    ours = fl.FusedMoE(128, 64, 4, 2, backend="triton_kernels", **options)
    other = fl.FusedMoE(128, 64, 4, 2, backend="torch", **options)
    for (name, parameter), wanted in zip(ours.named_parameters(), other.parameters(), strict=True):
        if parameter.dtype == torch.uint8:
            parameter.random_(118 if "scale" in name else 0, 122 if "scale" in name else 256)
        else:
            parameter.normal_()
        wanted.copy_(parameter)
    x, weights = torch.randn(5, 128, dtype=torch.bfloat16), torch.rand(5, 2)
    ids = torch.stack([torch.randperm(4)[:2] for _ in range(5)]).int()
    with fakes.modules(**fakes.triton_kernels()):
        ours.finalize()
        assert ours.w13.numel() == ours.w2.numel() == ours.w13_scale.numel() == 0
        assert ours.packed is not None and ours.packed.w13.numel() == other.w13.numel()
        ours.finalize()  # again: nothing to do
        y = ours(x, weights, ids)
    expected = other(x, weights, ids)
    assert (y.float() - expected.float()).norm() < 1e-2 * expected.float().norm()
    with pytest.raises(ArgumentError, match="where its weights were packed"):
        ours.to("meta")


@pytest.mark.parametrize("case", ["tiny_bf16", "shared_fp32", "all_filtered", "gpt_oss_interleaved", "two_shared_fp16"])
def test_grouped_products_on_a_cpu_equal_the_loop(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastlayers.moe.fused_moe import torch as torch_path

    spec = spec_of("fused_moe")
    chosen = spec.case(case)
    inputs = spec.make_inputs(chosen, torch.device("cpu"), 3)
    impl = torch_path.TorchFusedMoE(chosen.cfg)
    packed = spec.prepare(impl, inputs)
    assert torch_path._groups(inputs["x"], packed)
    grouped = spec.run(impl, inputs, packed)["y"]
    monkeypatch.setattr(torch_path, "GROUPED_TOKENS", 2)
    in_rounds = spec.run(impl, inputs, packed)["y"]
    monkeypatch.setattr(torch_path, "_groups", lambda x, packed: False)
    loop = spec.run(impl, inputs, packed)["y"]
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}[loop.dtype]
    for y in (grouped, in_rounds):
        assert (y - loop).float().norm() <= tolerance * loop.float().norm()


def test_rows_that_grouped_products_cannot_read_take_the_loop() -> None:
    from fastlayers.moe.fused_moe import torch as torch_path

    spec = spec_of("fused_moe")
    for case in ("odd_sizes", "fp8", "mxfp4_bf16"):
        inputs = spec.make_inputs(spec.case(case), torch.device("cpu"), 0)
        packed = spec.prepare(torch_path.TorchFusedMoE(spec.case(case).cfg), inputs)
        assert not torch_path._groups(inputs["x"], packed)
