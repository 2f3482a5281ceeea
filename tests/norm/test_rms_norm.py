"""RMSNorm against Hugging Face's modules, bit for bit, and its errors."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

import fastlayers as fl
from fastlayers.errors import ArgumentError
from fastlayers.norm.rms_norm import coded as coded_module
from fastlayers.norm.rms_norm.layer import RMS_NORM, RMSNorm, RMSNormConfig
from fastlayers.quant.group_quant.layer import GroupQuant
from fastlayers.weights import slots

FAMILIES = {
    "cast_then_scale": DeepseekV3RMSNorm,
    "scale_then_cast": GptOssRMSNorm,
    "one_plus": Qwen3NextRMSNorm,
}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounding", FAMILIES)
def test_bit_equal_to_hugging_face(rounding: str, dtype: torch.dtype) -> None:
    stock = FAMILIES[rounding](160, eps=1e-5).to(dtype)
    with torch.no_grad():
        stock.weight.copy_(torch.randn(160))
    mine = RMSNorm(160, 1e-5, rounding=rounding, dtype=dtype, backend="torch")
    mine.weight.copy_(stock.weight)
    x = (torch.randn(33, 160) * torch.exp(torch.randn(33, 1))).to(dtype)
    residual = torch.randn(33, 160).to(dtype)
    assert torch.equal(mine(x), stock(x))
    y, summed = mine(x, residual)
    assert torch.equal(summed, x + residual)
    assert torch.equal(y, stock(x + residual))


def test_the_roundings_differ() -> None:
    x, weight = torch.randn(64, 128).bfloat16(), (1 + 0.3 * torch.randn(128)).bfloat16()
    results = []
    for rounding in ("cast_then_scale", "scale_then_cast"):
        norm = RMSNorm(128, rounding=rounding, dtype=torch.bfloat16, backend="torch")
        norm.weight.copy_(weight)
        results.append(norm(x))
    assert not torch.equal(results[0], results[1])


def test_initial_weight_is_neutral() -> None:
    x = torch.randn(3, 16)
    plain, centred = RMSNorm(16)(x), RMSNorm(16, rounding="one_plus")(x)
    torch.testing.assert_close(plain, centred)
    torch.testing.assert_close(plain.pow(2).mean(-1), torch.ones(3), rtol=1e-4, atol=1e-4)


def test_zero_row_stays_finite() -> None:
    assert torch.equal(RMSNorm(16)(torch.zeros(2, 16)), torch.zeros(2, 16))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_leading_dimensions_and_inputs_untouched(backend: str) -> None:
    norm = RMSNorm(24, backend=backend)
    x, residual = torch.randn(2, 3, 24), torch.randn(2, 3, 24)
    kept = x.clone(), residual.clone()
    y, summed = norm(x, residual)
    assert y.shape == summed.shape == (2, 3, 24)
    torch.testing.assert_close(y.view(6, 24), norm(x.view(6, 24), residual.view(6, 24))[0])
    assert torch.equal(x, kept[0])
    assert torch.equal(residual, kept[1])


def test_slot() -> None:
    norm = RMSNorm(4)
    (name, slot), *rest = slots(norm, "model.norm")
    slot.fill(name, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert (name, rest, norm.weight.tolist()) == ("model.norm.weight", [], [1.0, 2.0, 3.0, 4.0])


def test_errors() -> None:
    norm, x = RMSNorm(8), torch.zeros(2, 8)
    for arguments, argument in (
        ((torch.zeros(2, 9),), "x"),
        ((x.half(),), "x"),
        ((torch.zeros(8, 2).t(),), "x"),
        ((x, torch.zeros(3, 8)), "residual"),
        ((x, x.half()), "residual"),
    ):
        with pytest.raises(ArgumentError) as caught:
            norm(*arguments)
        assert (caught.value.layer, caught.value.argument) == ("RMSNorm", argument)
    with pytest.raises(ArgumentError, match="rounding"):
        RMSNorm(8, rounding="never")
    with pytest.raises(ArgumentError, match="hidden_size"):
        RMSNorm(0)


def test_traceable() -> None:
    norm, x = RMSNorm(8, backend="torch"), torch.randn(2, 8)
    compiled = torch.compile(norm, backend="eager", fullgraph=True)
    assert all(torch.equal(a, b) for a, b in zip(compiled(x, x), norm(x, x), strict=True))


def test_a_cast_chooses_again_for_the_new_dtype() -> None:
    norm = fl.RMSNorm(16, dtype=torch.float32)
    before = norm.choice
    norm.to(torch.bfloat16)
    assert norm.cfg.dtype == torch.bfloat16 == norm.choice.cfg.dtype and norm.choice is not before
    assert norm(torch.ones(2, 16, dtype=torch.bfloat16)).dtype == torch.bfloat16
    norm.to("cpu")
    assert norm.cfg.dtype == torch.bfloat16


def test_packages_refuse_what_they_round_or_read_otherwise() -> None:
    def reasons(cfg: RMSNormConfig, device: str = "H200") -> dict[str, str]:
        return {row.name: row.reason for row in fl.backends("rms_norm", device=device, cfg=cfg) if not row.hardware}

    assert "rounds once, after the weight" in reasons(RMSNormConfig(64, dtype=torch.bfloat16))["sgl_kernel"]
    once = RMSNormConfig(64, rounding="scale_then_cast", dtype=torch.bfloat16)
    assert reasons(once) == {}
    assert "needs sm_80" in reasons(once, "cpu")["flashinfer"]
    odd = RMSNormConfig(97, rounding="one_plus", dtype=torch.float16)
    assert "97 values are not multiples of 16 bytes" in reasons(odd)["flashinfer"]
    wide = RMSNormConfig(64, rounding="one_plus", dtype=torch.float32)
    assert "dtype torch.float32 is not one of" in reasons(wide)["sgl_kernel"]


@pytest.mark.parametrize("name", ["flashinfer", "sgl_kernel"])
@pytest.mark.parametrize("one_plus", [False, True])
def test_package_backends_leave_their_inputs_alone(name: str, one_plus: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both packages played by torch: the norm alone writes to an output, the pair overwrites both of its inputs."""

    def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (weight + one_plus)

    def pair(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *_: Any, **__: Any) -> None:
        residual.add_(x)
        x.copy_(norm(residual, weight, eps))

    def into(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, pdl: bool) -> None:
        y.copy_(norm(x, weight, eps))

    def plain(x: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor, enable_pdl: bool) -> None:
        into(out, x, weight, eps, enable_pdl)

    prefix = "gemma_" if one_plus else ""
    package = types.ModuleType(name)
    if name == "flashinfer":
        played: Any = {f"{prefix}rmsnorm": plain, f"{prefix}fused_add_rmsnorm": pair}
        vars(package).update(played)
    else:
        played = {f"{prefix}rmsnorm": into, f"{prefix}fused_add_rmsnorm": pair}
        ops = types.SimpleNamespace(**{key: types.SimpleNamespace(default=f) for key, f in played.items()})
        monkeypatch.setattr(torch.ops, "sgl_kernel", ops, raising=False)
    monkeypatch.setitem(sys.modules, name, package)
    rounding = "one_plus" if one_plus else "scale_then_cast"
    impl = RMS_NORM.named(name).load()(RMSNormConfig(16, 1e-6, rounding, torch.bfloat16))
    x, residual, weight = torch.randn(3, 24)[:, :16], torch.randn(3, 16), torch.rand(16)
    before = x.clone(), residual.clone()
    y, none = impl(x, weight, None)
    assert none is None and torch.allclose(y, norm(x, weight, 1e-6))
    y, summed = impl(x, weight, residual)
    assert torch.equal(summed, x + residual) and torch.allclose(y, norm(x + residual, weight, 1e-6))
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])
    assert impl(x[:0], weight, residual[:0])[0].shape == (0, 16)


