"""Carry a plan out, undone step by step if anything fails, and undo a patch."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, cast

from torch import nn

from fastlayers.errors import ArgumentError, PatchError, check_choice, check_plain, describe
from fastlayers.patching import capturable, decode
from fastlayers.patching.bf12 import check_bf12
from fastlayers.patching.classes import swap, unswap
from fastlayers.patching.families import MODEL_TYPES
from fastlayers.patching.mla import FastMLA
from fastlayers.patching.packing import PackedModule, why_apart
from fastlayers.patching.plan import KINDS, Options, Step, is_patched, make_plan, selectors
from fastlayers.patching.report import PatchEntry, PatchReport

# Entry points of continuous batching: Hugging Face's manager sizes its pages wrongly for MLA and returns nothing.
_BATCHING = ("generate_batch", "init_continuous_batching")


def patch(
    model: nn.Module,
    *,
    attention: str | bool = "auto",
    moe: str | bool = "auto",
    linear: str | bool = "auto",
    norm: str | bool = "auto",
    mlp: str | bool = "auto",
    fuse_projections: bool = True,
    cache: str = "adopt",
    cuda_graph: bool = False,
    include: Any = None,
    exclude: Any = None,
    backend: str = "auto",
    verify: str | bool = "layer",
    strict: bool = False,
    dry_run: bool = False,
    fp8_math: bool = False,
    overlap: bool | None = None,
    bf12: bool = False,
) -> PatchReport:
    """Make a Hugging Face model run on fastlayers, in place; :func:`unpatch` undoes it.

    Parameters
    ----------
    model : nn.Module
        DeepSeek-V2 or V3, Qwen2, Qwen2-MoE, Qwen3, Qwen3-MoE, GPT-OSS, Llama or Llama 4's language model of
        transformers 5.15 or newer, in fp32, bf16, fp16 or FP8 blocks; wrapped (PEFT, ``torch.compile``, accelerate)
        or not.
    attention, moe, linear, norm, mlp : str or bool
        ``"auto"``, the name of a backend of that kind, or ``False``: leave this kind alone. ``moe`` takes routers
        and experts together, so a name must exist for both.
    fuse_projections : bool
        Put weights that read the same input (q_a and kv_a, q, k and v, gate and up) into one storage.
    cache : str
        ``"adopt"``: empty stock cache layers become latent ones on first use. ``"hf"``: caches stay as they are.
    cuda_graph : bool
        Capture the decode steps of ``generate`` (greedy, sampling) in CUDA graphs, one per batch and cache capacity.
    include, exclude : glob, class, predicate ``(name, module) -> bool``, or several
        Which modules may be replaced.
    backend : str
        What ``"auto"`` of every kind means.
    verify : str or bool
        ``"layer"``: a class of unknown code is compared with ours, and left alone if they differ; ``False``: always.
    strict : bool
        Raise if anything of a requested kind is skipped, except for what ``include`` and ``exclude`` leave out.
    dry_run : bool
        Only report what would be done.
    fp8_math : bool
        ``False``. It is of FP8 caches, and a patched model's hold its dtype; ``fastlayers_models`` has both.
    overlap : bool, optional
        Launch the next greedy step before it is asked for, and again if it is another then. Default: ``cuda_graph``.
    bf12 : bool
        With ``cuda_graph``: captured steps of one row read large bfloat16 linears, the head's too, in 12 bits a weight,
        without loss; the copies take 0.75 of their memory (:func:`fastlayers.store_bf12`).

    Returns
    -------
    PatchReport

    Raises
    ------
    PatchError
        Nothing can be replaced, or ``strict`` and something is skipped. The model is as it was.
    NoBackendError, UnknownNameError
        A backend that was named cannot run, or does not exist; the model is as it was.
    ArgumentError
        An argument that is not accepted; ``cuda_graph`` for a model that is not on a CUDA device or does not generate;
        a backend by name for modules that are patched with another one already.

    Examples
    --------
    >>> import fastlayers as fl
    >>> from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
    >>> config = DeepseekV3Config(
    ...     vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    ...     num_key_value_heads=2, first_k_dense_replace=1)
    >>> model = DeepseekV3ForCausalLM(config).eval()
    >>> report = fl.patch(model)
    >>> sorted({entry.kind for entry in report.replaced})
    ['attention', 'mlp', 'norm']
    >>> fl.unpatch(model)
    """
    options = _options(locals())
    if not isinstance(model, nn.Module):
        raise ArgumentError("patch", "model", type(model).__name__, "an nn.Module")
    attach = partial(decode.attach, overlapping=overlap is not False, bf12=bf12) if cuda_graph else None
    return _patch(_unwrap(model), options, attach, dry_run)


def _options(given: Mapping[str, Any]) -> Options:
    """Return the arguments of :func:`patch`, checked as far as they can be without a model."""
    check_choice("patch", "cache", given["cache"], ("adopt", "hf"))
    check_choice("patch", "verify", given["verify"], ("layer", False))
    flags = ("fuse_projections", "cuda_graph", "strict", "dry_run", "bf12")
    check_plain("patch", "bool", **{name: given[name] for name in flags})
    if given["overlap"] is not None:
        check_plain("patch", "bool", overlap=given["overlap"])
    check_plain("patch", "str", backend=given["backend"])
    if given["overlap"] and not given["cuda_graph"]:
        accepted = "cuda_graph=True beside it: steps that are launched from Python cannot run ahead of it"
        raise ArgumentError("patch", "overlap", True, accepted)
    if given["bf12"] and not given["cuda_graph"]:
        raise ArgumentError("patch", "bf12", True, "cuda_graph=True beside it: captured steps read the copies")
    if given["fp8_math"] is not False:
        accepted = (
            "False: patch has no fp8_math, since a patched model's caches hold its dtype; load the checkpoint with "
            "fastlayers_models.AutoModel.from_pretrained(path, kv_dtype=torch.float8_e4m3fn, fp8_math=True)"
        )
        raise ArgumentError("patch", "fp8_math", describe(given["fp8_math"]), accepted)
    return Options(
        _kinds(given, given["backend"]), given["fuse_projections"], given["cache"],
        selectors("include", given["include"]), selectors("exclude", given["exclude"]) or (), given["verify"],
        given["strict"],
    )  # fmt: skip


def check_options(layer: str, given: object) -> None:
    """Raise :class:`ArgumentError` unless ``given`` maps arguments of :func:`patch` (but ``model``) to good values."""
    known = {name: each.default for name, each in inspect.signature(patch).parameters.items() if name != "model"}
    if not isinstance(given, Mapping):
        raise ArgumentError(layer, "patch", repr(given), "a dict of arguments of fastlayers.patch")
    if unknown := [name for name in given if name not in known]:
        raise ArgumentError(
            layer, "patch", f"with {unknown[0]!r}", f"arguments of fastlayers.patch: {', '.join(known)}"
        )
    _options(known | dict(given))


def _patch(model: nn.Module, options: Options, attach: partial[Any] | None, dry_run: bool) -> PatchReport:
    if attach is not None:
        capturable.check_capturable(_roots(model))
        if attach.keywords["bf12"]:
            check_bf12(_roots(model))
    steps = make_plan(model, options)
    _check(steps, options)
    if dry_run:
        return PatchReport(tuple(_planned(steps, options)), dry_run=True)
    return _apply_or_undo(model, steps, options, attach)


def _planned(steps: list[Step], options: Options) -> Iterator[PatchEntry]:
    """Yield what a patch's entries would be, without what would run there and the bytes."""
    for step in steps:
        yield step.entry()
        mixin = step.rule.mixin if step.applies and step.rule is not None else None
        if options.fuse_projections and mixin is not None and issubclass(mixin, PackedModule):
            names = mixin._fl_parts(cast(Any, step.module))
            if not why_apart([getattr(step.module, name) for name in names]):
                yield _packed_entry(step, names, 0)


