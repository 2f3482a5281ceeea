"""What users replace, hook or override, before and after the patch: it runs, and the report says so."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import prune
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

import fastlayers as fl
from fastlayers.patching import guard

sys.path.insert(0, str(Path(__file__).parents[1]))
from test_contracts import close, logits
from tiny import build, prompt

# What a patch puts into v2 is v3's but for the router.
ALL: list[Any] = ["v3", pytest.param("v2", marks=pytest.mark.slow), "qwen2_moe", "qwen3", "gpt_oss", "llama"]
WITH_MLP = ["v3", "qwen2_moe", "llama"]
SPARSE = ["v3", "qwen3_moe", "gpt_oss"]


class Doubled(nn.Module):
    """Somebody's wrapper: no weight, no out_features."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2.0 * self.inner(x)


class Mine(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1.5 * super().forward(x)


def _attention(model: Any) -> Any:
    return model.model.layers[1].self_attn


def _first(model: Any) -> tuple[Any, str]:
    attention = _attention(model)
    name = "q_proj" if getattr(attention, "q_proj", None) is not None else "kv_a_proj_with_mqa"
    return attention, name


def _lora(model: Any) -> None:
    attention, name = _first(model)
    setattr(attention, name, Doubled(getattr(attention, name)))


def _new_weight(model: Any) -> None:
    attention, name = _first(model)
    linear = getattr(attention, name)
    linear.weight = nn.Parameter(2.0 * linear.weight.detach())


def _data(model: Any) -> None:
    attention, name = _first(model)
    linear = getattr(attention, name)
    linear.weight.data = 2.0 * linear.weight.data


def _pruned(model: Any) -> None:
    attention, name = _first(model)
    prune.l1_unstructured(getattr(attention, name), "weight", amount=0.5)


def _subclass(model: Any) -> None:
    attention, name = _first(model)
    getattr(attention, name).__class__ = Mine


def _hook(model: Any) -> None:
    attention, name = _first(model)
    getattr(attention, name).register_forward_hook(lambda module, args, output: 2.0 * output)


def _instance(model: Any) -> None:
    attention, name = _first(model)
    linear = getattr(attention, name)
    linear.forward = MethodType(lambda self, x: 2.0 * nn.Linear.forward(self, x), linear)


CHANGES: dict[str, Callable[[Any], None]] = {
    "adapter": _lora, "new_weight": _new_weight, "data": _data, "pruned": _pruned, "subclass": _subclass,
    "hook": _hook, "instance_forward": _instance,
}  # fmt: skip


# Weights and classes that are others when the compiler comes are seen by what sees data and an instance's forward.
LATE = ("new_weight", "pruned", "subclass")
COMPILED: list[Any] = [*(("llama", change) for change in ("data", "instance_forward")), ("v3", "adapter")]
COMPILED += [pytest.param("llama", change, marks=pytest.mark.slow) for change in ("adapter", "hook", *LATE)]
COMPILED += [pytest.param("v3", change, marks=pytest.mark.slow) for change in ("data", "hook")]


# What a stock model's program does not notice, either, once it is compiled: a class, before torch 2.12.
UNSEEN = {"hook"} | ({"subclass"} if torch.__version__ < "2.12" else set())


@torch.no_grad()
def layer_call(layer: Any, model: Any, length: int = 9) -> torch.Tensor:
    """Output of a decoder layer, or of what the compiler made of it."""
    x = torch.randn(2, length, 64, generator=torch.Generator().manual_seed(2))
    table = model.model.rotary_emb(x, position_ids=torch.arange(length)[None])
    out: torch.Tensor = layer(x, attention_mask=None, position_embeddings=table)
    return out


@pytest.mark.parametrize(("name", "change"), COMPILED)
def test_torch_compile_and_export_after_a_change_run_what_is_there(name: str, change: str) -> None:
    model, twin = build(name), build(name)
    stock = layer_call(twin.model.layers[1], twin)
    report = fl.patch(model)
    for m in (model, twin):
        CHANGES[change](m)
    layer, wanted = model.model.layers[1], layer_call(twin.model.layers[1], twin)
    assert not close(wanted, stock, 1e-3)
    assert close(layer_call(layer, model), wanted)
    torch._dynamo.reset()
    assert close(layer_call(torch.compile(layer, backend="eager"), model), wanted)
    counted = report.hits()
    x = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(2))
    table = model.model.rotary_emb(x, position_ids=torch.arange(9)[None])
    with torch.no_grad():
        program = torch.export.export(layer, (x,), {"attention_mask": None, "position_embeddings": table})
        assert close(program.module()(x, attention_mask=None, position_embeddings=table), wanted)
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert len(names) > 3 and not any("fastlayers" in name for name in names), "the program loads without us"
    assert report.hits() == counted


