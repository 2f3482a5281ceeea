"""The plan of a patch: pure, changes nothing. ``dry_run=True`` returns its report."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fastlayers.errors import ArgumentError, PatchError, dtype_name
from fastlayers.patching.classes import FastModule, original_class
from fastlayers.patching.comparison import own_forward
from fastlayers.patching.families import BLOCKS, RULES
from fastlayers.patching.guard import code_of, replaced_code
from fastlayers.patching.hashes import KNOWN
from fastlayers.patching.matching import Rule, is_known, qualified, verify, why_not
from fastlayers.patching.report import ALREADY, PatchEntry

KINDS = ("attention", "moe", "linear", "norm", "mlp")
Selector = str | type | Callable[[str, nn.Module], bool]


@dataclass(frozen=True)
class Options:
    """The arguments of ``patch``, checked. ``kinds``: kind -> backend, or ``None`` where it is not asked for."""

    kinds: dict[str, str | None]
    fuse_projections: bool
    cache: str
    include: tuple[Selector, ...] | None
    exclude: tuple[Selector, ...]
    verify: str | bool
    strict: bool

    def wanted(self, name: str, module: nn.Module) -> bool:
        """Return whether include and exclude let this module be patched."""
        if self.include is not None and not any(_selects(s, name, module) for s in self.include):
            return False
        return not any(_selects(s, name, module) for s in self.exclude)


@dataclass(frozen=True)
class Step:
    """One module and what is to happen to it. ``reason`` set: nothing. ``done``: it was patched before."""

    name: str
    module: nn.Module
    kind: str
    rule: Rule | None
    backend: str
    reason: str = ""
    done: bool = False

    @property
    def applies(self) -> bool:
        """Whether there is something to do."""
        return not self.reason and not self.done

    def entry(self, implementation: str = "", moved: int = 0, remark: str = "") -> PatchEntry:
        """Return the report's entry."""
        cls = original_class(self.module).__name__
        if self.reason:
            return PatchEntry(self.name, self.kind, cls, "skipped", "", self.reason)
        remark = ALREADY if self.done else remark
        return PatchEntry(self.name, self.kind, cls, "swapped", implementation, remark, moved)


def selectors(argument: str, given: Any) -> tuple[Selector, ...] | None:
    """Return ``include`` or ``exclude`` as a tuple."""
    if given is None:
        return None
    items = tuple(given) if isinstance(given, Iterable) and not isinstance(given, (str, type)) else (given,)
    for item in items:
        if not isinstance(item, (str, type)) and not callable(item):
            raise ArgumentError("patch", argument, repr(item), "globs on module names, classes, or predicates")
    return items


def _selects(selector: Selector, name: str, module: nn.Module) -> bool:
    if isinstance(selector, str):
        return fnmatch.fnmatchcase(name, selector)
    if isinstance(selector, type):
        return issubclass(original_class(module), selector)
    return bool(selector(name, module))


def _check_globs(model: nn.Module, options: Options) -> None:
    """Raise for a glob that no module's name matches: it would silently select nothing."""
    names = [name for name, _ in model.named_modules()]
    for argument, chosen in (("include", options.include), ("exclude", options.exclude)):
        for glob in chosen or ():
            if isinstance(glob, str) and not fnmatch.filter(names, glob):
                accepted = "a glob that matches a module's name, as in '*.self_attn'; kinds are left out by norm=False"
                raise ArgumentError("patch", argument, repr(glob), accepted)


def _kind_of_unknown(cls: type) -> str | None:
    """Return the kind that an unknown class seems to be, by a base or its name: it is worth a word in the report."""
    name = cls.__name__
    for base in cls.__mro__[1:]:
        if (rule := RULES.get(qualified(base))) is not None:
            return rule.kind
    for ending, kind in (
        ("RMSNorm", "norm"), ("Attention", "attention"), ("Experts", "moe"), ("Router", "moe"), ("MLP", "mlp"),
        ("FP8Linear", "linear"),
    ):  # fmt: skip
        if name.endswith(ending):
            return kind
    return None


def is_patched(module: nn.Module) -> bool:
    """Return whether ``module`` runs our code already."""
    return isinstance(module, FastModule) and "_fl_hits" in module.__dict__