def _watch(report: PatchReport, model: nn.Module, steps: list[Step]) -> None:
    """Let the report count what the patched modules run, replays of graphs included."""
    drivers = [driver for root in _roots(model) if (driver := decode.driver_of(root)) is not None]
    replays = {id(m): (driver.replays, driver.prefills) for driver in drivers for m in driver.root.modules()}
    for step in steps:
        if not step.reason:
            fast: Any = step.module
            report.watch(step.name, fast._fl_hits, fast._fl_falls, replays.get(id(fast), ()), fast._fl_reasons)
            if _packed(fast):
                report.watch_product(fast)
    for driver in drivers:
        report.watch("cuda_graph", driver.replays, driver.falls)


def _kinds(asked: Mapping[str, Any], backend: str) -> dict[str, str | None]:
    """Return each kind's backend; ``None``: leave the kind alone."""
    kinds: dict[str, str | None] = {}
    for kind in KINDS:
        value = asked[kind]
        if not isinstance(value, (str, bool)):
            raise ArgumentError("patch", kind, repr(value), '"auto", the name of a backend, or False')
        kinds[kind] = None if value is False else (backend if value in ("auto", True) else str(value))
    return kinds


def _apply_or_undo(model: nn.Module, steps: list[Step], options: Options, attach: partial[Any] | None) -> PatchReport:
    drivers = []
    with ExitStack() as undo:
        entries = _apply(model, steps, options, undo)
        if attach is not None:
            names = {id(module): name for name, module in model.named_modules()}
            for root in (root for root in _roots(model) if hasattr(root, "_sample")):
                drivers.append(attach(root, undo))
                entries.append(capturable.captured(names[id(root)], root))
        report = PatchReport(tuple(entries))
        _watch(report, model, steps)
        undo.pop_all()
    for driver in drivers:
        driver.drop_others()
    return report


