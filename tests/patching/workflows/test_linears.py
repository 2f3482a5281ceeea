"""Linears behind one product that somebody changes after the patch: their tables, their biases, their class."""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import fastlayers as fl

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
from test_contracts import close, logits
from test_replaced import ALL, _first, layer_call
from tiny import build, prompt


def _new_hooks(linear: nn.Linear) -> None:
    # How hooks are often removed; what is registered afterwards is written into the new table.
    linear._forward_hooks = OrderedDict()
    linear.register_forward_hook(lambda module, args, output: output + 0.5 * output.flip(-1))


def _new_parameters(linear: nn.Linear) -> None:
    held = linear._parameters
    linear._parameters = {name: None if p is None else nn.Parameter(p.detach().roll(1, 0)) for name, p in held.items()}


@pytest.mark.parametrize("change", [_new_hooks, _new_parameters])
@pytest.mark.parametrize("name", ALL)
def test_tables_of_modules_that_were_replaced_count(name: str, change: Callable[[nn.Linear], None]) -> None:
    model, twin = build(name), build(name)
    fl.patch(model)
    plain = logits(model)
    for m in (model, twin):
        attention, first = _first(m)
        change(getattr(attention, first))
    wanted = logits(twin)
    assert close(logits(model), wanted) and not close(wanted, plain, 1e-3)


def test_hooks_of_the_way_back_cost_nothing_where_there_is_none() -> None:
    model, twin = build("llama"), build("llama")
    report = fl.patch(model)
    calls: list[int] = []
    for m in (model, twin):
        m.model.layers[1].mlp.up_proj.register_full_backward_hook(lambda module, given, wanted: calls.append(1))
    assert close(logits(model), logits(twin)) and not any(report.fallbacks().values()) and not calls
    for m in (model, twin):
        m(**prompt()).logits.sum().backward()
    assert calls == [1, 1] and report.fallbacks()["model.layers.1.mlp"] > 0
    weights = [m.model.layers[0].self_attn.q_proj.weight for m in (model, twin)]
    assert close(weights[0].grad, weights[1].grad)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen2_moe", "v3"])
def test_torchs_own_int8_linears_after_the_patch(name: str, moved: bool) -> None:
    model, twin = build(name), build(name)
    fl.patch(model)
    found = []
    for m in (model, twin):
        m = torch.ao.quantization.quantize_dynamic(m, {nn.Linear}, torch.qint8, inplace=moved)
        # Their weight is a method; a copy and a move choose backends anew.
        found.append(m.to("cpu") if moved else copy.deepcopy(m))
    wanted = logits(found[1])
    assert close(logits(found[0]), wanted) and not close(wanted, logits(build(name)), 1e-4)
    if moved:
        fl.unpatch(model)
        assert torch.equal(logits(model), wanted)


def _bias_added(linear: nn.Linear) -> None:
    if linear.bias is None:
        linear.bias = nn.Parameter(torch.linspace(-1.0, 1.0, linear.out_features))


def _bias_removed(linear: nn.Linear) -> None:
    linear.bias = None  # type: ignore[assignment]


def _bias_cut(linear: nn.Linear) -> None:
    if linear.bias is not None:
        linear.bias.data = linear.bias.data[:1]  # where it lies: torch adds it to each output


BIASED = [("llama", _bias_added), ("v3", _bias_added), ("v2_lite", _bias_added), ("qwen2", _bias_removed)]
BIASED += [("qwen2", _bias_cut)]
# Latent attention is packed by the code that packs llama's, and guarded by it in compiled code, too.
BIASED_CASES = [
    pytest.param(name, change, compiled, marks=[pytest.mark.slow] * (compiled and name in ("v3", "v2_lite")))
    for name, change in BIASED
    for compiled in (False, True)
]


@pytest.mark.parametrize(("name", "change", "compiled"), BIASED_CASES)
def test_biases_changed_after_the_patch_count(name: str, change: Callable[[nn.Linear], None], compiled: bool) -> None:
    model, twin = build(name).requires_grad_(False), build(name).requires_grad_(False)
    fl.patch(model)
    torch._dynamo.reset()
    run = model.model.layers[1]
    if compiled:  # attention has what is changed in each family; whole layers take twice as long to compile
        run.self_attn.compile(backend="eager")
    before = layer_call(run, model)
    for m in (model, twin):
        for child in m.model.layers[1].modules():
            if type(child) is nn.Linear:
                change(child)
    wanted = layer_call(twin.model.layers[1], twin)
    assert not close(before, wanted, 1e-3) and close(layer_call(run, model), wanted)
    if not compiled:
        options = {"max_new_tokens": 6, "do_sample": False}
        assert torch.equal(model.generate(**prompt(1, 12), **options), twin.generate(**prompt(1, 12), **options))


@pytest.mark.parametrize("when", ["before", "after", "copied"])
@pytest.mark.parametrize("name", ["v3", "v2_lite", "llama"])
def test_weights_of_torchao(name: str, when: str) -> None:
    """As ``Codes`` in test_replaced.py, by the package itself: 0.18 beside torch 2.13 holds all of it."""
    torchao = pytest.importorskip("torchao.quantization")
    model, twin = build(name), build(name)
    report = None if when == "before" else fl.patch(model)
    for m in (model, twin):
        torchao.quantize_(m, torchao.Int8WeightOnlyConfig())
    report = report or fl.patch(model)
    found, wanted = copy.deepcopy(model) if when == "copied" else model, logits(twin)
    assert close(logits(found), wanted) and not close(wanted, logits(build(name)), 1e-4)
    if when == "before" and name != "llama":
        reasons = {entry.name: entry.reason for entry in report.skipped}
        assert reasons["model.layers.1.self_attn"].startswith("quantized(") and "kv_b_proj" in str(reasons)
    fl.unpatch(model)
    assert torch.equal(logits(model), wanted)
