"""Layers after drawn sequences of changes to their weights, against layers made anew of the same weights.

Each draw makes models of layers that pack or absorb weights and of layers that do not, lets them compute (so that
something is packed), and then changes them as users do: edits, replaces, loads, moves, copies, pickles and shares.
After each change every model computes what a fresh one with its state does, and a watch, as a captured step has one,
has noticed each change of what is computed.
"""

from __future__ import annotations

import copy
import io
import pickle
import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastlayers as fl
from fastlayers.attention.kv_cache.spec import LayerCache
from fastlayers.moe.fused_moe.layer import FusedMoE
from fastlayers.quant.spec import QuantSpec
from fastlayers.weights_epoch import WeightsWatch

sys.path.insert(0, str(Path(__file__).parent))
from test_weights_epoch import decode, mla, run_moe, values_like

F32 = torch.float32
DRAWS, BLOCK, LENGTH = 20, 20, 5


def experts(quant: str) -> FusedMoE:
    bias = quant == "bias"
    return FusedMoE(128, 128, 4, 2, quant=QuantSpec("none" if bias else quant), bias=bias, dtype=F32)


def attention() -> fl.Attention:
    return fl.Attention(32, 2, 1, 16, rotary=fl.RotaryEmbedding(16, max_position=64), page_size=16, dtype=F32)


def attend(layer: fl.Attention) -> torch.Tensor:
    seeds = torch.Generator().manual_seed(6)
    pages = [torch.randn(3, 16, 1, 16, generator=seeds) for _ in range(2)]
    meta = fl.AttentionState(1, 1, 2, 16).plan(fl.AttentionBatch((1,), (9,), [[1]]))
    y: torch.Tensor = layer(torch.randn(1, 32, generator=seeds), meta, LayerCache(pages[0], pages[1]))
    return y


def multiply(layer: Any) -> torch.Tensor:
    y: torch.Tensor = layer(torch.randn(3, 128, generator=torch.Generator().manual_seed(7)))
    return y


MAKERS: dict[str, Callable[[], nn.Module]] = {
    **{f"experts {quant}": lambda quant=quant: experts(quant) for quant in ("none", "bias", "fp8_block", "int8")},
    **{f"latent {quant}": lambda quant=quant: mla(quant) for quant in ("none", "fp8_block", "fp8_channel", "int8")},
    "attention": attention,
    "linear": lambda: fl.Linear(128, [8, 4], bias=True, names=("../q", "../k"), dtype=F32),
    "norm": lambda: fl.RMSNorm(128),
}  # type: ignore[misc]


def compute(kind: str, layer: Any) -> torch.Tensor:
    run = {"experts": run_moe, "latent": decode, "attention": attend}.get(kind.partition(" ")[0], multiply)
    with torch.no_grad():
        y: torch.Tensor = run(layer)
    return y


class Model:
    """A container of two layers of each drawn kind, and what a step that was captured last reads."""

    def __init__(self, kinds: dict[str, str], module: nn.Module, untouched: nn.Module) -> None:
        self.kinds, self.module, self.untouched = kinds, module, untouched
        self.watch = WeightsWatch(module)
        self.capture()

    def layer(self, name: str) -> Any:
        return self.module.get_submodule(name)

    def outputs(self) -> dict[str, torch.Tensor]:
        return {name: compute(kind, self.layer(name)) for name, kind in self.kinds.items()}

    def capture(self) -> None:
        """Compute, and remember the addresses and the copies that a replay would read."""
        self.found = self.outputs()
        self.addresses = [tensor.data_ptr() for tensor in self.module.state_dict().values()]
        self.copies = [
            self.layer(name).absorbed_weights()[0].clone() for name, kind in self.kinds.items() if "latent fp8" in kind
        ]
        self.watch.mark()

    def check(self, wanted: dict[str, torch.Tensor]) -> None:
        stale, addresses, copies = self.watch.stale, self.addresses, self.copies
        self.capture()
        for name, value in self.found.items():
            assert torch.equal(value, wanted[name]), f"{name} ({self.kinds[name]}) is not what its weights say"
        if not stale:
            assert addresses == self.addresses, "a captured step would read weights that are gone"
            assert all(map(torch.equal, copies, self.copies)), "a captured step would read a stale copy"

    def fresh(self) -> dict[str, torch.Tensor]:
        made = copy.deepcopy(self.untouched)  # quicker than to make one
        made.load_state_dict({name: value.clone() for name, value in self.module.state_dict().items()})
        return {name: compute(kind, made.get_submodule(name)) for name, kind in self.kinds.items()}


def container(kinds: dict[str, str]) -> nn.ModuleDict:
    return nn.ModuleDict({name: MAKERS[kind]() for name, kind in kinds.items()})


