"""Grouped-query attention as Hugging Face builds it: Llama, Qwen, GPT-OSS.

    B = batch, Q = new tokens, S = tokens attended to, H = heads, K = key heads, G = H / K, D = head_dim
    o = softmax(q·k · scale | mask | sink) v        a sink is one more logit of its head, without a value

Two parts. The class swap packs q, k and v into one product and turns q and k together. The attention itself goes
through Hugging Face's registries, under one name for models that ran sdpa and one for those that ran eager: with the
mask of sdpa, ``None`` (causal) or bool, and never with a copy of keys and values per query head. One query a row is
folded: its group becomes the queries of a key head. Without sinks and softcap torch's fused kernel runs, with them
plain products in fp32.

A bool mask that the caller made means what it meant before: True is seen under sdpa, while eager attention adds 0 and
1 to the scores. So that the two are told apart under eager, the masks that are made here are int8 there.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fastlayers import env
from fastlayers.attention.contexts import context_of
from fastlayers.attention.gqa.core import GQA, GQAConfig
from fastlayers.attention.mla.torch import MAX_SCORES, product
from fastlayers.attention.rotary_kv_write.layer import RotaryKVWriteConfig
from fastlayers.errors import NoBackendError
from fastlayers.patching.cache import PAGE
from fastlayers.patching.classes import count, wants_grad
from fastlayers.patching.matching import foreign_hooks
from fastlayers.patching.packing import PackedModule
from fastlayers.patching.paged import active_step

# What ran before and may be replaced, and the name that ours has then; flash, flex and paged implementations stay.
NAMES = {"sdpa": "fastlayers", "eager": "fastlayers_eager"}
BEFORE = {name: previous for previous, name in NAMES.items()}
Output = tuple[torch.Tensor, torch.Tensor | None]
# Keyword arguments of the original's forward that change what is computed.
_FOREIGN = ("cache", "is_causal", "position_bias")


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention under any mask.

    Parameters
    ----------
    q : Tensor ``[B, H, Q, D]``
    k, v : Tensor ``[B, K, S, D]``
    mask : Tensor or None
        ``[B or 1, H or 1, Q, S]``: bool (True: seen), or added to the scores. ``None``: one query sees everything,
        several are causal from the first key on.
    scale : float
    sinks : Tensor ``[H]``, optional
    softcap : float, optional

    Returns
    -------
    Tensor ``[B, Q, H, D]``
        Rows that see nothing give finite values.
    """
    queries, total = q.shape[2], k.shape[2]
    if mask is None and queries > 1 and total > queries:
        # A static cache at its first step: the rest is empty.
        k, v = k[:, :, :queries], v[:, :, :queries]
    if sinks is not None or softcap is not None:
        if mask is None and queries > 1:
            mask = causal(queries, queries, q.device)
        return _plain(q, k, v, mask, scale, sinks, softcap)
    batch, heads, _, width = q.shape
    if queries == 1:
        if mask is not None and mask.shape[1] == heads:
            mask = mask.reshape(mask.shape[0], k.shape[1], -1, mask.shape[3])
        folded = q.reshape(batch, k.shape[1], -1, width)
        o = F.scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=scale)
        return o.reshape(batch, 1, heads, -1)
    group = heads // k.shape[1]
    if group > 1 and mask is not None and q.is_cuda:
        # With a mask and grouped heads CUDA has no fused kernel.
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        group = 1
    o = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale, is_causal=mask is None, enable_gqa=group > 1
    )
    return o.transpose(1, 2)