# Each of the others is seen by test_a_compiled_layer_never_runs_a_stale_product, where linears are packed besides.
SEEN: list[Any] = ["data", "instance_forward"]
SEEN += [pytest.param(change, marks=pytest.mark.slow) for change in ("adapter", *LATE)]


@pytest.mark.parametrize("change", SEEN)
def test_a_change_after_torch_compile_is_seen(change: str) -> None:
    model, twin = build("llama"), build("llama")
    fl.patch(model)
    torch._dynamo.reset()
    compiled: Any = torch.compile(model.model.layers[1], backend="eager")
    before = layer_call(compiled, model)
    for m in (model, twin):
        CHANGES[change](m)
    if change in UNSEEN:
        torch._dynamo.reset()
    wanted = layer_call(twin.model.layers[1], twin)
    assert not close(before, wanted, 1e-3) and close(layer_call(compiled, model), wanted)


@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_program_follows_load_state_dict(strict: bool) -> None:
    model, other = build("llama"), build("llama", seed=5)
    fl.patch(model)
    layer, inner = model.model.layers[1], other.model.layers[1]
    x = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(2))
    table = model.model.rotary_emb(x, position_ids=torch.arange(9)[None])
    options = {"attention_mask": None, "position_embeddings": table}
    with torch.no_grad():
        program: Any = torch.export.export(layer, (x,), options, strict=strict).module()
        program.load_state_dict(inner.state_dict())
        assert close(program(x, **options), layer_call(inner, other))


# Compiled by hand; test_an_adapter_under_the_compiler_that_generate_starts is the same of what generate compiles.
@pytest.mark.slow
@pytest.mark.parametrize(("name", "linear"), [("v3", "kv_b_proj"), ("llama", "k_proj"), ("qwen3", "up_proj")])
def test_lora_with_the_compiled_static_cache(name: str, linear: str) -> None:
    peft = pytest.importorskip("peft")
    model, twin = (build(name, num_hidden_layers=1) for _ in range(2))
    fl.patch(model)
    inputs, found = prompt(1, 12), []
    for m in (twin, model):
        torch.manual_seed(3)
        lora = peft.get_peft_model(m, peft.LoraConfig(r=2, target_modules=[linear], init_lora_weights=False)).eval()
        torch._dynamo.reset()
        if m is model:  # stock's tokens need no compiler
            m.forward = torch.compile(m.forward, backend="eager")
        with torch.no_grad():
            found.append(lora.generate(**inputs, max_new_tokens=6, do_sample=False, cache_implementation="static"))
    assert torch.equal(found[0], found[1])


