"""DeepSeek's MLA attention as Hugging Face builds it, with absorbed decode.

    B = batch, Q = new tokens, S = tokens attended to, H = heads
    L = kv_lora_rank, R = qk_rope_head_dim, N = qk_nope_head_dim, V = v_head_dim
    W[H, N+V, L] = kv_b_proj.weight            Wk = W[:, :N], Wv = W[:, N:], both views

    expanded   k, v = W · latent for all S,  softmax(q·k) v       many queries: the original's own way
    absorbed   q' = (Wk^T q_nope, q_rope) [L+R];  o = Wv · (softmax(q' · row) · row[:L])     few queries, long cache

The cheaper one by operations is taken; the decision depends on shapes only. The mask that Hugging Face passes is
honoured as it is: ``None``, bool (True: seen) or additive; under eager attention, which adds 0 and 1, bool is additive.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from transformers.integrations.finegrained_fp8 import FP8Linear
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fastlayers import env
from fastlayers.attention.mla.config import MLA, MLAConfig
from fastlayers.attention.mla.torch import MAX_SCORES, product
from fastlayers.attention.mla_kv_write.layer import MLAKVWriteConfig
from fastlayers.errors import NoBackendError
from fastlayers.patching.cache import PAGE, LatentLayer, adopt, latent_rows
from fastlayers.patching.classes import count, differentiated, fast_class
from fastlayers.patching.fp8 import FastFP8Linear
from fastlayers.patching.gqa import attention_function, weights_asked
from fastlayers.patching.guard import untouched
from fastlayers.patching.packing import PackedModule, plain
from fastlayers.patching.paged import active_step
from fastlayers.patching.step import dense_meta
from fastlayers.quant.block_quant import dequantize_block_weight
from fastlayers.registry import Ladder

# Keyword arguments of the original's forward that change what is computed.
_FOREIGN = frozenset(
    ("cache", "is_causal", "position_bias", "sliding_window", "softcap", "s_aux", "dropout", "scaling")
)
# Linears of codes and scales, patched or not.
_CODED = (FP8Linear, fast_class(FP8Linear, FastFP8Linear))


def attend_latent(
    q: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor | None, scale: float, rank: int
) -> torch.Tensor:
    """Absorbed attention over dense latent rows under any mask.

    Parameters
    ----------
    q : Tensor ``[B, H, Q, L + R]``
    rows : Tensor ``[B, S, L + R]``
    mask : Tensor or None
        Broadcastable to ``[B, H, Q, S]``: bool (True: seen), or added to the scores. ``None``: everything is seen.
    scale : float
    rank : int

    Returns
    -------
    Tensor ``[B, H, Q, L]``
        Rows that see nothing give 0.
    """
    batch, heads, queries, width = q.shape
    step = max(1, MAX_SCORES // max(1, batch * heads * rows.shape[1]))
    if queries > step:
        pieces = []
        for first in range(0, queries, step):
            whole = mask is None or mask.shape[2] == 1
            part = mask if mask is None or whole else mask[:, :, first : first + step]
            pieces.append(attend_latent(q[:, :, first : first + step], rows, part, scale, rank))
        return torch.cat(pieces, dim=2)
    # A CPU multiplies in fp32: converted once for both products.
    wide = rows if rows.is_cuda else rows.float()
    scores = product(q.reshape(batch, heads * queries, width).to(wide.dtype), wide.transpose(1, 2))
    scores = scores.view(batch, heads, queries, -1) * scale
    fully_masked = None
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, float("-inf"))
        fully_masked = ~mask.any(-1, keepdim=True)
    elif mask is not None:
        scores = scores + mask
    # Rounded to the model's dtype, as the original's eager attention does.
    weights = scores.softmax(-1).to(rows.dtype).to(wide.dtype).view(batch, heads * queries, -1)
    o = product(weights, wide[..., :rank]).to(q.dtype).view(batch, heads, queries, rank)
    return o if fully_masked is None else o.masked_fill(fully_masked, 0.0)


def absorbed_is_cheaper(queries: int, keys: int, rank: int, rope: int, nope: int, value: int) -> bool:
    """Return whether absorbing takes fewer operations per head than expanding every key."""
    absorbed = queries * (rank * (nope + value) + keys * (2 * rank + rope))
    expanded = keys * rank * (nope + value) + queries * keys * (nope + rope + value)
    return absorbed < expanded


class FastMLA(PackedModule):
    """MLA; families add the signature of ``forward`` and ``_fl_rotate``."""

    _fl_relies: tuple[str, ...] = ("forward", "expand_kv", "eager_attention_forward", "repeat_kv")
    _fl_functions = ("linear", "softmax", "dropout", "scaled_dot_product_attention")
    _fl_baked = ("scaling",)
    _fl_core: Ladder | None
    _fl_adopt: bool
    _fl_dense: torch.Tensor | None
    _fl_dense_of: tuple[Any, ...]
    config: Any
    layer_idx: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    qk_head_dim: int
    v_head_dim: int
    scaling: float
    q_proj: Any
    q_a_proj: Any
    q_a_layernorm: Any
    q_b_proj: Any
    kv_a_proj_with_mqa: Any
    kv_a_layernorm: Any
    kv_b_proj: Any
    o_proj: Any
    expand_kv: Any

    def _fl_parts(self) -> tuple[str, ...]:
        return ("q_proj" if self.q_lora_rank is None else "q_a_proj"), "kv_a_proj_with_mqa"

    def _fl_pack(self, again: bool = False) -> int:
        # Of a quantised kv_b_proj one dequantised copy is held; unquantised weights are used where they are.
        moved, part = super()._fl_pack(again), self.kv_b_proj
        self._fl_dense = None
        weight = part.weight if type(part) in _CODED else None
        if type(weight) is nn.Parameter and weight.element_size() == 1 and weight.device.type != "meta":
            self._fl_dense = self._fl_dequantised()
            moved += self._fl_dense.numel() * self._fl_dense.element_size()
        return moved

    def _fl_dequantised(self) -> torch.Tensor:
        self._fl_dense_of = self._fl_sources()
        with torch.no_grad(), torch.inference_mode(False):
            return dequantize_block_weight(
                self.kv_b_proj.weight.detach(), self.kv_b_proj.weight_scale_inv.detach(),
                tuple(self.kv_b_proj.block_size), self.kv_a_layernorm.weight.dtype,
            )  # fmt: skip

    def _fl_sources(self) -> tuple[Any, ...]:
        """Return what a dequantised copy is of: the tensors, and their versions where they have some."""
        weight, scale = self.kv_b_proj.weight, self.kv_b_proj.weight_scale_inv
        return weight, scale, *(0 if each.is_inference() else each._version for each in (weight, scale))

    def _fl_edits(self) -> int:
        """Return a number that grows when a copy is made again: a captured step reads the one it was captured with."""
        return 0 if self._fl_dense is None or not self._fl_plain() else sum(self._fl_sources()[2:])

    def _fl_kv_b(self) -> torch.Tensor:
        """Return the weight of ``kv_b_proj``, of a quantised one the copy: made again if its source has changed."""
        if self._fl_dense is None:
            weight: torch.Tensor = self.kv_b_proj.weight
            return weight
        if not torch.compiler.is_compiling():
            now, then = self._fl_sources(), self._fl_dense_of
            if now[2:] != then[2:] or now[0] is not then[0] or now[1] is not then[1]:
                self._fl_dense = self._fl_dequantised()
        return self._fl_dense

    def _fl_choose(self) -> None:
        device, dtype = self.kv_a_layernorm.weight.device, self.kv_a_layernorm.weight.dtype
        auto = self._fl_backend == "auto" and "mla" not in env.backend_overrides()
        self._fl_core = None
        if auto and device.type != "cuda":
            return
        cfg = MLAConfig(
            self.num_heads, self.kv_lora_rank, self.qk_rope_head_dim, self.qk_nope_head_dim, self.v_head_dim,
            float(self.scaling), PAGE, dtype, dtype,
        )  # fmt: skip
        try:
            self._fl_core = MLA.choose(cfg, device, self._fl_backend).build()
        except NoBackendError:
            if not auto:
                raise

    def _fl_implementation(self) -> str:
        core = "torch" if self._fl_core is None else self._fl_core.choice.name
        return ", ".join(filter(None, (f"absorbed mla={core}", self._fl_together())))

    def _fl_rotate(self, q: torch.Tensor, k: torch.Tensor, position: Any) -> tuple[torch.Tensor, torch.Tensor]:
        raise TypeError(f"{type(self).__name__} has no rotary embedding")

    def _fl_may_run(self, hidden_states: torch.Tensor, mask: Any, extra: dict[str, Any]) -> int:
        """Return what :meth:`_fl_ready` does, 0 also where this call is not one that our code computes."""
        ready = self._fl_ready(hidden_states, mask)
        if not ready:
            return 0
        why = ""
        if mask is not None and not (isinstance(mask, torch.Tensor) and mask.dim() == 4):
            why = "a mask that is not a tensor of four dimensions"
        elif not _FOREIGN.isdisjoint(extra) and any(extra.get(name) is not None for name in _FOREIGN):
            why = "arguments for another attention"
        elif weights_asked(self, extra):
            why = "attention weights are asked for"
        elif self._fl_function() not in (sdpa_attention_forward, self._fl_eager()):
            why = f"attention {self.config._attn_implementation!r} is asked for"
        if why:
            self._fl_fell(why)
        return 0 if why else ready

    def _fl_eager(self) -> Any:
        return sys.modules[type(self)._fl_origin[0].__module__].eager_attention_forward  # type: ignore[attr-defined]

    def _fl_function(self) -> Any:
        """Return the attention function that the original would call."""
        return attention_function(self.config, self._fl_eager())

    def _fl_project(self, x: torch.Tensor, ready: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries ``[B,Q,H,N+R]``, normalised latents ``[B,Q,L]`` and unrotated rope keys ``[B,Q,R]``.

        ``ready``: see :meth:`_fl_fused`.
        """
        latent = self.kv_lora_rank + self.qk_rope_head_dim
        both = self._fl_fused(x, ready)
        if both is None:
            q = self.q_proj(x) if self.q_lora_rank is None else self.q_a_proj(x)
        else:
            q = both[..., :-latent]
        if self.q_lora_rank is not None:
            q = self.q_b_proj(self.q_a_layernorm(q))
        # After q, as the original calls them: hooks see the order.
        kv = self.kv_a_proj_with_mqa(x) if both is None else both[..., -latent:]
        nope, rope = kv.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        return q.reshape(*x.shape[:-1], -1, self.qk_head_dim), self.kv_a_layernorm(nope), rope

    def _fl_forward(
        self, hidden_states: torch.Tensor, position: Any, mask: torch.Tensor | None, cache: Any, extra: dict[str, Any],
        ready: int,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        count(self._fl_hits)
        if mask is not None and mask.dtype == torch.bool and self.config._attn_implementation == "eager":
            mask = mask.to(hidden_states.dtype)
        batch, queries = hidden_states.shape[:2]
        q, latent, k_rope = self._fl_project(hidden_states, ready)
        q_nope, q_rope = q.transpose(1, 2).split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        q_rope, k_rope = self._fl_rotate(q_rope, k_rope.unsqueeze(1), position)
        keys, values = latent.unsqueeze(1), k_rope
        step = active_step(cache)
        if step is not None:
            return step.apply(self.o_proj, self._fl_decode(q_nope, q_rope, keys, values, cache, step)), None
        if cache is not None:
            if self._fl_adopt:
                adopt(cache, self.layer_idx)
            keys, values = cache.update(keys, values, self.layer_idx)
        recorded = differentiated(q_nope, q_rope, keys, values)
        dense = None if recorded else self._fl_absorbable(queries, keys, mask)
        if dense is not None:
            rows = latent_rows(cache, self.layer_idx, keys, values)
            o = self._fl_absorbed(q_nope, q_rope, rows, mask, cache, dense)
        else:
            o = self._fl_expanded(q_nope, q_rope, keys, values, mask, extra)
        return self.o_proj(o.reshape(batch, queries, -1)), None

    def _fl_plain(self) -> bool:
        """Return whether ``kv_b_proj`` does nothing but multiply by its weight, so that it may be absorbed."""
        part = self.kv_b_proj
        if getattr(part, "bias", None) is not None:
            return False
        return plain(part) if self._fl_dense is None else type(part) in _CODED and untouched(part)

    def _fl_unpaged(self) -> str:
        return super()._fl_unpaged() or ("" if self._fl_plain() else "kv_b_proj was replaced or hooked")

    def _fl_decode(
        self, q_nope: torch.Tensor, q_rope: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, cache: Any,
        step: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Return ``[B, Q, H * V]`` of a step's tokens: written into the pages and attended there, absorbed."""
        pages, heads = cache.layers[self.layer_idx].pages(step.spare), self.num_heads
        write = MLAKVWriteConfig(self.kv_lora_rank, self.qk_rope_head_dim, pages.dtype)
        step.pick(write)(keys.reshape(step.rows, -1), values.reshape(step.rows, -1), pages, step.meta.out_cache_loc)
        weight = self._fl_kv_b()
        dense = weight.view(heads, self.qk_nope_head_dim + self.v_head_dim, self.kv_lora_rank)
        by_head = q_nope.transpose(0, 1).reshape(heads, step.rows, -1)
        absorbed = torch.bmm(by_head, dense[:, : self.qk_nope_head_dim])
        q = torch.cat((absorbed.transpose(0, 1), q_rope.transpose(1, 2).reshape(step.rows, heads, -1)), dim=-1)
        cfg = MLAConfig(
            heads, self.kv_lora_rank, self.qk_rope_head_dim, self.qk_nope_head_dim, self.v_head_dim,
            float(self.scaling), PAGE, q.dtype, pages.dtype, captured=True,
        )  # fmt: skip
        o, _ = step.pick(cfg).decode(q, pages, step.meta)
        out = torch.bmm(o.transpose(0, 1), dense[:, self.qk_nope_head_dim :].transpose(1, 2))
        return out.transpose(0, 1).reshape(q_nope.shape[0], q_nope.shape[2], -1)

    def _fl_absorbable(self, queries: int, keys: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
        """Return ``W[H, N+V, L]`` if this call is to be absorbed."""
        total = keys.shape[2]
        if mask is None:
            # Without a mask one query sees all; several are causal in a way that depends on the kernel.
            fits = queries == 1
        else:
            fits = mask.shape[-1] == total and mask.shape[-2] in (1, queries)
        cheaper = absorbed_is_cheaper(
            queries, total, self.kv_lora_rank, self.qk_rope_head_dim, self.qk_nope_head_dim, self.v_head_dim
        )
        if not (fits and cheaper and self._fl_plain()):
            return None
        weight = self._fl_kv_b()
        if weight.dtype != keys.dtype:
            return None
        return weight.view(self.num_heads, self.qk_nope_head_dim + self.v_head_dim, self.kv_lora_rank)

    def _fl_absorbed(
        self, q_nope: torch.Tensor, q_rope: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor | None, cache: Any,
        dense: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Return ``[B, Q, H, V]``."""
        batch, heads, queries, nope = q_nope.shape
        absorbed = torch.bmm(q_nope.transpose(0, 1).reshape(heads, batch * queries, nope), dense[:, :nope])
        q_latent = absorbed.view(heads, batch, queries, -1).transpose(0, 1)
        q = torch.cat((q_latent, q_rope), dim=-1)
        o = self._fl_paged(q, rows, mask, cache)
        if o is None:
            o = attend_latent(q, rows, mask, self.scaling, self.kv_lora_rank)
        by_head = o.transpose(0, 1).reshape(heads, batch * queries, -1)
        out = torch.bmm(by_head, dense[:, nope:].transpose(1, 2))
        return out.view(heads, batch, queries, -1).permute(1, 2, 0, 3)

    def _fl_paged(
        self, q: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor | None, cache: Any
    ) -> torch.Tensor | None:
        """Run the chosen core on the latent buffer as pages, or return ``None`` where it has no such form."""
        if self._fl_core is None or mask is not None or q.shape[2] != 1 or cache is None:
            return None
        layer = cache.layers[self.layer_idx]
        pages = layer.pages() if isinstance(layer, LatentLayer) else None
        if pages is None:
            return None
        batch, length = q.shape[0], rows.shape[1]
        core = self._fl_core.pick(batch)
        # The first layer of a step describes it for all.
        holder: Any = cache.layers[0] if isinstance(cache.layers[0], LatentLayer) else layer
        shape = batch, length, pages.shape[0] // batch, q.device
        if holder.described is None or holder.described[0] != shape:
            holder.described = shape, dense_meta(*shape)
        o, _ = core.decode(q[:, :, 0], pages, holder.described[1])
        return o.unsqueeze(2)

    def _fl_expanded(
        self, q_nope: torch.Tensor, q_rope: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
        mask: torch.Tensor | None, extra: dict[str, Any],
    ) -> torch.Tensor:  # fmt: skip
        """Return ``[B, Q, H, V]`` the original's way: expand every key, then its attention function."""
        query = torch.cat((q_nope, q_rope), dim=-1)
        k, v = self.expand_kv(keys, values)
        o: torch.Tensor = self._fl_function()(self, query, k, v, mask, dropout=0.0, scaling=self.scaling, **extra)[0]
        return o
