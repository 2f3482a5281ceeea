"""``fl.warmup``: build and compile what a module needs for some token counts; tell of every compile afterwards.

object                           what runs for each token count T
with ``warm_up_calls(tokens)``   what it says: models and generators of fastlayers_models (decode, and prefill)
patched Hugging Face model       a forward of T requests of one token, and ``generate`` after a prompt of T
layer                            its forward on T tokens
other module                     every layer inside
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from fastlayers.comm.agreement import axis_of, chosen, share_tables
from fastlayers.comm.fabric import agree
from fastlayers.errors import ArgumentError, as_integers, check_plain, check_positive
from fastlayers.layer import Layer
from fastlayers.memory import memory_for
from fastlayers.registry.spec import spec_of
from fastlayers.runtime import builds, compile_log, kernel_cache, precompile
from fastlayers.runtime.compile_log import CompileWatch
from fastlayers.runtime.package_builds import Built, Module, PackageBuilds
from fastlayers.tuning.probe import choices_of, probe_tables
from fastlayers.tuning.probe_shapes import Probed, probe_shapes
from fastlayers.tuning.table import probed_dir

if TYPE_CHECKING:
    from fastlayers.device import Device
    from fastlayers.registry import Backend

log = logging.getLogger(__name__)

Call = tuple[str, Callable[[], Any]]
# Of a Hugging Face model: tokens generated after each prompt, and the most requests in one batch.
NEW_TOKENS, WIDEST = 3, 1024
# What is warmed up of "all" where neither the module nor the caller says how much.
USUAL_TOKENS, MAX_BATCH = 8192, 256


@dataclass
class WarmupReport:
    """What a warm-up did.

    Attributes
    ----------
    steps : list[tuple[str, float, int]]
        What ran, probes included, its seconds, and how many kernels were compiled or loaded for it.
    watch : CompileWatch
        Warns of every compile from now on; ``watch.close()`` ends that.
    left_out : list[str]
        Layers inside the module that were not warmed up, and why: a warning named them.
    built : list[str]
        Backends of shapes that ``auto`` takes from now on, as the record names them.
    probed : list[Path]
        Tables that were made for shapes without one.
    modules : list[Built]
        What packages were asked to build: seconds, and of what failed the package's words.
    """

    steps: list[tuple[str, float, int]] = field(default_factory=list)
    watch: CompileWatch = field(default_factory=CompileWatch)
    left_out: list[str] = field(default_factory=list)
    built: list[str] = field(default_factory=list)
    probed: list[Path] = field(default_factory=list)
    modules: list[Built] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Of all steps."""
        return sum(seconds for _, seconds, _ in self.steps)

    @property
    def kernels(self) -> int:
        """Compiled or loaded."""
        return sum(kernels for _, _, kernels in self.steps)


@torch.inference_mode()
def warmup(
    module: Any,
    tokens: Sequence[int] | Literal["all"] = "all",
    *,
    max_tokens: int | None = None,
    max_batch: int = MAX_BATCH,
    build: bool = True,
    probe: bool = True,
    progress: bool = True,
) -> WarmupReport:
    """Run ``module`` on these token counts, so that everything they need is built and compiled.

    Parameters
    ----------
    module
        A generator or model of ``fastlayers_models``, a patched Hugging Face model, a layer, or a module that holds
        layers.
    tokens : sequence of int or "all"
        Token counts; what other counts need is not compiled. Where only decode or only a prompt of a count can run,
        the step's label says so. ``"all"``: whatever steps of up to ``max_tokens`` tokens and ``max_batch`` requests
        need, compiled side by side.
    max_tokens : int, optional
        Of ``"all"``; default: what the module says its longest request is, else 8192, or what its rotary embeddings
        reach.
    max_batch : int
        Of ``"all"``.
    build : bool
        Also take, and build, the backends that ``auto`` leaves out because their modules are not built yet; their
        record stays with the caches. False: take what is built by now. Either way what was chosen automatically is
        chosen again, and captured steps are captured again where that is something else.
    probe : bool
        Time, once for this device and these versions, the backends of shapes on CUDA that have no tuned table, a
        minute of them at a time, and whether what a table of other versions takes is still the fastest.
    progress : bool
        Show a progress bar.

    Returns
    -------
    WarmupReport
        Keep it, or not: the warnings about later compiles go on. Inside a CUDA graph capture they are errors
        (:class:`~fastlayers.errors.CaptureError`), whether there was a warm-up or not.

    Raises
    ------
    ArgumentError
        No token counts, one that ``module`` cannot run, a model that is not patched, or a layer that does not say
        what it is called with.
    """
    check_plain("warmup", "bool", progress=progress, build=build, probe=probe)
    check_positive("warmup", max_batch=max_batch, **({} if max_tokens is None else {"max_tokens": max_tokens}))
    max_batch, max_tokens = as_integers(max_batch, max_tokens)
    every = isinstance(tokens, str) and tokens == "all"
    most = (max_tokens or _longest(module)) if every else 0
    counts = _powers(most) if every else _checked(tokens)
    if not (isinstance(module, nn.Module) or hasattr(module, "warm_up_calls")):
        raise ArgumentError("warmup", "module", repr(module), "a module, or a generator of fastlayers_models")
    kernel_cache.ensure()
    compile_log.stop_watching()
    left_out: list[str] = []
    layers = _layers_of(module)
    _refresh_builds(module)
    builds.try_again()
    for layer in layers:
        layer.choose_again(built_only=not build)
    try:
        probed, probing = _probe(module, layers, build) if probe else ([], [])
        report = _run(module, layers if build else [], counts, left_out, (most, max_batch) if every else None, progress)
    except BaseException:
        for layer in layers:
            layer.choose_again()  # without what could not be built
        raise
    for layer in layers:
        layer.built_only = True
    report.probed, report.steps = probed, probing + report.steps
    if build:
        report.built = builds.record(_automatic(layers), max(counts))
        _refresh_builds(module)
    if (axis := axis_of(module)) is not None:
        agree(axis, chosen(module if isinstance(module, nn.Module) else module.model))
    return report


