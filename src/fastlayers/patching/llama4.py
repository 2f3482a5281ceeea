"""Llama 4's language model: which class is replaced by what, and what is particular about it.

Layers attend in chunks of positions, by Hugging Face's masks; in a step on pages, by where a row's chunk begins. Those
without positions scale queries by the slot of the token instead, as the original counts it: padding included. Experts
are in ``llama4_experts``. The vision part keeps its code.
"""

from __future__ import annotations

from typing import Any

import torch

from fastlayers.attention.meta import AttentionMeta
from fastlayers.attention.rotary_kv_write.layer import RotaryKVWriteConfig
from fastlayers.patching import structure
from fastlayers.patching.gqa import FastGQA
from fastlayers.patching.guard import untouched
from fastlayers.patching.hashes import KNOWN
from fastlayers.patching.matching import SILU, Rule, attributes_fit, is_known, silu
from fastlayers.patching.mlp import FastMLP
from fastlayers.patching.norm import FastRMSNorm


class FastLlama4RMSNorm(FastRMSNorm):
    """As Llama's; the original calls it ``eps``."""

    _fl_baked = ("eps",)
    eps: float

    def _fl_epsilon(self) -> float:
        return float(self.eps)


class FastLlama4MLP(FastMLP):
    """As Llama's, dense or a shared expert; the original calls it ``activation_fn``."""

    _fl_bypassed = {"activation_fn": SILU}  # noqa: RUF012


class FastLlama4GQA(FastGQA):
    """Neighbouring dimensions are rotated, then normed without weights; or neither, and queries scaled by slot."""

    _fl_relies = ("forward", "apply_rotary_emb", "eager_attention_forward", "repeat_kv")
    use_rope: Any
    attn_temperature_tuning: Any
    floor_scale: float
    attn_scale: float

    def _fl_choose(self) -> None:
        super()._fl_choose()
        self._fl_turn = None  # rotates halves

    def _fl_chunk(self) -> int | None:
        """Return the tokens of a chunk that this layer attends to, or ``None``: everything."""
        kinds, size = self.config.layer_types, self.config.attention_chunk_size
        return int(size) if kinds[self.layer_idx] == "chunked_attention" else None

    def _fl_unpaged(self) -> str:
        norm: Any = self._modules.get("qk_norm")
        if norm is not None and not (untouched(norm) and is_known(type(norm), ("forward", "_norm"), KNOWN)):
            return "qk_norm is not the code that a step writes keys with"
        return super()._fl_unpaged()

    def _fl_norm(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        norm: Any = self._modules.get("qk_norm")
        return (q, k) if norm is None else (norm(q), norm(k))

    def _fl_project(
        self, x: torch.Tensor, position: Any, ready: int = 1, cache: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q ``[B,H,Q,D]``, k and v ``[B,K,Q,D]``; q and k rotated and normed where the layer does that.

        Or q scaled by slot, of which ``cache`` holds the first ones.
        """
        both = self._fl_fused(x, ready)
        if both is None:
            q, k, v = self._fl_one_by_one(x)
            if self.use_rope:
                q, k = turned(q, position), turned(k, position)
        else:
            keys = self._modules["k_proj"].out_features // self.head_dim
            heads = both.view(*both.shape[:-1], -1, self.head_dim)
            rows, v = heads[:, :, :-keys], heads[:, :, -keys:]
            if self.use_rope:
                rows = turned(rows, position)
            q, k = rows[:, :, :-keys], rows[:, :, -keys:]
        norm: Any = self._modules.get("qk_norm")
        if norm is not None:
            q, k = norm(q), norm(k)
        if self._fl_tunes():
            seen = cache.get_seq_length(self.layer_idx) if cache is not None else 0
            slots = torch.arange(q.shape[1], device=q.device) + seen
            q = (q * self._fl_temperature(slots)[:, None, None]).to(q.dtype)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _fl_tunes(self) -> bool:
        return bool(self.attn_temperature_tuning and not self.use_rope)

    def _fl_temperature(self, slots: torch.Tensor) -> torch.Tensor:
        """Return what queries in these slots are multiplied by, fp32."""
        return torch.log1p(torch.floor((slots.float() + 1.0) / self.floor_scale)) * self.attn_scale + 1.0

    def _fl_write(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: Any,
        pages: tuple[torch.Tensor, torch.Tensor], step: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Scale, norm and rotate a step's heads, write keys and values, and return the queries."""
        if self._fl_tunes():
            q = (q * self._fl_temperature(step.meta.positions)[:, None, None]).to(q.dtype)
        # A rotation changes no length, so that a norm without weights may come before it.
        norm, width = self._modules.get("qk_norm"), self.head_dim  # type: Any, int
        eps, ones = (None, ()) if norm is None else (float(norm.eps), (step.ones(width, q.dtype),) * 2)
        write = RotaryKVWriteConfig(
            q.shape[1], k.shape[1], width, width, width, True, True, kv_dtype=pages[0].dtype, qk_norm=eps
        )  # fmt: skip
        cos, sin = step.tables(position, width // 2) if self.use_rope else step.still(width // 2)
        turned: torch.Tensor = step.pick(write)(q, k, v, cos, sin, step.request, *pages, step.meta.out_cache_loc, *ones)
        return turned

    def _fl_seen(self, step: Any) -> AttentionMeta:
        """Return what describes a step to this layer, which may attend in chunks."""
        chunk = self._fl_chunk()
        meta: AttentionMeta = step.meta if chunk is None else step.within(chunk)
        return meta


def turned(x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Rotate ``x [B, Q, heads, D]`` by unit numbers ``[B, Q, D/2]``, neighbours with neighbours."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * position.to(x.device)[:, :, None, :]).flatten(3).type_as(x)


def _norm_fits(module: Any) -> str | None:
    return attributes_fit(module, ("weight", "eps"))


def _mlp_fits(module: Any) -> str | None:
    return attributes_fit(module, (*structure.MLP_LINEARS, "activation_fn")) or silu(module, "activation_fn")


def _vision(module: Any) -> str:
    return "vision: its layers are not covered, the language model's are"


_attention = structure.with_attributes(
    structure.gqa_fits, "use_rope", "attn_temperature_tuning", "floor_scale", "attn_scale"
)
_LLAMA4 = "transformers.models.llama4.modeling_llama4.Llama4"

RULES: dict[str, Rule] = {
    f"{_LLAMA4}TextRMSNorm": Rule("norm", FastLlama4RMSNorm, _norm_fits),
    f"{_LLAMA4}TextMLP": Rule("mlp", FastLlama4MLP, _mlp_fits, structure.MLP_LINEARS),
    f"{_LLAMA4}TextAttention": Rule("attention", FastLlama4GQA, _attention, structure.ATTENTION_LINEARS),
    f"{_LLAMA4}VisionAttention": Rule("attention", None, _vision),
    f"{_LLAMA4}VisionMLP": Rule("mlp", None, _vision),
    f"{_LLAMA4}VisionPixelShuffleMLP": Rule("mlp", None, _vision),
}
