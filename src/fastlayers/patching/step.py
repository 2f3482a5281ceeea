"""One decode step over a :class:`PagedCache`: its static tensors, and what layers look up in it.

    B = batch, C = capacity

Everything that changes from step to step lies on the device at fixed addresses. Ids and positions are copied in;
lengths and slots are advanced by the step itself, so that a replay needs no host work for them.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from fastlayers.attention.gqa.core import GQA, GQAConfig
from fastlayers.attention.meta import AttentionBatch, AttentionMeta
from fastlayers.attention.mla.core import MLA, MLAConfig
from fastlayers.attention.rotary_kv_write.layer import ROTARY_KV_WRITE, RotaryKVWriteConfig
from fastlayers.linear.dense.layer import LINEAR, LinearConfig
from fastlayers.patching.cache import PAGE
from fastlayers.patching.packing import plain
from fastlayers.registry import Rung

# Up to so many rows the matrix-vector kernel is taken where no table says otherwise.
FEW_ROWS = 2
# Capacity up to which a row's keys are read by one program.
SHORT = 256
_REGISTRIES: dict[type, Any] = {GQAConfig: GQA, MLAConfig: MLA, RotaryKVWriteConfig: ROTARY_KV_WRITE}


class DecodeStep:
    """The tensors of a step, and the cores that layers of one configuration share.

    Parameters
    ----------
    batch, capacity : int
    device : torch.device
    core : str
        Backend of attention and of the write: one that needs no host work between steps.

    Attributes
    ----------
    ids, positions : Tensor int64 ``[B, 1]``
        Of the new tokens; positions are rotary ones.
    mask : Tensor int32 ``[B, 1, 1, 1]``
        First slot of each row that counts. Four dimensions: Hugging Face passes such a mask on as it is, and no mask
        of all keys is ever made.
    meta : AttentionMeta
    """

    def __init__(self, batch: int, capacity: int, device: torch.device, core: str) -> None:
        self.batch, self.capacity, self.device, self.core = batch, capacity, device, core
        pages = capacity // PAGE
        with torch.inference_mode(False):
            self.ids = torch.zeros(batch, 1, dtype=torch.int64, device=device)
            self.positions = torch.zeros(batch, 1, dtype=torch.int64, device=device)
            starts = torch.zeros(batch, dtype=torch.int32, device=device)
            self._lens = torch.zeros(batch, dtype=torch.int32, device=device)
            # Slot inside the row, slot in the cache.
            self._slots = torch.zeros(2, batch, dtype=torch.int64, device=device)
            self._first = torch.arange(batch, dtype=torch.int64, device=device) * capacity
            self.request = torch.arange(batch, dtype=torch.int64, device=device)
            numbers = torch.arange(batch * pages, dtype=torch.int32, device=device).view(batch, pages)
            cu = torch.arange(batch + 1, dtype=torch.int32, device=device)
        self.mask = starts.view(batch, 1, 1, 1)
        described = tuple(range(b * pages, (b + 1) * pages) for b in range(batch))
        self.meta = AttentionMeta(
            page_table=numbers, seq_lens=self._lens, starts=starts, cu_seqlens_q=cu, request_of_token=cu[:batch],
            positions=self._slots[0], out_cache_loc=self._slots[1], page_size=PAGE, max_query_len=1,
            max_seq_len=capacity, batch=AttentionBatch((1,) * batch, (capacity - 1,) * batch, described), bucket=batch,
        )  # fmt: skip
        # Tokens in the cache as the device counts them; host data.
        self.length = -1
        # The cache of the step that is running. Not held longer: a store is lent again when its cache is gone.
        self.cache: Any = None
        self._cores: dict[Any, Any] = {}
        self._linears: dict[LinearConfig, Any] = {}
        self._turn: tuple[Any, torch.Tensor, torch.Tensor] | None = None
        self._normed: tuple[torch.Tensor, torch.Tensor] | None = None
        self._next_norm: dict[int, nn.Module] = {}

    def set_length(self, length: int) -> None:
        """Write the number of cached tokens to the device."""
        self._lens.fill_(length)
        self._slots[0].fill_(length - 1)
        torch.add(self._first, length - 1, out=self._slots[1])
        self.length = length

    def begin(self) -> None:
        """Count the new token; the first launches of a step."""
        self._lens.add_(1)
        self._slots.add_(1)
        self._turn = self._normed = None
        if self.device.type == "cpu":
            # Where nothing is captured, cores may read lengths on the host.
            lengths, starts = tuple(int(n) - 1 for n in self._lens), tuple(int(n) for n in self.meta.starts)
            batch = AttentionBatch((1,) * self.batch, lengths, self.meta.batch.page_table, starts)
            self.meta = replace(self.meta, batch=batch)

    def end(self) -> None:
        """Drop what layers looked up: none of it outlives a step."""
        self._turn = self._normed = None

    def pick(self, cfg: Any) -> Any:
        """Return the core for ``cfg``, the same one for all layers that have it."""
        if cfg not in self._cores:
            self._cores[cfg] = self._rung(cfg).build(cfg)
        return self._cores[cfg]

    def _rung(self, cfg: Any) -> Rung:
        """Return the backend that captured steps may take, with what a table found for it."""
        registry = _REGISTRIES[type(cfg)]
        rungs = registry.choose(cfg, self.device).rungs
        rung: Rung = next(r for r in rungs if r.max_tokens is None or self.batch <= r.max_tokens)
        if rung.backend.name != self.core:
            rung = registry.choose(cfg, self.device, self.core).rungs[0]
        if isinstance(cfg, GQAConfig) and self.core == "triton" and self.capacity <= SHORT:
            # So few keys are not worth splitting: one program a row and key head, nothing to add up.
            rung = replace(rung, config=(("PROGRAMS", self.batch * cfg.num_kv_heads),))
        return rung

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return ``x · weightᵀ + bias`` by the backend that is best for so few rows."""
        cfg = LinearConfig(weight.shape[1], weight.shape[0], bias is not None, weight.dtype)
        if cfg not in self._linears:
            choice = LINEAR.choose(cfg, self.device)
            if choice.evidence == "rank" and self.batch <= FEW_ROWS and self.device.type == "cuda":
                # No table for this shape: at so few rows the matrix-vector kernel is ahead, or level (see notes).
                choice = LINEAR.choose(cfg, self.device, "triton")
            self._linears[cfg] = choice.build().pick(self.batch)
        y: torch.Tensor = self._linears[cfg](x, weight, bias)
        return y

    def apply(self, linear: Any, x: torch.Tensor) -> torch.Tensor:
        """Run a module: by :meth:`linear` if it is exactly an ``nn.Linear`` that nobody hooked, else as it is."""
        if plain(linear) and linear.weight.dtype == x.dtype:
            return self.linear(x, linear.weight, linear.bias)
        y: torch.Tensor = linear(x)
        return y

    def tables(self, position: Any, half: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin fp32 ``[B, half]``, row b for request b, from Hugging Face's ``[B, 1, half or more]``."""
        cos, sin = position
        if self._turn is None or self._turn[0] is not cos:
            narrow = (table[:, 0, :half].float().expand(self.batch, -1).contiguous() for table in (cos, sin))
            self._turn = cos, *narrow
        return self._turn[1], self._turn[2]

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
