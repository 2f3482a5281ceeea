"""Decoder layers during a decode step on pages: each residual add together with the norm that follows it.

Outside such a step the original ``forward`` runs. A layer returns the sum, as the original does, and leaves the next
layer's normed input with the step; sums are rounded to the model's dtype before they are normed, as without us.
"""

from __future__ import annotations

from typing import Any

import torch

from fastlayers.patching import block
from fastlayers.patching.classes import FastModule, count
from fastlayers.patching.hashes import KNOWN
from fastlayers.patching.matching import Rule, attributes_fit, bare, is_known, why_not
from fastlayers.patching.mlp import stepped
from fastlayers.patching.norm import FastRMSNorm
from fastlayers.patching.paged import active_step


class FastDecoderLayer(FastModule):
    """Norm, attention, norm, MLP, with two residual adds."""

    input_layernorm: Any
    post_attention_layernorm: Any
    self_attn: Any
    _modules: dict[str, Any]

    def _fl_implementation(self) -> str:
        return "residual adds in the norms"

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Run one layer; the signature is Hugging Face's."""
        step = active_step(past_key_values)
        options = {
            "attention_mask": attention_mask, "position_ids": position_ids, "past_key_values": past_key_values,
            "use_cache": use_cache, "position_embeddings": position_embeddings, **kwargs,
        }  # fmt: skip
        if step is None or not self._fl_usable(hidden_states):
            original: torch.Tensor = super().forward(hidden_states, **options)  # type: ignore[misc]
            return original
        count(self._fl_hits)
        normed = step.normed(hidden_states)
        if normed is None:
            normed = self.input_layernorm(hidden_states)
        attended, _ = self.self_attn(hidden_states=normed, **options)
        normed, hidden_states = _add(self.post_attention_layernorm, attended, hidden_states)
        parts = self._modules
        out = _run(parts["mlp"] if "mlp" in parts else parts["feed_forward"], normed, step)
        following = step.next_norm(self)
        if following is None:
            return hidden_states + out
        normed, hidden_states = _add(following, out, hidden_states)
        step.keep(hidden_states, normed)
        return hidden_states


def _run(mlp: Any, x: torch.Tensor, step: Any) -> torch.Tensor:
    """Run the MLP or sparse block."""
    out: Any = stepped(mlp, x, step)
    if out is None:
        out = block.run(mlp, x, step)
    if out is None:
        out = mlp(x)
    # GPT-OSS's block also returns its scores, Llama 4's its logits behind rows one after the other.
    found: torch.Tensor = out[0].view(x.shape) if isinstance(out, tuple) else out
    return found


def _add(norm: Any, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    both = norm._fl_add(x, residual) if isinstance(norm, FastRMSNorm) and bare(norm) else None
    if both is not None:
        return both
    total = residual + x
    return norm(total), total


def _fits(module: Any) -> str | None:
    mlp = "feed_forward" if hasattr(module, "feed_forward") else "mlp"
    return attributes_fit(module, ("input_layernorm", "post_attention_layernorm", "self_attn", mlp))


RULE = Rule("norm", FastDecoderLayer, _fits)


def fusible(module: Any) -> bool:
    """Return whether this is a decoder layer whose code is a known version and that nobody hooked."""
    cls: Any = type(module)
    return is_known(cls, RULE.relies, KNOWN) and why_not(module, RULE) is None


def decoder_of(root: Any) -> Any:
    """Return the module with the decoder's layers; transformers finds none where a base model has another name."""
    found = root.get_decoder() if hasattr(root, "get_decoder") else None
    return getattr(root, "model", root) if found is root else found