def make_plan(model: nn.Module, options: Options) -> list[Step]:
    """Decide about every module of ``model``; nothing is changed."""
    _check_globs(model, options)
    _check_quantization(model)
    steps, verified = [], {}  # type: ignore[var-annotated]
    # MoE blocks whose forward was bound to other kernels (MXFP4): they call neither router nor experts.
    bound = {
        id(child)
        for block in model.modules()
        if not own_forward(block) and "_hf_hook" not in block.__dict__
        for child in block.children()
    }
    linear = next((m.weight for m in model.modules() if type(m) is nn.Linear and "weight" in m._parameters), None)
    rotary = next((m for name, m in model.named_modules() if name.endswith("rotary_emb")), None)
    for name, module in model.named_modules():
        cls = original_class(module)
        rule = RULES.get(qualified(cls))
        kind = rule.kind if rule is not None else _kind_of_unknown(cls)
        if kind is None or qualified(cls) in BLOCKS or options.kinds[kind] is None:
            continue
        backend = str(options.kinds[kind])
        if is_patched(module):
            _check_same(name, module, kind, backend, options)
            steps.append(Step(name, module, kind, rule, backend, done=True))
            continue
        reason = _reason(name, module, rule, options, rotary, verified)
        if not reason and kind == "moe":
            reason = _other_dtype(module, linear)
        if not reason and kind == "moe" and id(module) in bound:
            reason = "instance-forward: the block's forward was replaced on the instance"
        steps.append(Step(name, module, kind, rule, backend, reason))
    return steps


def _check_same(name: str, module: Any, kind: str, backend: str, options: Options) -> None:
    """Raise if another backend is asked for by name than a module was patched with: it would not run."""
    if backend not in ("auto", module._fl_backend) and options.wanted(name, module):
        accepted = (
            f'"auto", or {module._fl_backend!r}, with which {name} is patched already: call fastlayers.unpatch first'
        )
        raise ArgumentError("patch", kind, repr(backend), accepted)


def _reason(
    name: str, module: nn.Module, rule: Rule | None, options: Options, rotary: Any, verified: dict[Any, str]
) -> str:
    if not options.wanted(name, module):
        return "user-excluded"
    if rule is None:
        return "unknown-class"
    reason = why_not(module, rule) or _codes(module, rule)
    if reason is not None:
        return reason
    cls: Any = original_class(module)
    if is_known(cls, rule.relies, KNOWN):
        return ""
    # Whatever somebody put in place of transformers' code would not be called any more.
    replaced = replaced_code(code_of(cls, rule.relies))
    if options.verify == "layer":
        # One layer of each class and backend answers for all.
        key = (type(module), options.kinds[rule.kind])
        if key not in verified:
            backend = str(options.kinds[rule.kind])
            if rule.verify is not None:
                wrong = rule.verify(module, backend)
            else:
                wrong = verify(module, rule, backend, options.fuse_projections, rotary)
            verified[key] = "" if wrong is None else f"verify-failed: {wrong}"
        return verified[key] or (f"replaced-code: {replaced}" if replaced else "")
    return f"unknown-forward: {replaced}" if replaced else "unknown-forward"


def _other_dtype(module: Any, linear: torch.Tensor | None) -> str:
    """Return a reason if experts were loaded as another dtype than the model's linears: no input would fit them.

    Or if a router is of a dtype that no backend takes.
    """
    if getattr(module._parameters.get("weight"), "dtype", None) == torch.float64:
        return "dtype: float64"
    weight = getattr(module, "down_proj", None)
    if not isinstance(weight, torch.Tensor) or linear is None or 1 in (weight.element_size(), linear.element_size()):
        return ""
    if weight.dtype == linear.dtype:
        return ""
    return f"dtype: experts of {dtype_name(weight.dtype)} in a model of {dtype_name(linear.dtype)}"


def _codes(module: nn.Module, rule: Rule) -> str | None:
    """Return a reason if a linear that the rule reads holds integers: codes, whose scales we know nothing of."""
    own = [(name, getattr(module, name, None)) for name in rule.linears]
    for name, child in [*own, ("", module)]:
        weight = getattr(child, "weight", None)
        if isinstance(weight, torch.Tensor) and not weight.is_floating_point():
            return f"quantized({dtype_name(weight.dtype)})" + (f": {name}" if name else "")
    return None


def _check_quantization(model: nn.Module) -> None:
    """Raise for a ``quantization_config`` that transformers does not know: it loaded the codes as weights."""
    for module in model.modules():
        config: Any = getattr(getattr(module, "config", None), "quantization_config", None)
        method = config.get("quant_method") if isinstance(config, Mapping) else None
        if method is not None and not _known_to_transformers(str(method)):
            raise PatchError(
                f"patch: quantization_config says quant_method {str(method)!r}, which transformers does not know: it "
                "loaded the codes as if they were weights. fastlayers_models.AutoModel reads int8 checkpoints, and "
                "`fastlayers convert SRC DST --format bf16` multiplies them out"
            )


def _known_to_transformers(method: str) -> bool:
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    # "bitsandbytes" stands there as "bitsandbytes_4bit" and "…_8bit".
    return any(name == method or name.startswith(f"{method}_") for name in AUTO_QUANTIZATION_CONFIG_MAPPING)


__all__ = ["KINDS", "Options", "Step", "is_patched", "make_plan", "selectors"]
