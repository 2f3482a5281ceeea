"""Ranked, lazy backends for each layer, and the one place where a backend is chosen.

A layer has a :class:`Registry` of :class:`Backend` rows. ``registry.choose(cfg, device, want)`` is called once,
in the layer's constructor, and returns a :class:`Choice`: one or more *rungs* (token thresholds), each with its
backend, plus the reason why every better-ranked backend lost. ``choice.build()`` imports only what was chosen.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from fastlayers import device as device_module
from fastlayers import env, kernel_cache
from fastlayers.device import Device
from fastlayers.errors import ArgumentError, EnvironmentVariableError, NoBackendError, UnknownNameError, check_plain

log = logging.getLogger(__name__)

# Layer name -> where its registry lives. The key is the name in FASTLAYERS_BACKEND, explain() and the docs.
LAYERS: dict[str, str] = {
    "linear": "fastlayers.linear.dense.layer:LINEAR",
    "embedding": "fastlayers.embedding.layer:EMBEDDING",
    "rms_norm": "fastlayers.norm.rms_norm.layer:RMS_NORM",
    "silu_mul": "fastlayers.activation.silu_mul.layer:SILU_MUL",
    "silu_mul_quant": "fastlayers.activation.silu_mul_quant.layer:SILU_MUL_QUANT",
    "group_quant": "fastlayers.quant.group_quant.layer:GROUP_QUANT",
    "mxfp8_quant": "fastlayers.quant.mxfp8_quant.layer:MXFP8_QUANT",
    "fp8_linear": "fastlayers.quant.fp8_linear.layer:FP8_LINEAR",
    "int8_linear": "fastlayers.quant.int8_linear.layer:INT8_LINEAR",
    "fp8_scaled_linear": "fastlayers.quant.fp8_scaled_linear.layer:FP8_SCALED_LINEAR",
    "bmm": "fastlayers.quant.bmm.layer:BMM",
    "rotary": "fastlayers.rotary.layer:ROTARY",
    "rotary_kv_write": "fastlayers.attention.rotary_kv_write.layer:ROTARY_KV_WRITE",
    "kv_write": "fastlayers.attention.kv_write.layer:KV_WRITE",
    "mla_kv_write": "fastlayers.attention.mla_kv_write.layer:MLA_KV_WRITE",
    "merge_state": "fastlayers.attention.merge_state.layer:MERGE_STATE",
    "mla": "fastlayers.attention.mla.core:MLA",
    "gqa": "fastlayers.attention.gqa.core:GQA",
    "router": "fastlayers.moe.router.layer:ROUTER",
    "moe_align": "fastlayers.moe.align.layer:MOE_ALIGN",
    "fused_moe": "fastlayers.moe.fused_moe.layer:FUSED_MOE",
    "sampler": "fastlayers.sampler.layer:SAMPLER",
}


def accepts_all(cfg: Any, device: Device) -> str | None:
    """A predicate without objections."""
    return None


@dataclass(frozen=True)
class Backend:
    """One implementation of a layer.

    Parameters
    ----------
    name : str
        Where the code comes from (``"deep_gemm"``), never a number format or an architecture.
    target : str or callable
        ``"package.module:Class"``, imported only if chosen; or the class itself. Called with ``cfg``, and with a
        mapping of kernel parameters after it where a tuned table gives one.
    needs : tuple[str, ...]
        Functions that optional packages must have, see :func:`fastlayers.device.missing`.
    refuse : callable
        ``refuse(cfg, device)``: pure; ``None`` or a sentence that says why not. Asks about hardware and shapes
        only; packages are ``needs``.
    auto_on : tuple[str, ...]
        Device types on which ``"auto"`` may take it. Empty: only by name.
    last_resort_on : tuple[str, ...]
        Device types on which ``"auto"`` takes it only if nothing else accepts, and says so once.
    weight_layout : str
        Layouts with the same name share packed weights: the condition for sharing a ladder.
    note : str
        Shown by ``explain`` and ``backends``, for example "not run on this hardware".
    phases : tuple[str, ...]
        For attention: the phases (``cfg.phase``) that it serves; empty: all.
    """

    name: str
    target: str | Callable[..., Any]
    needs: tuple[str, ...] = ()
    refuse: Callable[[Any, Device], str | None] = accepts_all
    auto_on: tuple[str, ...] = ("cuda",)
    last_resort_on: tuple[str, ...] = ()
    weight_layout: str = "checkpoint"
    note: str = ""
    phases: tuple[str, ...] = ()

    def serves(self, phase: str) -> bool:
        """Return whether it serves this phase of attention (``""``: a layer without phases, or all of them)."""
        return not self.phases or phase in self.phases

    def load(self) -> Callable[..., Any]:
        """Import and return the class behind ``target``."""
        if not isinstance(self.target, str):
            return self.target
        module, _, attribute = self.target.partition(":")
        try:
            loaded: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            given = f"{self.target!r}, which cannot be loaded: {type(error).__name__}: {error}"
            raise ArgumentError(f"backend {self.name!r}", "target", given, "'package.module:Class'") from error
        return loaded

    def refusal(self, cfg: Any, device: Device) -> str | None:
        """Return what ``refuse`` says; a predicate that raises refuses with what it raised."""
        if not self.serves(phase := getattr(cfg, "phase", "")):
            return f"serves {' and '.join(self.phases)} only, not {phase or 'every phase'}"
        try:
            return self.refuse(cfg, device)
        except Exception as error:  # a foreign row must not break the layer; the reason is kept
            return f"its refuse() raised {type(error).__name__}: {error}"

    def why_not(self, cfg: Any, device: Device) -> str | None:
        """Return why this backend cannot run ``cfg`` on ``device`` here, or ``None``."""
        return self.refusal(cfg, device) or device_module.missing(self.needs, load=not device.described)


# The two rows that every layer has.
def reference_backend(target: str) -> Backend:
    """Return the row of a layer's oracle: fp32, plain torch, taken only by name."""
    return Backend("reference", target, auto_on=(), note="fp32 oracle, for tests")


