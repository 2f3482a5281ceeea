"""Workflows drawn at random: a patch, then up to six things that users do, each compared with the stock model.

A draw is a number, and its steps are in the failure's message. Twenty-five draws in ``make test``, of which
the first twenty-one notice a blind guard four times; two thousand under ``-m slow``.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastlayers as fl
from fastlayers.patching import guard
from fastlayers.patching.guard import Guard
from fastlayers.patching.packing import Packed

sys.path.insert(0, str(Path(__file__).parents[1]))
from test_contracts import close
from tiny import build, prompt

FAMILIES = ("v3", "v2_lite", "qwen2", "qwen2_moe", "qwen3_moe", "gpt_oss", "llama")
BLOCK = 12


class Adapter(nn.Module):
    """A low-rank adapter around a linear, as PEFT's are built."""

    def __init__(self, base_layer: nn.Module, width: int, out: int, generator: torch.Generator) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.down = nn.Parameter(0.1 * torch.randn(2, width, generator=generator), requires_grad=False)
        self.up = nn.Parameter(0.1 * torch.randn(out, 2, generator=generator), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base_layer(x) + x @ self.down.to(x.dtype).T @ self.up.to(x.dtype).T
        return out


class Pair:
    """A stock model and a patched one to which the same happens."""

    def __init__(self, name: str, attn: str | None, options: dict[str, Any], folder: Path) -> None:
        self.stock = original(name, attn)
        self.fast, self.folder, self.patched = copy.deepcopy(self.stock), folder, True
        self.report = fl.patch(self.fast, **options)
        self.called: list[Any] = []

    def both(self, change: Callable[[Any], None]) -> None:
        for model in (self.stock, self.fast):
            change(model)


_MODELS: dict[tuple[str, str | None], Any] = {}


def original(name: str, attn: str | None) -> Any:
    """Return a copy of a stock model; each is made once."""
    if (name, attn) not in _MODELS:
        _MODELS[name, attn] = build(name, attn=attn, num_hidden_layers=2)
    return copy.deepcopy(_MODELS[name, attn])


def _linears(model: Any) -> list[str]:
    return [name for name, module in model.named_modules() if type(module) is nn.Linear and "lm_head" not in name]


def adapter(pair: Pair, rng: random.Random) -> None:
    """Put an adapter around a linear of the model as it is now."""
    names = sorted(set(_linears(pair.stock)) & set(_linears(pair.fast)))
    name, seed = rng.choice(names), rng.randrange(1000)

    def change(model: Any) -> None:
        parent, _, child = name.rpartition(".")
        linear = model.get_submodule(name)
        made = Adapter(linear, linear.in_features, linear.out_features, torch.Generator().manual_seed(seed))
        setattr(model.get_submodule(parent), child, made)

    pair.both(change)


def hook(pair: Pair, rng: random.Random) -> None:
    """Hook a module: it changes what the module returns, and everybody is to call it."""
    names = [name for name, module in pair.stock.named_modules() if name and not list(module.children())]
    name, before = rng.choice([n for n in names if "rotary" not in n]), rng.random() < 0.3
    factor = 1.0 + 0.2 * rng.random()

    def scaled(out: Any) -> Any:
        if isinstance(out, tuple):
            return tuple(factor * o if torch.is_tensor(o) and o.is_floating_point() else o for o in out)
        return factor * out

    def change(model: Any) -> None:
        module = model.get_submodule(name)
        if before and name.endswith("proj"):
            module.register_forward_pre_hook(Pre(factor))
        else:
            module.register_forward_hook(Post(scaled))

    pair.both(change)


class Pre:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, module: Any, args: tuple[Any, ...]) -> Any:
        return (self.factor * args[0], *args[1:])


class Post:
    def __init__(self, change: Callable[[Any], Any]) -> None:
        self.change = change

    def __call__(self, module: Any, args: Any, output: Any) -> Any:
        return self.change(output)


def weight(pair: Pair, rng: random.Random) -> None:
    """Replace, repoint or change a weight."""
    both = {name for name, _ in pair.stock.named_parameters()} & {name for name, _ in pair.fast.named_parameters()}
    name, how, factor = rng.choice(sorted(both)), rng.choice(("parameter", "data", "in_place")), 1.0 + rng.random()

    @torch.no_grad()
    def change(model: Any) -> None:
        parent, _, key = name.rpartition(".")
        owner = model.get_submodule(parent)
        held = getattr(owner, key)
        if how == "parameter":
            setattr(owner, key, nn.Parameter(factor * held.detach(), requires_grad=False))
        elif how == "data":
            held.data = factor * held.detach()
        else:
            held.mul_(factor)

    pair.both(change)


def compiled(pair: Pair, rng: random.Random) -> None:
    """Compile one layer and compare what it returns; the model stays as it is."""
    torch._dynamo.reset()
    index = rng.randrange(2)
    x = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(index))
    table = pair.stock.model.rotary_emb(x, position_ids=torch.arange(5)[None])
    with torch.no_grad():
        wanted = pair.stock.model.layers[index](x, attention_mask=None, position_embeddings=table)
        step: Any = torch.compile(pair.fast.model.layers[index], backend="eager")
        assert close(step(x, attention_mask=None, position_embeddings=table), wanted)


