"""Forward-mode AD and transforms of torch.func: right where a layer says so, an error in words everywhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional as F

import fastlayers as fl
from fastlayers.attention.kv_cache.spec import LayerCache
from fastlayers.attention.kv_write.layer import KVWrite
from fastlayers.errors import ArgumentError
from fastlayers.operators import operator
from fastlayers.quant.group_quant.layer import GroupQuant
from fastlayers.quant.spec import QuantSpec

sys.path.insert(0, str(Path(__file__).parent))
from test_gradients import F32, REFUSED, RIGHT, filled, interpreted

Call = Callable[[torch.Tensor], Any]
TRITON = pytest.param("triton", marks=interpreted)


def dual(f: Call, x: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        return f(forward_ad.make_dual(x, torch.ones_like(x)))


def dual_without_grad_mode(f: Call, x: torch.Tensor) -> Any:
    with torch.no_grad():
        return dual(f, x)


def dual_beside_a_gradient(f: Call, x: torch.Tensor) -> Any:
    return dual(f, x.clone().requires_grad_())


def first(y: Any) -> torch.Tensor:
    y = y[0] if isinstance(y, tuple) else y
    assert isinstance(y, torch.Tensor)
    return y.float()


FORWARD: dict[str, Callable[[Call, torch.Tensor], Any]] = {
    "dual_level": dual,
    "dual_level and no_grad": dual_without_grad_mode,
    "dual_level of a tensor that requires a gradient": dual_beside_a_gradient,
    "jvp": lambda f, x: torch.func.jvp(lambda x: first(f(x)), (x,), (torch.ones_like(x),)),
    "jacfwd": lambda f, x: torch.func.jacfwd(lambda x: first(f(x)).sum())(x),
    "jvp of vmap": lambda f, x: torch.func.jvp(
        torch.func.vmap(lambda x: first(f(x))), (x[None],), (torch.ones_like(x[None]),)
    ),
    "hessian": lambda f, x: torch.func.hessian(lambda x: first(f(x)).square().sum())(x),
}
BACKWARD: dict[str, Callable[[Call, torch.Tensor], Any]] = {
    "grad": lambda f, x: torch.func.grad(lambda x: first(f(x)).sum())(x),
    "grad of vmap": lambda f, x: torch.func.grad(lambda x: torch.func.vmap(lambda x: first(f(x)).sum())(x[None]).sum())(
        x
    ),
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(lambda x: first(f(x)).sum()))(x[None]),
}


@pytest.mark.parametrize("transform", [*FORWARD, *BACKWARD])
@pytest.mark.parametrize("name", REFUSED)
def test_inference_only_layers_refuse_every_transform(name: str, transform: str) -> None:
    words = rf"^{name.strip()}: \w+ is a tensor (that requires a|with a tangent .a forward-mode) gradient"
    with pytest.raises(ArgumentError, match=words):
        (FORWARD | BACKWARD)[transform](REFUSED[name], torch.randn(3, 128))


@interpreted
@pytest.mark.parametrize("transform", [*FORWARD, *BACKWARD])
@pytest.mark.parametrize("name", RIGHT)
def test_kernels_refuse_every_transform(name: str, transform: str) -> None:
    make, run, _, shape = RIGHT[name]
    layer = make("triton")
    words = r"^fastlayers::\w+: \w+ is a tensor .*gradient\)?; accepted: no gradient: this kernel is for inference; b"
    with pytest.raises(ArgumentError, match=words):
        (FORWARD | BACKWARD)[transform](lambda x: run(layer, x), torch.randn(shape))


@operator("test_forward_mode_twice", lambda x: torch.empty_like(x))
def _twice(x: torch.Tensor) -> torch.Tensor:
    return x + x


@pytest.mark.parametrize("how", ["level around the compiled", "compiled transform", "transform of the compiled"])
@pytest.mark.parametrize("kind", ["a quantised layer", "an operator"])
def test_what_is_compiled_refuses_tangents(kind: str, how: str) -> None:
    made: Call = fl.Int8Linear(8, 8, dtype=F32) if kind == "a quantised layer" else lambda x: _twice(x)
    x = torch.randn(3, 8)
    compiled = torch.compile(made, backend="eager")
    assert torch.equal(compiled(x), made(x))
    with pytest.raises(ArgumentError, match="x is a tensor with a tangent"):
        if how == "level around the compiled":
            dual(compiled, x)
        elif how == "compiled transform":
            torch.compile(lambda x: torch.func.jvp(made, (x,), (x,)), backend="eager")(x)
        else:
            torch.func.jvp(compiled, (x,), (x,))
    assert torch.equal(compiled(x), made(x))


@pytest.mark.parametrize("transform", FORWARD)
@pytest.mark.parametrize("backend", ["torch", TRITON])
def test_experts_that_are_not_quantised_refuse_forward_mode(backend: str, transform: str) -> None:
    layer = fl.FusedMoE(16, 16, 2, 1, quant=QuantSpec("none"), dtype=F32, backend=backend)
    call = lambda x: layer(x, torch.ones(3, 1), torch.zeros(3, 1, dtype=torch.int32))  # noqa: E731
    words = r"^FusedMoE, fastlayers::\w+: hidden_states is a tensor .*gradient\)?; accepted: no gradient: this kernel"
    with pytest.raises(ArgumentError, match=words):
        FORWARD[transform](call, torch.randn(3, 16))


def test_a_backward_pass_of_the_experts_names_layer_and_argument() -> None:
    layer = fl.FusedMoE(16, 16, 2, 1, quant=QuantSpec("none"), dtype=F32)
    weights = torch.ones(3, 1, requires_grad=True)
    y = layer(torch.randn(3, 16), weights, torch.zeros(3, 1, dtype=torch.int32))
    words = (
        r"^FusedMoE, fastlayers::moe_experts_loop: gradient is asked for; accepted: no gradient: this kernel is for "
        r"inference; topk_weights asked for one; backend='reference' has one$"
    )
    with pytest.raises(ArgumentError, match=words):
        y.sum().backward()


def test_the_reference_of_the_experts_has_a_right_gradient() -> None:
    torch.manual_seed(2)
    layer = filled(fl.FusedMoE(8, 4, 2, 2, quant=QuantSpec("none"), dtype=F32, backend="reference"))
    x, weights, ids = torch.randn(3, 8, requires_grad=True), torch.rand(3, 2), torch.tensor([[0, 1]] * 3).int()

    def formula(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        gate, up = torch.einsum("td,eid->tei", x, w13).chunk(2, -1)
        return torch.einsum("tei,edi,te->td", F.silu(gate) * up, w2, weights.double())

    wide = [each.detach().double().requires_grad_() for each in (x, layer.w13, layer.w2)]
    right = torch.autograd.grad(formula(*wide).square().sum(), wide)
    found = torch.autograd.grad(layer(x, weights, ids).square().sum(), [x, layer.w13, layer.w2])
    for one, other in zip(found, right, strict=True):
        assert torch.allclose(one.double(), other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", RIGHT)
def test_forward_derivatives_of_torch_are_right(name: str) -> None:
    make, run, formula, shape = RIGHT[name]
    torch.manual_seed(1)
    layer, x, v = filled(make("torch")), torch.randn(shape), torch.randn(shape)
    wanted = torch.func.jvp(lambda x: formula(layer, x), (x.double(),), (v.double(),))[1]
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(run(layer, forward_ad.make_dual(x, v))).tangent
    assert torch.allclose(found.double(), wanted, rtol=1e-4, atol=1e-5)
    assert torch.allclose(torch.func.jvp(lambda x: run(layer, x), (x,), (v,))[1].double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["torch", TRITON])
def test_a_parameters_tangent_is_refused_too(backend: str) -> None:
    layer = fl.Int8Linear(128, 8, dtype=F32, backend=backend)
    x, scale = torch.randn(3, 128), layer.weight_scale.detach()
    with pytest.raises(ArgumentError, match="Int8Linear: weight_scale is a tensor with a tangent"):
        torch.func.jvp(lambda s: torch.func.functional_call(layer, {"weight_scale": s}, x), (scale,), (scale + 1,))


@pytest.mark.parametrize("backend", ["torch", "reference", TRITON])
def test_caches_take_no_tangents(backend: str) -> None:
    keys, values = torch.zeros(2, 16, 1, 16), torch.zeros(2, 16, 1, 16)
    rows, cache = torch.randn(2, 1, 16), LayerCache(keys, values)
    with forward_ad.dual_level():
        given = forward_ad.make_dual(rows, rows)
        KVWrite(1, 16, kv_dtype=F32, backend=backend)(given, given, keys, values, torch.tensor([3, 17]))
        assert forward_ad.unpack_dual(cache.keys).tangent is None
    assert torch.equal(keys[0, 3], rows[0])


@pytest.mark.parametrize("name", REFUSED)
def test_a_level_without_tangents_and_inference_mode_refuse_nothing(name: str) -> None:
    x = torch.randn(3, 128)
    with forward_ad.dual_level():
        REFUSED[name](x)
        given = forward_ad.make_dual(x, x)
        with torch.inference_mode():  # torch goes on with no tangent in it
            REFUSED[name](given)


@pytest.mark.parametrize("name", ["FP8BlockLinear", "Int8Linear", "GroupQuant"])
def test_batches_of_torch_func_are_right_without_a_gradient(name: str) -> None:
    layer = {"FP8BlockLinear": fl.FP8BlockLinear, "Int8Linear": fl.Int8Linear}.get(name)
    made: Any = layer(128, 128, dtype=F32) if layer else GroupQuant(128)
    x = torch.randn(4, 3, 128)
    assert torch.equal(first(torch.func.vmap(made)(x)), torch.stack([first(made(each)) for each in x]))