def torch_backend(target: str, refuse: Callable[[Any, Device], str | None] = accepts_all) -> Backend:
    """Return the row of a layer's native torch path: what "auto" takes on a CPU, the last resort on CUDA."""
    return Backend("torch", target, refuse=refuse, auto_on=("cpu",), last_resort_on=("cuda",))


# What every kernel of ours uses of Triton.
TRITON_NEEDS = ("triton:jit", "triton.language:dot", "triton.language:float8e4nv")


def triton_backend(
    target: str, refuse: Callable[[Any, Device], str | None] = accepts_all, weight_layout: str = "checkpoint"
) -> Backend:
    """Return the row of a layer's Triton path: CUDA, or by name anywhere under Triton's interpreter."""

    def needs_cuda(cfg: Any, device: Device) -> str | None:
        if device.type != "cuda" and not (device.type == "cpu" and env.triton_interpret()):
            return f"Triton needs a CUDA device (or TRITON_INTERPRET=1 for tests), this is {device}"
        if device.capability is not None and device.capability < (8, 0):
            return f"needs sm_80 or newer, this is {device.sm}"
        return refuse(cfg, device)

    return Backend("triton", target, TRITON_NEEDS, needs_cuda, weight_layout=weight_layout)


class NotRun:
    """The target of rows for hardware that was not at hand: guards and reasons only, no kernels."""

    def __init__(self, cfg: Any) -> None:
        layer = type(cfg).__name__
        reason = "this row is a guard; it has never been run on sm_100 hardware"
        raise NoBackendError(layer, cfg, "sm_100", "auto", {"guard": reason})


def blackwell_guard(name: str, needs: tuple[str, ...], refuse: Callable[[Any], str | None] | None = None) -> Backend:
    """Return a row for sm_100 that is never chosen: it says what it would need and that it has not been run.

    ``refuse(cfg)``: what it cannot do on the right hardware either.
    """

    def needs_blackwell(cfg: Any, device: Device) -> str | None:
        if device.capability is None or device.capability[0] != 10:
            return f"needs sm_100, this is {device.sm}"
        return refuse(cfg) if refuse is not None else None

    return Backend(name, NotRun, needs, needs_blackwell, (), note="not run on this hardware")


