"""Attention with grouped queries (GQA, MHA, MQA): projections, norms, rotary, cache write, core, output.

T = tokens, E = hidden_size, Hq = num_heads, Hkv = num_kv_heads, D = head_dim
q, k, v        = qkv_proj(hidden[T, E])           one fused linear, split into heads
q, k           = q_norm(q), k_norm(k)             with qk_norm: RMSNorm over D
q, cache       = rotary(q), write(rotary(k), v)   one launch, with norms and MRoPE, too
o[T, Hq, D]    = core(q, cache)                   see fastlayers.attention.gqa.config
y[T, E]        = o_proj(o)                        a partial sum where heads are sharded
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

from fastlayers.attention.core import AttentionCore, Projections
from fastlayers.attention.gqa.config import GQA, NAME, GQAConfig
from fastlayers.attention.kv_cache.spec import LayerCache
from fastlayers.attention.meta import AttentionMeta
from fastlayers.attention.rotary_kv_write.layer import RotaryKVWrite
from fastlayers.comm.parallel import SINGLE, Axis, Shard
from fastlayers.errors import (
    ArgumentError,
    as_integers,
    check_kind,
    check_number,
    check_plain,
    check_positive,
    check_tensor,
)
from fastlayers.layer import trust
from fastlayers.linear.split_rows import rows_of, takes_split
from fastlayers.norm.rms_norm.layer import RMSNorm
from fastlayers.quant.spec import NONE, QuantSpec
from fastlayers.rotary.layer import RotaryEmbedding, check_rotary
from fastlayers.weights import Slot


class Attention(AttentionCore):
    """Attention with grouped queries over a paged cache.

    Parameters
    ----------
    hidden_size, num_heads, num_kv_heads, head_dim : int
        Of the whole layer, before sharding.
    rotary : RotaryEmbedding
        Usually shared by all layers. With MRoPE the rotation follows ``meta.rope_positions``, if there are any.
    qkv_bias, o_bias : bool
    qk_norm : float, optional
        Epsilon of an RMSNorm over each head of q and k, before the rotation (Qwen3). Default: none.
    window : int, optional
        Tokens that a token sees, itself included (Hugging Face's ``sliding_window``).
    sinks : bool
        One learned logit a head, added to the softmax denominator (GPT-OSS).
    softcap : float, optional
    softmax_scale : float, optional
        Default ``head_dim ** -0.5``.
    quant : QuantSpec
    prefix : str
        Checkpoint name of this module, to which ``quant``'s skip rules apply.
    axis : Axis
        Heads are split along it. With fewer key heads than ranks, each key head is held by several ranks.
    page_size : int
        Of the cache.
    kv_dtype : torch.dtype, optional
        Of the cache; default ``dtype``.
    device, dtype
        Of the weights.
    backend : str
        The core's: ``"auto"``, a name, or a ladder.

    Attributes
    ----------
    kv_row : tuple[int, int]
        ``(num_kv_heads, head_dim)`` on this rank, for :func:`fastlayers.kv_cache_spec`.

    Notes
    -----
    Parameters keep checkpoint names and layouts. Decode is capture-safe. Under sharding the output is a
    partial sum that the communicator reduces. Source: Ainslie et al. 2023; sinks: GPT-OSS.
    For inference only: keys and values are read back from the cache, so it raises where a gradient is asked for.

    Examples
    --------
    >>> import torch, fastlayers as fl
    >>> rotary = fl.RotaryEmbedding(8, max_position=64)
    >>> attention = fl.Attention(32, 4, 2, 8, rotary=rotary, page_size=16, dtype=torch.float32)
    >>> cache = fl.kv_cache_spec(attention, page_size=16).allocate(num_pages=3)[0]
    >>> meta = fl.AttentionState(2, 8, 1, 16).plan(fl.AttentionBatch((3, 5), (0, 0), [[1], [2]]))
    >>> attention(torch.zeros(8, 32), meta, cache).shape
    torch.Size([8, 32])
    """

    name = NAME
    shares_contexts = True
    # Whether the rotation takes q, k and v as one linear leaves them.
    side_by_side = True
    reads = "qkv_proj"

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        rotary: RotaryEmbedding,
        qkv_bias: bool = False,
        o_bias: bool = False,
        qk_norm: float | None = None,
        window: int | None = None,
        sinks: bool = False,
        softcap: float | None = None,
        softmax_scale: float | None = None,
        quant: QuantSpec = NONE,
        prefix: str = "",
        axis: Axis = SINGLE,
        page_size: int = 64,
        kv_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        check_positive(NAME, hidden_size=hidden_size, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
        check_plain(NAME, "int > 0 | None", window=window)
        hidden_size, num_heads, num_kv_heads, head_dim, window = as_integers(
            hidden_size, num_heads, num_kv_heads, head_dim, window
        )
        check_plain(NAME, "str", prefix=prefix)
        check_plain(NAME, "bool", qkv_bias=qkv_bias, o_bias=o_bias)
        check_kind(NAME, QuantSpec, quant=quant)
        check_kind(NAME, Axis, axis=axis)
        check_number(NAME, softmax_scale=softmax_scale, softcap=softcap, qk_norm=qk_norm)
        check_rotary(NAME, rotary, "head_dim", head_dim)
        dtype = dtype if dtype is not None else torch.get_default_dtype()
        self.hidden_size, self.head_dim, self.dtype, self.rotary = hidden_size, head_dim, dtype, rotary
        self.head_slice = axis.part(num_heads, f"{NAME} num_heads")
        self.num_heads, self.full_heads = self.head_slice.stop - self.head_slice.start, num_heads
        kv_axis = key_axis(num_kv_heads, axis)
        self.num_kv_heads = num_kv_heads // kv_axis.size
        self.kv_row = (self.num_kv_heads, head_dim)
        self._split = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        self._heads = sum(self._split)
        self._norms = () if qk_norm is None else ("q_norm", "k_norm")
        scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
        cache_dtype = dtype if kv_dtype is None else kv_dtype
        heads = self.num_heads, self.num_kv_heads, head_dim
        cfg = GQAConfig(*heads, scale, window, softcap, sinks, page_size, dtype, cache_dtype, lse=False)
        self.choose_core(GQA, cfg, device, backend, window)
        turns = rotary.cfg
        self.mrope = bool(turns.mrope_section)
        self.write = RotaryKVWrite(
            *heads, rotary_dim=turns.rotary_dim, interleaved_in=turns.interleaved_in,
            interleaved_out=turns.interleaved_out, kv_dtype=cache_dtype, qk_norm=qk_norm,
            mrope_section=turns.mrope_section, mrope_interleaved=turns.mrope_interleaved, device=device,
        )  # fmt: skip

        projections = Projections(quant, prefix, device, dtype)
        sizes = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim)
        specs = {projections.spec(part) for part in _PARTS}
        rows = max(spec.block_size[0] if spec.format == "fp8_block" else 1 for spec in specs)
        # One fused linear needs one split for all parts, one number format, and no scale block across a seam.
        whole = all(size // axis.size % rows == 0 for size in sizes[:2])
        self.fused = kv_axis.size == axis.size and len(specs) == 1 and whole
        if self.fused:
            names = tuple(f"../{part}" for part in _PARTS)
            self.qkv_proj = projections.linear("q_proj", hidden_size, sizes, qkv_bias, Shard("column", axis), names)
        else:
            for name, size, along in zip(_PARTS, sizes, (axis, kv_axis, kv_axis), strict=True):
                setattr(self, name, projections.linear(name, hidden_size, size, qkv_bias, Shard("column", along)))
        self.o_proj = projections.linear("o_proj", num_heads * head_dim, hidden_size, o_bias, Shard("row", axis))
        self.q_norm, self.k_norm = (
            RMSNorm(head_dim, qk_norm, device=device, dtype=dtype) if qk_norm is not None else None for _ in "qk"
        )
        # fp32 whatever the model's dtype: it enters the softmax, and costs a few bytes a head.
        logits = torch.zeros(self.num_heads, device=device, dtype=torch.float32)
        self.sinks = nn.Parameter(logits, requires_grad=False) if sinks else None
        trust(*(module for name, module in self.named_children() if name != "rotary"))

    def slots(self) -> Iterator[tuple[str, Slot]]:
        """Yield the checkpoint tensor ``sinks``, if there is one."""
        if self.sinks is not None:
            yield "sinks", Slot(self.sinks, (self.full_heads,), (self.head_slice,))

    def project(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return q ``[T, Hq, D]``, k and v ``[T, Hkv, D]`` before norms and rotation.

        The heads of all three side by side, and ``None`` twice, where one linear makes them and the write takes that.
        """
        if self.fused:
            held: Any = self._modules
            qkv = held["qkv_proj"](hidden).view(-1, self._heads, self.head_dim)
            return (qkv, None, None) if self.side_by_side else qkv.split_with_sizes(self._split, 1)
        q, k, v = (getattr(self, name)(hidden).unflatten(-1, (-1, self.head_dim)) for name in _PARTS)
        return q, k, v

    def rotate_and_write(self, q: torch.Tensor, k: Any, v: Any, meta: AttentionMeta, cache: LayerCache) -> torch.Tensor:
        """Return q, normed and turned; write k, treated the same, and v into ``cache``; all as projected."""
        held: Any = self._modules
        positions, tables = meta.positions, held["rotary"]._buffers
        if meta.rope_positions is not None:
            if not self.mrope:
                raise ArgumentError(NAME, "meta.rope_positions", "set", "None: this rotary has no mrope_section")
            positions = meta.rope_positions
            check_tensor("RotaryEmbedding", "positions", positions, shape=(3, q.shape[0]), dtype=torch.int64)
            positions = positions.contiguous()
        norms = [held[name] for name in self._norms]
        # Norms without weights of their own hold ones in a buffer.
        try:
            weights = [(norm._parameters or norm._buffers)["weight"] for norm in norms]
        except KeyError:  # pruned or parametrized: torch computes it
            weights = [norm.weight for norm in norms]
        turned: torch.Tensor = held["write"](
            q, k, v, tables["cos"], tables["sin"], positions, cache, meta.out_cache_loc, *weights
        )
        return turned

    @takes_split
    def forward(
        self, hidden: torch.Tensor, meta: AttentionMeta, cache: LayerCache, *, split: bool = False
    ) -> torch.Tensor:
        """Attend; the new tokens' keys and values are written into the cache first.

        Parameters
        ----------
        hidden : Tensor ``[T, E]``
            Tokens of all requests, one after the other, padded rows included.
        meta : AttentionMeta
            Of this step.
        cache : LayerCache
            Of this layer; written in place.
        split : bool
            Whether the result may be :class:`~fastlayers.linear.split_rows.SplitRows`: for a norm that reads it alone,
            where :func:`~fastlayers.linear.split_rows.leaves` says so.

        Returns
        -------
        Tensor ``[T, E]``
            A new tensor; a partial sum under sharding.
        """
        if type(meta) is not AttentionMeta or not meta.checked:
            self.check("hidden", hidden, meta, cache)
        elif (hidden.requires_grad and torch.is_grad_enabled()) or forward_ad._current_level >= 0:
            self.refuse_grad(hidden=hidden)
        q, k, v = self.project(hidden)
        q = self.rotate_and_write(q, k, v, meta, cache)
        held: Any = self._modules
        sinks: torch.Tensor | None = self._parameters.get("sinks")
        if sinks is None:  # there are none; or pruned or parametrized: torch computes them
            sinks = self.sinks
        if sinks is not None and sinks.dtype != torch.float32:
            sinks = sinks.float()
        o, _ = self.core(meta, q.shape[0])(q, cache.keys, cache.values, meta, sinks)
        if o.dtype != q.dtype:  # the reference's is fp32
            o = o.to(q.dtype)
        y: torch.Tensor = rows_of(held["o_proj"], o.flatten(1)) if split else held["o_proj"](o.flatten(1))
        return y


_PARTS = ("q_proj", "k_proj", "v_proj")


def key_axis(num_kv_heads: int, axis: Axis) -> Axis:
    """Return the axis along which key heads are split: ``axis``, or fewer parts, each held by several ranks.

    Raises
    ------
    ArgumentError
        Neither divides the other.
    """
    if num_kv_heads % axis.size == 0:
        return axis
    if axis.size % num_kv_heads:
        raise ArgumentError(NAME, "num_kv_heads", f"{num_kv_heads} over {axis.size} ranks", "a multiple or a divisor")
    return Axis(num_kv_heads, axis.rank // (axis.size // num_kv_heads), ())
