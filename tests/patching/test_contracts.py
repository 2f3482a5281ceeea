"""What a patched model keeps: names, configuration, files, copies, recorded outputs; and how a patch is undone."""

from __future__ import annotations

import copy
import inspect
import io
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import ContinuousBatchingConfig, DynamicCache, GenerationConfig, StaticCache

import fastlayers as fl
from fastlayers.errors import ArgumentError, PatchError
from fastlayers.patching.classes import PREFIX, FastModule
from fastlayers.patching.comparison import ADDRESS
from fastlayers.patching.packing import PackedModule

sys.path.insert(0, str(Path(__file__).parent))
from tiny import GQA, build, prompt

# The biases of qwen2 are in qwen2_moe, the norms of qwen3 in qwen3_moe, and both have dense layers, too.
IN_OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "qwen3")]
FAMILIES: list[Any] = ["v3", "v2", *(name for name in GQA if name not in ("qwen2", "qwen3")), *IN_OTHERS]
# Compiled layers of others have no modules that these have not: v3's shared expert is an MLP like theirs.
COMPILED: list[Any] = ["v3", "qwen3_moe", "gpt_oss"]
COMPILED += [pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "qwen2_moe", "qwen3", "llama")]
STEPS = [("dynamic", 1), pytest.param("dynamic", 2, marks=pytest.mark.slow), ("static", 2)]  # 2: of a variable length
SPARSE = ["v3", "qwen2_moe", "qwen3_moe", "gpt_oss"]


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


def packed_modules(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, PackedModule)]


def all_packed(model: Any) -> bool:
    """Whether every packed module has its weights in one storage right now."""
    x = torch.zeros(1, 1, model.config.hidden_size, dtype=model.dtype)
    packed = packed_modules(model)
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


