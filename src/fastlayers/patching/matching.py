"""Whether a module is what we think it is: class, structure, hooks, wrappers, and the code of its ``forward``."""

from __future__ import annotations

import ast
import copy
import functools
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.activations import SiLUActivation

from fastlayers.patching.classes import FastModule, fast_class, new_counters, original_class
from fastlayers.patching.comparison import own_forward
from fastlayers.patching.guard import code_of, replaced_code, untouched

SILU = (SiLUActivation, nn.SiLU)
Outputs = Callable[[], Iterable[torch.Tensor]]


@dataclass(frozen=True)
class Rule:
    """How one Hugging Face class is replaced.

    Parameters
    ----------
    kind : str
    mixin : type or None
        What goes in front of the class; ``None``: always left alone.
    why_not : callable
        ``module -> reason or None``: structure, shapes, formats.
    linears : tuple[str, ...]
        Children that must be plain linears.
    verify : callable, optional
        ``(module, backend) -> what differed, or None`` in place of :func:`verify`, where calls have another form.
    """

    kind: str
    mixin: type[FastModule] | None
    why_not: Callable[[Any], str | None]
    linears: tuple[str, ...] = ()
    verify: Callable[[Any, str], str | None] | None = None

    @property
    def relies(self) -> tuple[str, ...]:
        """What we replace or rely on; its code is fingerprinted."""
        return ("forward",) if self.mixin is None else self.mixin._fl_relies


def attributes_fit(module: Any, wanted: tuple[str, ...]) -> str | None:
    """Return a reason if an attribute is missing."""
    missing = [name for name in wanted if not hasattr(module, name)]
    return f"unknown-class: no attribute {', '.join(missing)}" if missing else None


def silu_gate(module: Any) -> str | None:
    """Return a reason unless ``module`` is a SwiGLU MLP with SiLU and without biases in gate and up."""
    return silu(module) or attributes_fit(module, ("gate_proj", "up_proj", "down_proj"))


def silu(module: Any, name: str = "act_fn") -> str | None:
    """Return a reason unless the activation, ``module``'s ``name``, is exactly SiLU as torch or transformers has it."""
    activation = getattr(module, name)
    if type(activation) not in SILU:
        return f"custom-gate: activation {type(activation).__name__}"
    if not untouched(activation) or replaced_code(code_of(type(activation), ("forward",))):
        return "custom-gate: the activation was hooked or replaced"
    return None


def qualified(cls: type) -> str:
    """Return the name by which rules are found."""
    return f"{cls.__module__}.{cls.__qualname__}"


def setting(config: Any, stored: str, name: str) -> Any:
    """Return ``config.name``, from where transformers stores it: its configurations' attributes take microseconds."""
    values = {} if torch.compiler.is_dynamo_compiling() else object.__getattribute__(config, "__dict__")
    return values[stored] if stored in values else getattr(config, name, None)


def foreign_hooks(module: nn.Module) -> bool:
    """Return whether somebody hooked ``module``; Hugging Face's recorders of outputs do not count."""
    if not (module._forward_pre_hooks or module._forward_hooks or module._backward_hooks):
        return False
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values(), *module._backward_hooks.values()]
    return any(getattr(hook, "__module__", "") != "transformers.utils.output_capturing" for hook in hooks)


def _placed_by_accelerate(module: nn.Module) -> bool:
    """Return whether accelerate's hook that moves inputs to the module's device is all that wraps ``forward``."""
    hook, wrapped = module.__dict__.get("_hf_hook"), module.__dict__.get("_old_forward")
    return type(hook).__name__ == "AlignDevicesHook" and getattr(wrapped, "__self__", None) is module


def bare(module: Any) -> bool:
    """Return whether calling this patched module runs our ``forward`` and nothing of anybody else's.

    Then a step may do its work without the call.
    """
    if "_fl_origin" not in type(module).__dict__ or foreign_hooks(module):
        return False
    return "forward" not in module.__dict__ or own_forward(module) or _placed_by_accelerate(module)


def why_not(module: nn.Module, rule: Rule) -> str | None:
    """Return the reason code (and words) why ``module`` must be left alone, or ``None``."""
    children = [(name, getattr(module, name, None)) for name in rule.linears]
    involved = [module, *(child for _, child in children if child is not None)]
    if not all(own_forward(part) or _placed_by_accelerate(part) for part in involved):
        return "instance-forward: forward was replaced on the instance"
    if any(getattr(part.__dict__.get("_hf_hook"), "offload", False) for part in involved):
        return "hooked: accelerate keeps the weights elsewhere between calls"
    if any(foreign_hooks(part) for part in involved):
        return "hooked: forward hooks are registered"
    for name, child in children:
        if child is not None and (reason := _linear_reason(name, child)) is not None:
            return reason
    for parameter in module.parameters(recurse=False):
        if type(parameter) is not nn.Parameter and hasattr(parameter, "placements"):
            return "dtensor: sharded parameters"
        if parameter.device.type not in ("cpu", "cuda", "meta"):
            return f"device: {parameter.device.type}"
    return rule.why_not(module)