# --- activations and hooks on everything


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("how", ["replaced", "hooked", "instance_forward"])
@pytest.mark.parametrize("name", WITH_MLP)
def test_activations(name: str, how: str, when: str) -> None:
    model, twin = build(name), build(name)

    def change(m: Any) -> None:
        mlp = m.model.layers[0].mlp
        if how == "replaced":
            mlp.act_fn = nn.GELU()
        elif how == "hooked":
            mlp.act_fn.register_forward_hook(lambda module, args, output: 2.0 * output)
        else:
            mlp.act_fn.forward = lambda x: 2.0 * x

    report = None
    if when == "after":
        report = fl.patch(model)
    for m in (model, twin):
        change(m)
    if report is None:
        report = fl.patch(model)
        found = {entry.name: entry.reason for entry in report.skipped}
        assert found["model.layers.0.mlp"].startswith("custom-gate")
    assert close(logits(model), logits(twin)) and not close(logits(twin), logits(build(name)), 1e-3)
    if when == "after":
        assert report.fallbacks()["model.layers.0.mlp"] > 0
        assert "act_fn was replaced or hooked" in report.summary()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["v3", "qwen3_moe"])
def test_activations_of_experts(name: str, when: str) -> None:
    model, twin = build(name), build(name)
    report = fl.patch(model) if when == "after" else None
    for m in (model, twin):
        m.model.layers[1].mlp.experts.act_fn = nn.GELU()
    report = report or fl.patch(model)
    assert close(logits(model), logits(twin)) and not close(logits(twin), logits(build(name)), 1e-4)


@pytest.mark.parametrize("name", ALL)
def test_hooks_on_all_modules_see_every_call(name: str) -> None:
    model, twin = build(name), build(name)
    report = fl.patch(model)
    calls: list[list[str]] = [[], []]
    for m, seen in ((model, calls[0]), (twin, calls[1])):
        names = {id(module): key for key, module in m.named_modules()}
        handle = torch_module.register_module_forward_hook(
            lambda module, args, output, names=names, seen=seen: seen.append(names.get(id(module), "?"))
        )
        try:
            wanted = logits(m)
        finally:
            handle.remove()
    assert calls[0] == calls[1] and len(calls[0]) > 20
    assert "hooks are registered on all modules" in report.summary()
    assert close(logits(model), wanted)


@pytest.mark.parametrize("name", ALL)
def test_hooks_written_into_the_tables_of_modules_run(name: str) -> None:
    model, twin = build(name), build(name)
    fl.patch(model)
    plain = logits(model)
    for m in (model, twin):
        attention = m.model.layers[1].self_attn
        linear = next(child for child in attention.children() if type(child) is nn.Linear)
        linear._forward_hooks[-1] = lambda module, args, output: output + 0.5 * output.flip(-1)
    wanted = logits(twin)
    assert close(logits(model), wanted) and not close(wanted, plain, 1e-3)


# --- code that was replaced


def _doubling(right: Any) -> Any:
    @functools.wraps(right)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        out = right(*args, **kwargs)
        if not isinstance(out, tuple):
            return 2.0 * out
        return tuple(2.0 * o if torch.is_tensor(o) and o.is_floating_point() else o for o in out)

    return wrapped


def _modeling(model: Any) -> Any:
    return sys.modules[type(model).__module__]


@pytest.mark.parametrize("when", ["before", "after", "between"])
@pytest.mark.parametrize("name", ALL)
def test_a_wrapped_class_forward_runs(monkeypatch: pytest.MonkeyPatch, name: str, when: str) -> None:
    model, twin = build(name), build(name)
    if when == "between":
        fl.patch(build(name))  # an earlier patch in this process knew the class as it was
    cls, calls = type(twin.model.norm), []
    right = cls.forward

    @functools.wraps(right)
    def counting(self: Any, *args: Any) -> Any:
        calls.append(1)
        return right(self, *args)

    if when == "after":
        fl.patch(model)
    monkeypatch.setattr(cls, "forward", counting)
    wanted, number = logits(twin), len(calls)
    report = fl.patch(model) if when != "after" else None
    calls.clear()
    assert close(logits(model), wanted) and len(calls) == number > 0
    if report is not None:
        reasons = {entry.reason for entry in report.skipped if entry.kind == "norm"}
        assert len(reasons) == 1 and "replaced-code" in reasons.pop()


