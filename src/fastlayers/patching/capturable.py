"""Whether the steps of a patched model can be captured, as it is now, and why not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from fastlayers.errors import ArgumentError
from fastlayers.patching.classes import FastModule
from fastlayers.patching.decoder import FastDecoderLayer, decoder_of
from fastlayers.patching.gqa import FastGQA
from fastlayers.patching.matching import foreign_hooks
from fastlayers.patching.mla import FastMLA
from fastlayers.patching.report import PatchEntry


def attention_layers(root: Any) -> list[Any]:
    """Return the attention layers of a model's decoder, ``None`` for those without; none of what is no decoder."""
    return [getattr(layer, "self_attn", None) for layer in getattr(decoder_of(root), "layers", ())]


def every_module(root: nn.Module) -> list[nn.Module]:
    """Return a module and all below it, each once, breadth first.

    ``nn.Module.modules`` resumes a generator a level for each of them: milliseconds for a large model, here tenths.
    """
    found = {root: None}
    for module in (queue := [root]):  # grows meanwhile
        for child in module._modules.values():
            if child is not None and child not in found:
                found[child] = None
                queue.append(child)
    return queue


def check_capturable(roots: list[Any]) -> None:
    """Raise unless these are models on CUDA devices that generate: others have no decode steps to capture.

    Raises
    ------
    ArgumentError
    """
    wrong = ""
    for root in roots:
        device = next(root.parameters()).device
        if device.type != "cuda":
            wrong = f"the model is on {device}"
    if not any(hasattr(root, "_sample") for root in roots):
        wrong = "the model does not generate"
    if wrong:
        raise ArgumentError("patch", "cuda_graph", f"True, but {wrong}", "a model on a CUDA device that generates")


def why_not_root(root: Any) -> str:
    """Return why the decode steps of this model cannot be captured as it is now, or ""."""
    if not hasattr(root, "_sample") or root.config.is_encoder_decoder:
        return f"{type(root).__name__} is not a decoder that generates"
    if getattr(root.config, "vision_config", None) is not None:
        return "images are not part of a step"
    layers = attention_layers(root)
    for index, layer in enumerate(layers):
        if not isinstance(layer, (FastGQA, FastMLA)):
            return f"attention of layer {index} is not patched ({type(layer).__name__})"
        if layer.layer_idx != index:
            return f"attention of layer {index} has layer_idx {layer.layer_idx}"
        if why := layer._fl_unpaged():
            return f"attention of layer {index}: {why}"
    if not layers:
        return f"{type(root).__name__} has no decoder layers"
    modules = every_module(root)
    for module in modules:
        if foreign_hooks(module):
            return f"a hook is registered on {_name(root, module) or 'the model'}, which a replay would not call"
        if "base_layer" in module._modules:
            return f"{_name(root, module)} is an adapter, which may be switched between calls"
    if why := why_not_rotary(getattr(decoder_of(root), "rotary_emb", None), layers):
        return why
    if len({held.device for module in modules for held in module._parameters.values() if held is not None}) != 1:
        return "its weights are on several devices"
    return ""


def _name(root: nn.Module, module: nn.Module) -> str:
    return next(name for name, each in root.named_modules() if each is module)


def fingerprint(root: Any) -> tuple[Any, ...]:
    """Return what a graph holds addresses of, or what its launches were chosen by."""
    modules = every_module(root)
    places = [
        held.data_ptr()
        for module in modules
        for table in (module._parameters, module._buffers)
        for held in table.values()
        if held is not None
    ]
    # What a module's guard found is captured with it: the original's code, or ours.
    guards = [module._fl_guard.why(module) for module in modules if isinstance(module, FastModule)]
    edits = [layer._fl_edits() for layer in attention_layers(root) if isinstance(layer, FastMLA)]
    # By number: to hold code that somebody put on a module might keep the model.
    kinds = [type(module) for module in modules]
    code = [id(kind.forward) for kind in dict.fromkeys(kinds)]
    code += [id(own) for module in modules for own in (type(module), module.__dict__.get("forward"))]
    return root.config._attn_implementation, root.dtype, guards, edits, code, places


def why_not_rotary(rotary: Any, layers: Sequence[Any]) -> str:
    """Return why steps cannot rotate by this embedding of Hugging Face's before these attention layers, or ""."""
    kind = getattr(rotary, "rope_type", "default")
    if not isinstance(kind, str) or "dynamic" in kind or kind == "longrope":
        return f"rotary embedding {kind!r} reads positions on the host"
    if getattr(rotary, "attention_scaling", 1.0) != 1.0 and any(hasattr(layer, "qk_norm") for layer in layers):
        return f"rotary embedding {kind!r} scales what a norm behind it takes back"
    return ""


def captured(name: str, root: Any) -> PatchEntry:
    """Return the line of the report on a model whose decode steps are to be captured."""
    reason = why_not_root(root)
    if reason:
        return PatchEntry(name, "decode", type(root).__name__, "skipped", "", f"not-capturable: {reason}")
    layers = decoder_of(root).layers
    fused = sum(isinstance(layer, FastDecoderLayer) for layer in layers)
    what = f"CUDA graphs by batch and capacity; adds in norms in {fused} of {len(layers)} layers"
    return PatchEntry(name, "decode", type(root).__name__, "captured", what)