@dataclass(frozen=True)
class Rung:
    """One step of a ladder: ``backend`` serves up to ``max_tokens`` tokens (``None``: no limit).

    ``config`` holds what the tuner found for the backend's kernels; empty: the backend's own rule.
    """

    max_tokens: int | None
    backend: Backend
    microseconds: float | None = None
    config: tuple[tuple[str, int], ...] = ()

    def build(self, cfg: Any) -> Any:
        """Import the backend and construct it with the configuration (and the tuner's, if there is one)."""
        if self.backend.needs:
            kernel_cache.ensure()  # before the first kernel, wherever the choice comes from
        target = self.backend.load()
        return target(cfg, dict(self.config)) if self.config else target(cfg)


@dataclass(frozen=True)
class Choice:
    """What was chosen for one layer, on which evidence, and why the rest lost."""

    layer: str
    cfg: Any
    device: Device
    asked: str
    rungs: tuple[Rung, ...]
    refused: Mapping[str, str] = field(default_factory=dict)
    evidence: str = "rank"

    @property
    def name(self) -> str:
        """The chosen backend's name; a ladder reads ``"triton:64|torch"``."""
        return "|".join(
            r.backend.name if r.max_tokens is None else f"{r.backend.name}:{r.max_tokens}" for r in self.rungs
        )

    def __reduce__(self) -> tuple[Any, ...]:
        rungs = tuple((rung.max_tokens, rung.backend.name, rung.microseconds, rung.config) for rung in self.rungs)
        return _restore_choice, (
            self.layer, self.cfg, self.device, self.asked, rungs, dict(self.refused), self.evidence
        )  # fmt: skip

    def build(self) -> Ladder:
        """Import the chosen backends and construct them with the configuration."""
        return Ladder(self, tuple(rung.build(self.cfg) for rung in self.rungs))

    def __repr__(self) -> str:
        return f"{self.layer}={self.name}"


def _restore_choice(
    layer: str, cfg: Any, device: Device, asked: str, rungs: tuple[Any, ...], refused: dict[str, str], evidence: str
) -> Choice:
    table = registry(layer)
    restored = tuple(Rung(limit, table.named(name), us, config) for limit, name, us, config in rungs)
    return Choice(layer, cfg, device, asked, restored, refused, evidence)


class Ladder:
    """The built implementations of a :class:`Choice`, fixed at construction."""

    def __init__(self, choice: Choice, impls: tuple[Any, ...]) -> None:
        self.choice, self.impls = choice, impls
        self._limited = tuple(
            (rung.max_tokens, impl)
            for rung, impl in zip(choice.rungs, impls, strict=True)
            if rung.max_tokens is not None
        )
        self.single = impls[0] if len(impls) == 1 else None

    def pick(self, num_tokens: int) -> Any:
        """Return the implementation for this token count; a loop over few rungs, which torch.compile can trace."""
        if self.single is not None:
            return self.single
        for limit, impl in self._limited:
            if num_tokens <= limit:
                return impl
        return self.impls[-1]

    def pack(self, *weights: Any) -> Any:
        """Let the implementation pack weights; all rungs share the result."""
        return self.impls[-1].pack(*weights)