def _refresh_builds(module: Any) -> None:
    """Read anew what is built; of a model that is split, together with the other ranks, which call this, too."""
    builds.refresh()
    if (axis := axis_of(module)) is not None:
        builds.meet(axis)


def _probe(module: Any, layers: Sequence[Layer], build: bool) -> tuple[list[Path], list[tuple[str, float, int]]]:
    """Probe tables of other versions and shapes without one; return what was written, and the step that it was."""
    model = module if isinstance(module, nn.Module) else getattr(module, "model", None)
    axis = axis_of(module)
    probes = isinstance(model, nn.Module) and (axis is None or axis.rank == 0)
    written: list[Path] = []
    did: list[str] = []
    begin = time.perf_counter()
    with compile_log.counted() as seen:
        if probes and isinstance(model, nn.Module):
            if tables := probe_tables(model):
                did.append(f"{len(tables)} tables of other versions checked")
            written = probe_shapes(model, build=build, longest=_said_longest(module))
            did += _shapes_told(written)
        if axis is not None:
            written = share_tables(written, probed_dir(), axis)
            did += [] if probes else [f"the first rank's probes waited for, {len(written)} tables"]
        if written:
            for layer in layers:
                layer.choose_again(built_only=not build)
        kernels = len(seen())
    return written, [(", ".join(did), time.perf_counter() - begin, kernels)] if did else []


def _shapes_told(probed: Probed) -> list[str]:
    """Return how many shapes without a table were probed, if there was one, and how many were left."""
    if not probed.shapes:
        return []
    of = f" of {probed.shapes}" if len(probed) < probed.shapes else ""
    return [f"{len(probed)}{of} shapes without a table probed"] + ([f"{probed.left} left"] if probed.left else [])


def _run(
    module: Any,
    building: Sequence[Layer],
    counts: Sequence[int],
    left_out: list[str],
    every: tuple[int, int] | None,
    progress: bool,
) -> WarmupReport:
    """Run everything; ``building``: the layers whose packages may build what they lack."""
    calls = list(calls_of(module, counts, left_out))
    if not calls:
        raise ArgumentError("warmup", "module", type(module).__name__, "a module with layers of fastlayers inside")
    steps: list[tuple[str, float, int]] = []
    modules: list[Built] = []
    with compile_log.counted() as seen, PackageBuilds() as builder:
        again = True
        while again:  # what a package cannot build is left out, and the rest runs once more
            begin, before, ended = time.perf_counter(), len(seen()), {}
            # First the jobs: with them ladders of all contexts are chosen, of which one may lack a package's module.
            jobs = _side_by_side(module, *every) if every is not None else []
            wanted = _lacking(building)
            builder.begin(wanted)
            if jobs:
                with _bar(len(jobs), progress) as advance:
                    ended = precompile.run(jobs, advance, modules=builder)
            done = builder.ended()
            modules += [each for each in done if each not in modules]
            if jobs or done:
                steps.append((_told(len(jobs), ended, done), time.perf_counter() - begin, len(seen()) - before))
            again = _leave_out(module, building, wanted, done)
        with _bar(len(calls), progress) as advance:
            for label, call in calls:
                before, begin = len(seen()), time.perf_counter()
                advance(label)
                call()
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                steps.append((label, time.perf_counter() - begin, len(seen()) - before))
    return WarmupReport(steps, left_out=left_out, modules=modules)


