"""Gradients: right where a layer says so, an error in words everywhere else, and caches outside of all that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import fastlayers as fl
from fastlayers import env
from fastlayers.activation.silu_mul_quant.layer import SiluMulQuant
from fastlayers.attention.kv_cache.spec import LayerCache
from fastlayers.attention.kv_write.layer import KVWrite
from fastlayers.attention.merge_state.layer import MergeState
from fastlayers.attention.mla_kv_write.layer import MLAKVWrite
from fastlayers.attention.rotary_kv_write.layer import RotaryKVWrite
from fastlayers.errors import ArgumentError
from fastlayers.quant.group_quant.layer import GroupQuant
from fastlayers.quant.mxfp8_quant.layer import MXFP8Quant
from fastlayers.quant.nvfp4_quant.layer import NVFP4Quant
from fastlayers.quant.spec import QuantSpec

interpreted = pytest.mark.skipif(not env.triton_interpret(), reason="needs TRITON_INTERPRET=1 without a GPU")
F32 = torch.float32


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def filled(layer: Any) -> Any:
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape))
        parameter.requires_grad_()
    return layer


def rms(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * layer.weight.double()


def rotated(layer: Any, x: torch.Tensor) -> torch.Tensor:
    cos, sin = (table[:3, None].double() for table in (layer.cos, layer.sin))
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def routed(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, layer.weight.double()).softmax(-1).topk(2).values


Right = tuple[Callable[[str], Any], Callable[[Any, torch.Tensor], Any], Callable[..., torch.Tensor], tuple[int, ...]]
RIGHT: dict[str, Right] = {
    "linear": (
        lambda b: fl.Linear(8, 6, bias=True, dtype=F32, backend=b), lambda m, x: m(x),
        lambda m, x: F.linear(x, m.weight.double(), m.bias.double()), (3, 8),
    ),
    "lm_head": (
        lambda b: fl.LMHead(8, 6, dtype=F32, backend=b), lambda m, x: m(x),
        lambda m, x: F.linear(x, m.weight.double()), (3, 8),
    ),
    "rms_norm": (lambda b: fl.RMSNorm(8, 1e-6, dtype=F32, backend=b), lambda m, x: m(x), rms, (3, 8)),
    "silu_mul": (
        lambda b: fl.SiluAndMul(4, backend=b), lambda m, x: m(x),
        lambda m, x: F.silu(x[..., :4]) * x[..., 4:], (3, 8),
    ),
    "rotary": (
        lambda b: fl.RotaryEmbedding(8, max_position=4, backend=b), lambda m, x: m(x, None, torch.arange(3))[0],
        rotated, (3, 2, 8),
    ),
    "router": (
        lambda b: fl.TopKRouter(8, 4, 2, renormalize=False, backend=b), lambda m, x: m(x)[0], routed, (3, 8),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_torch_gradients_are_right(name: str) -> None:
    make, run, formula, shape = RIGHT[name]
    torch.manual_seed(1)
    layer, x = filled(make("torch")), leaf(*shape)
    y, wide = run(layer, x), x.detach().double().requires_grad_()
    wanted = formula(layer, wide)
    weights = torch.randn(wanted.shape).double()
    inputs = [x, *layer.parameters()]
    found = torch.autograd.grad((y.double() * weights).sum(), inputs)
    right = torch.autograd.grad((wanted * weights).sum(), [wide, *layer.parameters()])
    for one, other in zip(found, right, strict=True):
        assert torch.allclose(one.double(), other.double(), rtol=1e-4, atol=1e-5)


def test_the_embeddings_gradient_is_right() -> None:
    layer = filled(fl.VocabEmbedding(5, 4, dtype=F32))
    layer(torch.tensor([1, 3, 3])).sum().backward()
    assert layer.weight.grad.sum(-1).tolist() == [0.0, 4.0, 0.0, 8.0, 0.0]


def test_a_product_of_batches_has_a_right_gradient() -> None:
    x, weight = leaf(2, 3, 4), leaf(2, 5, 4)
    product = fl.Bmm(2, 4, 5, dtype=F32)
    product(x, weight).sum().backward()
    assert torch.allclose(x.grad, weight.detach().sum(1, keepdim=True).expand(2, 3, 4), atol=1e-5)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="Bmm: x is a tensor that requires a gradient; accepted: tensors that need"):
        product(x, weight.detach(), out=torch.empty(2, 3, 5))


@pytest.mark.parametrize("which", ["x", "weight"])
@pytest.mark.parametrize("backend", [pytest.param("triton", marks=interpreted)])
def test_a_product_that_is_written_in_place_refuses_gradients(backend: str, which: str) -> None:
    given = {"x": torch.randn(2, 3, 4), "weight": torch.randn(2, 5, 4)}
    given[which].requires_grad_()
    product = fl.Bmm(2, 4, 5, dtype=F32, backend=backend)
    with pytest.raises(
        ArgumentError, match=f"Bmm: {which} is a tensor that requires a gradient; accepted: tensors that"
    ):
        product(**given)
    with torch.no_grad():
        assert product(**given).shape == (2, 3, 5)


@pytest.mark.parametrize("which", ["hidden_states", "weight"])
def test_the_routers_reference_refuses_gradients(which: str) -> None:
    layer, x = fl.TopKRouter(8, 4, 2, dtype=F32, backend="reference"), torch.randn(3, 8)
    (x if which == "hidden_states" else layer.weight).requires_grad_()
    with pytest.raises(ArgumentError, match="TopKRouter: logits is a tensor that requires a gradient; accepted: "):
        layer(x)
    with torch.no_grad():
        assert layer(x)[0].shape == (3, 2)


@interpreted
@pytest.mark.parametrize("name", RIGHT)
def test_kernels_have_none_and_say_so(name: str) -> None:
    make, run, _, shape = RIGHT[name]
    layer, x = make("triton"), leaf(*shape)
    y = run(layer, x)
    with pytest.raises(ArgumentError, match=r"fastlayers::.*gradient is asked for; accepted: no gradient: this kernel"):
        y.sum().backward()
    with torch.no_grad():
        assert not run(layer, x).requires_grad


def experts(quant: str) -> Callable[[torch.Tensor], Any]:
    layer = fl.FusedMoE(128, 128, 2, 1, quant=QuantSpec(quant), dtype=F32)
    return lambda x: layer(x, torch.ones(3, 1), torch.zeros(3, 1, dtype=torch.int32))


def attention(x: torch.Tensor, wanting: str = "") -> Any:
    layer = fl.Attention(128, 2, 1, 16, rotary=fl.RotaryEmbedding(16, max_position=64), page_size=16, dtype=F32)
    if wanting:
        layer.get_parameter(wanting).requires_grad_()
    return layer(x, META, LayerCache(torch.zeros(2, 16, 1, 16), torch.zeros(2, 16, 1, 16)))


def latent_attention(x: torch.Tensor, wanting: str = "") -> Any:
    layer = fl.MLAAttention(
        128, 2, q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16,
        rotary=fl.RotaryEmbedding(16, max_position=64, interleaved_in=True), page_size=16, dtype=F32,
    )  # fmt: skip
    if wanting:
        layer.get_parameter(wanting).requires_grad_()
    return layer(x, META, LayerCache(torch.zeros(2, 16, 48), None))


# Planned here: transforms of torch.func wrap what is made within them, and a plan is written by NumPy.
META = fl.AttentionState(1, 3, 1, 16).plan(fl.AttentionBatch((3,), (0,), [[1]]))


REFUSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "FP8BlockLinear": lambda x: fl.FP8BlockLinear(128, 128, dtype=F32)(x),
    "Int8Linear": lambda x: fl.Int8Linear(128, 8, dtype=F32)(x),
    "WeightOnlyLinear": lambda x: fl.WeightOnlyLinear(128, 8, dtype=F32)(x),
    "FP8ScaledLinear": lambda x: fl.FP8ScaledLinear(128, 8, dtype=F32)(x),
    "FusedMoE": experts("fp8_block"),
    "FusedMoE ": experts("int8"),
    "GroupQuant": lambda x: GroupQuant(128)(x),
    "MXFP8Quant": lambda x: MXFP8Quant()(x),
    "NVFP4Quant": lambda x: NVFP4Quant()(x, torch.ones(1), torch.tensor([0, 3], dtype=torch.int32)),
    "SiluMulQuant": lambda x: SiluMulQuant(64, group_size=64)(x),
    "MergeState": lambda x: MergeState(64)(x.view(3, 2, 64), x.new_ones(3, 2), x.view(3, 2, 64), x.new_ones(3, 2)),
    "Attention": attention,
    "MLAAttention": latent_attention,
    "Bmm": lambda x: fl.Bmm(1, 128, 128, format="fp8_tensor", dtype=F32)(
        x[None], torch.zeros(1, 128, 128).to(torch.float8_e4m3fn), torch.ones(1)
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_inference_only_layers_say_so(name: str) -> None:
    words = rf"{name.strip()}: \w+ is a tensor that requires a gradient; accepted: tensors that need no gradient"
    x = leaf(3, 128)
    with pytest.raises(ArgumentError, match=words):
        REFUSED[name](x)
    with torch.no_grad():
        REFUSED[name](x)
    REFUSED[name](x.detach())


def test_experts_that_are_not_quantised_say_so_in_the_backward_pass() -> None:
    x = leaf(3, 128)
    with pytest.raises(ArgumentError, match=r"moe_experts_loop: gradient is asked for"):
        experts("none")(x).sum().backward()


@pytest.mark.parametrize("which", ["weight", "weight_scale_inv", "bias"])
def test_a_parameter_that_wants_a_gradient_is_named(which: str) -> None:
    layer = fl.FP8BlockLinear(128, 128, bias=True, dtype=F32)
    getattr(layer, which).requires_grad_()
    with pytest.raises(ArgumentError, match=f"FP8BlockLinear: {which} is a tensor that requires a gradient"):
        layer(torch.randn(1, 128))


@pytest.mark.parametrize("backend", ["torch", "reference", pytest.param("triton", marks=interpreted)])
def test_caches_are_outside_autograd(backend: str) -> None:
    rows, loc = leaf(2, 1, 16), torch.tensor([3, 17])
    keys, values, latents = torch.zeros(2, 16, 1, 16), torch.zeros(2, 16, 1, 16), torch.zeros(2, 16, 32)
    KVWrite(1, 16, kv_dtype=F32, backend=backend)(rows, rows * 2, keys, values, loc)
    MLAKVWrite(16, 16, kv_dtype=F32, backend=backend)(rows[:, 0], rows[:, 0] * 2, latents, loc)
    for cache in (keys, values, latents):
        assert not cache.requires_grad and cache.grad_fn is None
    assert torch.equal(keys[0, 3], rows[0].detach()) and torch.equal(latents[1, 1, 16:], 2 * rows[1, 0].detach())
    write = RotaryKVWrite(1, 1, 16, kv_dtype=F32, backend=backend)
    tables = [torch.ones(4, 8), torch.zeros(4, 8), torch.arange(2)]
    cache = LayerCache(keys, values)
    with pytest.raises(ArgumentError, match="RotaryKVWrite: k is a tensor that requires a gradient"):
        write(rows.detach(), rows, rows.detach(), *tables, cache, loc)
    assert not cache.keys.requires_grad


@pytest.mark.parametrize(
    ("call", "which"),
    [(attention, "qkv_proj.weight"), (latent_attention, "q_proj.weight"), (latent_attention, "kv_b_proj.weight")],
)
def test_attention_names_a_weight_before_the_cache_that_wants_a_gradient(call: Any, which: str) -> None:
    with pytest.raises(ArgumentError, match=f"Attention: {which} is a tensor that requires a gradient"):
        call(torch.randn(3, 128), which)
    assert call(torch.randn(3, 128), "o_proj.weight").requires_grad  # behind the cache it is right
