"""Hooks of every kind on all modules of the process, and on activations: each sees each call of the original's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

import fastlayers as fl

sys.path.insert(0, str(Path(__file__).parents[1]))
from test_contracts import close, logits
from tiny import build, prompt

FORWARD: dict[str, Callable[..., Any]] = {
    "before": torch_module.register_module_forward_pre_hook, "after": torch_module.register_module_forward_hook,
}  # fmt: skip
BACKWARD: dict[str, Callable[..., Any]] = {
    "before": torch_module.register_module_full_backward_pre_hook,
    "after": torch_module.register_module_full_backward_hook,
}


@pytest.mark.parametrize("kind", FORWARD)
@pytest.mark.parametrize("name", ["v3", "qwen2_moe", "gpt_oss", "llama"])
def test_what_hooks_on_all_modules_return_counts(name: str, kind: str) -> None:
    model, twin = build(name), build(name)
    report = fl.patch(model)
    plain, found, calls = logits(model), [], []

    def scaled(module: Any, *given: Any) -> Any:
        calls.append(type(module).__name__.removeprefix("Fast"))
        # A pre-hook gets the arguments, another one also what came out.
        value = given[-1]
        first = value[0] if isinstance(value, tuple) and value else value
        if not torch.is_tensor(first) or not first.is_floating_point():
            return None
        return (0.9 * first, *value[1:]) if isinstance(value, tuple) else 0.9 * first

    for m in (twin, model):
        calls.clear()
        handle = FORWARD[kind](scaled)
        try:
            found.append((logits(m), list(calls)))
        finally:
            handle.remove()
    assert found[0][1] == found[1][1] and len(calls) > 20
    assert close(found[1][0], found[0][0]) and not close(found[0][0], plain, 1e-3)
    assert "hooks are registered on all modules" in report.summary()
    assert close(logits(model), plain)


@pytest.mark.filterwarnings("ignore:.*backward hook")
@pytest.mark.parametrize("kind", BACKWARD)
def test_hooks_of_the_way_back_on_all_modules(kind: str) -> None:
    model, twin = build("llama"), build("llama")
    fl.patch(model)
    seen: list[list[str]] = []
    for m in (twin, model):
        calls: list[str] = []
        handle = BACKWARD[kind](lambda module, *given, calls=calls: calls.append(type(module).__name__))
        try:
            m(**prompt(1, 8)).logits.sum().backward()
        finally:
            handle.remove()
        seen.append([name.removeprefix("Fast") for name in calls])
    assert seen[0] == seen[1] and len(seen[0]) > 20
    assert close(model.model.embed_tokens.weight.grad, twin.model.embed_tokens.weight.grad)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("how", ["hook", "pre_hook", "instance_forward"])
@pytest.mark.parametrize("name", ["v3", "qwen3_moe"])
def test_activations_of_experts_that_are_hooked(name: str, how: str, when: str) -> None:
    model, twin = build(name), build(name)
    plain = logits(twin)
    report = fl.patch(model) if when == "after" else None
    for m in (model, twin):
        activation: nn.Module = m.model.layers[1].mlp.experts.act_fn
        if how == "hook":
            activation.register_forward_hook(lambda module, args, output: 2.0 * output)
        elif how == "pre_hook":
            activation.register_forward_pre_hook(lambda module, args: (0.5 * args[0],))
        else:
            activation.forward = lambda x: 2.0 * x  # type: ignore[method-assign]
    report = report or fl.patch(model)
    wanted = logits(twin)
    assert close(logits(model), wanted) and not close(wanted, plain, 1e-4)
    if when == "after":
        assert report.fallbacks()["model.layers.1.mlp.experts"] > 0 and "act_fn" in report.summary()
    else:
        reasons = {entry.name: entry.reason for entry in report.skipped}
        assert reasons["model.layers.1.mlp.experts"] == "custom-gate: the activation was hooked or replaced"
