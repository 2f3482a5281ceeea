"""Rotary embedding of q and k fused with the write of k and v into a paged cache, and with norms, in one launch.

    T = tokens, Hq = num_heads, Hkv = num_kv_heads, D = head_dim, V = v_head_dim, d = rotary_dim ≤ D
    y(x)[t, h]           = x[t, h] turned by positions[t]: fp32, rounded once to the model's dtype; dimensions
                           pair as in fastlayers.rotary
    q_rotated[T, Hq, D]  = y(q)                                    new tensor, or ``out``
    k_cache[loc[t], h]   = cache_dtype(y(k)[t, h])
    v_cache[loc[t], h]   = cache_dtype(v[t, h])

With ``qk_norm`` an RMSNorm over each head of q and k comes first, rounded as Qwen3 does ("cast_then_scale"):

    q[t, h], k[t, h]     = weight · (x / sqrt(mean(x²) + eps)).to(dtype)

With ``latent`` (MLA) there is one cache of rows [latent | rope], one key head, and v is the latent:

    q_rotated[T, Hq, R]  = y(q_pe)                                 R = D = d = head_dim
    cache[loc[t], :L]    = cache_dtype(latent[t])                  L = v_head_dim
    cache[loc[t], L:]    = cache_dtype(y(k_pe)[t])

With ``mrope_section`` positions may be [3, T]: each frequency turns by its own axis, as in fastlayers.rotary.

e4m3 caches saturate: values are clamped to ±448 before the cast (scale 1). Several rows may share slot 0,
where padded rows go; what it then holds is unspecified.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.autograd import forward_ad

from fastlayers import env
from fastlayers.attention.kv_cache.spec import DTYPES as CACHE_DTYPES
from fastlayers.attention.kv_cache.spec import LayerCache
from fastlayers.attention.kv_write.layer import FLOATS, INDICES, check_cache, needs_e4m3
from fastlayers.attention.meta import check_loc
from fastlayers.errors import ArgumentError, check_choice, check_positive, check_tensor, describe, free_to_look
from fastlayers.layer import Layer
from fastlayers.registry import Registry, reference_backend, torch_backend, triton_backend
from fastlayers.rotary.layer import RotaryConfig

NAME = "RotaryKVWrite"


@dataclass(frozen=True)
class RotaryKVWriteConfig:
    """What a backend must know, see the file's head; pairings as in ``RotaryConfig``."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    rotary_dim: int
    interleaved_in: bool = False
    interleaved_out: bool = False
    latent: bool = False
    kv_dtype: torch.dtype = torch.bfloat16
    qk_norm: float | None = None
    mrope_section: tuple[int, ...] = ()
    mrope_interleaved: bool = False

    def __post_init__(self) -> None:
        check_positive(NAME, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)
        check_positive(NAME, v_head_dim=self.v_head_dim, rotary_dim=self.rotary_dim)
        check_choice(NAME, "kv_dtype", self.kv_dtype, CACHE_DTYPES)
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise ArgumentError(NAME, "rotary_dim", self.rotary_dim, f"an even number up to {self.head_dim}")
        if self.latent and self.num_kv_heads != 1:
            raise ArgumentError(NAME, "num_kv_heads", self.num_kv_heads, "1 with latent")
        if self.qk_norm is not None and (self.latent or not self.qk_norm >= 0):
            raise ArgumentError(NAME, "qk_norm", self.qk_norm, "an epsilon of 0 or more, and not with latent")
        if self.mrope_section and (len(self.mrope_section) != 3 or sum(self.mrope_section) != self.rotary_dim // 2):
            accepted = f"three counts that sum to {self.rotary_dim // 2}"
            raise ArgumentError(NAME, "mrope_section", self.mrope_section, accepted)

    @property
    def rotary(self) -> RotaryConfig:
        """The rotation alone."""
        pairing = self.interleaved_in, self.interleaved_out
        return RotaryConfig(self.head_dim, self.rotary_dim, *pairing, self.mrope_section, self.mrope_interleaved)

    def rows(self, keys: torch.Tensor, values: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the caches as views, see :func:`cache_rows`."""
        assert self.latent or values is not None
        return cache_rows(keys, None if self.latent else values, self.v_head_dim)


def cache_rows(keys: torch.Tensor, values: torch.Tensor | None, v_head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views ``[slots, Hkv, D]`` and ``[slots, Hkv, V]``; without ``values`` a row is [latent | rope]."""
    if values is None:
        slots = keys.flatten(0, 1)
        return slots[:, None, v_head_dim:], slots[:, None, :v_head_dim]
    return keys.flatten(0, 1), values.flatten(0, 1)


_HERE = "fastlayers.attention.rotary_kv_write"
ROTARY_KV_WRITE = Registry(
    "rotary_kv_write",
    [
        triton_backend(f"{_HERE}.triton:TritonRotaryKVWrite", needs_e4m3),
        torch_backend(f"{_HERE}.torch:TorchRotaryKVWrite"),
        reference_backend(f"{_HERE}.reference:ReferenceRotaryKVWrite"),
    ],
    cases=f"{_HERE}.cases",
)


class RotaryKVWrite(Layer):
    """Turns q and k, and writes k and v (or MLA's latent and rope) into a paged cache.

    Parameters
    ----------
    num_heads, num_kv_heads, head_dim : int
        Of this rank. MLA: ``num_kv_heads=1``, ``head_dim`` is the rope dimension.
    v_head_dim : int, optional
        Default ``head_dim``. MLA: ``kv_lora_rank``.
    rotary_dim : int, optional
        Default ``head_dim``.
    interleaved_in, interleaved_out : bool
        As in :class:`fastlayers.RotaryEmbedding`.
    latent : bool
        MLA's cache of rows [latent | rope].
    kv_dtype : torch.dtype
        Of the cache: fp32, fp16, bf16 or e4m3.
    qk_norm : float, optional
        Epsilon of an RMSNorm over each head of q and k, before they turn. Default: none.
    mrope_section : tuple[int, ...]
        Frequencies that turn by time, height and width. Default: all by one position.
    mrope_interleaved : bool
        As in :class:`fastlayers.RotaryEmbedding`.
    device : torch device, optional
    backend : str
        ``"auto"``, a name, or a ladder.

    Notes
    -----
    Attention must read the cache afterwards and not write it again. Capture-safe; allocates its output. With
    ``FASTLAYERS_DEBUG`` slots and positions are checked, which synchronises; without it the Triton backend
    clamps positions into the table. Source: Su et al. 2021 for the rotation. For inference
    only: it raises where an input requires a gradient. On a CPU it raises for positions outside the tables and for
    slots outside the cache.

    Examples
    --------
    >>> import torch, fastlayers as fl
    >>> from fastlayers.attention.rotary_kv_write.layer import RotaryKVWrite
    >>> write = RotaryKVWrite(1, 1, 2, kv_dtype=torch.float32)
    >>> cache = fl.attention.kv_cache.spec.KVCacheSpec(((1, 2),), 1, torch.float32).allocate(2)[0]
    >>> x, zero, one = torch.tensor([[[1.0, 0.0]]]), torch.zeros(1, 1), torch.ones(1, 1)
    >>> q = write(x, x, x, zero, one, torch.tensor([0]), cache, torch.tensor([1]))  # a quarter turn
    >>> q.tolist(), cache.keys[1].tolist(), cache.values[1].tolist()
    ([[[0.0, 1.0]]], [[[0.0, 1.0]]], [[[1.0, 0.0]]])
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        *,
        rotary_dim: int | None = None,
        interleaved_in: bool = False,
        interleaved_out: bool = False,
        latent: bool = False,
        kv_dtype: torch.dtype = torch.bfloat16,
        qk_norm: float | None = None,
        mrope_section: tuple[int, ...] = (),
        mrope_interleaved: bool = False,
        device: torch.device | str | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        cfg = RotaryKVWriteConfig(
            num_heads,
            num_kv_heads,
            head_dim,
            head_dim if v_head_dim is None else v_head_dim,
            head_dim if rotary_dim is None else rotary_dim,
            interleaved_in,
            interleaved_out,
            latent,
            kv_dtype,
            qk_norm,
            mrope_section,
            mrope_interleaved,
        )
        self.choose(ROTARY_KV_WRITE, cfg, device, backend)
        self.debug = env.debug()

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        cache: LayerCache,
        loc: torch.Tensor,
        q_weight: torch.Tensor | None = None,
        k_weight: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Norm (with ``qk_norm``), turn and write.

        Parameters
        ----------
        q : Tensor ``[T, Hq, D]``
        k : Tensor ``[T, Hkv, D]``
            MLA: the rope part of the key, ``[T, 1, R]``.
        v : Tensor ``[T, Hkv, V]``
            MLA: the latent, ``[T, 1, L]``. All three of one dtype; any strides, last dimension contiguous. Where k and
            v are ``None``, q has the heads of all three side by side, ``[T, Hq + 2 Hkv, D]``.
        cos, sin : Tensor fp32 ``[max_position, d / 2]``
        positions : Tensor int64 ``[T]``, with ``mrope_section`` also ``[3, T]``
            All three contiguous.
        cache : LayerCache
            Written in place; contiguous.
        loc : Tensor int64 or int32 ``[T]``
            Slot of each row; contiguous.
        q_weight, k_weight : Tensor ``[D]``, with ``qk_norm`` only
            Of q's dtype; contiguous.
        out : Tensor ``[T, Hq, D]``, optional
            Mutated and returned; of q's dtype, any strides, last dimension contiguous. No part of q, k or v.

        Returns
        -------
        Tensor ``[T, Hq, D]``
            The turned ``q``: ``out``, or a new tensor.
        """
        core = self.ladder.single or self.ladder.pick(q.shape[0])
        if k is None or v is None:
            if self.trusted and q.shape[0] and hasattr(core, "side_by_side"):
                whole: torch.Tensor | None = core.side_by_side(
                    q, cos, sin, positions, cache.keys, cache.values, loc, q_weight, k_weight
                )
                if whole is not None:
                    return whole
            q, k, v = self._apart(q, k, v)
        if not self.trusted:
            self._check(q, k, v, cos, sin, positions, cache, loc, q_weight, k_weight, out)
        try:
            turned: torch.Tensor = core(
                q, k, v, cos, sin, positions, cache.keys, cache.values, loc, q_weight, k_weight, out
            )  # fmt: skip
        except IndexError:  # on a CPU, where looking is free; before anything was written
            _check_range(positions, cos.shape[0])
            check_loc(NAME, loc, cache.keys.shape[0] * cache.keys.shape[1], True)
            raise
        return turned

    def _apart(self, q: torch.Tensor, k: object, v: object) -> tuple[torch.Tensor, ...]:
        """Return views of what lies side by side."""
        cfg = self.cfg
        heads = cfg.num_heads, cfg.num_kv_heads, cfg.num_kv_heads
        if k is not v:
            name, given = ("k", k) if v is None else ("v", v)
            raise ArgumentError(NAME, name, describe(given), "None, as the other one")
        if not self.trusted:
            check_tensor(NAME, "q", q, shape=(None, sum(heads), cfg.head_dim), dtype=FLOATS)
        # One call instead of a slice each, which costs the host four times as much.
        return q.split_with_sizes(heads, 1)

    def _check(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        cache: LayerCache,
        loc: torch.Tensor,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> None:
        cfg, wanted = self.cfg, (None, self.cfg.num_heads, self.cfg.head_dim)
        check_tensor(NAME, "q", q, shape=wanted, dtype=FLOATS, device=self.device_type, last_dim_contiguous=True)
        tokens, where = q.shape[0], q.device
        for name, x, width in (("k", k, cfg.head_dim), ("v", v, cfg.v_head_dim)):
            shape = (tokens, cfg.num_kv_heads, width)
            check_tensor(NAME, name, x, shape=shape, dtype=q.dtype, device=where, last_dim_contiguous=True)
        table = (None, cfg.rotary_dim // 2)
        check_tensor(NAME, "cos", cos, shape=table, dtype=torch.float32, device=where, contiguous=True)
        check_tensor(NAME, "sin", sin, shape=tuple(cos.shape), dtype=torch.float32, device=where, contiguous=True)
        axes = (3, tokens) if cfg.mrope_section and positions.dim() == 2 else (tokens,)
        check_tensor(NAME, "positions", positions, shape=axes, dtype=torch.int64, device=where, contiguous=True)
        if out is not None:
            like = tuple(q.shape)
            check_tensor(NAME, "out", out, shape=like, dtype=q.dtype, device=where, last_dim_contiguous=True)
        check_tensor(NAME, "loc", loc, shape=(tokens,), dtype=INDICES, device=where, contiguous=True)
        self._check_cache(cache, where)
        check_loc(NAME, loc, cache.keys.shape[0] * cache.keys.shape[1], self.debug or free_to_look(loc))
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:  # through the cache there is none
            self.refuse_grad(q=q, k=k, v=v, q_weight=q_weight, k_weight=k_weight)
        if self.debug and tokens:
            _check_range(positions, cos.shape[0])
        for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
            if cfg.qk_norm is not None:
                check_tensor(NAME, name, weight, shape=(cfg.head_dim,), dtype=q.dtype, device=where, contiguous=True)
            elif weight is not None:
                raise ArgumentError(NAME, name, describe(weight), "None without qk_norm")

    def _check_cache(self, cache: LayerCache, where: torch.device) -> None:
        cfg, dtype = self.cfg, self.cfg.kv_dtype
        if not isinstance(cache, LayerCache):
            raise ArgumentError(NAME, "cache", describe(cache), "a LayerCache")
        if cfg.latent:
            check_cache(NAME, "cache.keys", cache.keys, (cfg.v_head_dim + cfg.head_dim,), dtype, where)
            return
        check_cache(NAME, "cache.keys", cache.keys, (cfg.num_kv_heads, cfg.head_dim), dtype, where)
        pages = tuple(cache.keys.shape[:2])
        check_cache(NAME, "cache.values", cache.values, (cfg.num_kv_heads, cfg.v_head_dim), dtype, where, pages)


def _check_range(positions: torch.Tensor, limit: int) -> None:
    low, high = int(positions.min()), int(positions.max())
    if low < 0 or high >= limit:
        raise ArgumentError(NAME, "positions", f"from {low} to {high}", f"positions in [0, {limit})")