def _unwrap(model: nn.Module) -> nn.Module:
    """Return the module behind ``torch.compile``; wrappers with ordinary children are simply walked through."""
    inner = model.__dict__.get("_modules", {}).get("_orig_mod")
    return inner if inner is not None else model


def _check(steps: list[Step], options: Options) -> None:
    if not any(not step.reason for step in steps):
        groups: dict[tuple[str, str], list[str]] = {}  # all layers of a model have the same few reasons
        for step in steps:
            groups.setdefault((type(step.module).__name__, step.reason), []).append(step.name)
        listed = "".join(
            f"\n  {kind}: {reason}, {names[0]}" + f" and {len(names) - 1} more" * (len(names) > 1)
            for (kind, reason), names in groups.items()
        )
        raise PatchError(
            f"patch: nothing can be replaced in this model; accepted: {', '.join(MODEL_TYPES)}"
            f"{listed or '; here is no module of a known kind'}"
        )
    wrong = [step for step in steps if step.reason and step.reason != "user-excluded"]
    if options.strict and wrong:
        listed = "".join(f"\n  {s.name} ({type(s.module).__name__}): {s.reason}" for s in wrong)
        raise PatchError(f"patch: strict, but {len(wrong)} modules would be skipped{listed}")


def _apply(model: nn.Module, steps: list[Step], options: Options, undo: ExitStack) -> list[PatchEntry]:
    entries = []
    # FP8 linears first: what attention copies from them is read through their parameters either way.
    for step in steps:
        if not step.applies:
            entries.append(step.entry(_implementation(step.module) if step.done else ""))
            continue
        assert step.rule is not None and step.rule.mixin is not None
        undo.callback(unswap, step.module)
        fast: Any = step.module
        if issubclass(step.rule.mixin, FastMLA):
            fast._fl_adopt = options.cache == "adopt"
        moved = swap(step.module, step.rule.mixin, step.backend, options.fuse_projections)
        entries.append(step.entry(_implementation(step.module), 0 if _packed(step.module) else moved, _apart(fast)))
        if _packed(step.module):
            entries.append(_packed_entry(step, fast._fl_parts(), moved))
    for root in (root for root in _roots(model) if any(isinstance(module, FastMLA) for module in root.modules())):
        for name in _BATCHING:
            if hasattr(root, name) and name not in root.__dict__:
                undo.callback(root.__dict__.pop, name, None)
                root.__dict__[name] = NoContinuousBatching(root, name)
    return entries


