"""What a patched model keeps: names, configuration, files, copies, recorded outputs; and how a patch is undone."""

from __future__ import annotations

import copy
import io
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, StaticCache

import fastlayers as fl
from fastlayers.errors import PatchError
from fastlayers.patching.classes import PREFIX, FastModule
from fastlayers.patching.packing import PackedModule

sys.path.insert(0, str(Path(__file__).parent))
from tiny import build, prompt

FAMILIES = ["v3", "v2"]


@torch.inference_mode()
def logits(model: Any, **options: Any) -> torch.Tensor:
    found: torch.Tensor = model(**prompt(2, 40, pads=(0, 6)), **options).logits
    return found


def close(a: torch.Tensor, b: torch.Tensor, bound: float = 1e-5) -> bool:
    return float((a - b).norm()) <= bound * float(b.norm())


def snapshot(model: Any) -> dict[str, Any]:
    """Everything that a patch may not leave behind."""
    return {
        "classes": {name: type(module) for name, module in model.named_modules()},
        "attributes": {name: sorted(module.__dict__) for name, module in model.named_modules()},
        "storages": {name: p.untyped_storage().nbytes() for name, p in model.named_parameters()},
        "hooks": {name: len(module._load_state_dict_post_hooks) for name, module in model.named_modules()},
        "experts": model.config._experts_implementation,
        "attention": model.config._attn_implementation,
        "config": model.config.to_json_string(),
    }


def all_packed(model: Any) -> bool:
    """Whether every packed module has its weights in one storage right now."""
    x = torch.zeros(1, 1, model.config.hidden_size, dtype=model.dtype)
    packed = [module for module in model.modules() if isinstance(module, PackedModule)]
    with torch.no_grad():
        return bool(packed) and all(module._fl_fused(x) is not None for module in packed)


@pytest.mark.parametrize("name", FAMILIES)
def test_unpatch_restores_everything_bit_for_bit(name: str) -> None:
    model = build(name)
    before, wanted = snapshot(model), logits(model)
    fl.patch(model)
    assert snapshot(model) != before
    logits(model)
    fl.unpatch(model)
    assert snapshot(model) == before
    assert torch.equal(logits(model), wanted)
    fl.unpatch(model)
    assert snapshot(model) == before


def test_a_second_patch_changes_nothing() -> None:
    model = build("v3")
    first = fl.patch(model)
    before, kept = snapshot(model), logits(model)
    second = fl.patch(model)
    assert snapshot(model) == before
    assert all(entry.reason == "already patched" for entry in second.replaced)
    assert {e.name for e in second.replaced} == {e.name for e in first.replaced if e.action != "packed"}
    assert not any(second.hits().values())
    assert torch.equal(logits(model), kept)
    assert min(second.hits().values()) > 0
    fl.unpatch(model)
    assert not any(isinstance(m, FastModule) for m in model.modules())


def test_names_and_configuration_stay(tmp_path: Path) -> None:
    model = build("v3")
    keys = {key: (value.shape, value.dtype) for key, value in model.state_dict().items()}
    model.save_pretrained(tmp_path / "before")
    fl.patch(model)
    assert {key: (value.shape, value.dtype) for key, value in model.state_dict().items()} == keys
    model.save_pretrained(tmp_path / "after")
    before, after = ((tmp_path / folder / "config.json").read_text() for folder in ("before", "after"))
    assert json.loads(before) == json.loads(after)
    assert "fastlayers" not in after
    sizes = [sum(f.stat().st_size for f in (tmp_path / folder).glob("*.safetensors")) for folder in ("before", "after")]
    assert sizes[0] == sizes[1]


def test_stock_transformers_loads_what_a_patched_model_saved(tmp_path: Path) -> None:
    model = build("v3")
    wanted = logits(model)
    fl.patch(model)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert not any(isinstance(m, FastModule) for m in again.modules())
    assert torch.equal(logits(again), wanted)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch_save"])
def test_copies_of_a_patched_model_run_and_can_be_unpatched(how: str) -> None:
    model = build("v3")
    stock = logits(model)
    report = fl.patch(model)
    wanted = logits(model)
    if how == "deepcopy":
        other = copy.deepcopy(model)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    counted = report.hits()
    assert torch.equal(logits(other), wanted)
    assert report.hits() == counted, "a copy has its own counters"
    assert all_packed(other)
    # A change of the original must not show in the copy, nor the other way round.
    with torch.no_grad():
        model.model.layers[0].self_attn.q_a_proj.weight.mul_(2.0)
        model.model.layers[0].mlp.up_proj.weight.mul_(2.0)
    assert torch.equal(logits(other), wanted)
    fl.unpatch(other)
    assert not any(n.startswith(PREFIX) for m in other.modules() for n in m.__dict__)
    assert torch.equal(logits(other), stock)


