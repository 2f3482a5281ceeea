"""Captured generation after, and while, somebody changes the model: a replay never runs what is not there any more."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.flop_counter import FlopCounterMode
from transformers import LogitsProcessor, LogitsProcessorList

import fastlayers as fl
from fastlayers.patching import decode

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny import build, eager_graphs, prompt


@pytest.fixture
def pair() -> tuple[Any, Any, Any]:
    stock, fast = build("llama"), build("llama")
    report = fl.patch(fast)
    with ExitStack() as undo:
        driver = decode.attach(fast, undo, make_graphs=eager_graphs, core="torch")
        undo.pop_all()
    return stock, fast, (driver, report)


def tokens(model: Any, *processors: Any, seed: int = 1, **options: Any) -> list[int]:
    out = model.generate(
        **prompt(1, 10, seed=seed),
        **options,
        max_new_tokens=16,
        do_sample=False,
        logits_processor=LogitsProcessorList(processors),
    )
    found: list[int] = out[0].tolist()
    return found


def _doubled(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    return 2.0 * output


def _wrapped(module: Any) -> None:
    right = module.forward
    module.forward = lambda *args, **kwargs: -1.5 * right(*args, **kwargs)


def _derived(module: Any) -> None:
    class Mine(type(module)):  # type: ignore[misc]
        def forward(self, *args: Any) -> torch.Tensor:
            return -1.5 * super().forward(*args)

    module.__class__ = Mine


CHANGES: dict[str, Callable[[Any], None]] = {
    "activation": lambda m: setattr(m.model.layers[0].mlp, "act_fn", nn.GELU()),
    "epsilon": lambda m: [setattr(x, "variance_epsilon", 0.7) for x in m.modules() if hasattr(x, "variance_epsilon")],
    "hook": lambda m: m.model.layers[0].mlp.up_proj.register_forward_hook(_doubled),
    "weight": lambda m: setattr(m.lm_head, "weight", nn.Parameter(-m.lm_head.weight.detach())),
    "bias": lambda m: [
        setattr(x, "bias", nn.Parameter(torch.linspace(-1.0, 1.0, x.out_features)))
        for x in m.model.layers[1].modules()
        if type(x) is nn.Linear
    ],
    "norm_forward": lambda m: _wrapped(m.model.layers[1].post_attention_layernorm),
    "mlp_forward": lambda m: _wrapped(m.model.layers[0].mlp),
    "layer_forward": lambda m: _wrapped(m.model.layers[1]),
    "mlp_class": lambda m: _derived(m.model.layers[1].mlp),
    "norm_class": lambda m: _derived(m.model.layers[0].post_attention_layernorm),
    "linear": lambda m: setattr(m.model.layers[1].self_attn, "o_proj", nn.Sequential(m.model.layers[1].mlp.act_fn)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_between_calls(pair: tuple[Any, Any, Any], change: str) -> None:
    stock, fast, (driver, _) = pair
    before = tokens(fast)
    assert before == tokens(stock) and int(driver.replays) > 0
    for model in (stock, fast):
        CHANGES[change](model)
    assert tokens(fast) == tokens(stock) != before


@pytest.mark.parametrize("name", ["llama", "v3", "gpt_oss"])
def test_code_replaced_on_instances_and_classes(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    stock, fast = build(name), build(name)
    fl.patch(fast)
    driver = decode.attach(fast, ExitStack(), make_graphs=eager_graphs, core="torch")
    before, right = tokens(fast), nn.Linear.forward
    assert before == tokens(stock) and driver.graphs is not None and driver.graphs.keys
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: right(self, x) * (0.5 + torch.arange(self.out_features)))
    assert tokens(fast) == tokens(stock) != before
    monkeypatch.undo()
    assert tokens(fast) == before
    held = driver._weights
    for model in (stock, fast):
        inner, embed = model.model.forward, model.model.embed_tokens.forward
        model.model.embed_tokens.forward = lambda ids, embed=embed: embed(ids).flip(-1)
        model.model.forward = functools.partial(lambda right, **kwargs: right(**kwargs), inner)
    assert tokens(fast) == tokens(stock) != before
    assert driver._weights != held, "what is replayed was captured with other code"


class Louder(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = -2.0 * self.inner(x)
        return out


@pytest.mark.parametrize("name", ["v3", "v2_lite"])
def test_a_wrapper_around_what_is_absorbed(name: str) -> None:
    stock, fast = build(name), build(name)
    fl.patch(fast)
    driver = decode.attach(fast, ExitStack(), make_graphs=eager_graphs, core="torch")
    before, replays = tokens(fast), int(driver.replays)
    for model in (stock, fast):
        for layer in model.model.layers:
            layer.self_attn.kv_b_proj = Louder(layer.self_attn.kv_b_proj)
    assert tokens(fast) == tokens(stock) != before and int(driver.replays) == replays > 0


def test_hooks_on_all_modules_between_calls(pair: tuple[Any, Any, Any]) -> None:
    stock, fast, (driver, _) = pair
    before = tokens(fast)
    replays = int(driver.replays)
    names: list[str] = []
    handle = torch_module.register_module_forward_hook(lambda module, args, output: names.append(type(module).__name__))
    try:
        assert tokens(fast) == before == tokens(stock)
    finally:
        handle.remove()
    assert int(driver.replays) == replays and names.count("Linear") > 100


def test_generation_that_is_watched(pair: tuple[Any, Any, Any]) -> None:
    stock, fast, (driver, _) = pair
    before = tokens(fast)
    replays, counted = int(driver.replays), []
    for model in (stock, fast):
        with FlopCounterMode(display=False) as flops:
            assert tokens(model) == before
        counted.append(flops.get_total_flops())
    assert counted[0] == counted[1] > 0 and int(driver.replays) == replays
    assert tokens(fast) == before and int(driver.replays) > replays


class HookLate(LogitsProcessor):
    """Registers a hook in the middle of a call of generate, as a controller of activations would."""

    def __init__(self, model: Any) -> None:
        self.model, self.steps, self.calls = model, 0, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        if self.steps == 8:
            self.model.model.layers[1].register_forward_hook(self.hook)
        return scores

    def hook(self, module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return -output


def test_a_hook_registered_while_tokens_are_generated(pair: tuple[Any, Any, Any]) -> None:
    stock, fast, (driver, _) = pair
    late = [HookLate(model) for model in (stock, fast)]
    outs = [tokens(model, processor) for model, processor in zip((stock, fast), late, strict=True)]
    assert outs[0] == outs[1] and outs[0] != tokens(build("llama"))
    assert late[0].calls == late[1].calls > 0
    assert 0 < int(driver.replays) < 15


def test_one_thread_at_a_time_has_the_graphs(pair: tuple[Any, Any, Any], caplog: pytest.LogCaptureFixture) -> None:
    stock, fast, (driver, _) = pair
    first, second, seen = tokens(stock), tokens(stock, seed=5), []

    def meanwhile(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == 18:
            with ThreadPoolExecutor(1) as pool:
                seen.append(pool.submit(tokens, fast, seed=5).result())
        return scores

    with caplog.at_level(logging.WARNING, logger="fastlayers.patching.decode"):
        assert tokens(fast, meanwhile) == first
    assert seen == [second] and "another thread is generating" in caplog.text
    assert int(driver.replays) == 15 and len(driver.ledger) == 1, "nothing was captured twice"
    assert tokens(fast, seed=5) == second and int(driver.replays) == 30
    with pytest.raises(ValueError, match="no_such_argument"):
        tokens(fast, no_such_argument=1)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(tokens, fast).result() == first
    assert int(driver.replays) == 45, "a call that raised gave them back"


def test_a_wrapped_model_tells_its_steps(pair: tuple[Any, Any, Any]) -> None:
    _, fast, (driver, _) = pair
    tokens(fast)
    assert fl.explain(fast).steps == tuple(driver.report()) != ()
    assert fl.explain(nn.Sequential(fast)).steps == fl.explain(torch.compile(fast)).steps == tuple(driver.report())


def test_a_generate_of_the_instance_is_called_and_put_back() -> None:
    fast, calls = build("llama"), []
    original = fast.generate

    def noted(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return original(*args, **options)

    fast.generate = noted
    fl.patch(fast)
    driver = decode.attach(fast, ExitStack(), make_graphs=eager_graphs, core="torch")
    wanted = tokens(fast)
    assert calls == [1] and int(driver.replays) == 15
    fl.unpatch(fast)
    assert fast.generate is noted
    fl.patch(fast)
    decode.attach(fast, ExitStack(), make_graphs=eager_graphs, core="torch")
    ours = fast.generate
    fast.generate = lambda *args, **options: ours(*args, **options)
    wrapper = fast.generate
    fl.unpatch(fast)
    assert fast.generate is wrapper and tokens(fast) == wanted and calls == [1, 1]
