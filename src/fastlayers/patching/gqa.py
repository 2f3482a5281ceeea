"""Grouped-query attention as Hugging Face builds it: Llama, Qwen, GPT-OSS.

    B = batch, Q = new tokens, S = tokens attended to, H = heads, K = key heads, G = H / K, D = head_dim
    o = softmax(q·k · scale | mask | sink) v        a sink is one more logit of its head, without a value

The class swap packs q, k and v into one product and rotates q and k together. The attention is what the original's
would be: Hugging Face's registry is asked at each call, and where it gives transformers' own sdpa or eager function,
:func:`attend` runs, which never copies keys and values per query head. One query a row is folded: its group becomes the
queries of a key head. Without sinks torch's fused kernel runs, with them plain products in fp32.

Masks are Hugging Face's, and mean what they mean to the original. Under sdpa ``None`` is causal unless ``is_causal``
says otherwise, and a bool mask is True where something is seen. Eager attention adds whatever it gets to the scores,
and ``None`` hides nothing.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.nn import functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fastlayers import env
from fastlayers.attention.gqa.config import GQA, GQAConfig
from fastlayers.attention.meta import AttentionMeta
from fastlayers.attention.mla.torch import MAX_SCORES, product
from fastlayers.attention.rotary_kv_write.layer import RotaryKVWriteConfig
from fastlayers.errors import NoBackendError
from fastlayers.patching.cache import PAGE
from fastlayers.patching.classes import count, differentiated
from fastlayers.patching.matching import bare, foreign_hooks, setting
from fastlayers.patching.packing import PackedModule
from fastlayers.patching.paged import active_step
from fastlayers.registry import environment_wishes
from fastlayers.rotary.layer import ROTARY, RotaryConfig

Output = tuple[torch.Tensor, torch.Tensor | None]
# Queries that a CPU takes at a time: each block multiplies only the keys that it may see.
BLOCK = 64
# Keyword arguments of the original's forward that change what is computed; the last two it cannot pass on.
_FOREIGN = ("cache", "position_bias", "dropout", "scaling")


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    is_causal: bool = True,
    dense: Any = None,
) -> torch.Tensor:
    """Attention under any mask.

    Parameters
    ----------
    q : Tensor ``[B, H, Q, D]``
    k, v : Tensor ``[B, K, S, D]``
    mask : Tensor or None
        ``[B or 1, H or 1, Q, S]``: bool (True: seen), or added to the scores. ``None``: see ``is_causal``.
    scale : float
    sinks : Tensor ``[H]``, optional
    softcap : float, optional
    is_causal : bool
        Without a mask several queries are causal from the first key on; else everything is seen.
    dense : TritonDense, optional
        Takes one query a row in one launch, where torch has no fused operation for it.

    Returns
    -------
    Tensor ``[B, Q, H, D]``
        Rows that see nothing give finite values.
    """
    queries, total = q.shape[2], k.shape[2]
    hides = is_causal and mask is None and queries > 1
    if hides and total > queries:
        # A static cache at its first step: the rest is empty.
        k, v = k[:, :, :queries], v[:, :, :queries]
    fused = mask is None or mask.dtype in (torch.bool, q.dtype)
    if sinks is not None or softcap is not None or not fused:
        if hides:
            mask = causal(queries, queries, q.device)
        if dense is not None and queries == 1 and softcap is None and dense.serves(q, k, v, mask):
            found: torch.Tensor = dense(q, k, v, mask, sinks, scale)
            return found
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
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, is_causal=hides, enable_gqa=group > 1)
    return o.transpose(1, 2)


def causal(queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """Return the bool mask ``[1, 1, queries, keys]`` of queries that begin with the first key."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril()[None, None]


def _seen_keys(mask: torch.Tensor) -> tuple[int, int]:
    """Return the first and last + 1 of the keys that some query may see; all keys if a query sees nothing."""
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
    # A query that sees nothing weighs all keys alike under a mask that is added.
    if not bool(seen.any(-1).all()):
        return 0, mask.shape[-1]
    columns = seen.flatten(0, 2).any(0).nonzero()
    return int(columns[0]), int(columns[-1]) + 1