def _linear_reason(name: str, child: Any) -> str | None:
    cls = original_class(child)
    if cls is nn.Linear or cls.__name__ == "FP8Linear":
        return None
    if hasattr(child, "base_layer") or "lora" in cls.__name__.lower():
        return "wrapped-linear(LoRA): " + name
    if isinstance(child, nn.Linear) or hasattr(child, "qweight"):  # the latter: AWQ's and GPTQ's linears
        return f"quantized({cls.__name__}): {name}"
    return f"wrapped-linear({cls.__name__}): {name}"


def fingerprint(cls: type, names: tuple[str, ...]) -> str | None:
    """Return a hash of the code of methods, and of functions of their module, that ignores comments and layout.

    ``None`` without source. Names that there are not do not count.
    """
    return _hash(tuple(inspect.unwrap(function) for _, _, function in code_of(cls, names)))


def is_known(cls: type, names: tuple[str, ...], known: Mapping[str, tuple[str, ...]]) -> bool:
    """Return whether this code is transformers' own, in a version of ``known``."""
    own = not replaced_code(code_of(cls, names))
    return own and fingerprint(cls, names) in known.get(qualified(cls), ())


@functools.cache
def _hash(functions: tuple[Callable[..., Any], ...]) -> str | None:
    parts = []
    for function in functions:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        except (OSError, TypeError, SyntaxError):
            return None
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                node.decorator_list, node.returns = [], None
                for argument in (*node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg):
                    if argument is not None:
                        argument.annotation = None
                first = node.body[0]
                if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                    node.body = node.body[1:] or [ast.Pass()]
        parts.append(ast.unparse(tree))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


# Largest relative error of a layer against its original: the same operations in another order.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def apart(dtype: torch.dtype, wanted: Outputs, given: Outputs) -> str | None:
    """Return what differs between the tensors of two calls of a layer of this dtype, stock's and ours, or is raised."""
    try:
        pairs = list(zip(wanted(), given(), strict=True))
    except Exception as error:  # whatever a changed forward raises: the layer is left alone, and says why
        return f"{type(error).__name__}: {error}"
    for w, g in pairs:
        size = float((g.double() - w.double()).norm() / w.double().norm().clamp_min(1e-30))
        if not size <= TOLERANCE.get(dtype, 3e-2):
            return f"relative error {size:.1e} in {dtype}"
    return None


@torch.no_grad()
def verify(module: nn.Module, rule: Rule, backend: str, fuse: bool, rotary: Any) -> str | None:
    """Compare the original with the fast class on random input, in fp32 and in the model's dtype.

    Works on copies. Returns ``None`` if they agree, else what differed.
    """
    weight = next(module.parameters())
    if rule.mixin is None or weight.device.type == "meta" or weight.element_size() == 1:
        return None
    for dtype in dict.fromkeys((torch.float32, weight.dtype)):
        stock = copy.deepcopy(module).to(dtype).eval()
        fast: Any = copy.deepcopy(stock)
        new_counters(fast)
        fast._fl_backend, fast._fl_fuse, fast._fl_adopt = backend, fuse, True
        mixin: Any = rule.mixin
        original: Any = type(fast)
        fast.__class__ = fast_class(original, mixin)
        fast._fl_choose()  # a backend that was named raises where it cannot run
        fast._fl_refresh()
        # Code that somebody replaced is compared as well: what differs is the better reason.
        fast._fl_watch(trusted=True)
        eager = getattr(getattr(stock, "config", None), "_attn_implementation", None) == "eager"
        both = (partial(_run, layer, rule.kind, dtype, rotary, eager) for layer in (stock, fast))
        if wrong := apart(dtype, *both):
            return wrong
        if int(fast._fl_hits) == 0:
            return "the fast path did not run"
    return None


def _run(layer: Any, kind: str, dtype: torch.dtype, rotary: Any, eager: bool) -> list[torch.Tensor]:
    weight = next(layer.parameters())
    generator = torch.Generator().manual_seed(0)
    width = _input_width(layer)
    x = torch.randn(2, 12, width, generator=generator).to(weight.device, dtype)
    if kind == "norm" or kind == "mlp":
        return [layer(x)]
    if kind == "moe":
        found = layer(x.view(-1, width))
        if len(found) == 2:
            return list(found)
        logits, weights, ids = found
        return [logits, torch.zeros_like(logits).scatter(1, ids, weights.to(logits.dtype))]
    from transformers.cache_utils import DynamicCache

    # The layer may be any of the model; the cache wants indices from 0.
    layer.layer_idx = 0
    cache, outputs = DynamicCache(), []
    for first, last in ((0, 8), (8, 9), (9, 12)):
        position = torch.arange(first, last, device=x.device).expand(2, -1)
        mask: torch.Tensor | None = None
        if (first or eager) and last - first > 1:
            seen = torch.arange(last, device=x.device)[None, :] <= position[0][:, None]
            mask = seen.expand(2, 1, -1, -1)
            if eager:
                mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
        table = rotary(x[:, first:last], position_ids=position)
        outputs.append(
            layer(
                hidden_states=x[:, first:last], position_embeddings=table, attention_mask=mask, past_key_values=cache
            )[0]
        )
    return outputs


def _input_width(layer: Any) -> int:
    if isinstance(getattr(layer, "q_proj", None), nn.Linear):
        return int(layer.q_proj.in_features)
    for name in ("hidden_dim", "hidden_size"):
        if isinstance(getattr(layer, name, None), int):
            return int(getattr(layer, name))
    return int(next(layer.parameters()).shape[-1])
