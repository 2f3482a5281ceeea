"""Caches that a patched model filled: kept by reference, copied, cropped, changed in place, pickled, reshaped."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

import fastlayers as fl
from fastlayers.patching import decode

sys.path.insert(0, str(Path(__file__).parents[1]))
from test_contracts import close
from tiny import build, eager_graphs, prompt

MLA = ["v3", "v2"]


def branch(model: Any, change: Callable[[DynamicCache], DynamicCache]) -> list[torch.Tensor]:
    """Prefill, change the cache or make another, go on with both; logits of everything."""
    ids, found = prompt(1, 60)["input_ids"], []
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        for first, last in ((0, 30), (30, 31)):
            found.append(model(ids[:, first:last], past_key_values=cache, use_cache=True).logits)
        other = change(cache)
        for start, held in ((40, other), (50, cache), (44, other), (54, cache)):
            for step in range(start, start + 3):
                found.append(model(ids[:, step : step + 1], past_key_values=held, use_cache=True).logits)
    return found


def _by_reference(cache: Any) -> Any:
    other = DynamicCache()
    for index, layer in enumerate(cache.layers):
        other.update(layer.keys, layer.values, index)
    cache.crop(-5)
    return other


def _kept_tensors(cache: Any) -> Any:
    held = [(layer.keys, layer.values) for layer in cache.layers]
    cache.crop(-3)
    other = copy.copy(cache)
    other.layers = [copy.copy(layer) for layer in cache.layers]
    for layer, (keys, values) in zip(other.layers, held, strict=True):
        layer.keys, layer.values = keys, values
    return other


def _shallow(cache: Any) -> Any:
    other = copy.copy(cache)
    other.layers = [copy.copy(layer) for layer in cache.layers]
    return other


def _deep(cache: Any) -> Any:
    return copy.deepcopy(cache)


def _data(cache: Any) -> Any:
    for layer in cache.layers:
        layer.keys.data = 1.5 * layer.keys.data
    return copy.deepcopy(cache)


def _set(cache: Any) -> Any:
    for layer in cache.layers:
        layer.values.set_(1.5 * layer.values)
    return copy.deepcopy(cache)


def _in_place(cache: Any) -> Any:
    for layer in cache.layers:
        layer.keys[:, :, 3:7] = 0.0
    return copy.deepcopy(cache)


def _held_layer(cache: Any) -> Any:
    layers = list(cache.layers)
    cache.crop(-2)
    assert all(held is layer for held, layer in zip(layers, cache.layers, strict=True))
    other = DynamicCache()
    other.layers = [copy.copy(layer) for layer in layers]
    return other


CHANGES = {
    "by_reference": _by_reference, "kept_tensors": _kept_tensors, "shallow": _shallow, "deep": _deep, "data": _data,
    "set": _set, "in_place": _in_place, "held_layer": _held_layer,
}  # fmt: skip


@pytest.mark.parametrize("name", MLA)
def test_a_cache_outlives_a_cast_of_the_model(name: str) -> None:
    ids, found = prompt(2, 20)["input_ids"], []
    for patched in (False, True):
        model, cache = build(name, torch.bfloat16), DynamicCache()
        if patched:
            fl.patch(model)
        with torch.no_grad():
            model(ids[:, :12], past_key_values=cache)
            model.float()
            found.append(
                torch.cat([model(ids[:, a:b], past_key_values=cache).logits for a, b in ((12, 13), (13, 20))], 1)
            )
        assert {layer.keys.dtype for layer in cache.layers} == {torch.float32}
    assert found[1].dtype == torch.float32 and close(found[1], found[0], 1e-2)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", MLA)
def test_branches_of_a_cache_go_their_own_ways(name: str, change: str) -> None:
    model = build(name)
    wanted = branch(model, CHANGES[change])
    report = fl.patch(model)
    given = branch(model, CHANGES[change])
    assert min(report.hits().values()) > 0
    assert all(close(g, w) for g, w in zip(given, wanted, strict=True))


@pytest.mark.parametrize("name", MLA)
def test_what_is_kept_of_a_cache_stays_as_it_was(name: str) -> None:
    model, twin = build(name), build(name)
    fl.patch(model)
    ids, found = prompt(1, 60)["input_ids"], []
    for m in (model, twin):
        cache = DynamicCache(config=m.config)
        with torch.no_grad():
            for first, last in ((0, 30), (30, 31)):
                m(ids[:, first:last], past_key_values=cache, use_cache=True)
            kept = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
            copies = [tensor.clone() for tensor in kept]
            cache.crop(-5)
            for step in range(40, 44):
                found.append(m(ids[:, step : step + 1], past_key_values=cache, use_cache=True).logits)
        assert all(torch.equal(tensor, other) for tensor, other in zip(kept, copies, strict=True))
    assert all(close(given, wanted) for given, wanted in zip(found[:4], found[4:], strict=True))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", MLA)
def test_a_step_runs_expand_kv_of_an_instance(name: str, when: str) -> None:
    """It is what a step without copies of the expanded keys has no use for."""
    model, twin = build(name), build(name)
    if when == "after":
        fl.patch(model)
    calls: list[torch.Size] = []
    for m in (model, twin):
        attention = m.model.layers[1].self_attn
        right = attention.expand_kv

        def expanded(latent: Any, *rest: Any, right: Any = right) -> Any:
            calls.append(latent.shape)
            return tuple(2.0 * each for each in right(latent, *rest))

        attention.expand_kv = expanded
    if when == "before":
        fl.patch(model)
    ids, found = prompt(1, 20)["input_ids"], []
    for m in (model, twin):
        cache = DynamicCache(config=m.config)
        with torch.no_grad():
            for first, last in ((0, 18), (18, 19)):
                found.append(m(ids[:, first:last], past_key_values=cache, use_cache=True).logits)
    assert close(found[0], found[2]) and close(found[1], found[3])
    assert len(calls) == 4 and calls[:2] == calls[2:]


def test_a_layer_object_taken_before_the_first_step_is_the_one_that_is_filled() -> None:
    model = build("v3")
    fl.patch(model)
    cache = DynamicCache(config=model.config)
    layers = list(cache.layers)
    with torch.no_grad():
        model(prompt(1, 12)["input_ids"], past_key_values=cache, use_cache=True)
    assert len(layers) == 3 and all(layer.get_seq_length() == 12 for layer in layers)
    assert cache.layers[0] is layers[0]


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", MLA)
def test_keys_and_values_can_be_viewed(name: str, kind: str) -> None:
    model, shapes = build(name), []
    fl.patch(model)
    for patched in (True, False):
        if not patched:
            fl.unpatch(model)
        cache: Any = DynamicCache() if kind == "dynamic" else StaticCache(config=model.config, max_cache_len=32)
        with torch.no_grad():
            model(prompt(2, 12)["input_ids"], past_key_values=cache, use_cache=True)
        keys, values = cache.layers[0].keys, cache.layers[0].values
        assert keys.is_contiguous() and values.is_contiguous()
        shapes.append((keys.view(keys.shape[0], -1).shape, values.view(-1).shape))
    assert shapes[0] == shapes[1]


LOAD = """
import pickle, sys
sys.modules["fastlayers"] = None
for path in sys.argv[1:]:
    cache, config = pickle.load(open(path, "rb"))
    assert type(cache).__name__ == "DynamicCache"
    assert {type(layer).__name__ for layer in cache.layers} == {"DynamicLayer"}
    print(cache.get_seq_length(), cache.layers[1].keys.shape[2], config._attn_implementation)
