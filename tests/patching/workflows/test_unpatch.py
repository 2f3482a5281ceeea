"""unpatch after others changed the model: it never stops half way, and names what they changed."""

from __future__ import annotations

import copy
import functools
import gc
import logging
import sys
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import fastlayers as fl
from fastlayers.errors import PatchError
from fastlayers.patching import decode
from fastlayers.patching.classes import PREFIX, FastModule

sys.path.insert(0, str(Path(__file__).parents[1]))
from test_contracts import close, logits, snapshot
from tiny import build, eager_graphs, prompt

NAMES = ["v3", "qwen3_moe", "gpt_oss", "llama"]


class Half(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 0.5 * weight


def nothing_of_ours(model: Any) -> bool:
    left = [name for m in model.modules() for name in m.__dict__ if name.startswith(PREFIX)]
    return not left and not any(isinstance(m, FastModule) for m in model.modules())


@pytest.mark.parametrize("name", NAMES)
def test_after_parametrizing_a_norm_and_a_linear(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model, twin = build(name), build(name)
    fl.patch(model)
    for m in (model, twin):
        parametrize.register_parametrization(m.model.norm, "weight", Half())
        parametrize.register_parametrization(m.model.layers[0].self_attn.o_proj, "weight", Half())
    wanted = logits(twin)
    assert close(logits(model), wanted)
    with caplog.at_level(logging.WARNING, "fastlayers"):
        fl.unpatch(model)
    assert "Parametrized" in caplog.text and "unpatch" in caplog.text
    assert nothing_of_ours(model) and torch.equal(logits(model), wanted)
    assert isinstance(model.model.norm, type(build(name).model.norm))
    for m in (model, twin):
        parametrize.remove_parametrizations(m.model.norm, "weight")
    assert type(model.model.norm) is type(build(name).model.norm)
    assert torch.equal(logits(model), logits(twin))


@pytest.mark.parametrize("name", NAMES)
def test_after_somebody_derived_from_a_patched_class(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model, twin = build(name), build(name)
    fl.patch(model)
    for m in (model, twin):
        attention = m.model.layers[0].self_attn

        class Louder(type(attention)):  # type: ignore[misc]
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                out, weights = super().forward(*args, **kwargs)
                return 1.5 * out, weights

        attention.__class__ = Louder
    wanted = logits(twin)
    assert not close(wanted, logits(build(name)), 1e-3)
    other = copy.deepcopy(model)
    for m in (model, other):
        assert close(logits(m), wanted) and isinstance(m.model.layers[0].self_attn, FastModule)
        with caplog.at_level(logging.WARNING, "fastlayers"):
            fl.unpatch(m)
        assert "Louder" in caplog.text
        assert nothing_of_ours(m) and torch.equal(logits(m), wanted)
        caplog.clear()


def _louder(base: Any, way: str) -> Any:
    right = base.forward

    class ByClass(base):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out, weights = base.forward(self, *args, **kwargs)
            return 1.5 * out, weights

    class ByFunction(base):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out, weights = right(self, *args, **kwargs)
            return 1.5 * out, weights

    return ByClass if way == "class" else ByFunction


@pytest.mark.parametrize("way", ["class", "function"])
@pytest.mark.parametrize("name", NAMES)
def test_after_somebody_derived_and_calls_the_class_by_name(
    name: str, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, twin = build(name), build(name)
    fl.patch(model)
    for m in (model, twin):
        m.model.layers[0].self_attn.__class__ = _louder(type(m.model.layers[0].self_attn), way)
    wanted = logits(twin)
    assert close(logits(model), wanted) and not close(wanted, logits(build(name)), 1e-3)
    with caplog.at_level(logging.WARNING, "fastlayers"):
        fl.unpatch(model)
    assert "forward was wrapped" in caplog.text and torch.equal(logits(model), wanted)
    assert not any(key.startswith(PREFIX) for m in model.modules() for key in m.__dict__)


@pytest.mark.parametrize("way", ["partial", "closure", "default", "wraps"])
@pytest.mark.parametrize("name", NAMES)
def test_after_forward_was_wrapped_on_an_instance(name: str, way: str, caplog: pytest.LogCaptureFixture) -> None:
    model, twin = build(name), build(name)
    plain = logits(twin)
    fl.patch(model)
    for m in (model, twin):
        norm = m.model.layers[0].input_layernorm
        right = norm.forward

        def twice(inner: Any, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = 2.0 * inner(x)
            return out

        if way == "partial":
            norm.forward = functools.partial(twice, right)
        elif way == "closure":
            norm.forward = (lambda held: lambda x: twice(held, x))(right)
        elif way == "default":
            norm.forward = lambda x, held=right: twice(held, x)
        else:
            norm.forward = functools.wraps(right)(lambda x, box=[right]: twice(box[0], x))
    wanted = logits(twin)
    assert close(logits(model), wanted) and not close(wanted, plain, 1e-3)
    with caplog.at_level(logging.WARNING, "fastlayers"):
        fl.unpatch(model)
    assert "forward was wrapped" in caplog.text and torch.equal(logits(model), wanted)
    assert not any(key.startswith(PREFIX) for m in model.modules() for key in m.__dict__)
    report = fl.patch(model)
    assert "instance-forward" in {e.name: e.reason for e in report.skipped}["model.layers.0.input_layernorm"]
    fl.unpatch(model)
    del model.model.layers[0].input_layernorm.forward
    report = fl.patch(model)
    assert close(logits(model), plain) and min(report.hits().values()) > 0
    fl.unpatch(model)
    assert nothing_of_ours(model) and torch.equal(logits(model), plain)


@contextmanager
def offloaded(model: Any) -> Iterator[None]:
    accelerate = pytest.importorskip("accelerate")
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    yield
    accelerate.hooks.remove_hook_from_submodules(model)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("unpatched", ["after", "within"])
def test_after_offloading(name: str, unpatched: str) -> None:
    model = build(name)
    wanted = logits(model)
    fl.patch(model)
    with offloaded(model):
        assert close(logits(model), wanted)
        if unpatched == "within":
            fl.unpatch(model)
            assert close(logits(model), wanted)
    assert close(logits(model), wanted)
    fl.unpatch(model)
    assert nothing_of_ours(model) and torch.equal(logits(model), wanted)
    assert not any("Fast" in repr(m.__dict__.get("forward", "")) for m in model.modules())


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", NAMES)
def test_hooks_of_accelerate_that_went_count_no_more(name: str, when: str) -> None:
    """Their removal leaves each module's own ``forward`` on the instance."""
    model = build(name)
    wanted = logits(model)
    fresh = fl.patch(build(name), dry_run=True)
    report = fl.patch(model) if when == "after" else None
    with offloaded(model):
        pass
    assert "forward" in model.model.layers[0].input_layernorm.__dict__
    report = report or fl.patch(model)
    assert [(e.name, e.reason) for e in report.skipped] == [(e.name, e.reason) for e in fresh.skipped]
    assert close(logits(model), wanted) and set(report.fallbacks().values()) == {0}
    fl.unpatch(model)
    assert nothing_of_ours(model) and torch.equal(logits(model), wanted)


@pytest.mark.parametrize("name", NAMES)
def test_after_children_were_replaced_or_removed(name: str) -> None:
    model, twin = build(name), build(name)
    fl.patch(model)
    for m in (model, twin):
        layer = m.model.layers[1]
        layer.post_attention_layernorm = nn.LayerNorm(64)
        layer.self_attn.o_proj = nn.Sequential(layer.self_attn.o_proj, nn.Tanh())
        del m.model.layers[0]
        for index, left in enumerate(m.model.layers):
            left.self_attn.layer_idx = index
        m.config.num_hidden_layers -= 1
    wanted = logits(twin, use_cache=False)
    assert close(logits(model, use_cache=False), wanted)
    fl.unpatch(model)
    assert nothing_of_ours(model) and torch.equal(logits(model, use_cache=False), wanted)


@pytest.mark.parametrize("name", NAMES)
def test_an_inner_model_alone(name: str) -> None:
    model = build(name)
    before, wanted = snapshot(model), logits(model)
    fl.patch(model)
    fl.unpatch(model.model)
    assert not any(isinstance(m, FastModule) for m in model.model.modules())
    assert torch.equal(logits(model), wanted)
    if name == "v3":
        # Nothing of MLA is patched any more: what transformers does is transformers'.
        seen: list[Any] = []
        type(model).generate_batch, right = (lambda self, *a: seen.append(self)), type(model).generate_batch
        try:
            model.generate_batch([[1]])
        finally:
            type(model).generate_batch = right
        assert seen == [model]
    fl.unpatch(model)
    assert snapshot(model) == before


@pytest.mark.parametrize("name", [*NAMES, "v2"])
def test_a_patched_model_is_freed_when_it_is_dropped(name: str) -> None:
    model = build(name)
    report = fl.patch(model)
    logits(model)
    parts = [weakref.ref(model), weakref.ref(model.model.norm), weakref.ref(next(model.parameters()))]
    gc.collect()
    gc.disable()
    try:
        del model
        assert [part() for part in parts] == [None] * 3
    finally:
        gc.enable()
    assert report.hits()


@pytest.mark.parametrize("name", [*NAMES, "v2"])
def test_a_model_with_captured_steps_is_freed_when_it_is_dropped(name: str) -> None:
    model = build(name)
    fl.patch(model)
    driver = decode.attach(model, ExitStack(), eager_graphs, "torch")
    for _ in range(3):
        model.generate(**prompt(1, 20), max_new_tokens=4, do_sample=False)
    assert int(driver.replays) > 0 and int(driver.prefills) > 0
    parts = [weakref.ref(each) for each in (model, model.model.norm, driver, driver.graphs)]
    gc.collect()
    gc.disable()
    try:
        del model, driver
        assert [part() for part in parts] == [None] * 4
    finally:
        gc.enable()


def test_copies_of_what_refuses_continuous_batching_refuse_for_themselves() -> None:
    import copy
    import pickle

    model = build("v3")
    fl.patch(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(PatchError, match="continuous batching is not supported"):
            other.generate_batch([[1, 2, 3]])
        assert other.__dict__["generate_batch"].root() is other
        fl.unpatch(other)
        assert "generate_batch" not in other.__dict__


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_continuous_batching_runs_while_patched(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig
    from transformers.generation.continuous_batching import ContinuousBatchingManager

    # A walk through all that a suite's process holds takes a second; the manager asks for eight here.
    monkeypatch.setattr(gc, "collect", lambda: 0)
    model = build(name)
    before = model.config._attn_implementation
    report = fl.patch(model)
    assert model.config._attn_implementation == before and "generate_batch" not in model.__dict__
    options = GenerationConfig(max_new_tokens=4, eos_token_id=-1, pad_token_id=0)
    twin, options.do_sample = build(name), False
    # Without numbers the pages take most of the machine's memory.
    pages = ContinuousBatchingConfig(block_size=16, num_blocks=8, max_batch_tokens=32)
    by_hand = []
    for m in (model, twin):
        manager = ContinuousBatchingManager(m, options, pages)
        assert "fastlayers" not in str(m.config._attn_implementation)
        manager.start()
        try:
            manager.add_request([5, 6, 7])
            by_hand.append(manager.get_result(timeout=300).generated_tokens)
        finally:
            manager.stop(block=True)
    assert by_hand[0] == by_hand[1] and len(by_hand[0]) == 4
    model.set_attn_implementation(before)
    logits(model)
    assert min(report.hits().values()) > 0
    given, wanted = (
        m.generate_batch([[5, 6, 7], [9, 10]], generation_config=options, continuous_batching_config=pages)
        for m in (model, twin)
    )
    assert [row.generated_tokens for row in given.values()] == [row.generated_tokens for row in wanted.values()]
    assert model.config._attn_implementation == twin.config._attn_implementation
    assert prompt(1)["input_ids"].shape == (1, 48)