@dataclass
class Registry:
    """The ranked backends of one layer, best first.

    Parameters
    ----------
    layer : str
        The name in :data:`LAYERS`.
    ranked : list of Backend
    cases : str
        Module with ``SPEC``, a :class:`fastlayers.testing.spec.LayerSpec`; imported by tests and benchmarks only.
    """

    layer: str
    ranked: list[Backend]
    cases: str = ""

    def __post_init__(self) -> None:
        names = [backend.name for backend in self.ranked]
        if len(set(names)) != len(names):
            raise ArgumentError(self.layer, "backends", names, "distinct names")

    def add(self, new: Backend, *, before: str | None = None) -> None:
        """Add a backend, ranked before the named one (default: first).

        Raises
        ------
        ArgumentError
            The name is taken, or a field is not of its type.
        """
        if not isinstance(new, Backend):
            raise ArgumentError(self.layer, "backend", repr(new), "a Backend")
        if not isinstance(new.name, str) or new.name == "auto" or not re.fullmatch(r"[\w.+-]+", new.name):
            accepted = "letters, digits, '_', '.', '+', '-'; not 'auto'"
            raise ArgumentError(self.layer, "backend", repr(new.name), accepted)
        kinds = dict.fromkeys(("needs", "auto_on", "last_resort_on", "phases"), "tuple[str, ...]")
        kinds |= {"weight_layout": "str", "note": "str", "refuse": "Callable"}
        kinds |= {} if isinstance(new.target, str) else {"target": "Callable"}
        for name, kind in kinds.items():
            check_plain(self.layer, kind, **{f"{name} of {new.name!r}": getattr(new, name)})
        names = [backend.name for backend in self.ranked]
        if new.name in names:
            raise ArgumentError(self.layer, "backend", repr(new.name), f"a name other than {', '.join(names)}")
        self.ranked.insert(names.index(self.named(before).name) if before else 0, new)

    def named(self, name: str) -> Backend:
        """Return the backend of this name or raise :class:`UnknownNameError` with the known ones."""
        for backend in self.ranked:
            if backend.name == name:
                return backend
        known = ", ".join(backend.name for backend in self.ranked)
        raise UnknownNameError(f"{self.layer}: backend {name!r} is unknown; known: {known}")

    def choose(self, cfg: Any, device: Any = None, want: str = "auto") -> Choice:
        """Choose once: ``want`` is ``"auto"``, a backend's name, or a ladder ``"triton:64|torch"``.

        ``FASTLAYERS_BACKEND`` replaces ``"auto"`` only; what the code names wins.

        Raises
        ------
        NoBackendError
            Nothing can run it; every reason is in the message. A named backend never falls back.
        UnknownNameError
            A name that is not registered, in the call or in the environment.
        """
        target = device_module.as_device(device)
        named, evidence = self._wish(want)
        if named == "auto":
            return self._choose_auto(cfg, target)
        return self._choose_named(self._parse(named), cfg, target, named, evidence)

    def choose_phases(self, cfg: Any, phases: tuple[str, ...], device: Any = None, want: str = "auto") -> list[Choice]:
        """Choose for each phase of attention; ``cfg`` is a dataclass with a field ``phase``.

        What is named serves the phases that it can; a phase that no named backend serves is chosen automatically,
        and its evidence says so.

        Raises
        ------
        NoBackendError, UnknownNameError
            As :meth:`choose`; also if what is named serves no phase.
        """
        target = device_module.as_device(device)
        named, evidence = self._wish(want)
        configs = [replace(cfg, phase=phase) for phase in phases]
        if named == "auto":
            return [self._choose_auto(each, target) for each in configs]
        rungs, chosen = self._parse(named), []
        for each in configs:
            serving = [rung for rung in rungs if rung.backend.serves(each.phase)]
            if serving:
                limits = [rung.max_tokens for rung in serving[:-1]] + [None]
                cut = tuple(replace(rung, max_tokens=m) for rung, m in zip(serving, limits, strict=True))
                left = "".join(f"; {r.backend.name} does not serve {each.phase}" for r in rungs if r not in serving)
                chosen.append(self._choose_named(cut, each, target, named, evidence + left))
            else:
                auto = self._choose_auto(each, target)
                chosen.append(
                    replace(auto, asked=named, evidence=f"{auto.evidence}; {named} does not serve {each.phase}")
                )
        return chosen

    def _wish(self, want: str) -> tuple[str, str]:
        """Return what is asked for, the environment's override included, and on which evidence."""
        if not isinstance(want, str):
            raise ArgumentError(self.layer, "backend", repr(want), "'auto', a name, or a ladder like 'triton:64|torch'")
        load_plugins()
        if want != "auto":
            return want, "asked for by name"
        named = environment_wishes().get(self.layer, "auto")
        return named, f"{env.BACKEND}={self.layer}={named}"

    def _choose_named(self, rungs: tuple[Rung, ...], cfg: Any, device: Device, want: str, evidence: str) -> Choice:
        refused = {r.backend.name: why for r in rungs if (why := r.backend.why_not(cfg, device)) is not None}
        if refused:
            raise NoBackendError(self.layer, cfg, device, want, refused)
        return Choice(self.layer, cfg, device, want, rungs, {}, evidence)

    def _choose_auto(self, cfg: Any, device: Device) -> Choice:
        from fastlayers import tuning

        refused: dict[str, str] = {}
        able: list[Backend] = []
        for backend in self.ranked:
            if device.type not in backend.auto_on:
                continue
            why = backend.why_not(cfg, device)
            if why is None:
                able.append(backend)
            else:
                refused[backend.name] = why
        if not able:
            return self._last_resort(cfg, device, refused)
        tuned = tuning.ladder(self.layer, cfg, device, {b.name: b for b in able})
        if tuned is not None:
            return Choice(self.layer, cfg, device, "auto", tuned.rungs, refused, tuned.evidence)
        return Choice(self.layer, cfg, device, "auto", (Rung(None, able[0]),), refused)

    def _last_resort(self, cfg: Any, device: Device, refused: dict[str, str]) -> Choice:
        for backend in self.ranked:
            if device.type in backend.last_resort_on:
                why = backend.why_not(cfg, device)
                if why is None:
                    reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items()) or "none is ranked"
                    _warn_once(f"{self.layer}: only {backend.name} runs on {device} ({reasons}); expect it to be slow")
                    return Choice(self.layer, cfg, device, "auto", (Rung(None, backend),), refused, "last resort")
                refused[backend.name] = why
        raise NoBackendError(self.layer, cfg, device, "auto", refused)

    def _parse(self, want: str) -> tuple[Rung, ...]:
        pieces = [piece.strip() for piece in want.split("|")]
        rungs: list[Rung] = []
        for position, piece in enumerate(pieces):
            name, separator, limit = piece.partition(":")
            last = position == len(pieces) - 1
            if last == bool(separator) or (separator and not limit.isdigit()):
                raise ArgumentError(self.layer, "backend", repr(want), "a name, or a ladder like 'triton:64|torch'")
            rungs.append(Rung(int(limit) if separator else None, self.named(name)))
        check_ladder(self.layer, want, tuple(rungs))
        return tuple(rungs)