def causal(queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """Return the bool mask ``[1, 1, queries, keys]`` of queries that begin with the first key."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril()[None, None]


def _plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float,
    sinks: torch.Tensor | None, softcap: float | None,
) -> torch.Tensor:  # fmt: skip
    batch, heads, queries, width = q.shape
    kv_heads, total = k.shape[1:3]
    step = max(1, MAX_SCORES // max(1, batch * heads * total))
    if queries > step:
        pieces = []
        for first in range(0, queries, step):
            part = mask if mask is None or mask.shape[2] == 1 else mask[:, :, first : first + step]
            pieces.append(_plain(q[:, :, first : first + step], k, v, part, scale, sinks, softcap))
        return torch.cat(pieces, dim=1)
    rows = q.reshape(batch * kv_heads, -1, width)
    scores = product(rows, k.reshape(batch * kv_heads, total, width).transpose(1, 2))
    scores = scores.view(batch, heads, queries, total) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    blind = None
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, float("-inf"))
        blind = None if sinks is not None else ~mask.any(-1, keepdim=True)
    elif mask is not None:
        scores = scores + mask
    if sinks is not None:
        column = sinks.float().view(1, heads, 1, 1).expand(batch, heads, queries, 1)
        weights = torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    # Rounded to the model's dtype, as eager attention does.
    weights = weights.reshape(batch * kv_heads, -1, total).to(v.dtype)
    o = product(weights, v.reshape(batch * kv_heads, total, -1)).view(batch, heads, queries, -1)
    if blind is not None:
        o = o.masked_fill(blind, 0.0)
    return o.to(q.dtype).transpose(1, 2)


def attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> Output:
    """Attend; what Hugging Face's registry calls. Modules that are not patched run Hugging Face's own function."""
    foreign = any(kwargs.get(name) is not None for name in _FOREIGN)
    ours = isinstance(module, FastGQA) and not module.training and not foreign and not wants_grad(module, query)
    if not ours or _weights_asked(module, kwargs):
        return _stock(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    mask = seen_or_added(attention_mask, _ran_eager(module), query.dtype)
    return attend(query, key, value, mask, scale, kwargs.get("s_aux"), kwargs.get("softcap")), None


def seen_or_added(mask: torch.Tensor | None, eager: bool, dtype: torch.dtype) -> torch.Tensor | None:
    """Return ``mask`` as the fast path reads it, bool (True: seen) or added to the scores.

    ``eager``: whether attention was eager, which adds whatever the caller gives.
    """
    if mask is None or not eager:
        return mask
    if mask.dtype == torch.int8:
        return mask.view(torch.bool)
    return mask.to(dtype) if mask.dtype == torch.bool else mask


def _made_for_eager(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """Return the mask that Hugging Face makes for sdpa, as int8: bool masks are the caller's."""
    mask: torch.Tensor | None = sdpa_mask(*args, **kwargs)
    return None if mask is None else mask.view(torch.int8)


def _ran_eager(module: Any) -> bool:
    """Return whether the attention of ``module`` is eager, or was before the patch."""
    name: str = module.config._attn_implementation
    return BEFORE.get(name, name) == "eager"


def _weights_asked(module: Any, extra: dict[str, Any]) -> bool:
    """Return whether attention weights are to be recorded, which only eager attention has."""
    if not _ran_eager(module):
        return False
    return bool(extra.get("output_attentions") or getattr(module.config, "output_attentions", False))


def _stock(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **kwargs: Any
) -> Output:
    """Run what ran before the patch."""
    origin = type(module)._fl_origin[0] if isinstance(module, FastGQA) else type(module)
    eager = getattr(sys.modules[origin.__module__], "eager_attention_forward", None)
    was_eager = _ran_eager(module)
    mask = seen_or_added(mask, was_eager, query.dtype)
    if eager is None or not (was_eager or kwargs.get("s_aux") is not None):
        found: Output = sdpa_attention_forward(module, query, key, value, mask, **kwargs)
        return found
    if mask is None and query.shape[2] > 1:
        mask = causal(query.shape[2], key.shape[2], query.device)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
    result: Output = eager(module, query, key, value, mask, **kwargs)
    return result


class FastGQA(PackedModule):
    """Attention whose q, k and v are one product; families add what their forward passes on."""

    _fl_origin: tuple[type, type]
    training: bool
    config: Any
    layer_idx: int
    head_dim: int
    num_key_value_groups: int
    scaling: float
    q_proj: Any
    k_proj: Any
    v_proj: Any
    o_proj: Any

    def _fl_parts(self) -> tuple[str, ...]:
        return "q_proj", "k_proj", "v_proj"

    def _fl_choose(self) -> None:
        wanted = env.backend_overrides().get("gqa", "auto") if self._fl_backend == "auto" else self._fl_backend
        if wanted not in ("auto", "torch"):
            GQA.named(wanted)
            why = "Hugging Face's caches are not pages; only torch attends over them"
            raise NoBackendError("gqa", type(self).__name__, self.q_proj.weight.device, wanted, {wanted: why})

    def _fl_implementation(self) -> str:
        packed = "" if getattr(self, "_fl_weight", None) is None else f", {'+'.join(self._fl_parts())}"
        return f"gqa=torch{packed}"

    def _fl_extra(self) -> dict[str, Any]:
        """Return what this family's forward passes to the attention function besides the common arguments."""
        return {}

    def _fl_may_run(self, hidden_states: torch.Tensor, position: Any, mask: Any, extra: dict[str, Any]) -> bool:
        """Return whether this call is one that our code computes; counts a fallback otherwise."""
        if not self._fl_usable(hidden_states):
            return False
        known_mask = mask is None or (isinstance(mask, torch.Tensor) and mask.dim() == 4)
        known_position = position is not None and position[0].shape[-1] in (self.head_dim, self.head_dim // 2)
        foreign = any(extra.get(name) is not None for name in _FOREIGN)
        if known_mask and known_position and not foreign and not _weights_asked(self, extra):
            return True
        count(self._fl_falls)
        return False

    def _fl_project(self, x: torch.Tensor, position: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return turned q ``[B,H,Q,D]``, turned k and v ``[B,K,Q,D]``."""
        width, both = self.head_dim, self._fl_fused(x)
        keys = self.k_proj.out_features // width
        if both is None:
            q, k, v = (linear(x).unflatten(-1, (-1, width)) for linear in self._fl_linears())
            q, k = self._fl_norm(q, k)
            return _turn(q, position).transpose(1, 2), _turn(k, position).transpose(1, 2), v.transpose(1, 2)
        heads = both.unflatten(-1, (-1, width))
        v = heads[:, :, -keys:]
        q, k = self._fl_turned(heads[:, :, :-keys], keys, position)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _fl_norm(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalise the heads of q and k, where the family does."""
        return q, k

    def _fl_norm_weights(self, dtype: torch.dtype) -> tuple[Any, ...]:
        """Return epsilon and weights of norms that the write may do, or ``(None,)``: :meth:`_fl_norm` does them."""
        return (None,)

    def _fl_turned(self, both: torch.Tensor, keys: int, position: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return turned q and k of ``both [B, Q, H + K, D]``."""
        turned = _turn(both, position)
        return turned[:, :, :-keys], turned[:, :, -keys:]

    def _fl_decode(self, x: torch.Tensor, position: Any, cache: Any, step: Any) -> torch.Tensor:
        """Return ``[B, 1, H * D]`` of one new token a row: written into the pages and attended there."""
        keys, values = cache.layers[self.layer_idx].paged()
        width, kv_heads = self.head_dim, keys.shape[2]
        heads = kv_heads * self.num_key_value_groups
        q, k, v = self._fl_side_by_side(x, step).view(step.batch, -1, width).split((heads, kv_heads, kv_heads), dim=1)
        eps, *weights = self._fl_norm_weights(q.dtype)
        if eps is None:
            q, k = self._fl_norm(q, k)
        extra = self._fl_extra()
        write = RotaryKVWriteConfig(heads, kv_heads, width, width, width, kv_dtype=keys.dtype, qk_norm=eps)
        cos, sin = step.tables(position, width // 2)
        q = step.pick(write)(q, k, v, cos, sin, step.request, keys, values, step.meta.out_cache_loc, *weights)
        sinks = extra.get("s_aux")
        cfg = GQAConfig(
            heads, kv_heads, width, float(self.scaling), extra.get("sliding_window"), None, sinks is not None, PAGE,
            q.dtype, keys.dtype, "decode", context=context_of(step.capacity),
        )  # fmt: skip
        o, _ = step.pick(cfg)(q, keys, values, step.meta, None if sinks is None else sinks.float())
        flat: torch.Tensor = o.view(step.batch, 1, heads * width)
        return flat

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Output:
        """Attend; the signature is Hugging Face's."""
        if not self._fl_may_run(hidden_states, position_embeddings, attention_mask, kwargs):
            original: Output = super().forward(  # type: ignore[misc]
                hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs
            )
            return original
        count(self._fl_hits)
        step = active_step(past_key_values)
        if step is not None:
            o = self._fl_decode(hidden_states, position_embeddings, past_key_values, step)
            return step.apply(self.o_proj, o), None
        q, k, v = self._fl_project(hidden_states, position_embeddings)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        origin = self._fl_origin[0]
        eager = sys.modules[origin.__module__].eager_attention_forward
        function = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        o, weights = function(
            self, q, k, v, attention_mask, dropout=0.0, scaling=self.scaling, **self._fl_extra(), **kwargs
        )
        return self.o_proj(o.reshape(*hidden_states.shape[:-1], -1)), weights


class FastNormedGQA(FastGQA):
    """Heads of q and k are normalised before they are turned (Qwen3)."""

    q_norm: Any
    k_norm: Any

    def _fl_norm(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.q_norm(q), self.k_norm(k)

    def _fl_norm_weights(self, dtype: torch.dtype) -> tuple[Any, ...]:
        norms = self.q_norm, self.k_norm
        same = len({float(norm.variance_epsilon) for norm in norms}) == 1
        if not same or not all(getattr(norm, "_fl_rounding", "") == "cast_then_scale" for norm in norms):
            return (None,)
        if any(norm.weight.dtype != dtype or foreign_hooks(norm) for norm in norms):
            return (None,)
        for norm in norms:
            count(norm._fl_hits)
        return float(self.q_norm.variance_epsilon), self.q_norm.weight, self.k_norm.weight

    def _fl_turned(self, both: torch.Tensor, keys: int, position: Any) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = self._fl_norm(both[:, :, :-keys], both[:, :, -keys:])
        turned = _turn(torch.cat((q, k), dim=2), position)
        return turned[:, :, :-keys], turned[:, :, -keys:]


def _turn(x: torch.Tensor, position: Any) -> torch.Tensor:
    """Rotate ``x [B, Q, heads, D]`` by cos and sin ``[B, Q, D]`` or ``[B, Q, D/2]``, halves with halves."""
    cos, sin = (table.unsqueeze(2) for table in position)
    first, second = x.chunk(2, dim=-1)
    if cos.shape[-1] == x.shape[-1]:
        return x * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def register() -> None:
    """Make the names known to both registries; done when this module is imported."""
    # Without a function for masks they would be None, and padding silently ignored.
    for previous, make_mask in (("sdpa", sdpa_mask), ("eager", _made_for_eager)):
        AttentionInterface.register(NAMES[previous], attention_forward)
        AttentionMaskInterface.register(NAMES[previous], make_mask)


register()
