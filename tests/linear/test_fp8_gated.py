"""The activation in front of an FP8 down projection: one launch less, the same bits."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import fastlayers as fl
from fastlayers.activation.silu_mul_quant.layer import SILU_MUL_QUANT
from fastlayers.errors import ArgumentError
from fastlayers.linear.fp8_block.package_gemm import PackageGemm
from fastlayers.quant.block_quant import dequantize_block_weight
from fastlayers.runtime.launch import Kernel
from fastlayers_models.blocks import SwiGLU


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count what is launched, by kernel."""
    found: Counter[str] = Counter()
    original = Kernel._through_triton

    def counting(self: Kernel, *given: Any) -> Any:
        found[self.__name__] += 1
        return original(self, *given)

    monkeypatch.setattr(Kernel, "_through_triton", counting)
    return found


def layers(k: int, dtype: torch.dtype, scale_fmt: str = "float") -> tuple[fl.FP8BlockLinear, fl.SiluAndMul, Any]:
    torch.manual_seed(0)
    dense = fl.Linear(k, 72, True, dtype=dtype)
    nn.init.normal_(dense.weight)
    nn.init.normal_(dense.bias)
    down = fl.FP8BlockLinear.from_linear(dense, scale_fmt=scale_fmt, backend="triton")
    act = fl.SiluAndMul(k, backend="triton")
    quantised = down.quantised_activation(act)
    assert quantised is not None
    for module in quantised.values():
        module.choose(SILU_MUL_QUANT, module.cfg, None, "triton")
    return down, act, quantised


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@torch.no_grad()
def test_bits_are_those_of_two_launches(dtype: torch.dtype, scale_fmt: str, launches: Counter[str]) -> None:
    down, act, quantised = layers(256, dtype, scale_fmt)
    for shape in ((4,), (17,), (2, 3)):
        x = 3 * torch.randn(*shape, 512, dtype=dtype)
        launches.clear()
        wanted = down(act(x))
        before = launches.total()
        launches.clear()
        found = down.gated(x, act, quantised)
        assert torch.equal(found, wanted) and found.shape == (*shape, 72)
        assert launches["_silu_mul_quant_kernel"] == 1 and launches.total() == before - 1
        assert not launches["_silu_mul_kernel"] and not launches["_group_quant_kernel"]


@torch.no_grad()
def test_hooks_and_another_activation_are_called() -> None:
    down, act, quantised = layers(256, torch.bfloat16)
    x = torch.randn(4, 512, dtype=torch.bfloat16)
    wanted, seen = act(x), []
    for module, register in itertools.product((down, act), ("register_forward_pre_hook", "register_forward_hook")):
        handle = getattr(module, register)(lambda module, given, *result: seen.append((module, given[0])))
        down.gated(x, act, quantised)
        handle.remove()
    assert [module for module, _ in seen] == [down, down, act, act]
    assert all(torch.equal(given, wanted if module is down else x) for module, given in seen)
    doubled = nn.Module()
    doubled.forward = lambda x: 2 * act(x)  # type: ignore[method-assign]
    assert torch.equal(down.gated(x, doubled, quantised), down(2 * wanted))  # type: ignore[arg-type]


@torch.no_grad()
def test_what_quantises_itself_or_pads_keeps_its_launches(launches: Counter[str]) -> None:
    """One or two tokens, whose product quantises on its way; and a width that is no whole number of groups."""
    for k, tokens in ((256, 1), (256, 2), (200, 9)):
        down, act, quantised = layers(k, torch.bfloat16)
        x = torch.randn(tokens, 2 * k, dtype=torch.bfloat16)
        wanted = down(act(x))
        launches.clear()
        assert torch.equal(down.gated(x, act, quantised), wanted)
        assert not launches["_silu_mul_quant_kernel"]


@torch.no_grad()
def test_packages_get_the_codes_in_their_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    class Played(PackageGemm):
        """A package's product, which notes the strides of its scales."""

        def gemm(self, q: torch.Tensor, s: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            strides.append(s.stride())
            x = q.float() * s.repeat_interleave(128, 1)
            return (x @ dequantize_block_weight(weight, scale).T).to(torch.bfloat16)

    strides: list[tuple[int, ...]] = []
    down, act, quantised = layers(256, torch.bfloat16)
    played = Played(down.cfg)
    monkeypatch.setattr(down.ladder, "single", played)
    x = torch.randn(5, 512, dtype=torch.bfloat16)
    wanted = down(act(x))
    assert torch.equal(down.gated(x, act, quantised), wanted)
    assert strides == [(1, 8), (1, 8)]  # five tokens, rounded up to eight: what TMA loads
    # What pads rows quantises by itself.
    monkeypatch.setattr(Played, "row_multiple", 16)
    assert played.codes_layout(5) is None


def test_gradients_are_refused_as_before() -> None:
    down, act, quantised = layers(256, torch.bfloat16)
    with pytest.raises(ArgumentError, match="requires a gradient"):
        down.gated(torch.randn(4, 512, dtype=torch.bfloat16, requires_grad=True), act, quantised)


def test_another_rounding_is_never_replaced() -> None:
    down, act, _ = layers(256, torch.bfloat16)
    assert down.quantised_activation(act) is not None
    rung = act.choice.rungs[0]
    other = fl.registry("silu_mul").named("sgl_kernel")
    act.choice = replace(act.choice, rungs=(rung, replace(rung, backend=other)))
    assert down.quantised_activation(act) is None


@torch.no_grad()
def test_mlps_of_models_take_it(launches: Counter[str]) -> None:
    """What dense layers and shared experts are made of, with FP8 blocks; and not where weights are bf16."""

    def context(quant: fl.QuantSpec) -> Any:
        def linear(name: str, *sizes: Any, **options: Any) -> nn.Module:
            made = fl.linear(*sizes, quant=quant, dtype=torch.bfloat16, backend="triton", **options)
            made.weight.copy_(torch.randn(made.weight.shape))
            return made

        def fused(prefix: str, parts: Any, size: int, bias: bool, shard: Any) -> nn.Module:
            return linear(prefix, 128, [size] * 2, bias, names=parts, shard=shard)

        config, parallel = SimpleNamespace(hidden_size=128), fl.ParallelSpec()
        return SimpleNamespace(
            config=config, parallel=parallel, device=None, dtype=torch.bfloat16, linear=linear, fused=fused
        )  # fmt: skip

    mlp, plain = (SwiGLU(context(quant), "mlp", 256) for quant in (fl.QuantSpec("fp8_block"), fl.QuantSpec()))
    assert plain.act_quant is None
    x = torch.randn(6, 128, dtype=torch.bfloat16)
    found = mlp(x)
    assert launches["_silu_mul_quant_kernel"] == (mlp.act_quant["col"].choice.name == "triton")  # type: ignore[index]
    assert torch.equal(found, mlp.down_proj(mlp.act_fn(mlp.gate_up_proj(x))))
    assert plain(x).shape == x.shape