def check_ladder(layer: str, want: str, rungs: tuple[Rung, ...]) -> None:
    """Raise unless thresholds increase and all rungs share one weight layout."""
    limits = [rung.max_tokens for rung in rungs[:-1]]
    if any(a is None or b is None or a >= b for a, b in pairwise(limits)):
        raise ArgumentError(layer, "backend", repr(want), "a ladder with increasing thresholds")
    layouts = {rung.backend.weight_layout for rung in rungs}
    if len(layouts) > 1:
        raise ArgumentError(layer, "backend", f"{want!r} with weight layouts {sorted(layouts)}", "one weight layout")


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        log.warning(message)


def environment_wishes() -> dict[str, str]:
    """Return ``{layer: backend or ladder}`` as ``FASTLAYERS_BACKEND`` has it, for layers and backends that exist.

    Raises
    ------
    EnvironmentVariableError, UnknownNameError, ArgumentError
        An entry is not of the form, or names no layer, no backend, or no ladder.
    """
    load_plugins()
    overrides = env.backend_overrides()
    for layer, named in overrides.items():
        if layer not in LAYERS:
            raise EnvironmentVariableError(f"{env.BACKEND}: layer {layer!r} is unknown; known: {', '.join(LAYERS)}")
        if named != "auto":
            _builtin_registry(layer)._parse(named)
    return overrides


def registry(layer: str) -> Registry:
    """Return the registry of a layer by its name in :data:`LAYERS`, plug-ins included."""
    if layer not in LAYERS:
        raise UnknownNameError(f"layer {layer!r} is unknown; known: {', '.join(LAYERS)}")
    load_plugins()
    return _builtin_registry(layer)


def _builtin_registry(layer: str) -> Registry:
    module, _, attribute = LAYERS[layer].partition(":")
    found: Registry = getattr(importlib.import_module(module), attribute)
    return found


plugin_errors: dict[str, str] = {}
_plugins_loaded = False


def load_plugins() -> None:
    """Load out-of-tree backends from the entry-point group ``fastlayers.backends``, once per process.

    Each entry point is a function ``register(add)``; it calls ``add(layer, backend, before=None)``. One that
    fails is recorded in :data:`plugin_errors` (``fastlayers doctor`` shows it) and logged; the rest go on.
    """
    global _plugins_loaded
    if _plugins_loaded:
        return
    _plugins_loaded = True
    from importlib.metadata import entry_points

    for entry in entry_points(group="fastlayers.backends"):
        try:
            entry.load()(lambda layer, backend, before=None: _builtin_registry(layer).add(backend, before=before))
        except Exception as error:  # a foreign plug-in must not break the library; the reason is kept
            plugin_errors[entry.name] = f"{type(error).__name__}: {error}"
            log.warning("plug-in %s of group fastlayers.backends failed: %s", entry.name, plugin_errors[entry.name])
