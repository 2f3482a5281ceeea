"""Attention with grouped queries (GQA, MHA, MQA): projections, norms, rotary, cache write, core, output.

T = tokens, E = hidden_size, Hq = num_heads, Hkv = num_kv_heads, D = head_dim
q, k, v        = qkv_proj(hidden[T, E])           one fused linear, split into heads
q, k           = q_norm(q), k_norm(k)             with qk_norm: RMSNorm over D
q, cache       = rotary(q), write(rotary(k), v)   one launch with the norms; four with MRoPE
o[T, Hq, D]    = core(q, cache)                   see fastlayers.attention.gqa.core
y[T, E]        = o_proj(o)                        a partial sum where heads are sharded
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from fastlayers import env
from fastlayers.attention.contexts import CONTEXTS, context_of
from fastlayers.attention.gqa.core import GQA, NAME, GQAConfig, phase_of
from fastlayers.attention.kv_cache.spec import LayerCache
from fastlayers.attention.kv_write.layer import KVWrite
from fastlayers.attention.meta import AttentionMeta, check_pages, check_step
from fastlayers.attention.rotary_kv_write.layer import RotaryKVWrite
from fastlayers.comm.parallel import SINGLE, Axis, Shard
from fastlayers.errors import ArgumentError, check_kind, check_number, check_plain, check_positive, check_tensor
from fastlayers.layer import Layer, before_the_cache, trust
from fastlayers.linear.base import LinearBase
from fastlayers.linear.factory import linear
from fastlayers.norm.rms_norm.layer import RMSNorm
from fastlayers.quant.spec import NONE, QuantSpec
from fastlayers.registry import Ladder
from fastlayers.rotary.layer import RotaryEmbedding, check_rotary
from fastlayers.weights import Slot


class Attention(Layer):
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
        scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
        cache_dtype = dtype if kv_dtype is None else kv_dtype
        heads = self.num_heads, self.num_kv_heads, head_dim
        cfg = GQAConfig(*heads, scale, window, softcap, sinks, page_size, dtype, cache_dtype, lse=False)
        self.choose_phases(GQA, cfg, device, backend)
        self._other_ladders: dict[tuple[str, int, str], Ladder] = {}
        self._debug = env.debug()
        # The last class of contexts that decode tells apart: what lies before a window is not read.
        self._last_context = CONTEXTS[-1] if window is None else context_of(window)
        # The fused write turns every frequency by one position; MRoPE's three axes need the rotation by itself.
        self.mrope = bool(rotary.cfg.mrope_section)
        self.write: RotaryKVWrite | KVWrite
        if self.mrope:
            self.write = KVWrite(self.num_kv_heads, head_dim, kv_dtype=cache_dtype, device=device)
        else:
            self.write = RotaryKVWrite(
                *heads,
                rotary_dim=rotary.cfg.rotary_dim,
                interleaved_in=rotary.cfg.interleaved_in,
                interleaved_out=rotary.cfg.interleaved_out,
                kv_dtype=cache_dtype,
                qk_norm=qk_norm,
                device=device,
            )

        def project(
            name: str, into: int, out: int | Sequence[int], bias: bool, shard: Shard, fused: bool = False
        ) -> LinearBase:
            spec = quant.for_module(f"{prefix}.{name}" if prefix else name)
            names = tuple(f"../{part}" for part in _PARTS) if fused else None
            return linear(into, out, bias, quant=spec, shard=shard, names=names, device=device, dtype=dtype)

        sizes = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim)
        specs = {quant.for_module(f"{prefix}.{part}" if prefix else part) for part in _PARTS}
        rows = max(spec.block_size[0] if spec.format == "fp8_block" else 1 for spec in specs)
        # One fused linear needs one split for all parts, one number format, and no scale block across a seam.
        whole = all(size // axis.size % rows == 0 for size in sizes[:2])
        self.fused = kv_axis.size == axis.size and len(specs) == 1 and whole
        if self.fused:
            self.qkv_proj = project("q_proj", hidden_size, sizes, qkv_bias, Shard("column", axis), fused=True)
        else:
            for name, size, along in zip(_PARTS, sizes, (axis, kv_axis, kv_axis), strict=True):
                setattr(self, name, project(name, hidden_size, size, qkv_bias, Shard("column", along)))
        self.o_proj = project("o_proj", num_heads * head_dim, hidden_size, o_bias, Shard("row", axis))
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

    def project(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q ``[T, Hq, D]``, k and v ``[T, Hkv, D]`` before norms and rotation."""
        if self.fused:
            heads, kv_heads = self.num_heads, self.num_kv_heads
            whole = self.qkv_proj(hidden).view(-1, heads + 2 * kv_heads, self.head_dim)
            return whole[:, :heads], whole[:, heads : heads + kv_heads], whole[:, heads + kv_heads :]
        q, k, v = (getattr(self, name)(hidden).unflatten(-1, (-1, self.head_dim)) for name in _PARTS)
        return q, k, v

    def rotate_and_write(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meta: AttentionMeta, cache: LayerCache
    ) -> torch.Tensor:
        """Return q, normed and turned; write k, treated the same, and v into ``cache``."""
        q_norm, k_norm = self.q_norm, self.k_norm
        if not self.mrope:
            if meta.rope_positions is not None:
                raise ArgumentError(NAME, "meta.rope_positions", "set", "None: this rotary has no mrope_section")
            weights = () if q_norm is None or k_norm is None else (q_norm.weight, k_norm.weight)
            tables = self.rotary.cos, self.rotary.sin
            return self.write(q, k, v, *tables, meta.positions, cache, meta.out_cache_loc, *weights)
        if q_norm is not None and k_norm is not None:
            q, k = q_norm(q), k_norm(k)
        positions = meta.positions if meta.rope_positions is None else meta.rope_positions
        q, k = self.rotary(q, k, positions)
        self.write(k, v, cache.keys, cache.values, meta.out_cache_loc)
        return q

    def _ladder_for(self, meta: AttentionMeta) -> Ladder:
        """Return the ladder for this step's phase and, in decode, its context.

        The context is that of the longest request, for a captured bucket its capacity: known on the host, and the same
        at every replay. All but the usual ladders are built when the first such step comes.
        """
        if meta.is_extend_bucket:
            return self._captured_ladder()
        batch = meta.batch
        if not (batch.is_padded or batch.is_decode):
            return self.ladder
        context = 0 if batch.is_padded else min(meta.context, self._last_context)
        if context == self.cfg.context:
            return self.decode_ladder
        phase = phase_of(batch)
        key = (phase, context, self.choice.device.type)
        if key not in self._other_ladders:
            cfg = replace(self.cfg, context=context or self.cfg.context)
            choice = GQA.choose_phases(cfg, (phase,), self.choice.device, self.decode_choice.requested)[0]
            # Nothing of what is built depends on the context but the choice.
            same = phase == "decode" and choice.rungs == self.decode_choice.rungs
            self._other_ladders[key] = self.decode_ladder if same else choice.build()
        return self._other_ladders[key]

    def _captured_ladder(self) -> Ladder:
        """Return the ladder of captured extends, of backends that read lengths on the device."""
        key = ("captured", 0, self.choice.device.type)
        if key not in self._other_ladders:
            cfg = replace(self.cfg, captured=True)
            choice = GQA.choose_phases(cfg, ("extend",), self.choice.device, self.choice.requested)[0]
            self._other_ladders[key] = choice.build()
        return self._other_ladders[key]

    def forward(self, hidden: torch.Tensor, meta: AttentionMeta, cache: LayerCache) -> torch.Tensor:
        """Attend; the new tokens' keys and values are written into the cache first.

        Parameters
        ----------
        hidden : Tensor ``[T, E]``
            Tokens of all requests, one after the other, padded rows included.
        meta : AttentionMeta
            Of this step.
        cache : LayerCache
            Of this layer; written in place.

        Returns
        -------
        Tensor ``[T, E]``
            A new tensor; a partial sum under sharding.
        """
        if not getattr(meta, "checked", False):
            self._check(hidden, meta, cache)
        if torch.is_grad_enabled():
            self.refuse_grad(hidden=hidden, **before_the_cache(self))
        q, k, v = self.project(hidden)
        q = self.rotate_and_write(q, k, v, meta, cache)
        sinks = None if self.sinks is None else self.sinks.float()
        ladder = self._ladder_for(meta)
        core = ladder.single or ladder.pick(meta.num_tokens)
        o, _ = core(q, cache.keys, cache.values, meta, sinks)
        if o.dtype != q.dtype:  # the reference's is fp32
            o = o.to(q.dtype)
        y: torch.Tensor = self.o_proj(o.flatten(1))
        return y

    def _check(self, hidden: torch.Tensor, meta: AttentionMeta, cache: LayerCache) -> None:
        check_step(NAME, meta, cache)
        shape = (meta.num_tokens, self.hidden_size)
        check_tensor(NAME, "hidden", hidden, shape=shape, dtype=self.dtype, device=self.o_proj.weight.device)
        self.check_step(meta, cache)

    def check_step(self, meta: AttentionMeta, cache: LayerCache) -> None:
        """Raise :class:`ArgumentError` unless a step's metadata and a cache are as this layer needs them.

        ``forward`` does so by itself, unless a model that holds the layer did.
        """
        check_step(NAME, meta, cache)
        size, where = self.cfg.page_size, self.o_proj.weight.device
        if meta.page_size != size:
            raise ArgumentError(NAME, "meta.page_size", meta.page_size, f"{size}, as constructed")
        check_tensor(NAME, "meta.positions", meta.positions, device=where)
        wanted, dtype = (None, size, *self.kv_row), self.cfg.kv_dtype
        check_tensor(NAME, "cache.keys", cache.keys, shape=wanted, dtype=dtype, device=where, contiguous=True)
        both = tuple(cache.keys.shape)
        check_tensor(NAME, "cache.values", cache.values, shape=both, dtype=dtype, device=where, contiguous=True)
        check_pages(NAME, meta, cache.num_pages, self._debug)


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