@pytest.mark.parametrize("when", ["before", "after", "between"])
@pytest.mark.parametrize("name", ALL)
def test_a_wrapped_forward_of_each_class_runs(monkeypatch: pytest.MonkeyPatch, name: str, when: str) -> None:
    fl.patch(probe := build(name))
    classes = {type(module)._fl_origin[0] for module in probe.modules() if hasattr(type(module), "_fl_origin")}
    plain = logits(twin := build(name))
    assert len(classes) >= 3
    for cls in classes:
        model = build(name)
        if when == "after":
            fl.patch(model)
        elif when == "before":
            guard._KNOWN_CODE.clear()
        monkeypatch.setattr(cls, "forward", _doubling(cls.forward))
        if when != "after":
            fl.patch(model)
        wanted = logits(twin)
        assert close(logits(model), wanted) and not close(wanted, plain, 1e-4)
        monkeypatch.undo()
        assert close(logits(model), plain)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("function", ["apply_rotary_pos_emb", "eager_attention_forward"])
@pytest.mark.parametrize("name", ["v3", "qwen3", "gpt_oss", "llama"])
def test_replaced_functions_of_the_modeling_module_run(
    monkeypatch: pytest.MonkeyPatch, name: str, function: str, when: str
) -> None:
    if (name, function) == ("v3", "apply_rotary_pos_emb"):
        function = "apply_rotary_pos_emb_interleave"
    model, twin = build(name, attn="eager"), build(name, attn="eager")
    plain = logits(twin)
    if when == "after":
        fl.patch(model)
    right = getattr(_modeling(model), function)

    def other(*args: Any, **kwargs: Any) -> Any:
        first, second = right(*args, **kwargs)
        return 1.3 * first, second

    monkeypatch.setattr(_modeling(model), function, other)
    wanted = logits(twin)
    assert not close(wanted, plain, 1e-3)
    if when == "before":
        report = fl.patch(model)
        assert all(e.reason for e in report.skipped) and {e.kind for e in report.skipped} == {"attention"}
    assert close(logits(model), wanted)
    monkeypatch.undo()
    assert close(logits(model), plain)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["v3", "qwen3", "llama"])
def test_own_functions_registered_under_sdpa_run(name: str, when: str) -> None:
    model, twin = build(name), build(name)
    plain = logits(twin)

    def mine(module: Any, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any) -> Any:
        out, weights = sdpa_attention_forward(module, 0.5 * q, k, v, mask, **kwargs)
        return out, weights

    if when == "after":
        fl.patch(model)
    AttentionInterface.register("sdpa", mine)
    try:
        if when == "before":
            fl.patch(model)
        wanted = logits(twin)
        assert not close(wanted, plain, 1e-3)
        assert close(logits(model), wanted)
    finally:
        AttentionInterface.register("sdpa", sdpa_attention_forward)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
    assert close(logits(model), plain)


@pytest.mark.parametrize("way", ["registered_before", "registered_after", "chosen_before", "chosen_after"])
@pytest.mark.parametrize("name", SPARSE)
def test_own_experts_implementations_run(name: str, way: str) -> None:
    model, twin = build(name), build(name)
    plain, current = logits(twin), twin.config._experts_implementation
    right = ALL_EXPERTS_FUNCTIONS["grouped_mm"]

    def mine(module: Any, *args: Any) -> torch.Tensor:
        out: torch.Tensor = 0.5 * right(module, *args)
        return out

    assert current == "grouped_mm"
    if way.endswith("after"):
        fl.patch(model)
    try:
        ExpertsInterface.register("grouped_mm" if way.startswith("registered") else "of_a_test", mine)
        if way.startswith("chosen"):
            for m in (model, twin):
                m.set_experts_implementation("of_a_test")
        if way.endswith("before"):
            report = fl.patch(model)
            assert any("experts-implementation" in entry.reason for entry in report.skipped)
        wanted = logits(twin)
        assert not close(wanted, plain, 1e-3)
        assert close(logits(model), wanted)
    finally:
        ExpertsInterface.register("grouped_mm", right)
        ExpertsInterface._global_mapping.pop("of_a_test", None)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("name", "where", "method"),
    [
        ("qwen3_moe", "model.layers.1.mlp.experts", "_apply_gate"), ("v3", "model.layers.1.self_attn", "expand_kv"),
        ("v2", "model.layers.0.self_attn", "expand_kv"),
    ],
)  # fmt: skip
def test_methods_overridden_on_an_instance_run(name: str, where: str, method: str, when: str) -> None:
    model, twin = build(name), build(name)
    plain = logits(twin)
    if when == "after":
        fl.patch(model)
    for m in (model, twin):
        module = m.get_submodule(where)
        setattr(module, method, MethodType(_doubling(getattr(type(module), method)), module))
    if when == "before":
        fl.patch(model)
    wanted = logits(twin)
    assert not close(wanted, plain, 1e-4) and close(logits(model), wanted)


