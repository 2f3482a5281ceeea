"""Gradients that begin inside a patched model: at a hook, a mask, a router or a cache of the caller's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import fastlayers as fl

sys.path.insert(0, str(Path(__file__).parents[1]))
from test_contracts import close
from tiny import build, prompt

FAMILIES = ["v3", "v2_lite", "qwen2", "qwen3_moe", "gpt_oss", "llama"]
# What a controller of activations hooks; those that a family has.
PLACES = (
    "input_layernorm", "self_attn", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.k_norm",
    "self_attn.kv_a_proj_with_mqa", "self_attn.kv_a_layernorm", "self_attn.o_proj", "mlp", "mlp.gate_proj",
    "mlp.experts",
)  # fmt: skip


def same(name: str, flow: Callable[[Any], list[torch.Tensor]], attn: str | None = None, **options: Any) -> Any:
    """Compare what ``flow`` gives of a stock and a patched model; return the report."""
    stock, fast = build(name, attn=attn).requires_grad_(False), build(name, attn=attn).requires_grad_(False)
    report = fl.patch(fast, **options)
    wanted, given = flow(stock), flow(fast)
    assert len(wanted) == len(given) > 0
    for w, g in zip(wanted, given, strict=True):
        assert float(w.norm()) > 0 and close(g, w, 1e-4)
    return report


def loss(model: Any, *args: Any, **options: Any) -> torch.Tensor:
    out: torch.Tensor = model(*args, **options).logits.square().mean()
    return out


def steered(model: Any) -> list[torch.Tensor]:
    """Gradients of vectors that hooks add, one place at a time."""
    found = []
    for place in PLACES:
        names = dict(model.model.layers[0].named_modules())
        if place not in names:
            continue
        added: list[torch.Tensor] = []

        def add(module: Any, args: Any, output: Any, added: list[torch.Tensor] = added) -> Any:
            first = output[0] if isinstance(output, tuple) else output
            added[:] = added or [torch.zeros(first.shape[-1], requires_grad=True)]
            return (first + added[0], *output[1:]) if isinstance(output, tuple) else first + added[0]

        handle = names[place].register_forward_hook(add)
        loss(model, **prompt(2, 12, pads=(0, 3))).backward()
        handle.remove()
        assert added[0].grad is not None
        found.append(added[0].grad)
    return found


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("name", FAMILIES)
def test_vectors_that_hooks_add_are_trained_as_in_stock(name: str, attn: str) -> None:
    if name == "gpt_oss" and attn == "sdpa":
        pytest.skip("transformers has no sdpa for GPT-OSS")
    same(name, steered, attn)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_mask_that_is_trained(name: str) -> None:
    hidden = torch.zeros(12, 12).masked_fill(~torch.ones(12, 12, dtype=torch.bool).tril(), -1e9)

    def flow(model: Any) -> list[torch.Tensor]:
        bias = torch.zeros(12, 12, requires_grad=True)
        loss(model, prompt(2, 12)["input_ids"], attention_mask=(hidden + bias).expand(2, 1, 12, 12)).backward()
        assert bias.grad is not None
        return [bias.grad]

    same(name, flow, "eager")


@pytest.mark.parametrize("name", ["v3", "qwen2_moe", "gpt_oss"])
def test_routers_that_are_trained_alone(name: str) -> None:
    def flow(model: Any) -> list[torch.Tensor]:
        routers = [p for key, p in model.named_parameters() if key.endswith(("mlp.gate.weight", "mlp.router.weight"))]
        for parameter in routers:
            parameter.requires_grad_()
        loss(model, **prompt(2, 12)).backward()
        return [parameter.grad for parameter in routers if parameter.grad is not None]

    falls = same(name, flow).fallbacks()
    assert falls["model.layers.1.mlp.experts"] == 1, "experts get no gradient of their own, their shares do"


@pytest.mark.parametrize("name", FAMILIES)
def test_caches_with_gradients(name: str) -> None:
    def given(model: Any) -> list[torch.Tensor]:
        prefix, first = DynamicCache(), DynamicCache()
        with torch.no_grad():
            model(prompt(1, 6)["input_ids"], past_key_values=first, use_cache=True)
        leaves = []
        for index, layer in enumerate(first.layers):
            leaves += [layer.keys.clone().requires_grad_(), layer.values.clone().requires_grad_()]
            prefix.update(*leaves[-2:], index)
        loss(model, prompt(1, 3, seed=4)["input_ids"], past_key_values=prefix, use_cache=True).backward()
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    def grown(model: Any) -> list[torch.Tensor]:
        embedded = model.get_input_embeddings()(prompt(1, 9)["input_ids"]).detach().requires_grad_()
        cache = DynamicCache()
        with torch.no_grad():
            model(inputs_embeds=embedded[:, :2], past_key_values=cache, use_cache=True)
        model(inputs_embeds=embedded[:, 2:5], past_key_values=cache, use_cache=True)
        total = torch.zeros(())
        for step in range(5, 9):
            total = total + loss(
                model, inputs_embeds=embedded[:, step : step + 1].detach(), past_key_values=cache, use_cache=True
            )
        total.backward()
        return [embedded.grad]

    same(name, given)
    same(name, grown)


def test_gradients_behind_kernels_of_an_mlp() -> None:
    def flow(model: Any) -> list[torch.Tensor]:
        bias = torch.zeros(96, requires_grad=True)
        for layer in model.model.layers:
            layer.mlp.up_proj.register_forward_hook(lambda module, args, output: output + bias)
        loss(model, **prompt(1, 5)).backward()
        assert bias.grad is not None
        return [bias.grad]

    report = same("llama", flow, mlp="triton")
    assert "silu_mul=triton" in {entry.implementation.split(", ")[-1] for entry in report.replaced}
