"""Bmm: by hand, MLA's absorbed products through views, memory, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastlayers.errors import ArgumentError
from fastlayers.linear.bmm.layer import Bmm, BmmConfig
from fastlayers.linear.fp8_scaled.layer import quantize_scaled_weight
from fastlayers.quant.block_quant import dequantize_block_weight, quantize_block_weight

E4M3 = torch.float8_e4m3fn
BACKENDS = ("torch", "triton", "reference")


@pytest.mark.parametrize("backend", BACKENDS)
def test_per_tensor_by_hand(backend: str) -> None:
    x = torch.tensor([[[448.0, 17.0]], [[1.0, 19.0]]])  # [2, 1, 2]; the scale of the call is 1
    weight = torch.tensor([[[2.0, 1.0]], [[4.0, -1.0]]]).to(E4M3)
    layer = Bmm(2, 2, 1, format="fp8_tensor", dtype=torch.float32, backend=backend)
    expected = torch.tensor([[[896.0 + 16]], [[4.0 - 20]]])
    assert torch.equal(layer(x, weight, torch.tensor(1.0)), expected)
    assert torch.equal(layer(x, weight, torch.tensor([0.5, 2.0])), expected * torch.tensor([0.5, 2.0])[:, None, None])


@pytest.mark.parametrize("backend", BACKENDS)
def test_block_scales_belong_to_their_features(backend: str) -> None:
    """Two blocks of features of very different size: one scale for both would lose the smaller."""
    x = torch.cat([torch.full((1, 1, 128), 448.0), torch.full((1, 1, 128), 448.0 * 2**-20)], -1)
    weight, scale = torch.ones(1, 2, 256).to(E4M3), torch.tensor([[[0.0, 2.0]]])
    y = Bmm(1, 256, 2, format="fp8_block", dtype=torch.float32, backend=backend)(x, weight, scale)
    assert torch.equal(y, torch.full((1, 1, 2), 448.0 * 2**-20 * 128 * 2))


@pytest.mark.parametrize("format", ["none", "fp8_tensor", "fp8_block"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_absorbed_products_of_mla(format: str, backend: str) -> None:
    """The two products around MLA's decode, on views of ``kv_b_proj``, against the same on copies."""
    torch.manual_seed(0)
    heads, nope, value, latent, tokens = 2, 128, 128, 256, 3
    per_head = torch.randn(heads, nope + value, latent) / latent**0.5
    if format == "fp8_tensor":
        stored, scale = quantize_scaled_weight(per_head.flatten(0, 1), "tensor")
        exact = stored.float() * scale
        scales = (scale, scale)
    elif format == "fp8_block":
        stored, scale = quantize_block_weight(per_head.flatten(0, 1))
        exact = dequantize_block_weight(stored, scale)
        grid = scale.view(heads, 2, 2)
        scales = (grid[:, :1].transpose(1, 2), grid[:, 1:])
    else:
        stored = exact = per_head.flatten(0, 1)
        scales = (None, None)
    split = stored.view(heads, nope + value, latent)
    w_kc, w_vc = split[:, :nope], split[:, nope:]
    exact = exact.view(heads, nope + value, latent)
    options: dict[str, Any] = {"format": format, "dtype": torch.float32, "backend": backend}
    q = torch.randn(tokens, heads, nope + 64)
    absorbed = torch.full((tokens, heads, latent + 64), 7.0)
    out = absorbed[..., :latent].transpose(0, 1)
    made = Bmm(heads, nope, latent, **options)(q[..., :nope].transpose(0, 1), w_kc.transpose(1, 2), scales[0], out=out)
    assert made.data_ptr() == absorbed.data_ptr() and bool((absorbed[..., latent:] == 7).all())
    expected = torch.einsum("thn,hnl->thl", q[..., :nope], exact[:, :nope])
    bound = 1e-6 if format == "none" else 0.035
    assert float((absorbed[..., :latent] - expected).norm() / expected.norm()) < bound
    o = torch.randn(tokens, heads, latent)
    found = Bmm(heads, latent, value, **options)(o.transpose(0, 1), w_vc, scales[1])
    expected = torch.einsum("thl,hvl->htv", o, exact[:, nope:])
    assert float((found - expected).norm() / expected.norm()) < bound


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("format", ["fp8_tensor", "fp8_block"])
def test_nan_reaches_the_output(format: str, backend: str) -> None:
    weight = torch.ones(1, 2, 128).to(E4M3)
    scale = torch.ones(1) if format == "fp8_tensor" else torch.ones(1, 1, 1)
    layer = Bmm(1, 128, 2, format=format, dtype=torch.float32, backend=backend)
    for broken in (float("nan"), float("inf")):
        x = torch.ones(1, 2, 128)
        x[0, 1, 5] = broken
        y = layer(x, weight, scale)
        assert y[0, 1].isnan().all() and bool(y[0, 0].isnan().all()) == (format == "fp8_tensor")
        x[0, 1, 5] = 1.0
        assert layer(x, weight, scale).isfinite().all()


def _call(format: str = "none", **changed: Any) -> Any:
    values: dict[str, Any] = {
        "x": torch.zeros(2, 3, 128), "weight": torch.zeros(2, 4, 128), "weight_scale": None, "out": None
    } | changed  # fmt: skip
    layer = Bmm(2, 128, 4, format=format, dtype=torch.float32)
    return layer(values["x"], values["weight"], values["weight_scale"], out=values["out"])


@pytest.mark.parametrize(
    ("build", "argument"),
    [
        (lambda: Bmm(0, 4, 4), "heads"),
        (lambda: Bmm(1, 4, 4, format="int8"), "format"),
        (lambda: Bmm(1, 4, 4, dtype=torch.int8), "dtype"),
        (lambda: _call(x=torch.zeros(3, 2, 128)), "x is"),
        (lambda: _call(x=torch.zeros(2, 128, 3).transpose(1, 2)), "x is"),
        (lambda: _call(weight=torch.zeros(2, 128, 4)), "weight is"),
        (
            lambda: _call(weight_scale=torch.ones(1)),
            "weight_scale is .* with weights that have no scales; accepted: None",
        ),
        (
            lambda: _call("fp8_tensor", weight=torch.zeros(2, 4, 128).to(E4M3)),
            "None with fp8_tensor; accepted: the weight's",
        ),
        (
            lambda: _call("fp8_tensor", weight=torch.zeros(2, 4, 128).to(E4M3), weight_scale=torch.ones(3)),
            "weight_scale",
        ),
        (
            lambda: _call("fp8_block", weight=torch.zeros(2, 4, 128).to(E4M3), weight_scale=torch.ones(2, 1, 2)),
            "blocks",
        ),
        (lambda: _call(out=torch.zeros(2, 4, 3)), "out is"),
        (lambda: _call(out=torch.zeros(2, 4, 3).transpose(1, 2)), "out is"),
    ],
)
def test_bad_arguments_are_named(build: Any, argument: str) -> None:
    with pytest.raises(ArgumentError, match=argument):
        build()


def test_config_and_compile() -> None:
    cfg = BmmConfig(2, 16, 8, "fp8_block", torch.float16)
    assert eval(repr(cfg)) == cfg and cfg.weight_dtype == E4M3
    layer = Bmm(2, 16, 8, dtype=torch.float32)
    assert torch._dynamo.explain(layer)(torch.randn(2, 3, 16), torch.randn(2, 8, 16)).graph_break_count == 0