def test_to_another_dtype_and_back() -> None:
    model, twin = build("v3"), build("v3")
    fl.patch(model)
    for dtype in (torch.bfloat16, torch.float32):
        model, twin = model.to(dtype), twin.to(dtype)
        assert all_packed(model)
        bound = 1e-5 if dtype == torch.float32 else 0.3
        assert close(logits(model).float(), logits(twin).float(), bound)


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_reaches_the_packed_weights(assign: bool) -> None:
    model, other = build("v3"), build("v3", seed=5)
    wanted = logits(other)
    fl.patch(model)
    assert not close(logits(model), wanted)
    model.load_state_dict({key: value.clone() for key, value in other.state_dict().items()}, assign=assign)
    assert all_packed(model)
    assert close(logits(model), wanted)


def test_a_parameter_replaced_behind_our_back_is_used() -> None:
    model, twin = build("v3"), build("v3")
    fl.patch(model)
    for m in (model, twin):
        attention, mlp = m.model.layers[0].self_attn, m.model.layers[0].mlp
        attention.q_a_proj.weight = nn.Parameter(2.0 * attention.q_a_proj.weight.detach())
        mlp.gate_proj.weight = nn.Parameter(0.5 * mlp.gate_proj.weight.detach())
    assert close(logits(model), logits(twin))


def test_weights_changed_in_place_are_used() -> None:
    model, twin = build("v2"), build("v2")
    fl.patch(model)
    with torch.no_grad():
        for m in (model, twin):
            for parameter in m.parameters():
                parameter.mul_(1.1)
    assert close(logits(model), logits(twin))


def test_hidden_states_and_router_outputs_are_recorded_as_before() -> None:
    model = build("v3")
    inputs = prompt(2, 40, pads=(0, 6))
    routed: list[Any] = []
    with torch.inference_mode():
        wanted = model(**inputs, output_hidden_states=True)
        gate = model.model.layers[1].mlp.gate
        stock_routing = gate(wanted.hidden_states[1].reshape(-1, 64))
        fl.patch(model)
        given = model(**inputs, output_hidden_states=True)
        routed = gate(wanted.hidden_states[1].reshape(-1, 64))
    assert len(given.hidden_states) == len(wanted.hidden_states) == 4
    seen = inputs["attention_mask"].bool()
    for w, g in zip(wanted.hidden_states, given.hidden_states, strict=True):
        assert close(g[seen], w[seen])
    assert len(routed) == 3
    for w, g in zip(stock_routing, routed, strict=True):
        assert torch.equal(w, g)


def test_attention_weights_are_recorded_by_the_original() -> None:
    model = build("v3", attn="eager")
    inputs = prompt(2, 20)
    with torch.inference_mode():
        wanted = model(**inputs, output_attentions=True).attentions
        report = fl.patch(model)
        given = model(**inputs, output_attentions=True).attentions
    assert len(given) == len(wanted) == 3
    assert all(close(g, w) for w, g in zip(wanted, given, strict=True))
    assert all(count == 1 for name, count in report.fallbacks().items() if name.endswith("self_attn"))


def test_another_instance_is_not_touched() -> None:
    model, other = build("v3"), build("v3")
    before, wanted = snapshot(other), logits(other)
    fl.patch(model)
    assert snapshot(other) == before
    assert torch.equal(logits(other), wanted)


def test_training_and_gradients_run_the_original() -> None:
    model, twin = build("v3"), build("v3")
    report = fl.patch(model)
    inputs = prompt(2, 16)
    for m in (model, twin):
        m.train()
        m(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert not any(report.hits().values())
    assert min(report.fallbacks().values()) > 0
    for (name, a), (_, b) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        assert a.grad is None or close(a.grad, b.grad, 1e-4), name


def test_the_context_manager_undoes_even_after_an_error() -> None:
    model = build("v3")
    before = snapshot(model)
    with pytest.raises(KeyError), fl.patched(model) as report:
        assert len(report.replaced) > 10
        raise KeyError("user code")
    assert snapshot(model) == before
    fl.patch(model)
    with fl.patched(model):
        pass
    assert any(isinstance(m, FastModule) for m in model.modules()), "it was patched before the block"


def test_continuous_batching_says_that_it_does_not_work() -> None:
    model = build("v3")
    fl.patch(model)
    with pytest.raises(PatchError, match="continuous batching is not supported"):
        model.generate_batch([[1, 2, 3]])
    fl.unpatch(model)
    assert "generate_batch" not in model.__dict__


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@torch.no_grad()
def test_compiled_decode_has_no_graph_break(kind: str) -> None:
    model = build("v3")
    inputs = prompt(2, 24)
    fl.patch(model)
    step: Any = torch.compile(model, backend="eager", fullgraph=True)
    ids = inputs["input_ids"]
    cache: Any = DynamicCache() if kind == "dynamic" else StaticCache(config=model.config, max_cache_len=40)
    model(ids[:, :-2], past_key_values=cache, use_cache=True)
    twin = copy.deepcopy(cache)
    for position in (-2, -1):
        end = ids.shape[1] + position + 1
        wanted = model(ids[:, end - 1 : end], past_key_values=twin, use_cache=True).logits
        given = step(ids[:, end - 1 : end], past_key_values=cache, use_cache=True).logits
        assert close(given, wanted)