@pytest.mark.parametrize("way", [ADDRESS, "data_ptr"])
def test_packed_weights_are_found_where_they_were_put(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastlayers.patching.guard.ADDRESS", way)  # of torch before 2.12
    model = build("qwen3")
    fl.patch(model)
    assert all_packed(model)
    for module in packed_modules(model):
        linear = module._fl_linears()[0]
        linear.weight.data = linear.weight.data.clone()
    assert not any(module._fl_packed.holds(module) for module in packed_modules(model))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_second_patch_changes_nothing(name: str) -> None:
    model = build(name)
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


@pytest.mark.parametrize("name", ["v3", "llama"])
def test_the_context_manager_undoes_what_it_did_and_no_more(name: str) -> None:
    model = build(name)
    fl.patch(model, include="*.0.*")
    before, wanted = snapshot(model), logits(model)
    with fl.patched(model) as report:
        assert {entry.reason for entry in report.replaced} >= {"already patched", ""}
        assert any(isinstance(module, FastModule) for module in model.model.layers[1].modules())
    assert snapshot(model) == before and torch.equal(logits(model), wanted)
    assert isinstance(model.model.layers[0].self_attn, FastModule)
    assert not any(isinstance(module, FastModule) for module in model.model.layers[1].modules())


def test_another_backend_by_name_needs_an_unpatch() -> None:
    model = build("llama")
    fl.patch(model, include="*.0.*")
    before, wanted = (
        snapshot(model),
        r"norm is 'reference'.*'auto', with which model.layers.0.input_layernorm is patched",
    )
    with pytest.raises(ArgumentError, match=wanted):
        fl.patch(model, norm="reference")
    assert snapshot(model) == before
    report = fl.patch(model, norm="reference", exclude="*.0.*")
    named = {entry.name for entry in report.replaced if entry.implementation == "rms_norm=reference"}
    assert "model.layers.1.input_layernorm" in named and "model.layers.0.input_layernorm" not in named
    assert all(entry.reason == "already patched" for entry in fl.patch(model).replaced)


@pytest.mark.parametrize("name", FAMILIES)
def test_names_and_configuration_stay(name: str, tmp_path: Path) -> None:
    model = build(name)
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


@pytest.mark.parametrize("name", FAMILIES)
def test_stock_transformers_loads_what_a_patched_model_saved(name: str, tmp_path: Path) -> None:
    model = build(name)
    wanted = logits(model)
    fl.patch(model)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert not any(isinstance(m, FastModule) for m in again.modules())
    assert torch.equal(logits(again), wanted)


@pytest.mark.parametrize("name", FAMILIES)
def test_shallow_copies_move_nothing(name: str) -> None:
    model = build(name)
    fl.patch(model)
    wanted, places = logits(model), [p.data_ptr() for p in model.parameters()]
    copies = [copy.copy(layer.self_attn) for layer in model.model.layers]
    assert [p.data_ptr() for p in model.parameters()] == places and all_packed(model)
    for layer, other in zip(model.model.layers, copies, strict=True):
        layer.self_attn = other
    assert torch.equal(logits(model), wanted) and all_packed(model)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch_save"])
def test_copies_of_a_patched_model_run_and_can_be_unpatched(name: str, how: str) -> None:
    model = build(name)
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
        for module in packed_modules(model):
            module._fl_linears()[0].weight.mul_(2.0)
    assert torch.equal(logits(other), wanted)
    fl.unpatch(other)
    assert not any(n.startswith(PREFIX) for m in other.modules() for n in m.__dict__)
    assert torch.equal(logits(other), stock)


@pytest.mark.parametrize("name", FAMILIES)
def test_to_another_dtype_and_back(name: str) -> None:
    model, twin = build(name), build(name)
    fl.patch(model)
    for dtype in (torch.bfloat16, torch.float32):
        model, twin = model.to(dtype), twin.to(dtype)
        assert all_packed(model)
        bound = 1e-5 if dtype == torch.float32 else 0.3
        assert close(logits(model).float(), logits(twin).float(), bound)


@pytest.mark.parametrize("moe", ["auto", "torch"])
@pytest.mark.parametrize("name", ["v3", "qwen3_moe", "gpt_oss"])
def test_a_dtype_that_no_backend_takes_runs_the_original(name: str, moe: str) -> None:
    model, twin = build(name), build(name)
    report = fl.patch(model, moe=moe)
    for m in (model, twin):
        m.to(torch.float64)
        m.set_experts_implementation("eager")  # torch has no grouped product of fp64
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    wanted = logits(twin)
    assert wanted.dtype == torch.float64 and close(logits(model), wanted)
    experts = "model.layers.1.mlp.experts"
    assert report.fallbacks()[experts] == 1 and "no backend for the weights as they are" in report.summary()
    for m in (model, twin):
        m.to(torch.float32)
    assert close(logits(model), logits(twin)) and report.hits()[experts] == 1
    model = build(name).to(torch.float64)
    reasons = {entry.reason for entry in fl.patch(model, moe=moe).skipped if entry.kind == "moe"}
    assert reasons == {"dtype: float64", "quantized(torch.float64)"}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_reaches_the_packed_weights(name: str, assign: bool) -> None:
    model, other = build(name), build(name, seed=5)
    wanted = logits(other)
    fl.patch(model)
    assert not close(logits(model), wanted)
    model.load_state_dict({key: value.clone() for key, value in other.state_dict().items()}, assign=assign)
    assert all_packed(model)
    assert close(logits(model), wanted)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_parameter_replaced_behind_our_back_is_used(name: str) -> None:
    model, twin = build(name), build(name)
    fl.patch(model)
    parts = [f"{n}.{m._fl_parts()[0]}" for n, m in model.named_modules() if isinstance(m, PackedModule)]
    assert parts
    for m in (model, twin):
        for part in parts[:2]:
            linear = m.get_submodule(part)
            linear.weight = nn.Parameter(2.0 * linear.weight.detach())
    assert close(logits(model), logits(twin))


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_changed_in_place_are_used(name: str) -> None:
    model, twin = build(name), build(name)
    fl.patch(model)
    with torch.no_grad():
        for m in (model, twin):
            for parameter in m.parameters():
                parameter.mul_(1.1)
    assert close(logits(model), logits(twin))


@pytest.mark.parametrize("name", FAMILIES)
def test_arguments_have_the_originals_names(name: str) -> None:
    model, twin = build(name), build(name)
    fl.patch(model)
    compared = 0
    for fast, stock in zip(model.modules(), twin.modules(), strict=True):
        given, wanted = (
            [(each.name, each.kind) for each in inspect.signature(module.forward).parameters.values()]
            for module in (fast, stock)
        )
        assert given == wanted
        compared += type(fast) is not type(stock)
    assert compared > 4


@pytest.mark.parametrize("name", FAMILIES)
def test_hooks_of_single_modules_are_called_in_the_originals_order(name: str) -> None:
    calls: list[list[str]] = [[], []]
    for model, seen in zip((build(name), build(name)), calls, strict=True):
        if seen is calls[1]:
            fl.patch(model)
        for key, module in model.named_modules():
            module.register_forward_hook(lambda module, args, output, key=key, seen=seen: seen.append(key))
        logits(model)
    assert calls[0] == calls[1] and len(calls[0]) > 20


@pytest.mark.parametrize("name", FAMILIES)
def test_hidden_states_and_router_outputs_are_recorded_as_before(name: str) -> None:
    model = build(name)
    inputs = prompt(2, 40, pads=(0, 6))
    options: dict[str, Any] = {"output_hidden_states": True}
    if name in SPARSE and name != "v3":
        options["output_router_logits"] = True
    blocks = [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    gates = [getattr(block, "gate", None) or block.router for block in blocks]
    assert bool(gates) == (name in SPARSE or name == "v2")
    with torch.inference_mode():
        wanted = model(**inputs, **options)
        x = wanted.hidden_states[1].reshape(-1, 64)
        stock_routing = [gate(x) for gate in gates]
        fl.patch(model)
        given = model(**inputs, **options)
        routing = [gate(x) for gate in gates]
    assert len(given.hidden_states) == len(wanted.hidden_states) == len(model.model.layers) + 1
    seen = inputs["attention_mask"].bool()
    for w, g in zip(wanted.hidden_states, given.hidden_states, strict=True):
        assert close(g[seen], w[seen])
    for stock, ours in zip(stock_routing, routing, strict=True):
        assert len(ours) == 3
        assert all(g.dtype == w.dtype and torch.equal(g, w) for w, g in zip(stock, ours, strict=True))
    if "output_router_logits" in options:
        assert len(given.router_logits) == len(wanted.router_logits) == len(gates)
        for w, g in zip(wanted.router_logits, given.router_logits, strict=True):
            assert close(g.view(2, 40, -1)[seen], w.view(2, 40, -1)[seen])


@pytest.mark.parametrize("name", FAMILIES)
def test_attention_weights_are_recorded_by_the_original(name: str) -> None:
    model = build(name, attn="eager")
    inputs = prompt(2, 20)
    with torch.inference_mode():
        wanted = model(**inputs, output_attentions=True).attentions
        report = fl.patch(model)
        given = model(**inputs, output_attentions=True).attentions
    assert len(given) == len(wanted) == len(model.model.layers)
    assert all(close(g, w) for w, g in zip(wanted, given, strict=True))
    assert all(count == 1 for name, count in report.fallbacks().items() if name.endswith("self_attn"))


@pytest.mark.parametrize("name", FAMILIES)
def test_another_instance_is_not_touched(name: str) -> None:
    model, other = build(name), build(name)
    before, wanted = snapshot(other), logits(other)
    fl.patch(model)
    assert snapshot(other) == before
    assert torch.equal(logits(other), wanted)


@pytest.mark.parametrize("name", FAMILIES)
def test_training_and_gradients_run_the_original(name: str) -> None:
    model, twin = build(name), build(name)
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


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_continuous_batching_gives_stocks_tokens(name: str) -> None:
    """Over transformers' own pages: one prompt is longer than a step may be, so that steps mix prompts and decoding."""
    model = build(name)
    settings = {
        "generation_config": GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0),
        "continuous_batching_config": ContinuousBatchingConfig(block_size=16, num_blocks=32, max_batch_tokens=32),
    }

    def tokens() -> list[list[int]]:
        found = model.generate_batch([[1, 2, 3, 4], list(range(1, 40))], **settings)
        assert all(each.error is None for each in found.values())
        return [found[name].generated_tokens for name in sorted(found)]

    wanted = tokens()
    fl.patch(model)
    assert [len(each) for each in wanted] == [4, 4] and tokens() == wanted


@pytest.mark.parametrize("name", FAMILIES)
def test_hooks_of_accelerate_go_on_working(name: str) -> None:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    model = build(name)
    for module in list(model.modules()):
        if module is not model and len(list(module.parameters(recurse=False))):
            add_hook_to_module(module, AlignDevicesHook(execution_device=torch.device("cpu")))
    for layer in model.model.layers:
        add_hook_to_module(layer.self_attn, AlignDevicesHook(execution_device=torch.device("cpu"), io_same_device=True))
    wanted, before = logits(model), snapshot(model)
    report = fl.patch(model)
    assert {e.kind for e in report.replaced} >= {"attention", "norm"}
    assert close(logits(model), wanted)
    assert min(report.hits().values()) > 0
    fl.unpatch(model)
    assert snapshot(model) == before and torch.equal(logits(model), wanted)


@pytest.mark.parametrize("name", COMPILED)
@torch.no_grad()
def test_compiled_layers_neither_break_nor_compile_again(name: str) -> None:
    model = build(name)
    report = fl.patch(model)
    torch._dynamo.reset()
    layer = model.model.layers[-1]
    # One family shows what becomes of the counters where writes are made functional; the others' programs are as long.
    step: Any = torch.compile(layer, backend="aot_eager" if name == "v3" else "eager", fullgraph=True)
    x = torch.randn(2, 5, 64)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for turn in range(20):
            x = x.roll(1, 0) + 0.1
            position = torch.arange(turn, turn + 5)[None].expand(2, -1)
            table = model.model.rotary_emb(x, position_ids=position)
            given = step(x, attention_mask=None, position_embeddings=table)
    wanted = layer(x, attention_mask=None, position_embeddings=table)
    assert close(given, wanted)
    own = [
        count for key, count in report.hits().items() if key.startswith(f"model.layers.{len(model.model.layers) - 1}.")
    ]
    assert own and min(own) >= 21, "counters run in compiled code too"


@pytest.mark.parametrize(("kind", "steps"), STEPS)
@torch.no_grad()
def test_compiled_decode_has_no_graph_break(kind: str, steps: int) -> None:
    model = build("v3", num_hidden_layers=1, first_k_dense_replace=0)  # layers alone are above, without experts, too
    inputs = prompt(2, 24)
    fl.patch(model)
    step: Any = torch.compile(model, backend="eager", fullgraph=True)
    ids = inputs["input_ids"]
    cache: Any = DynamicCache() if kind == "dynamic" else StaticCache(config=model.config, max_cache_len=40)
    model(ids[:, :-steps], past_key_values=cache, use_cache=True)
    twin = copy.deepcopy(cache)
    for position in range(-steps, 0):
        end = ids.shape[1] + position + 1
        wanted = model(ids[:, end - 1 : end], past_key_values=twin, use_cache=True).logits
        given = step(ids[:, end - 1 : end], past_key_values=cache, use_cache=True).logits
        assert close(given, wanted)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("where", ["all", "copy", "load"])
def test_copies_made_in_inference_mode_run_outside_as_stock_ones_do(name: str, where: str) -> None:
    """Copies of a stock model that are made in inference mode run under ``no_grad``, and so do unpatched ones."""
    model = build(name)
    stock = logits(model)
    if where == "load":
        with torch.inference_mode():
            model = copy.deepcopy(model)
        assert all(p.is_inference() for p in model.parameters())
    fl.patch(model)
    wanted = logits(model)
    with torch.inference_mode(where != "load"):
        other = copy.deepcopy(model)
    with torch.no_grad():
        assert all_packed(other)
        assert torch.equal(other(**prompt(2, 40, pads=(0, 6))).logits, wanted)
    with torch.inference_mode(where == "all"):
        fl.unpatch(other)
    with torch.no_grad():
        assert torch.equal(other(**prompt(2, 40, pads=(0, 6))).logits, stock)
    assert torch.equal(logits(model), wanted)
    fl.unpatch(model)
    with torch.no_grad():
        assert torch.equal(model(**prompt(2, 40, pads=(0, 6))).logits, stock)