def coded(
    tokens: int, hidden: int, layout: str, dtype: torch.dtype, rounding: str, residual: bool, device: str
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return codes, scales and sum of one launch, and of the norm with the quantisation behind it."""
    generator = torch.Generator().manual_seed(tokens * hidden)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    norm = RMSNorm(hidden, rounding=rounding, dtype=dtype, device=device, backend="triton")
    norm.weight.copy_(drawn(hidden))
    # Columns of something wider, and rows that are all zero, not finite, or of very different size.
    x = drawn(tokens, hidden + 128) * torch.exp(4 * drawn(tokens, 1))
    x, other = x[:, :hidden], drawn(tokens, hidden) if residual else None
    if tokens > 4:
        x[1], x[2, 0], x[3, 5] = 0, float("nan"), float("inf")
    y, summed = norm(x, other) if residual else (norm(x), None)
    quantise = GroupQuant(scale_layout=layout, device=device, backend="triton")
    found = norm.coded(x, other, layout)
    assert found is not None
    sums = [] if summed is None or found[1] is None else [[summed], [found[1]]]
    assert residual == bool(sums)
    rows = found[0]
    assert rows.scales.stride() == quantise(y)[1].stride()
    return [rows.codes, rows.scales, *(sums[1] if sums else ())], [*quantise(y), *(sums[0] if sums else ())]


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(
        a.shape == b.shape and torch.equal(*(each.contiguous().view(-1).view(torch.uint8) for each in (a, b)))
        for a, b in zip(found, wanted, strict=True)
    )


@torch.inference_mode()
@pytest.mark.parametrize("layout", ["row", "col", "col_tma4"])
@pytest.mark.parametrize(
    ("tokens", "hidden", "dtype", "rounding", "residual"),
    [
        (5, 384, torch.bfloat16, "cast_then_scale", True), (6, 1536, torch.float16, "scale_then_cast", False),
        (3, 128, torch.float32, "one_plus", True), (0, 256, torch.bfloat16, "cast_then_scale", True),
    ],
)  # fmt: skip
def test_codes_are_those_of_the_norm_quantised(
    tokens: int, hidden: int, dtype: torch.dtype, rounding: str, residual: bool, layout: str
) -> None:
    assert same(*coded(tokens, hidden, layout, dtype, rounding, residual, "cpu"))


@torch.inference_mode()
def test_a_fault_in_codes_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are quantised before they are rounded have other codes; a group must have its own scale."""
    plain = coded_module.coded_norm

    def unrounded(x: torch.Tensor, weight: torch.Tensor, residual: None, *rest: Any) -> list[torch.Tensor]:
        return plain(x.float(), weight.float(), residual, *rest)

    def shifted(*given: Any) -> list[torch.Tensor]:
        codes, scales = plain(*given)
        return [codes, scales.roll(1, 1)]

    for fault, part in ((unrounded, 0), (shifted, 1)):
        monkeypatch.setattr("fastlayers.norm.rms_norm.triton.coded_norm", fault)
        found, wanted = coded(5, 384, "row", torch.bfloat16, "cast_then_scale", False, "cpu")
        assert not same(found[part : part + 1], wanted[part : part + 1])


@pytest.mark.gpu
@torch.inference_mode()
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 7168), (64, 1536), (4096, 7168), (300, 4096), (17, 2048)])
def test_codes_on_a_gpu(tokens: int, hidden: int) -> None:
    for layout in ("col", "col_tma4"):
        for residual in (False, True):
            assert same(*coded(tokens, hidden, layout, torch.bfloat16, "cast_then_scale", residual, "cuda"))


@torch.inference_mode()
def test_who_gets_no_codes() -> None:
    class Other(RMSNorm):
        pass

    x = torch.randn(3, 128)
    assert RMSNorm(128, dtype=torch.float32, backend="torch").coded(x, None, "row") is None
    assert Other(128, dtype=torch.float32, backend="triton").coded(x, None, "row") is None
    watched = RMSNorm(128, dtype=torch.float32, backend="triton")
    assert watched.coded(x, None, "row") is not None
    watched.register_forward_hook(lambda module, given, y: None)
    assert watched.coded(x, None, "row") is None