def test_numbers_changed_after_the_patch_count() -> None:
    model, twin = build("llama"), build("llama")
    report = fl.patch(model)
    for m in (model, twin):
        for module in m.modules():
            if hasattr(module, "variance_epsilon"):
                module.variance_epsilon = 0.5
    assert close(logits(model), logits(twin)) and not close(logits(twin), logits(build("llama")), 1e-3)
    assert report.fallbacks()["model.norm"] > 0


@pytest.mark.parametrize("moe", ["auto", "torch"])
@pytest.mark.parametrize(("number", "value"), [("limit", 0.3), ("alpha", 0.5)])
def test_numbers_of_experts_changed_after_the_patch_count(number: str, value: float, moe: str) -> None:
    model, twin = build("gpt_oss"), build("gpt_oss")
    report = fl.patch(model, moe=moe)
    for m in (model, twin):
        setattr(m.model.layers[1].mlp.experts, number, value)
    assert close(logits(model), logits(twin)) and not close(logits(twin), logits(build("gpt_oss")), 1e-3)
    assert report.fallbacks()["model.layers.1.mlp.experts"] > 0 and report.hits()["model.layers.0.mlp.experts"] > 0


# --- wrappers


@pytest.mark.parametrize("name", ALL)
def test_wrappers_without_a_weight_after_the_patch(name: str) -> None:
    model, twin = build(name), build(name)
    fl.patch(model)
    for m in (model, twin):
        for layer in m.model.layers:
            for parent in (layer.self_attn, layer.mlp):
                for child in [key for key, value in parent.named_children() if type(value) is nn.Linear]:
                    setattr(parent, child, Doubled(getattr(parent, child)))
    wanted = logits(twin)
    assert close(logits(model), wanted)
    model.to(torch.float64).to(torch.float32)
    assert close(logits(copy.deepcopy(model)), wanted)
    fl.unpatch(model)
    assert torch.equal(logits(model), wanted)


class Codes(torch.Tensor):
    """Stands in for torchao's int8 weights: a tensor subclass with a product of its own."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.nn.functional.linear:
            x, weight, *bias = args
            return torch.nn.functional.linear(x, 2.0 * weight.as_subclass(torch.Tensor), *bias, **kwargs)
        if function in (torch.Tensor.view, torch.Tensor.reshape, torch.Tensor.element_size):
            raise AttributeError("these weights have no such view")
        return super().__torch_function__(function, types, args, kwargs)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["v3", "v2_lite", "llama"])
def test_weights_that_are_not_plain_tensors(name: str, when: str) -> None:
    model, twin = build(name), build(name)
    report = fl.patch(model) if when == "after" else None
    for m in (model, twin):
        attention = m.model.layers[1].self_attn
        for linear in [child for child in attention.children() if type(child) is nn.Linear]:
            linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Codes), requires_grad=False)
    report = report or fl.patch(model)
    assert close(logits(model), logits(twin))
    if when == "before" and name != "llama":
        reasons = {entry.name: entry.reason for entry in report.skipped}
        assert reasons["model.layers.1.self_attn"] == "quantized(Codes): kv_b_proj"
