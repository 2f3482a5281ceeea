"""MLA as DeepSeek builds it: latent projections, norms, rotary, paged latent cache, attention, output projection.

    T tokens, D hidden, H heads on this rank, Lq = q_lora_rank, L = kv_lora_rank, V = v_head_dim
    N = qk_nope_head_dim, R = qk_rope_head_dim

    q_a[Lq] | c[L] | k_pe[R] = x · [W_qa | W_kva]ᵀ              one product for both (Lq given)
    q[H, N+R] = norm(q_a) · W_qbᵀ                               or x · W_qᵀ without q_lora
    cache[slot] = [norm(c) | rope(k_pe)]                        L+R numbers a token, for all heads
    mqa:  o_h = softmax(scale·([q_nope_h · W_kc_h | rope(q_pe_h)] · cache)) · cache[:L] · W_vc_hᵀ
    mha:  k_h = [c · W_kc_hᵀ | k_pe],  v_h = c · W_vc_hᵀ,  o_h = softmax(scale · q_h · k_h) · v_h
    y = o · W_oᵀ                                                a partial sum when heads are split over ranks

``kv_b_proj.weight`` viewed ``[H, N+V, L]`` holds W_kc (first N rows of a head) and W_vc (last V rows).
Source: DeepSeek-V2 (2024), section 2.1; paths: fastlayers.attention.mla.prefix_chunks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

from fastlayers.attention.core import AttentionCore, Projections
from fastlayers.attention.kv_cache.spec import LayerCache
from fastlayers.attention.merge_state.layer import MergeState
from fastlayers.attention.meta import AttentionBatch, AttentionMeta, check_loc
from fastlayers.attention.mla.config import FEW, MLA, NAME, MLAConfig
from fastlayers.attention.mla.fp8_absorb import QuantisedAbsorb
from fastlayers.attention.mla.prefix_chunks import PATHS, Expansion, MLAThresholds, outweighs_capture, select_path
from fastlayers.attention.rotary_kv_write.layer import RotaryKVWrite
from fastlayers.comm.parallel import REPLICATED, SINGLE, Axis, Shard
from fastlayers.errors import ArgumentError, as_integers, check_kind, check_plain, check_positive
from fastlayers.layer import trust
from fastlayers.linear.quantised import QuantisedLinear
from fastlayers.norm.rms_norm.layer import RMSNorm
from fastlayers.quant.coded_rows import CodingNorm, layout_of_codes
from fastlayers.quant.spec import NONE, QuantSpec
from fastlayers.rotary.layer import RotaryEmbedding, check_rotary
from fastlayers.weights_epoch import Packed


def _join_heads(*given: Any) -> None:
    from fastlayers.attention.mla.joined_heads import join_heads  # there may be no Triton without a GPU

    join_heads(*given)


_FUSED = ("../q_a_proj", "../kv_a_proj_with_mqa")


class _Views:
    """Absorbed weights that are views of one weight: good for as long as that is the weight and lies where it did."""

    __slots__ = ("address", "value", "weight")

    def __init__(self, weight: nn.Parameter, value: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.weight, self.address = weight, weight.data_ptr()
        # Views hold what they are of, which then cannot be exchanged (torch's swap_tensors); detached ones do not.
        self.value = (value[0].detach(), value[1].detach())

    def __reduce__(self) -> tuple[Any, ...]:
        # A copied or restored layer looks at its own weight.
        return type(None), ()


class MLAAttention(AttentionCore):
    """Multi-head latent attention over a paged latent cache.

    Parameters
    ----------
    hidden_size, num_heads : int
        Of the whole layer; heads are split over ``axis``.
    q_lora_rank : int or None
        ``None``: queries come from ``q_proj`` directly (V2-Lite).
    kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim : int
    rotary : RotaryEmbedding
        Shared by the layers of a model.
    softmax_scale : float, optional
        Default ``(N + R) ** -0.5``; YaRN models multiply by their factor.
    bias : bool
        On q_a, kv_a and o projections.
    norm_eps : float
        Of the two inner norms.
    quant : QuantSpec
    prefix : str
        Checkpoint name of this module, to which ``quant``'s skip rules apply.
    axis : Axis
        Attention tensor parallelism; the output is then a partial sum.
    page_size : int
    kv_dtype : torch.dtype, optional
        Of the cache; default ``dtype``. e4m3 saturates, scale 1.
    fp8_math : bool
        With an e4m3 cache: absorbed attention may round queries and softmax weights to e4m3 as well.
    fp8_absorb : bool
        With a ``kv_b_proj`` of FP8 blocks: absorbed products multiply its codes, and round their inputs to e4m3 by 128
        features, instead of a dequantised copy, which is then not held. As coarse as that format.
    thresholds : MLAThresholds, optional
    alt_stream : torch.cuda.Stream, optional
        Second stream on which the latent's norm overlaps the query's, only while a graph is captured; share one
        among all layers.
    device, dtype, backend
        ``backend`` names the attention core's.

    Notes
    -----
    Parameters keep checkpoint names and layouts. Decode is capture-safe; prefill reads host lengths.
    For inference only: latents are read back from the cache, so it raises where a gradient is asked for.

    Examples
    --------
    >>> import torch, fastlayers as fl
    >>> rotary = fl.RotaryEmbedding(16, max_position=64, interleaved_in=True)
    >>> mla = fl.MLAAttention(32, 2, q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16,
    ...                       v_head_dim=16, rotary=rotary, page_size=16, dtype=torch.float32)
    >>> cache = fl.kv_cache_spec(mla, page_size=16).allocate(num_pages=3)[0]
    >>> meta = fl.AttentionState(2, 8, 1, 16).plan(fl.AttentionBatch((3, 5), (0, 0), [[1], [2]]))
    >>> mla(torch.zeros(8, 32), meta, cache).shape, mla.path(meta)
    (torch.Size([8, 32]), 'mha')
    """

    name = NAME
    reads = "qkv_a_proj"
    several_tokens, core_path = "ragged", "mqa"
    few = FEW

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        rotary: RotaryEmbedding,
        softmax_scale: float | None = None,
        bias: bool = False,
        norm_eps: float = 1e-6,
        quant: QuantSpec = NONE,
        prefix: str = "",
        axis: Axis = SINGLE,
        page_size: int = 64,
        kv_dtype: torch.dtype | None = None,
        fp8_math: bool = False,
        fp8_absorb: bool = False,
        thresholds: MLAThresholds | None = None,
        alt_stream: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        check_positive(NAME, hidden_size=hidden_size, num_heads=num_heads, page_size=page_size)
        check_positive(NAME, qk_nope_head_dim=qk_nope_head_dim, qk_rope_head_dim=qk_rope_head_dim)
        check_positive(NAME, kv_lora_rank=kv_lora_rank, v_head_dim=v_head_dim)
        check_plain(NAME, "int > 0 | None", q_lora_rank=q_lora_rank)
        hidden_size, num_heads, page_size, q_lora_rank = as_integers(hidden_size, num_heads, page_size, q_lora_rank)
        kv_lora_rank, v_head_dim = as_integers(kv_lora_rank, v_head_dim)
        qk_nope_head_dim, qk_rope_head_dim = as_integers(qk_nope_head_dim, qk_rope_head_dim)
        check_plain(NAME, "bool", bias=bias, fp8_absorb=fp8_absorb)
        check_plain(NAME, "str", prefix=prefix)
        check_plain(NAME, "float >= 0", norm_eps=norm_eps)
        check_kind(NAME, QuantSpec, quant=quant)
        check_kind(NAME, Axis, axis=axis)
        check_kind(NAME, MLAThresholds | None, thresholds=thresholds)
        check_kind(NAME, torch.cuda.Stream | None, alt_stream=alt_stream)
        check_rotary(NAME, rotary, "qk_rope_head_dim", qk_rope_head_dim, whole=True)
        dtype = dtype if dtype is not None else torch.get_default_dtype()
        heads = axis.part(num_heads, "MLAAttention num_heads")
        self.num_heads, self.head_dim = heads.stop - heads.start, qk_nope_head_dim + qk_rope_head_dim
        scale = self.head_dim**-0.5 if softmax_scale is None else softmax_scale
        cfg = MLAConfig(
            self.num_heads, kv_lora_rank, qk_rope_head_dim, qk_nope_head_dim, v_head_dim, scale, page_size, dtype,
            kv_dtype if kv_dtype is not None else dtype,
            fp8_math=fp8_math, lse=False,
        )  # fmt: skip
        self.choose_core(MLA, cfg, device, backend)
        self.hidden_size, self.q_lora_rank, self.rotary, self.alt_stream = hidden_size, q_lora_rank, rotary, alt_stream
        self.thresholds = thresholds if thresholds is not None else MLAThresholds()
        self.kv_row = (cfg.latent_width,)

        projections = Projections(quant, prefix, device, dtype)
        project = projections.linear
        norm = partial(RMSNorm, eps=norm_eps, device=device, dtype=dtype)
        column = Shard("column", axis) if axis.size > 1 else REPLICATED
        row = Shard("row", axis) if axis.size > 1 else REPLICATED
        latent, query = kv_lora_rank + qk_rope_head_dim, num_heads * self.head_dim
        self.fused_a = q_lora_rank is not None and self._fusable(projections, q_lora_rank)
        if q_lora_rank is None:
            self.q_proj = project("q_proj", hidden_size, query, False, column)
        else:
            self.q_a_layernorm = norm(q_lora_rank)
            self.q_b_proj = project("q_b_proj", q_lora_rank, query, False, column)
        if self.fused_a:
            assert q_lora_rank is not None
            self.qkv_a_proj = project("q_a_proj", hidden_size, (q_lora_rank, latent), bias, REPLICATED, _FUSED)
        else:
            if q_lora_rank is not None:
                self.q_a_proj = project("q_a_proj", hidden_size, q_lora_rank, bias, REPLICATED)
            self.kv_a_proj_with_mqa = project("kv_a_proj_with_mqa", hidden_size, latent, bias, REPLICATED)
        self.kv_a_layernorm = norm(kv_lora_rank)
        expanded = num_heads * (qk_nope_head_dim + v_head_dim)
        self.kv_b_proj = project("kv_b_proj", kv_lora_rank, expanded, False, column)
        self.o_proj = project("o_proj", num_heads * v_head_dim, hidden_size, bias, row)
        self.rotary_kv_write = RotaryKVWrite(
            self.num_heads, 1, qk_rope_head_dim, kv_lora_rank, interleaved_in=rotary.cfg.interleaved_in,
            interleaved_out=rotary.cfg.interleaved_out, latent=True, kv_dtype=cfg.kv_dtype, device=device,
        )  # fmt: skip
        self.merge = MergeState(v_head_dim, device=device)
        self.quantised_absorb = QuantisedAbsorb(cfg, self.kv_b_proj, device) if fp8_absorb else None
        self._absorbed: Packed | None = None
        self._views: _Views | None = None
        trust(*(module for name, module in self.named_children() if name != "rotary"))

    @property
    def fixed_dtype(self) -> torch.dtype:
        """The dtype of inputs, outputs and unquantised weights."""
        dtype: torch.dtype = self.cfg.dtype
        return dtype

    @staticmethod
    def _fusable(projections: Projections, q_lora_rank: int) -> bool:
        """Whether q_a and kv_a can be one weight: the same format, and whole scale blocks up to the seam."""
        first, second = (projections.spec(name) for name in ("q_a_proj", "kv_a_proj_with_mqa"))
        return first == second and (first.format != "fp8_block" or q_lora_rank % first.block_size[0] == 0)

    def finalize(self) -> None:
        """Prepare the absorbed weights; a copy is made only where kv_b_proj is quantised (dequantised once)."""
        if self.quantised_absorb is None:
            self.absorbed_weights()

    def weights_changed(self) -> None:
        """Tell, and forget the absorbed weights."""
        self._absorbed = self._views = None
        super().weights_changed()

    def packed_sources(self) -> tuple[torch.Tensor, ...]:
        """Return the weight and scales of a quantised ``kv_b_proj``: the absorbed weights are a copy."""
        if not isinstance(self.kv_b_proj, QuantisedLinear) or self.quantised_absorb is not None:
            return ()
        found = tuple(self.kv_b_proj.parameters())
        # A model that was copied under inference_mode has no versions: then no copy is held.
        return () if any(weight.is_inference() for weight in found) else found

    def _absorb(self) -> tuple[torch.Tensor, torch.Tensor]:
        cfg, projection = self.cfg, self.kv_b_proj
        weight = projection.dequantized(cfg.dtype) if isinstance(projection, QuantisedLinear) else projection.weight
        per_head = weight.view(self.num_heads, cfg.qk_nope_head_dim + cfg.v_head_dim, cfg.kv_lora_rank)
        return per_head[:, : cfg.qk_nope_head_dim], per_head[:, cfg.qk_nope_head_dim :]

    def absorbed_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(W_kc [H,N,L], W_vc [H,V,L])``: views of ``kv_b_proj.weight``, or a copy where it is quantised.

        The copy is made again where the weights it is of were replaced, loaded, moved or edited.
        """
        return self._absorbed_weights(torch.compiler.is_compiling())

    def _absorbed_weights(self, compiling: bool) -> tuple[torch.Tensor, torch.Tensor]:
        if compiling:  # no program may hold a copy: it would not ask whether that is fresh
            return self._absorb()
        held = self._absorbed
        if held is not None and held.counter._version == held.at:
            absorbed: tuple[torch.Tensor, torch.Tensor] = held.value
            return absorbed
        views = self._views
        if views is not None:
            projection: Any = self._modules["kv_b_proj"]
            weight = projection._parameters.get("weight")
            if weight is views.weight and weight.data_ptr() == views.address:
                return views.value
        sources = self.packed_sources()
        if not sources:
            absorbed = self._absorb()
            weight = self.kv_b_proj.weight
            if type(weight) is nn.Parameter and absorbed[0]._base is weight:
                self._views = _Views(weight, absorbed)
                return self._views.value
            return absorbed
        with torch.inference_mode(False), torch.no_grad():
            absorbed = self._absorb()
        self.weights_changed()  # a captured step holds the address of the copy that is replaced
        self._absorbed = Packed(absorbed, self, sources)
        return absorbed

    def path(self, meta: AttentionMeta) -> str:
        """Return the path this layer takes for ``meta``: ``meta.path`` if set, else chosen by the thresholds."""
        if meta.path and meta.path not in PATHS:
            raise ArgumentError(NAME, "meta.path", repr(meta.path), "one of " + ", ".join(PATHS))
        if meta.path or meta.batch.is_decode:
            return meta.path or "mqa"
        return select_path(meta.batch, self.thresholds, self.num_heads)

    def long_prefix(self, tokens: int) -> str:
        """Return the path of prefixes that are expanded chunk by chunk, if steps of so many tokens reach it."""
        return "mha_chunked" if tokens > self.thresholds.one_shot else ""

    def outweighs_capture(self, batch: AttentionBatch) -> bool:
        """Return whether an extend of a long prefix had better expand it: captured ones attend to latents."""
        return outweighs_capture(batch, self.thresholds, self.num_heads)

    def forward(self, hidden_states: torch.Tensor, meta: AttentionMeta, cache: LayerCache) -> torch.Tensor:
        """Attend; the new tokens' latents are written to ``cache`` first.

        Parameters
        ----------
        hidden_states : Tensor ``[T, D]``
        meta : AttentionMeta
        cache : LayerCache
            Mutated: rows ``meta.out_cache_loc``.

        Returns
        -------
        Tensor ``[T, D]``
            A partial sum if heads are split over ranks.
        """
        cfg = self.cfg
        if type(meta) is not AttentionMeta or not meta.checked:
            self.check("hidden_states", hidden_states, meta, cache)
        elif (hidden_states.requires_grad and torch.is_grad_enabled()) or forward_ad._current_level >= 0:
            self.refuse_grad(hidden_states=hidden_states)
        q, latent, k_pe = self._project(hidden_states)
        held: Any = self._modules
        nope, tables = cfg.qk_nope_head_dim, held["rotary"]._buffers
        path = "mqa" if meta.phase == "decode" and not meta.path else self.path(meta)
        room = None
        if path == "mqa" and not torch.compiler.is_compiling():  # a compiler traces no product that writes into a view
            room = q.new_empty(q.shape[0], self.num_heads, *self.kv_row)
        q_pe = held["rotary_kv_write"](
            q[..., nope:], k_pe.unsqueeze(1), latent.unsqueeze(1), tables["cos"], tables["sin"], meta.positions, cache,
            meta.out_cache_loc, out=None if room is None else room[..., cfg.kv_lora_rank :],
        )  # fmt: skip
        if path == "mqa":
            o = self._mqa(q[..., :nope], q_pe, room, cache.keys, meta)
        else:
            if q.is_cuda and not torch.compiler.is_compiling():
                _join_heads(None, q_pe, q)
            else:
                q[..., nope:] = q_pe
            o = self._mha(q, cache.keys, meta, path)
        projected: torch.Tensor = held["o_proj"](o.flatten(1))
        return projected

    def check_step(self, meta: AttentionMeta, cache: LayerCache) -> None:
        """Raise :class:`ArgumentError` unless a step's metadata and a cache are as this layer needs them.

        ``forward`` does so by itself, unless a model that holds the layer did.
        """
        super().check_step(meta, cache)
        check_loc(NAME, meta.out_cache_loc, cache.num_pages * meta.page_size, self._debug)

    def _project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        cfg = self.cfg
        held: Any = self._modules
        sizes = [cfg.kv_lora_rank, cfg.qk_rope_head_dim]
        if self.fused_a:
            q_a, latent, k_pe = held["qkv_a_proj"](hidden_states).split_with_sizes([self.q_lora_rank, *sizes], -1)
        else:
            latent, k_pe = held["kv_a_proj_with_mqa"](hidden_states).split_with_sizes(sizes, -1)
            q_a = hidden_states if self.q_lora_rank is None else held["q_a_proj"](hidden_states)
        if self.q_lora_rank is None:
            q, latent = held["q_proj"](q_a), held["kv_a_layernorm"](latent)
        else:
            q_a, latent = self._both_norms(q_a, latent)
            q = held["q_b_proj"](q_a)
        return q.view(-1, self.num_heads, self.head_dim), latent, k_pe

    def _both_norms(self, q_a: torch.Tensor, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Norm both latents, side by side on two streams while a graph is captured; the query's maybe as codes."""
        norm_q: Any = self.q_a_layernorm
        if hasattr(self.q_b_proj, "codes_layout"):
            norm_q = CodingNorm(norm_q, self._codes_of_query)
        aside = self.alt_stream is not None and q_a.is_cuda and not torch.compiler.is_compiling()
        if not aside or not torch.cuda.is_current_stream_capturing():
            return norm_q(q_a), self.kv_a_layernorm(latent)
        main = torch.cuda.current_stream()
        self.alt_stream.wait_stream(main)
        normed_q = norm_q(q_a)
        with torch.cuda.stream(self.alt_stream):
            normed_latent = self.kv_a_layernorm(latent)
        main.wait_stream(self.alt_stream)
        return normed_q, normed_latent

    def _codes_of_query(self, rows: int) -> str | None:
        """Return the layout of scales in which ``q_b_proj`` takes so many rows as codes, as a communicator asks it."""
        plain = torch.is_grad_enabled() or torch.compiler.is_compiling()
        return None if plain else layout_of_codes(self.q_b_proj, rows)

    def _mqa(
        self, q_nope: torch.Tensor, q_pe: torch.Tensor, q: torch.Tensor | None, cache: torch.Tensor, meta: AttentionMeta
    ) -> torch.Tensor:
        """Return ``o [T, H, V]``; ``q``: where both parts of the absorbed queries go, ``q_pe`` already there."""
        cfg, compiling, quantised = self.cfg, q is None, self.quantised_absorb
        decode = self.core(meta, q_nope.shape[0]).decode
        if quantised is not None:
            return quantised(self.kv_b_proj, q_nope, q_pe, q, lambda queries: decode(queries, cache, meta)[0])
        w_kc, w_vc = self._absorbed_weights(compiling)
        if q is None:
            q = torch.cat([torch.bmm(q_nope.transpose(0, 1), w_kc).transpose(0, 1), q_pe], -1)
            o_latent = decode(q, cache, meta)[0].to(q.dtype)
            return torch.bmm(o_latent.transpose(0, 1), w_vc.transpose(1, 2)).transpose(0, 1)
        # Both products write through strided views; nothing is copied.
        torch.bmm(q_nope.transpose(0, 1), w_kc, out=q[..., : cfg.kv_lora_rank].transpose(0, 1))
        o_latent, _ = decode(q, cache, meta)
        if o_latent.dtype != q.dtype:  # the reference's is fp32
            o_latent = o_latent.to(q.dtype)
        o = q.new_empty(q.shape[0], self.num_heads, cfg.v_head_dim)
        torch.bmm(o_latent.transpose(0, 1), w_vc.transpose(1, 2), out=o.transpose(0, 1))
        return o

    def _expand(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys ``[S,H,N+R]`` and values ``[S,H,V]`` of cached rows ``[S, L+R]`` (in the model's dtype)."""
        cfg = self.cfg
        latent, k_pe = rows.split([cfg.kv_lora_rank, cfg.qk_rope_head_dim], -1)
        kv = self.kv_b_proj(latent).view(-1, self.num_heads, cfg.qk_nope_head_dim + cfg.v_head_dim)
        k_nope, v = kv.split([cfg.qk_nope_head_dim, cfg.v_head_dim], -1)
        k_pe = k_pe.unsqueeze(1).expand(-1, self.num_heads, -1)
        if not kv.is_cuda or torch.compiler.is_compiling():
            return torch.cat([k_nope, k_pe], -1), v
        k = kv.new_empty(*kv.shape[:2], cfg.qk_nope_head_dim + cfg.qk_rope_head_dim)
        _join_heads(k_nope, k_pe, k)
        return k, v

    def _mha(self, q: torch.Tensor, cache: torch.Tensor, meta: AttentionMeta, path: str) -> torch.Tensor:
        core = self.ladder.pick(q.shape[0])
        if path == "mha" and any(meta.batch.prefix_lens):
            raise ArgumentError(NAME, "meta.path", "'mha' with a cached prefix", "a batch without prefixes")
        chunk = self.thresholds.chunk
        step: Expansion = meta.plan_of(("mla", path, chunk), lambda _: Expansion(path, chunk))
        rows, merged, merged_lse = cache.view(-1, cache.shape[-1]), None, None
        for part in step.parts:
            # The new tokens' rows are read back from the cache, so that prefill and decode see the same rounded rows.
            k, v = self._expand(rows[part.slots].to(q.dtype))
            o, lse = core.prefill(q, k, v, part.lens, need_lse=len(step.parts) > 1)
            merged, merged_lse = (o, lse) if merged is None else self.merge(merged, merged_lse, o, lse)
        assert merged is not None
        return merged if merged.dtype == q.dtype else merged.to(q.dtype)