class World:
    """The models of one draw, views of weights that somebody kept, and where chance comes from."""

    def __init__(self, seed: int) -> None:
        self.random, self.seed = random.Random(seed), seed
        chosen = self.random.sample(list(MAKERS), 2)
        kinds = {f"{kind.replace(' ', '_')}_{i}": kind for kind in chosen for i in range(2)}
        module, untouched = container(kinds), container(kinds)
        module.load_state_dict(values_like(module, seed))
        if self.random.random() < 0.7:
            fl.finalize(module)
        self.models = [Model(kinds, module, untouched)]
        self.views: list[torch.Tensor] = []
        self.log: list[str] = []

    def model(self) -> Model:
        return self.random.choice(self.models)

    def owner(self, model: Model) -> tuple[nn.Module, str]:
        """Return a module with a parameter, and its name."""
        name = self.random.choice([name for name, _ in model.module.named_parameters(remove_duplicate=False)])
        module, _, own = name.rpartition(".")
        return model.module.get_submodule(module), own

    def values(self, weight: torch.Tensor, name: str) -> torch.Tensor:
        self.seed += 1000
        holder = nn.Module()
        holder.register_parameter(name, nn.Parameter(weight.detach(), requires_grad=False))
        return values_like(holder, self.seed)[name]

    def pair(self, model: Model) -> tuple[Any, Any]:
        """Return two layers of one kind."""
        first = self.random.choice([name for name in model.kinds if name.endswith("_0")])
        pair = [model.layer(first), model.layer(first[:-1] + "1")]
        self.random.shuffle(pair)
        return pair[0], pair[1]


Change = Callable[[World], None]
CHANGES: list[Change] = []


def change(function: Change) -> Change:
    CHANGES.append(function)
    return function


@change
def edit(world: World) -> None:
    module, name = world.owner(world.model())
    weight, how = getattr(module, name), world.random.randrange(8)
    values = world.values(weight, name)
    rows = slice(None, 1) if weight.shape[0] > 1 else slice(None)
    with torch.inference_mode() if how == 0 else torch.no_grad():
        if how < 2:
            weight.copy_(values)
        elif how == 2:
            weight[rows].copy_(values[rows])
        elif how == 3:
            weight.detach().view(-1).copy_(values.view(-1))
        elif how == 4:
            torch._foreach_copy_([weight], [values])
        elif how == 5:
            weight[rows] = values[rows]
        elif how == 6:
            torch.cat([values], out=weight) if values.element_size() > 1 else weight.copy_(values)
        else:
            module.state_dict(keep_vars=world.random.random() < 0.5)[name].copy_(values)


@change
def keep_a_view(world: World) -> None:
    module, name = world.owner(world.model())
    weight = getattr(module, name)
    world.views.append(weight.detach() if world.random.random() < 0.5 else weight.view(-1))


@change
def write_through_a_view(world: World) -> None:
    if world.views:
        view = world.random.choice(world.views)
        with torch.no_grad():
            view.copy_(world.values(view, "weight_scale" if view.dtype == F32 and (view > 0).all() else "weight"))


@change
def step_an_optimiser(world: World) -> None:
    weights = [p for p in world.model().module.parameters() if p.dtype == F32]
    for weight in weights:
        weight.requires_grad_()
        weight.grad = weight.detach() * 0.1  # scales stay above zero
    torch.optim.SGD(weights, lr=0.5, foreach=world.random.random() < 0.5).step()
    for weight in weights:
        weight.requires_grad_(False)
        weight.grad = None


@change
def replace(world: World) -> None:
    module, name = world.owner(world.model())
    how, values = world.random.randrange(4), world.values(getattr(module, name), name)
    with torch.inference_mode(how == 3):
        made = nn.Parameter(values.clone(), requires_grad=False)
    if how == 1:
        delattr(module, name)
    if how in (1, 2):
        module.register_parameter(name, made)
    else:
        setattr(module, name, made)


@change
def write_unseen_and_repack(world: World) -> None:
    model = world.model()
    module, name = world.owner(model)
    weight, how = getattr(module, name), world.random.randrange(5)
    values = world.values(weight, name)
    if how == 0:
        weight.data = values
    elif how == 1:
        weight.data.copy_(values)
    elif how == 2 and weight._use_count() == 1:  # else torch refuses
        torch.utils.swap_tensors(weight, nn.Parameter(values, requires_grad=False))
    elif how <= 3:
        with torch.no_grad():
            weight.set_(values)
    else:
        module._parameters[name] = nn.Parameter(values, requires_grad=False)
    for each in world.models:
        fl.repack(each.module)


@change
def load(world: World) -> None:
    model, swapped = world.model(), torch.__future__.get_swap_module_params_on_conversion()
    target = model.module if world.random.random() < 0.5 else model.layer(world.random.choice(list(model.kinds)))
    world.seed += 1000
    values = values_like(target, world.seed)
    kept = {name: value for name, value in values.items() if world.random.random() < 0.7}
    torch.__future__.set_swap_module_params_on_conversion(not world.views and world.random.random() < 0.2)
    try:
        target.load_state_dict(kept, strict=False, assign=world.random.random() < 0.4)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swapped)