"""


class Without(pickle.Unpickler):
    """Reads a pickle as where fastlayers is not installed."""

    def find_class(self, module: str, name: str) -> Any:
        assert not module.startswith("fastlayers"), (module, name)
        return super().find_class(module, name)


# Another process takes seconds to import transformers.
@pytest.mark.parametrize("elsewhere", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_pickled_caches_and_configurations_load_without_fastlayers(tmp_path: Path, elsewhere: bool) -> None:
    paths = []
    for name in ("v3", "llama"):
        model = build(name)
        fl.patch(model)
        cache = DynamicCache()
        with torch.no_grad():
            model(prompt(1, 12)["input_ids"], past_key_values=cache, use_cache=True)
        paths.append(tmp_path / f"{name}.pickle")
        paths[-1].write_bytes(pickle.dumps((cache, model.config)))
        again, config = Without(io.BytesIO(paths[-1].read_bytes())).load()
        assert torch.equal(again.layers[0].keys, cache.layers[0].keys)
        assert type(again) is DynamicCache and {type(layer).__name__ for layer in again.layers} == {"DynamicLayer"}
        assert again.get_seq_length() == again.layers[1].keys.shape[2] == 12 and config._attn_implementation == "sdpa"
    if not elsewhere:
        return
    done = subprocess.run([sys.executable, "-c", LOAD, *map(str, paths)], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines() == ["12 12 sdpa"] * 2, done.stderr


@pytest.mark.parametrize("name", ["v3", "llama"])
def test_pickled_caches_of_captured_decoding_are_stock_ones(name: str) -> None:
    from contextlib import ExitStack

    model = build(name)
    fl.patch(model)
    decode.attach(model, ExitStack(), make_graphs=eager_graphs, core="torch")
    out = model.generate(**prompt(1, 12), max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    held = io.BytesIO()
    torch.save(out.past_key_values, held)
    assert b"fastlayers" not in held.getvalue()
    held.seek(0)
    again = torch.load(held, weights_only=False)
    assert type(again) is DynamicCache and again.get_seq_length() == out.past_key_values.get_seq_length()


def test_a_pickled_configuration_says_what_the_model_was_loaded_with() -> None:
    for name in ("llama", "gpt_oss", "qwen3_moe"):
        model = build(name)
        before = pickle.dumps(model.config)
        fl.patch(model)
        assert pickle.dumps(model.config) == before