def _implementation(module: Any) -> str:
    found: str = module._fl_implementation()
    return found


def _packed(module: nn.Module) -> bool:
    return isinstance(module, PackedModule) and bool(module._fl_together())


def _apart(module: Any) -> str:
    """Return a remark if weights that could share a buffer stay where they are, for somebody else's sake."""
    why = module._fl_packed.apart if isinstance(module, PackedModule) else ""
    return f"{'+'.join(module._fl_parts())} apart: {why}" if why.startswith(("alias", "tied", "weights")) else ""


def _packed_entry(step: Step, names: tuple[str, ...], moved: int) -> PatchEntry:
    return PatchEntry(f"{step.name}.{'+'.join(names)}", step.kind, "Linear", "packed", "one product", "", moved)


def _roots(model: nn.Module) -> list[Any]:
    """Return the outermost Hugging Face models inside ``model``."""
    from transformers import PreTrainedModel

    found: list[Any] = []
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and not any(module in set(root.modules()) for root in found):
            found.append(module)
    return found


class NoContinuousBatching:
    """Stands in for an entry point of continuous batching while the model's latent attention is patched.

    Holds the model weakly: an attribute of the model that held it would keep it alive.
    """

    def __init__(self, root: Any, name: str) -> None:
        self.root, self.name = weakref.ref(root), name

    def __reduce__(self) -> tuple[Any, ...]:
        return NoContinuousBatching.__new__, (NoContinuousBatching,), (self.root(), self.name)

    def __setstate__(self, state: tuple[Any, str]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        root: Any = self.root()
        if not any(isinstance(module, FastMLA) for module in root.modules()):
            return getattr(type(root), self.name)(root, *args, **kwargs)
        raise PatchError(
            f"{self.name}: continuous batching is not supported for multi-head latent attention. transformers sizes "
            "its pages for other heads and returns empty outputs; use generate(), or fastlayers' own models for serving"
        )


def unpatch(model: nn.Module) -> None:
    """Undo :func:`patch`: classes, weights' storages, implementations. Logits are bit-identical to before.

    Parameters
    ----------
    model : nn.Module
        A patched model or a copy of one. A model that is not patched stays as it is.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError("unpatch", "model", type(model).__name__, "an nn.Module")
    _undo(_unwrap(model))


def _undo(model: nn.Module, kept: Mapping[int, Any] = MappingProxyType({})) -> None:
    """Undo what was patched; ``kept``: what stays, by :func:`_known`, drivers with what they had chosen."""
    for root in _roots(model):
        driver = decode.driver_of(root)
        if driver is not None and id(driver) in kept:
            driver.choose(*kept[id(driver)])
            driver.drop_others()
        elif driver is not None:
            driver.detach()
        for name in _BATCHING:
            found = root.__dict__.get(name)
            if isinstance(found, NoContinuousBatching) and id(found) not in kept:
                del root.__dict__[name]
    for module in list(model.modules()):
        if is_patched(module) and id(module) not in kept:
            unswap(module)


def _known(model: nn.Module) -> dict[int, Any]:
    """Return the number of each module, driver and stand-in that is patched or ours already; what drivers chose."""
    found: list[Any] = [module for module in model.modules() if is_patched(module)]
    for root in _roots(model):
        found += [decode.driver_of(root), *(root.__dict__.get(name) for name in _BATCHING)]
    chosen = {id(each): each.chosen for each in found if isinstance(each, decode.DecodeDriver)}
    return {id(each): chosen.get(id(each)) for each in found if each is not None}


@contextmanager
def patched(model: nn.Module, **options: Any) -> Iterator[PatchReport]:
    """Patch ``model`` inside a ``with`` block; what was patched before stays patched after it, and nothing else.

    Takes the arguments of :func:`patch` and gives its report.
    """
    before = _known(_unwrap(model)) if isinstance(model, nn.Module) else {}
    report = patch(model, **options)
    try:
        yield report
    finally:
        if not report.dry_run:
            _undo(_unwrap(model), before)