def _told(jobs: int, ended: Mapping[str, float], done: Sequence[Built]) -> str:
    """Return what ran at the same time, and whom that waited for."""
    label = f"{jobs} calls side by side" if jobs else ""
    if len(ended) > 1:
        label += ", the last of " + ", of ".join(f"{name} after {took:.1f} s" for name, took in ended.items())
    if done:
        each = ", ".join(f"{built.module.label} {built.seconds:.1f} s" for built in done)
        label += f"{' and ' if label else ''}{len(done)} modules built by packages: {each}"
    return label


def _lacking(layers: Sequence[Layer]) -> dict[Module, list[str]]:
    """Return the modules that packages lack for what was chosen automatically, with the entries that need each."""
    found: dict[Module, list[str]] = {}
    for layer, backend, cfg, device in _automatic(layers):
        lacks = builds.unbuilt(layer, backend, cfg, device) and not builds.failed(layer, backend, cfg, device)
        modules = getattr(backend.load(), "modules", None) if lacks else None
        for module in modules(cfg) if modules is not None else ():
            entries = found.setdefault(module, [])
            if (entry := builds.entry(layer, backend.name, cfg, device)) not in entries:
                entries.append(entry)
    return found


def _leave_out(
    module: Any, layers: Sequence[Layer], wanted: Mapping[Module, Sequence[str]], done: Sequence[Built]
) -> bool:
    """Choose again without what could not be built, on all ranks alike; return whether there is such a thing."""
    failed = {entry: built.words for built in done if built.words is not None for entry in wanted[built.module]}
    if (axis := axis_of(module)) is not None:
        failed = builds.of_all_ranks(failed, axis)
    builds.leave_out(failed)
    if failed:
        for layer in layers:
            layer.choose_again(built_only=False)
    return bool(failed)


def _layers_of(module: Any) -> list[Layer]:
    """Return the layers inside a module, or inside the model of a generator."""
    model = module if isinstance(module, nn.Module) else getattr(module, "model", None)
    return [each for each in model.modules() if isinstance(each, Layer)] if isinstance(model, nn.Module) else []


def _automatic(layers: Sequence[Layer]) -> Iterator[tuple[str, Backend, Any, Device]]:
    """Yield each backend that was chosen automatically, with its shape."""
    for layer in layers:
        for choice in choices_of(layer):
            if choice.requested == "auto":
                for rung in choice.rungs:
                    yield choice.layer, rung.backend, choice.cfg, choice.device


def _longest(module: Any) -> int:
    """Return the most tokens of a prompt: what a module says its requests may have, or what is usual."""
    if (said := _said_longest(module)) is not None:
        return max(1, said - NEW_TOKENS)
    rotaries = [layer.rotary for layer in _layers_of(module) if hasattr(layer, "rotary")]
    return min([USUAL_TOKENS, *(getattr(rotary, "max_position", USUAL_TOKENS) for rotary in rotaries)])


def _said_longest(module: Any) -> int | None:
    """Return the most tokens of a request that a module says it takes."""
    config: Any = getattr(module, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    places = (module, "max_length"), (config, "max_position_embeddings")
    return min(
        (value for holder, name in places if isinstance(value := getattr(holder, name, None), int)), default=None
    )


def _powers(most: int) -> list[int]:
    """Return the counts at which a whole model runs, where its layers run at many more: the largest first."""
    return sorted({most} | {1 << power for power in range(most.bit_length())}, reverse=True)


def _side_by_side(module: Any, max_tokens: int, max_batch: int) -> list[precompile.Job]:
    """Return the calls of one layer of each kind; those that cannot be called alone run inside others."""
    model = module if isinstance(module, nn.Module) else getattr(module, "model", None)
    step = getattr(module, "step", None)
    jobs: list[precompile.Job] = []
    for name, layer in precompile.representatives(model):
        if _unknown(layer) is None:
            layer.finalize()  # in one thread, before several call it
            jobs += precompile.jobs_of(name, layer, _examples, max_tokens, max_batch, step)
    return jobs


def _checked(tokens: Any) -> list[int]:
    """Return the distinct counts, largest first."""
    if isinstance(tokens, (str, bytes)) or not isinstance(tokens, Iterable) or getattr(tokens, "ndim", 1) != 1:
        raise ArgumentError("warmup", "tokens", repr(tokens), "a sequence of token counts, such as [1, 512], or 'all'")
    counts = list(tokens)
    if not counts:
        raise ArgumentError("warmup", "tokens", counts, "at least one token count")
    check_positive("warmup", **{f"tokens[{i}]": count for i, count in enumerate(counts)})
    return sorted(set(as_integers(*counts)), reverse=True)


@contextmanager
def _bar(total: int, shown: bool) -> Iterator[Callable[[str], None]]:
    """Yield a function that is told what runs next."""
    if not shown:
        yield lambda label: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task, started = bar.add_task("warming up", total=total), False

        def advance(label: str) -> None:
            nonlocal started
            bar.update(task, description=f"warming up {label}", advance=1 if started else 0)
            started = True

        yield advance
        bar.update(task, completed=total)


def calls_of(module: Any, counts: Sequence[int], left_out: list[str] | None = None) -> Iterator[Call]:
    """Yield what a warm-up of ``module`` runs: a label and a function each.

    Layers inside ``module`` that do not say what they are called with are named in a warning, and in ``left_out``;
    if they are all that there is, that is the error of :func:`layer_calls`.
    """
    if hasattr(module, "warm_up_calls"):
        yield from module.warm_up_calls(counts)
    elif hasattr(module, "generate") and hasattr(module, "config"):
        yield from _hugging_face_calls(module, counts)
    elif isinstance(module, Layer):
        yield from layer_calls(type(module).__name__, module, counts)
    else:
        inside = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, Layer)]
        inside = [(name, layer) for name, layer in inside if not _inside_a_layer(module, name)]
        some = any(_unknown(layer) is None for _, layer in inside)
        for name, layer in inside:
            if some and (unknown := _unknown(layer)):
                sentence = f"{name} ({type(layer).__name__}) is not warmed up: it does not know {unknown}"
                log.warning("%s", sentence)
                if left_out is not None:
                    left_out.append(sentence)
            else:
                yield from layer_calls(name, layer, counts)