def _plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float,
    sinks: torch.Tensor | None, softcap: float | None,
) -> torch.Tensor:  # fmt: skip
    batch, heads, queries, width = q.shape
    kv_heads, total = k.shape[1:3]
    step = max(1, MAX_SCORES // max(1, batch * heads * total))
    on_host = q.device.type == "cpu" and not torch.compiler.is_compiling()
    whole = mask is not None and mask.shape[-1] == total and queries > 1
    in_blocks = on_host and mask is not None and whole and (mask.dtype == torch.bool or mask.is_floating_point())
    if in_blocks:
        step = min(step, BLOCK)
    if queries > step:
        pieces = []
        for first in range(0, queries, step):
            part = mask if mask is None or mask.shape[2] == 1 else mask[:, :, first : first + step]
            start, end = _seen_keys(part) if in_blocks and part is not None else (0, total)
            part = None if part is None else part[..., start:end]
            rows, keys, values = q[:, :, first : first + step], k[:, :, start:end], v[:, :, start:end]
            pieces.append(_plain(rows, keys, values, part, scale, sinks, softcap))
        return torch.cat(pieces, dim=1)
    rows = q.reshape(batch * kv_heads, -1, width)
    scores = product(rows, k.reshape(batch * kv_heads, total, width).transpose(1, 2))
    scores = scores.view(batch, heads, queries, total).mul_(scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    fully_masked = None
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill_(~mask, float("-inf"))
        fully_masked = None if sinks is not None else ~mask.any(-1, keepdim=True)
    elif mask is not None:
        scores = scores + mask
    if sinks is not None:
        sink = sinks.float().view(1, heads, 1, 1)
        most = torch.maximum(scores.amax(-1, keepdim=True), sink)
        weights = (scores - most).exp_()
        weights /= weights.sum(-1, keepdim=True) + (sink - most).exp()
    else:
        weights = scores.softmax(-1)
    # Rounded to the model's dtype, as eager attention does.
    weights = weights.reshape(batch * kv_heads, -1, total).to(v.dtype)
    o = product(weights, v.reshape(batch * kv_heads, total, -1)).view(batch, heads, queries, -1)
    if fully_masked is not None:
        o = o.masked_fill(fully_masked, 0.0)
    return o.to(q.dtype).transpose(1, 2)


def weights_asked(module: Any, extra: dict[str, Any]) -> bool:
    """Return whether somebody may read attention weights, which only eager attention has."""
    if setting(module.config, "_attn_implementation_internal", "_attn_implementation") != "eager":
        return False
    asked = extra.get("output_attentions") or setting(module.config, "_output_attentions", "output_attentions")
    return bool(asked) or foreign_hooks(module)


def attention_function(config: Any, eager: Any) -> Any:
    """Return what Hugging Face's registry gives for a configuration, as the original asks for it at each call."""
    name = setting(config, "_attn_implementation_internal", "_attn_implementation")
    table = ALL_ATTENTION_FUNCTIONS
    found = table._local_mapping.get(name) or table._global_mapping.get(name)
    # Eager attention and unknown names.
    return table.get_interface(name, eager) if found is None else found


class FastGQA(PackedModule):
    """Attention whose q, k and v are one product; families add what their forward passes on."""

    _fl_relies: tuple[str, ...] = (
        "forward", "apply_rotary_pos_emb", "_apply_rotary_emb", "rotate_half", "eager_attention_forward", "repeat_kv",
    )  # fmt: skip
    _fl_functions = ("linear", "softmax", "dropout", "scaled_dot_product_attention")
    # Arguments that change what is computed, or that the family's forward passes itself.
    _fl_foreign = frozenset((*_FOREIGN, "sliding_window", "s_aux"))
    _fl_origin: tuple[type, type]
    # Norms and rotation of packed q and k in one launch, and one query's attention, where there are kernels for it.
    _fl_turn: Any
    _fl_dense: Any
    _modules: dict[str, Any]
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
        given = environment_wishes().get("gqa", "auto") if self._fl_backend == "auto" else None
        wanted, source = (self._fl_backend, "") if given is None else (given, env.BACKEND)
        if wanted not in ("auto", "torch"):
            GQA.named(wanted)
            why = "Hugging Face's caches are not pages; only torch attends over them"
            raise NoBackendError("gqa", type(self).__name__, self.q_proj.weight.device, wanted, {wanted: why}, source)
        self._fl_turn = self._fl_dense = None
        weight = getattr(self.q_proj, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.device.type != "meta" and self.head_dim % 2 == 0:
            rotary = ROTARY.choose(RotaryConfig(self.head_dim, self.head_dim), weight.device)
            if rotary.requested not in ("auto", "torch", "triton"):
                why = "a patched module rotates by Triton's kernel, or as the original does"
                refused = {rotary.requested: why}
                name = type(self).__name__  # rotary is not a kind of patch's: only the environment names one
                raise NoBackendError("rotary", name, weight.device, rotary.requested, refused, env.BACKEND)
            if rotary.name == "triton":
                from fastlayers.patching.triton_dense import TritonDense
                from fastlayers.patching.triton_turn import TritonTurn

                self._fl_turn = TritonTurn()
                self._fl_dense = TritonDense() if wanted == "auto" else None

    def _fl_implementation(self) -> str:
        turn = "" if self._fl_turn is None else "rotary=triton"
        return ", ".join(filter(None, ("gqa=torch", turn, self._fl_together())))

    def _fl_extra(self) -> dict[str, Any]:
        """Return what this family's forward passes to the attention function besides the common arguments."""
        return {}

    def _fl_may_run(self, hidden_states: torch.Tensor, position: Any, mask: Any, extra: dict[str, Any]) -> int:
        """Return what :meth:`_fl_ready` does, 0 also where this call is not one that our code computes."""
        ready = self._fl_ready(hidden_states, mask)
        if not ready:
            return 0
        why = ""
        if mask is not None and not (isinstance(mask, torch.Tensor) and mask.dim() == 4):
            why = "a mask that is not a tensor of four dimensions"
        elif position is None or position[0].shape[-1] not in (self.head_dim, self.head_dim // 2):
            why = "rotary tables of another width"
        elif not self._fl_foreign.isdisjoint(extra) and (
            any(extra.get(n) is not None for n in _FOREIGN) or any(n in extra for n in self._fl_extra())
        ):
            why = "arguments for another attention"
        elif weights_asked(self, extra):
            why = "attention weights are asked for"
        if why:
            self._fl_fell(why)
        return 0 if why else ready

    def _fl_attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, extra: dict[str, Any]
    ) -> Output:
        """Return what the original's attention function would, ``[B, Q, H, D]``, and its weights."""
        own, origin = self._fl_extra(), self._fl_origin[0]
        eager = sys.modules[origin.__module__].eager_attention_forward
        function = attention_function(self.config, eager)
        sinks = own.get("s_aux")
        # Under autograd and autocast the original's function runs: kernels know no gradient, and where rows see
        # nothing eager attention's is its own; autocast rounds its masks elsewhere than those of a fused one.
        recorded = differentiated(q, k, v, mask) or torch.is_autocast_enabled(q.device.type)
        if function is eager and not recorded:
            # It adds any mask to the scores, a bool one as 0 and 1.
            mask = mask.to(q.dtype) if mask is not None and mask.dtype == torch.bool else mask
            dense = None if torch.compiler.is_dynamo_compiling() else self._fl_dense
            return attend(q, k, v, mask, self.scaling, sinks, None, False, dense), None
        if (
            function is sdpa_attention_forward
            and not recorded
            and sinks is None
            and (mask is None or mask.dtype in (torch.bool, q.dtype))
        ):
            is_causal = extra.get("is_causal")
            if is_causal is None:
                is_causal = getattr(self, "is_causal", True)
            return attend(q, k, v, mask, self.scaling, None, None, is_causal), None
        found: Output = function(self, q, k, v, mask, dropout=0.0, scaling=self.scaling, **own, **extra)
        return found

    def _fl_project(
        self, x: torch.Tensor, position: Any, ready: int = 1, cache: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return rotated q ``[B,H,Q,D]``, rotated k and v ``[B,K,Q,D]``; ``ready``: see :meth:`_fl_fused`.

        ``cache``: of what came before, where queries depend on that.
        """
        width, both = self.head_dim, self._fl_fused(x, ready)
        if both is None:
            q, k, v = self._fl_one_by_one(x)
            return rotate(q, position).transpose(1, 2), rotate(k, position).transpose(1, 2), v.transpose(1, 2)
        keys = self._modules["k_proj"].out_features // width
        heads = both.view(*both.shape[:-1], -1, width)
        v = heads[:, :, -keys:]
        turned = self._fl_turned(both, keys, position)
        q, k = self._fl_rotated(heads[:, :, :-keys], keys, position) if turned is None else turned
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _fl_one_by_one(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the heads of q, k and v, normed where they are, by calls in the original's order: hooks see it."""
        return tuple(linear(x).unflatten(-1, (-1, self.head_dim)) for linear in self._fl_linears())

    def _fl_turned(self, both: torch.Tensor, keys: int, position: Any) -> tuple[torch.Tensor, ...] | None:
        """Return what :meth:`_fl_rotated` does of a packed product, by one launch; ``None``: not of these tensors."""
        if self._fl_turn is None or torch.compiler.is_dynamo_compiling() or differentiated(both, *position):
            return None
        (cos, sin), (batch, queries, _) = position, both.shape
        if cos.shape != sin.shape or cos.shape[:-1] not in ((batch, queries), (1, queries)):
            return None
        if not cos.dtype == sin.dtype == both.dtype or not (cos.is_contiguous() and sin.is_contiguous()):
            return None
        norms = self._fl_turn_norms(both.dtype)
        if norms is None:
            return None
        heads = keys * self.num_key_value_groups
        rows = both.view(batch * queries, -1)
        turned: torch.Tensor = self._fl_turn(rows, position, norms[0], (heads, keys), self.head_dim, norms[1])
        return turned.view(batch, queries, -1, self.head_dim).split_with_sizes((heads, keys), 2)

    def _fl_turn_norms(self, dtype: torch.dtype) -> tuple[tuple[torch.Tensor, ...], float] | None:
        """Return weights and epsilon of norms before the rotation, or ``None``: they have to be called."""
        return (), 0.0

    def _fl_norm(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalise the heads of q and k, where the family does."""
        return q, k

    def _fl_norm_weights(self, dtype: torch.dtype) -> tuple[Any, ...]:
        """Return epsilon and weights of norms that the write may do, or ``(None,)``: :meth:`_fl_norm` does them."""
        return (None,)

    def _fl_rotated(self, both: torch.Tensor, keys: int, position: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rotated q and k of ``both [B, Q, H + K, D]``."""
        rotated = rotate(both, position)
        return rotated[:, :, :-keys], rotated[:, :, -keys:]

    def _fl_decode(self, x: torch.Tensor, position: Any, cache: Any, step: Any) -> torch.Tensor:
        """Return ``[…, H * D]`` of a step's tokens: written into the pages and attended there."""
        keys, values = cache.layers[self.layer_idx].paged(step.spare)
        width, kv_heads = self.head_dim, keys.shape[2]
        heads = kv_heads * self.num_key_value_groups
        whole = self._fl_side_by_side(x, step).view(step.rows, -1, width)
        q, k, v = whole.split_with_sizes((heads, kv_heads, kv_heads), 1)
        q = self._fl_write(q, k, v, position, (keys, values), step)
        extra = self._fl_extra()
        sinks = extra.get("s_aux")
        cfg = GQAConfig(
            heads, kv_heads, width, float(self.scaling), extra.get("sliding_window"), None, sinks is not None, PAGE,
            q.dtype, keys.dtype, step.phase, context=step.context, captured=True,
        )  # fmt: skip
        o, _ = step.pick(cfg)(q, keys, values, self._fl_seen(step), None if sinks is None else sinks.float())
        flat: torch.Tensor = o.view(*x.shape[:-1], heads * width)
        return flat

    def _fl_write(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: Any,
        pages: tuple[torch.Tensor, torch.Tensor], step: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Norm and rotate a step's heads, write keys and values, and return the queries."""
        eps, *weights = self._fl_norm_weights(q.dtype)
        if eps is None:
            q, k = self._fl_norm(q, k)
        width = self.head_dim
        write = RotaryKVWriteConfig(
            q.shape[1], k.shape[1], width, width, width, kv_dtype=pages[0].dtype, qk_norm=eps
        )  # fmt: skip
        cos, sin = step.tables(position, width // 2)
        turned: torch.Tensor = step.pick(write)(
            q, k, v, cos, sin, step.request, *pages, step.meta.out_cache_loc, *weights
        )
        return turned

    def _fl_seen(self, step: Any) -> AttentionMeta:
        """Return what describes a step to this layer."""
        meta: AttentionMeta = step.meta
        return meta

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Output:
        """Attend; the signature is Hugging Face's."""
        ready = self._fl_may_run(hidden_states, position_embeddings, attention_mask, kwargs)
        if not ready:
            original: Output = super().forward(  # type: ignore[misc]
                hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs
            )
            return original
        count(self._fl_hits)
        step = active_step(past_key_values)
        if step is not None:
            o = self._fl_decode(hidden_states, position_embeddings, past_key_values, step)
            return step.apply(self.o_proj, o), None
        q, k, v = self._fl_project(hidden_states, position_embeddings, ready, past_key_values)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        o, weights = self._fl_attend(q, k, v, attention_mask, kwargs)
        return self._modules["o_proj"](o.reshape(*hidden_states.shape[:-1], -1)), weights


class FastNormedGQA(FastGQA):
    """Heads of q and k are normalised before they are rotated (Qwen3)."""

    q_norm: Any
    k_norm: Any

    def _fl_norm(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._modules["q_norm"](q), self._modules["k_norm"](k)

    def _fl_one_by_one(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        norms = self._modules["q_norm"], self._modules["k_norm"], lambda v: v
        each = zip(self._fl_linears(), norms, strict=True)
        return tuple(norm(linear(x).unflatten(-1, (-1, self.head_dim))) for linear, norm in each)

    def _fl_norm_weights(self, dtype: torch.dtype) -> tuple[Any, ...]:
        norms = self.q_norm, self.k_norm
        same = len({float(norm.variance_epsilon) for norm in norms}) == 1
        if not same or not all(getattr(norm, "_fl_rounding", "") == "cast_then_scale" for norm in norms):
            return (None,)
        if any(norm.weight.dtype != dtype or not bare(norm) for norm in norms):
            return (None,)
        for norm in norms:
            count(norm._fl_hits)
        return float(self.q_norm.variance_epsilon), self.q_norm.weight.contiguous(), self.k_norm.weight.contiguous()

    def _fl_turn_norms(self, dtype: torch.dtype) -> tuple[tuple[torch.Tensor, ...], float] | None:
        norms: list[Any] = [self._modules["q_norm"], self._modules["k_norm"]]
        for norm in norms:
            if getattr(norm, "_fl_rounding", "") != "cast_then_scale" or not bare(norm) or norm.training:
                return None
            weight = norm._parameters.get("weight")
            if weight is None or weight.dtype != dtype or not norm._fl_guard.stands(norm):
                return None
        if norms[0].variance_epsilon != norms[1].variance_epsilon:
            return None
        for norm in norms:
            count(norm._fl_hits)
        return tuple(norm._parameters["weight"].contiguous() for norm in norms), float(norms[0].variance_epsilon)

    def _fl_rotated(self, both: torch.Tensor, keys: int, position: Any) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = self._fl_norm(both[:, :, :-keys], both[:, :, -keys:])
        rotated = rotate(torch.cat((q, k), dim=2), position)
        return rotated[:, :, :-keys], rotated[:, :, -keys:]


def rotate(x: torch.Tensor, position: Any) -> torch.Tensor:
    """Rotate ``x [B, Q, heads, D]`` by cos and sin ``[B, Q, D]`` or ``[B, Q, D/2]``, halves with halves."""
    cos, sin = (table.unsqueeze(2) for table in position)
    first, second = x.chunk(2, dim=-1)
    if cos.shape[-1] == x.shape[-1]:
        return x * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