@change
def fail_to_load(world: World) -> None:
    model = world.model()
    values = {name: value[:0] for name, value in model.module.state_dict().items()}
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.module.load_state_dict(values)


@change
def move(world: World) -> None:
    model = world.model()
    target = model.module if world.random.random() < 0.5 else model.layer(world.random.choice(list(model.kinds)))
    how = world.random.randrange(4)
    if how == 0:
        target.to("cpu")
    elif how == 1:
        target._apply(lambda tensor: tensor.clone())
    elif how == 2:
        target.share_memory()  # moves what lies under the tensors; only on a CPU, where no step is captured
        for each in world.models:
            each.capture()
    else:
        values = {name: value.clone() for name, value in target.state_dict().items()}
        target.to_empty(device="cpu")
        for module in target.modules():
            if isinstance(module, fl.RotaryEmbedding):  # to_empty empties buffers, too
                module._fill_tables(torch.device("cpu"))
        target.load_state_dict(values)


@change
def copy_model(world: World) -> None:
    model, how = world.model(), world.random.randrange(3)
    if how == 0:
        made = copy.deepcopy(model.module)
    elif how == 1 and not any(weight.dtype == torch.float8_e4m3fn for weight in model.module.parameters()):
        made = pickle.loads(pickle.dumps(model.module))  # not e4m3, which torch cannot restore so
    else:
        file = io.BytesIO()
        torch.save(model.module, file)
        made = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    if len(world.models) == 3:
        world.models.pop(world.random.randrange(3))
    world.models.append(Model(model.kinds, made, model.untouched))


@change
def copy_a_layer(world: World) -> None:
    """Put a shallow copy of a layer in its place, or in the other's of its kind: they have the same weights."""
    model = world.model()
    name = world.random.choice(list(model.kinds))
    target = world.random.choice([name, name[:-1] + "0", name[:-1] + "1"])
    model.module[target] = copy.copy(model.layer(name))  # type: ignore[index]
    fl.repack(model.module)  # a container of torch's own tells nobody


@change
def share_a_weight(world: World) -> None:
    first, second = world.pair(world.model())
    name = world.random.choice([name for name, _ in first.named_parameters()])
    holder, _, own = name.rpartition(".")
    weight, how = first.get_parameter(name), world.random.randrange(3)
    if how == 1:
        weight = nn.Parameter(weight.detach(), requires_grad=False)
    if how == 2:  # exchanged
        setattr(first.get_submodule(holder), own, second.get_parameter(name))
    setattr(second.get_submodule(holder), own, weight)


@change
def share_a_child(world: World) -> None:
    source, target = world.model(), world.model()
    first = world.random.choice(list(source.kinds))
    if source.kinds == target.kinds:
        names = [name for name, _ in source.layer(first).named_children() if name.endswith("proj")]
        if names:
            name = world.random.choice(names)
            setattr(target.layer(first[:-1] + "0"), name, getattr(source.layer(first), name))


@change
def share_a_layer(world: World) -> None:
    source, target = world.model(), world.model()
    name = world.random.choice(list(source.kinds))
    if source.kinds == target.kinds:
        target.module[name] = source.layer(name)  # type: ignore[index]
        fl.repack(target.module)  # a container of torch's own tells nobody


@change
def finalize_or_repack(world: World) -> None:
    module = world.model().module
    world.random.choice([fl.finalize, fl.repack, lambda module: WeightsWatch(module)])(module)


@change
def compute_in_threads(world: World) -> None:
    model = world.model()
    with ThreadPoolExecutor(3) as threads:
        for found in threads.map(lambda _: model.outputs(), range(3)):
            assert found.keys() == model.kinds.keys()


def play(seed: int) -> list[str]:
    """Return the changes of one draw; raises where a model is not what its weights say."""
    world = World(seed)
    for _ in range(LENGTH):
        for _ in range(world.random.choice([1, 1, 2, 3])):  # some before anything computes
            chosen = world.random.choice(CHANGES)
            world.log.append(chosen.__name__)
            chosen(world)
        try:
            for model in world.models:
                model.check(model.fresh())
        except AssertionError as error:
            raise AssertionError(f"draw {seed}: {world.log}: {error}") from error
    return world.log


def drawn(first: int) -> None:
    seen = {name for seed in range(first, first + BLOCK) for name in play(seed)}
    assert len(seen) == len(CHANGES)


@pytest.mark.parametrize("first", range(0, DRAWS, BLOCK))
def test_drawn_changes(first: int) -> None:
    drawn(first)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(DRAWS, 100 * DRAWS, BLOCK))
def test_many_drawn_changes(first: int) -> None:
    drawn(first)


def test_draws_notice_a_layer_that_packs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draws are able to fail: with layers that are never told, one of a few does."""
    monkeypatch.setattr("fastlayers.weights_epoch.WatchedModule.weights_changed", lambda self: None)
    monkeypatch.setattr("fastlayers.weights_epoch.WeightsWatch.stale", False)
    with pytest.raises(AssertionError, match="draw"):
        for seed in range(DRAWS):
            play(seed)