def _inside_a_layer(root: nn.Module, name: str) -> bool:
    parts = name.split(".")
    return any(isinstance(root.get_submodule(".".join(parts[:i])), Layer) for i in range(1, len(parts)))


def _hugging_face_calls(model: Any, counts: Sequence[int]) -> Iterator[Call]:
    from fastlayers.patching.plan import is_patched

    if not any(isinstance(module, Layer) or is_patched(module) for module in model.modules()):
        given = f"a {type(model).__name__} that is not patched"
        raise ArgumentError("warmup", "module", given, "a patched one: call fastlayers.patch(model) first")
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    limit = getattr(config, "max_position_embeddings", None)
    for count in counts:
        if limit is not None and count + NEW_TOKENS > limit:
            accepted = f"1 to {limit - NEW_TOKENS}: the model has {limit} positions (max_position_embeddings)"
            raise ArgumentError("warmup", "tokens", count, accepted)
        alone = count > WIDEST
        if not alone:
            wide = torch.zeros(count, 1, dtype=torch.int64, device=model.device)
            yield f"{count} requests", lambda ids=wide: model(input_ids=ids, use_cache=True)  # type: ignore[misc]
        prompt = torch.zeros(1, count, dtype=torch.int64, device=model.device)
        yield (
            f"prompt of {count}" + (f" (no batch: at most {WIDEST} requests)" if alone else ""),
            lambda ids=prompt: _generate(model, ids),  # type: ignore[misc]
        )  # fmt: skip


def _generate(model: Any, ids: torch.Tensor) -> None:
    """Generate a few tokens; where prompts are captured, twice: the first one of its size never is."""
    for _ in range(2 if "_fl_decode" in model.__dict__ else 1):
        model.generate(
            ids, attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False,
        )  # fmt: skip


def _unknown(layer: Any) -> str | None:
    """Return what keeps us from calling ``layer`` by itself, or ``None``."""
    spec = spec_of(layer.choice.layer)
    return None if hasattr(layer, "example_inputs") or spec.examples is not None else spec.unknown


def layer_calls(label: str, layer: Any, counts: Sequence[int]) -> Iterator[Call]:
    """Yield one forward of ``layer`` for each token count.

    Raises
    ------
    ArgumentError
        Its ``SPEC`` has no ``examples`` and it has no method ``example_inputs(num_tokens)``; or it cannot take a count.
    """
    if unknown := _unknown(layer):
        given = f"{label} ({type(layer).__name__}), which does not know {unknown}"
        accepted = "the module that calls it, or a layer with a method example_inputs(num_tokens)"
        raise ArgumentError("warmup", "module", given, accepted)
    for count in counts:
        for inputs in _examples(layer, count):
            yield f"{label} {count}", lambda inputs=inputs: layer(*inputs)  # type: ignore[misc]


def _examples(layer: Any, count: int) -> list[tuple[Any, ...]]:
    """Return argument tuples of calls that together need what ``count`` tokens need: the layer's own, or its spec's."""
    own, usual = getattr(layer, "example_inputs", None), spec_of(layer.choice.layer).examples
    with memory_for("warmup", tokens=count):
        found: list[tuple[Any, ...]] = own(count) if own is not None else usual(layer, count) if usual else []
    return found
