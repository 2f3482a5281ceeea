"""Whether the steps of a patched model can be captured, as it is now, and why not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastlayers.patching.decoder import decoder_of
from fastlayers.patching.gqa import FastGQA
from fastlayers.patching.matching import foreign_hooks
from fastlayers.patching.mla import FastMLA


def attention_layers(root: Any) -> list[Any]:
    """Return the attention layers of a model's decoder, ``None`` for those without; none of what is no decoder."""
    return [getattr(layer, "self_attn", None) for layer in getattr(decoder_of(root), "layers", ())]


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
    for name, module in root.named_modules():
        if foreign_hooks(module):
            return f"a hook is registered on {name or 'the model'}, which a replay would not call"
        if "base_layer" in module._modules:
            return f"{name} is an adapter, which may be switched between calls"
    if why := why_not_rotary(getattr(decoder_of(root), "rotary_emb", None), layers):
        return why
    if len({p.device for p in root.parameters()}) != 1:
        return "its weights are on several devices"
    return ""


def why_not_rotary(rotary: Any, layers: Sequence[Any]) -> str:
    """Return why steps cannot rotate by this embedding of Hugging Face's before these attention layers, or ""."""
    kind = getattr(rotary, "rope_type", "default")
    if not isinstance(kind, str) or "dynamic" in kind or kind == "longrope":
        return f"rotary embedding {kind!r} reads positions on the host"
    if getattr(rotary, "attention_scaling", 1.0) != 1.0 and any(hasattr(layer, "qk_norm") for layer in layers):
        return f"rotary embedding {kind!r} scales what a norm behind it takes back"
    return ""