def reload(pair: Pair, rng: random.Random) -> None:
    """Save the state of one and load it into a new model, which takes its place; wrappers come along by copy."""
    how = rng.choice(("state_dict", "assign", "torch_save"))
    state = pair.fast.state_dict()
    wanted = pair.stock.state_dict()
    assert state.keys() == wanted.keys()
    assert all(state[key].shape == wanted[key].shape and state[key].dtype == wanted[key].dtype for key in wanted)
    if how == "torch_save":
        torch.save(state, pair.folder / "state.pt")
        state = torch.load(pair.folder / "state.pt")
    scaled = {key: 1.05 * value if value.is_floating_point() else value.clone() for key, value in state.items()}
    for model in (pair.stock, pair.fast):
        fresh = {key: value.clone() for key, value in scaled.items()}
        model.load_state_dict(fresh, assign=how == "assign")
        model.requires_grad_(False)


def duplicate(pair: Pair, rng: random.Random) -> None:
    """Go on with a deep copy."""
    pair.stock, pair.fast = copy.deepcopy(pair.stock), copy.deepcopy(pair.fast)
    pair.report = None


def unpatch(pair: Pair, rng: random.Random) -> None:
    """Undo the patch, or patch again if it is undone."""
    if pair.patched:
        fl.unpatch(pair.fast)
        assert not any("_fl_" in key for module in pair.fast.modules() for key in module.__dict__)
        assert torch.equal(logits(pair.fast), logits(pair.stock)), "unpatched logits are stock's bit for bit"
    else:
        fl.patch(pair.fast)
    pair.patched = not pair.patched


def generate(pair: Pair, rng: random.Random) -> None:
    """Generate greedily, with one of the caches."""
    options: dict[str, Any] = rng.choice(({}, {}, {"cache_implementation": "static"}, {"num_beams": 2}))
    inputs = prompt(2, 10, seed=rng.randrange(50), pads=(0, rng.randrange(4)))
    outs = [
        model.generate(**inputs, max_new_tokens=6, min_new_tokens=6, do_sample=False, **options)
        for model in (pair.stock, pair.fast)
    ]
    assert torch.equal(outs[0], outs[1])


STEPS = (adapter, hook, weight, compiled, reload, duplicate, unpatch, generate)
# Compiling takes longer than everything else together.
SHARE = (4, 4, 4, 1, 3, 3, 3, 4)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    out: torch.Tensor = model(**prompt(2, 12, pads=(0, 3))).logits
    return out


def draw(number: int, folder: Path) -> None:
    """Run one workflow; the steps are named where it fails."""
    rng = random.Random(number)
    name = rng.choice(FAMILIES)
    attn = rng.choice(("sdpa", "eager")) if name != "gpt_oss" else "eager"
    options = rng.choice(({}, {}, {"fuse_projections": False}, {"cache": "hf"}, {"moe": "torch"}, {"norm": False}))
    if options.get("moe") and "moe" not in name and name != "gpt_oss":
        options = {}
    pair, done = Pair(name, attn, options, folder), [f"{name} {attn} {options}"]
    for step in rng.choices(STEPS, SHARE, k=rng.randint(1, 6)):
        done.append(step.__name__)
        try:
            step(pair, rng)
            wanted, given = logits(pair.stock), logits(pair.fast)
            assert bool(wanted.isfinite().all()), "a stock model that overflowed compares nothing"
            assert close(given, wanted, 2e-5), f"relative error {float((given - wanted).norm() / wanted.norm()):.1e}"
        except Exception as error:
            raise AssertionError(f"draw {number}: {', '.join(done)}: {type(error).__name__}: {error}") from error


def block(first: int, folder: Path) -> None:
    """Run a block to its end, and name every draw of it that failed."""
    failed = []
    for number in range(first, first + BLOCK):
        try:
            draw(number, folder)
        except AssertionError as error:
            failed.append(error)
    if failed:
        raise AssertionError("\n".join(map(str, failed))) from failed[0]


@pytest.mark.parametrize("first", range(0, 12, BLOCK))
def test_drawn_workflows(first: int, tmp_path: Path) -> None:
    block(first, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(12, 2052, BLOCK))
def test_many_drawn_workflows(first: int, tmp_path: Path) -> None:
    block(first, tmp_path)


@pytest.mark.parametrize("number", [0, 4, 6, 20])
def test_draws_notice_a_guard_that_sees_nothing(monkeypatch: pytest.MonkeyPatch, number: int, tmp_path: Path) -> None:
    monkeypatch.setattr(guard, "written", lambda *questions: (lambda module: True,) * 2)
    monkeypatch.setattr(Guard, "holds", lambda guard, module: True)
    monkeypatch.setattr(Packed, "holds", lambda packed, module: packed.weight is not None)
    with pytest.raises(AssertionError, match="relative error"):
        draw(number, tmp_path)
