"""One step over a :class:`PagedCache`: its static tensors, and what layers look up in it.

    B = batch, C = capacity, T = tokens of an extend's bucket

    DecodeStep   one token a row: rows lie one behind the other, ids [B, 1]
    ExtendStep   the prompts: all rows' tokens one behind the other, without their left padding, ids [1, T]

Everything that changes from step to step lies on the device at fixed addresses. Ids and positions are copied in.
Lengths and slots of decode are advanced by the step itself, so that a replay needs no host work for them; those of an
extend are planned by an :class:`AttentionState`, as for every other model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from fastlayers.attention.buckets import ExtendBucket
from fastlayers.attention.context_buckets import context_of
from fastlayers.attention.gqa.config import GQA, GQAConfig
from fastlayers.attention.meta import AttentionBatch, AttentionMeta, AttentionState
from fastlayers.attention.mla.config import MLA, MLAConfig
from fastlayers.attention.mla_kv_write.layer import MLA_KV_WRITE, MLAKVWriteConfig
from fastlayers.attention.rotary_kv_write.layer import ROTARY_KV_WRITE, RotaryKVWriteConfig
from fastlayers.attention.step_buffers import Mirrored
from fastlayers.linear.dense.layer import LINEAR, LinearConfig
from fastlayers.patching.bf12 import BF12Copies
from fastlayers.patching.cache import PAGE
from fastlayers.patching.packing import plain
from fastlayers.registry import Rung

_REGISTRIES: dict[type, Any] = {
    GQAConfig: GQA, MLAConfig: MLA, RotaryKVWriteConfig: ROTARY_KV_WRITE, MLAKVWriteConfig: MLA_KV_WRITE,
}  # fmt: skip


def dense_meta(batch: int, length: int, pages_each: int, device: torch.device) -> AttentionMeta:
    """Describe a decode step over a dense buffer ``[batch, pages_each * PAGE, …]`` to a paged core; no host sync."""
    numbers = torch.arange(batch * pages_each, dtype=torch.int32, device=device).view(batch, pages_each)
    request = torch.arange(batch + 1, dtype=torch.int32, device=device)
    described = tuple(range(b * pages_each, (b + 1) * pages_each) for b in range(batch))
    return AttentionMeta(
        page_table=numbers,
        seq_lens=torch.full((batch,), length, dtype=torch.int32, device=device),
        starts=torch.zeros(batch, dtype=torch.int32, device=device),
        cu_seqlens_q=request,
        request_of_token=request[:batch],
        positions=torch.full((batch,), length - 1, dtype=torch.int64, device=device),
        out_cache_loc=torch.zeros(batch, dtype=torch.int64, device=device),
        page_size=PAGE,
        max_query_len=1,
        max_seq_len=length,
        batch=AttentionBatch((1,) * batch, (length - 1,) * batch, described),
    )


class PagedStep:
    """What layers look up in a step, and the cores that those of one configuration share.

    Parameters
    ----------
    rows : int
        Tokens of the step, padding included.
    capacity : int
    device : torch.device
    core : str
        Backend of attention and of the write, or ``"auto"``: the best that reads lengths on the device.

    Attributes
    ----------
    ids, positions : Tensor int64
        Of the new tokens; positions are rotary ones.
    mask : Tensor int32, four dimensions
        Hugging Face passes such a mask on as it is, and no mask of all keys is ever made.
    kept : int or Tensor int64 ``[B]``
        Which hidden rows the head reads.
    count : Tensor int32 ``[1]``, optional
        Tokens that are real, where some are padding.
    spare : bool
        Whether pages are numbered with the spare one in front, which nobody's tokens are written to.
    phase : str
        Of grouped-query attention, see :mod:`fastlayers.attention.gqa.config`.
    meta : AttentionMeta
    """

    ids: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    meta: AttentionMeta
    kept: Any = 1
    count: torch.Tensor | None = None
    spare = False
    phase = "decode"
    # Of weights, for one row.
    copies: BF12Copies | None = None

    def __init__(self, rows: int, capacity: int, device: torch.device, core: str) -> None:
        self.rows, self.capacity, self.device, self.core = rows, capacity, device, core
        with torch.inference_mode(False):
            self.request = torch.arange(rows, dtype=torch.int64, device=device)
        # The cache of the step that is running. Not held longer: a store is lent again when its cache is gone.
        self.cache: Any = None
        self._cores: dict[Any, Any] = {}
        self._linears: dict[LinearConfig, Any] = {}
        self._rotation: tuple[Any, torch.Tensor, torch.Tensor] | None = None
        self._normed: tuple[torch.Tensor, torch.Tensor] | None = None
        self._still: tuple[torch.Tensor, torch.Tensor] | None = None
        self._ones: torch.Tensor | None = None
        self._chunks: dict[int, AttentionMeta] = {}
        self._next_norm: dict[int, nn.Module] = {}

    @property
    def context(self) -> int:
        """Class of the longest context that this step may have."""
        return context_of(self.capacity)

    def begin(self) -> None:
        """Do what comes before the first layer, inside a graph."""
        self._forget()

    def end(self) -> None:
        """Drop what layers looked up: none of it outlives a step."""
        self._forget()

    def _forget(self) -> None:
        self._rotation = self._normed = self._still = self._ones = None
        self._chunks.clear()

    def pick(self, cfg: Any) -> Any:
        """Return the core for ``cfg``, the same one for all layers that have it."""
        if cfg not in self._cores:
            self._cores[cfg] = self._rung(cfg).build(cfg)
        return self._cores[cfg]

    def _rung(self, cfg: Any) -> Rung:
        """Return the backend that captured steps may take, with what a table found for it."""
        return _REGISTRIES[type(cfg)].choose(cfg, self.device, self.core).rung_for(self.rows)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return ``x · weightᵀ + bias`` by the backend that is best for so many rows."""
        if self.copies is not None and (copy := self.copies.of(weight)) is not None:
            return copy(x, weight, bias)
        cfg = LinearConfig(weight.shape[1], weight.shape[0], bias is not None, weight.dtype)
        if cfg not in self._linears:
            self._linears[cfg] = LINEAR.choose(cfg, self.device).build().pick(self.rows)
        y: torch.Tensor = self._linears[cfg](x, weight, bias)
        return y

    def apply(self, linear: Any, x: torch.Tensor) -> torch.Tensor:
        """Run a module: by :meth:`linear` if it is exactly an ``nn.Linear`` that nobody hooked, else as it is."""
        if plain(linear) and linear.weight.dtype == x.dtype:
            return self.linear(x, linear.weight, linear.bias)
        y: torch.Tensor = linear(x)
        return y

    def tables(self, position: Any, half: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin fp32 ``[rows, half]``, a row a token, from Hugging Face's of half or more columns.

        ``position``: both, or as one tensor of complex numbers.
        """
        whole = isinstance(position, torch.Tensor)
        given = position if whole else position[0]
        if self._rotation is None or self._rotation[0] is not given:
            cos, sin = (position.real, position.imag) if whole else position
            narrow = (table.flatten(0, -2)[:, :half].float().expand(self.rows, -1).contiguous() for table in (cos, sin))
            self._rotation = given, *narrow
        return self._rotation[1], self._rotation[2]

    def still(self, half: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin as :meth:`tables` does, that rotate nothing."""
        if self._still is None:
            one = torch.ones(self.rows, half, dtype=torch.float32, device=self.device)
            self._still = one, torch.zeros_like(one)
        return self._still

    def ones(self, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight of a norm that has none."""
        if self._ones is None:
            self._ones = torch.ones(width, dtype=dtype, device=self.device)
        return self._ones

    def within(self, chunk: int) -> AttentionMeta:
        """Return what describes the step to a layer that attends in chunks of positions; none is longer here."""
        return self.meta

    def chain(self, layers: list[Any]) -> None:
        """Remember which norm reads what a decoder layer returns."""
        self._next_norm = {id(a): b.input_layernorm for a, b in pairwise(layers)}

    def next_norm(self, layer: Any) -> Any:
        """Return the norm that reads what ``layer`` returns, or ``None``."""
        return self._next_norm.get(id(layer))

    def keep(self, hidden: torch.Tensor, normed: torch.Tensor) -> None:
        """Keep the normed form of ``hidden`` for the layer that reads it."""
        self._normed = hidden, normed

    def normed(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Return the normed form of exactly this tensor, if the layer before made it."""
        if self._normed is None or self._normed[0] is not hidden:
            return None
        return self._normed[1]


class DecodeStep(PagedStep):
    """One token a row; see :class:`PagedStep` for the arguments.

    ``mask [B, 1, 1, 1]`` holds the first slot of each row that counts.
    """

    def __init__(self, batch: int, capacity: int, device: torch.device, core: str) -> None:
        super().__init__(batch, capacity, device, core)
        self.batch, pages = batch, capacity // PAGE
        with torch.inference_mode(False):
            self.ids = torch.zeros(batch, 1, dtype=torch.int64, device=device)
            self.positions = torch.zeros(batch, 1, dtype=torch.int64, device=device)
            # Slot inside the row, slot in the cache.
            self._slots = torch.zeros(2, batch, dtype=torch.int64, device=device)
            self._first = torch.arange(batch, dtype=torch.int64, device=device) * capacity
            dense = dense_meta(batch, capacity, pages, device)
        self.meta = replace(dense, positions=self._slots[0], out_cache_loc=self._slots[1], bucket=batch)
        self.mask = self.meta.starts.view(batch, 1, 1, 1)
        # Tokens in the cache as the device counts them; host data.
        self.length = -1

    def set_length(self, length: int) -> None:
        """Write the number of cached tokens to the device."""
        self.meta.seq_lens.fill_(length)
        self._slots[0].fill_(length - 1)
        torch.add(self._first, length - 1, out=self._slots[1])
        self.length = length

    def begin(self) -> None:
        """Count the new token; the first launches of a step."""
        super().begin()
        self.meta.seq_lens.add_(1)
        self._slots.add_(1)
        if self.device.type == "cpu":
            # Where nothing is captured, cores may read lengths on the host.
            lengths, starts = tuple(int(n) - 1 for n in self.meta.seq_lens), tuple(int(n) for n in self.meta.starts)
            batch = AttentionBatch((1,) * self.batch, lengths, self.meta.batch.page_table, starts)
            self.meta = replace(self.meta, batch=batch)

    def within(self, chunk: int) -> AttentionMeta:
        """Return the step as one in which each row begins where the chunk of its new token does."""
        if chunk not in self._chunks:
            place, starts = self._slots[0], self.meta.starts
            begins = starts + torch.div(place - starts, chunk, rounding_mode="floor").int() * chunk
            self._chunks[chunk] = replace(self.meta, starts=begins)
            if self.device.type == "cpu":
                batch = replace(self.meta.batch, starts=tuple(int(n) for n in begins))
                self._chunks[chunk] = replace(self.meta, starts=begins, batch=batch)
        return self._chunks[chunk]


class ExtendStep(PagedStep):
    """The tokens of several rows' prompts in an empty cache.

    Parameters
    ----------
    batch, capacity, tokens : int
        ``tokens``: of the bucket.
    padded : bool
        Whether rows may begin with padding.
    device, core
        See :class:`PagedStep`.
    """

    spare = True

    def __init__(self, batch: int, capacity: int, tokens: int, padded: bool, device: torch.device, core: str) -> None:
        super().__init__(tokens, capacity, device, core)
        self.phase, pages = "padded" if padded else "extend", capacity // PAGE
        self._pages = [list(range(1 + row * pages, 1 + (row + 1) * pages)) for row in range(batch)]
        self._bucket = ExtendBucket(tokens, batch)
        with torch.inference_mode(False):
            self._state = AttentionState(batch, tokens, pages, PAGE, device)
            self.ids, self.positions = (torch.zeros(1, tokens, dtype=torch.int64, device=device) for _ in range(2))
            self._last = Mirrored([(batch, torch.int64), (1, torch.int32)], device)
            (self.kept, self.count), self._host = zip(*self._last.fields, strict=True)
            self.mask = torch.zeros(1, 1, 1, 1, dtype=torch.int32, device=device)
        # Nobody's tokens, for the runs before a capture.
        self.meta = self._state.plan(AttentionBatch((), (), []), bucket=self._bucket)

    def plan(self, ids: torch.Tensor, positions: torch.Tensor, starts: Sequence[int]) -> None:
        """Copy in prompts ``[B, S]``, of which row b begins at ``starts[b]``; overwrites the one before."""
        batch, length = ids.shape
        counts = tuple(length - start for start in starts)
        self._state.plan(AttentionBatch(counts, tuple(starts), self._pages, tuple(starts)), bucket=self._bucket)
        total = sum(counts)
        for target, given in ((self.ids, ids), (self.positions, positions)):
            flat = given.expand(batch, length).reshape(-1)
            if total < batch * length:
                real = [row * length + place for row, start in enumerate(starts) for place in range(start, length)]
                flat = flat.index_select(0, torch.tensor(real).to(flat.device))
            target[0, :total].copy_(flat)
        kept, count = self._host
        kept[:], count[0] = [end - 1 for end in accumulate(counts)], total
        self._last.send()
