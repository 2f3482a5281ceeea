"""Attention metadata: one step's requests as host data, and the tensors that kernels read.

    B = requests, T = new tokens of the step, P = pages of one request

    AttentionBatch   host description of a step: lengths and page table
    AttentionState   owns static device buffers; plan(batch) fills them, all host work of a step happens here
    AttentionMeta    frozen views into those buffers; shared by all layers of an attention group

Position p of request b lives in slot ``page_table[b, p // page_size] * page_size + p % page_size``. Page 0 (so
also slot 0) is nobody's: padded rows write there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from fastlayers import env
from fastlayers.attention.kv_cache.spec import LayerCache
from fastlayers.errors import ArgumentError, CaptureError, check_positive, describe


@dataclass(frozen=True)
class AttentionBatch:
    """One step's requests, on the host.

    Parameters
    ----------
    query_lens : tuple[int, ...]
        New tokens of each request; 0 is allowed.
    prefix_lens : tuple[int, ...]
        Tokens of each request that are cached already.
    page_table : Sequence[Sequence[int]]
        Pages of each request, at least enough for prefix + new tokens.
    starts : tuple[int, ...]
        First position of each request that counts (left padding); default 0.
    """

    query_lens: tuple[int, ...]
    prefix_lens: tuple[int, ...]
    page_table: Sequence[Sequence[int]]
    starts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.query_lens)
        if len(self.prefix_lens) != count or len(self.page_table) != count or len(self.starts) not in (0, count):
            lengths = (count, len(self.prefix_lens), len(self.page_table), len(self.starts))
            raise ArgumentError("AttentionBatch", "lengths", lengths, "one query, prefix, page row (and start) each")
        if count and min(*self.query_lens, *self.prefix_lens, 0) < 0:
            raise ArgumentError(
                "AttentionBatch", "query_lens, prefix_lens", (self.query_lens, self.prefix_lens), ">= 0"
            )

    @property
    def seq_lens(self) -> tuple[int, ...]:
        """Length of each request including the new tokens."""
        return tuple(p + q for p, q in zip(self.prefix_lens, self.query_lens, strict=True))

    @property
    def num_tokens(self) -> int:
        """New tokens of the whole step."""
        return sum(self.query_lens)

    @property
    def is_decode(self) -> bool:
        """Whether every request brings exactly one token."""
        return all(q == 1 for q in self.query_lens)


class StepPlan(Protocol):
    """Host work and static buffers of one backend (a split schedule, say) for steps of one kind."""

    def plan(self, meta: AttentionMeta) -> None:
        """Bring the buffers up to date for ``meta``; never called inside a capture."""


class StepPlans:
    """The plans of an :class:`AttentionState`, by backend and bucket."""

    def __init__(self) -> None:
        self._plans: dict[tuple[Hashable, int | None], StepPlan] = {}
        self._planned: dict[tuple[Hashable, int | None], int] = {}

    def get(self, key: Hashable, meta: AttentionMeta, make: Callable[[AttentionMeta], StepPlan]) -> StepPlan:
        """Return the plan for ``key``, made and planned if this step has not done so yet."""
        own = (key, meta.bucket)
        if self._planned.get(own) == meta.step:
            return self._plans[own]
        found = self._plans.get(own)
        if meta.positions.is_cuda and torch.cuda.is_current_stream_capturing():
            if found is None:
                raise CaptureError(f"attention: {key} has no plan yet; run the step once before it is captured")
            return found
        if found is None:
            found = make(meta)
        found.plan(meta)
        self._plans[own], self._planned[own] = found, meta.step
        return found

    def refresh(self, meta: AttentionMeta) -> None:
        """Plan everything that was used with this bucket before."""
        for own, plan in self._plans.items():
            if own[1] == meta.bucket:
                plan.plan(meta)
                self._planned[own] = meta.step


@dataclass(frozen=True)
class AttentionMeta:
    """What attention kernels read in one step. All tensors are views into an :class:`AttentionState`.

    Attributes
    ----------
    page_table : Tensor int32 ``[B, P]``
    seq_lens : Tensor int32 ``[B]``
        Including this step's tokens; padded rows have 1.
    starts : Tensor int32 ``[B]``
        First position that counts.
    cu_seqlens_q : Tensor int32 ``[B + 1]``
    request_of_token : Tensor int32 ``[T]``
    positions : Tensor int64 ``[T]``
    out_cache_loc : Tensor int64 ``[T]``
        Slot that each new token's row is written to; 0 for padded rows.
    page_size : int
    max_query_len, max_seq_len : int
        Host bounds. Under capture they depend on the bucket, never on this step's lengths.
    batch : AttentionBatch
        The step as planned (host data; not read under capture).
    path : str
        Which way an MLA layer takes for this batch, see :mod:`fastlayers.attention.mla.paths`; "" before it is set.
    bucket : int, optional
        Requests that a captured decode step is padded to; ``None`` outside capture.
    step : int
        Number of the step, by which plans know whether they are up to date.
    plans : StepPlans
        What backends planned for steps of this state, see :meth:`plan_of`.
    rope_positions : Tensor int64 ``[3, T]``, optional
        Time, height and width of each new token, for MRoPE; masks and slots still follow ``positions``. Not planned
        here: ``dataclasses.replace(meta, rope_positions=...)``, under capture always with the same tensor.
    """

    page_table: torch.Tensor
    seq_lens: torch.Tensor
    starts: torch.Tensor
    cu_seqlens_q: torch.Tensor
    request_of_token: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor
    page_size: int
    max_query_len: int
    max_seq_len: int
    batch: AttentionBatch
    path: str = ""
    rope_positions: torch.Tensor | None = None
    bucket: int | None = None
    step: int = 0
    plans: StepPlans = field(default_factory=StepPlans, repr=False, compare=False)

    @property
    def is_decode(self) -> bool:
        """Whether each request brings one token (host data that a bucket fixes)."""
        return self.max_query_len == 1 and self.num_tokens == self.num_requests

    def plan_of(self, key: Hashable, make: Callable[[AttentionMeta], StepPlan]) -> Any:
        """Return the plan of a backend for this step; ``key`` is shared by all layers of an attention group.

        Made by ``make(self)`` at first use and kept by the state, so that a captured graph finds its buffers; planned
        once a step. For a bucket, :meth:`AttentionState.plan` plans it again before every replay.

        Raises
        ------
        CaptureError
            It does not exist yet and a capture is under way: run the step once before capturing it.
        """
        return self.plans.get(key, self, make)

    @property
    def num_tokens(self) -> int:
        """Rows of the step, padding included."""
        return self.positions.shape[0]

    @property
    def num_requests(self) -> int:
        """Requests of the step, padding included."""
        return self.seq_lens.shape[0]


class AttentionState:
    """Static buffers for the metadata of one attention group.

    Parameters
    ----------
    max_batch, max_tokens, max_pages : int
        Largest requests and tokens of a step, and pages of one request.
    page_size : int
    device : torch device

    Notes
    -----
    Addresses never change, so a captured graph that read one :class:`AttentionMeta` reads the next step's values
    after the next :meth:`plan` with the same bucket.
    """

    def __init__(
        self, max_batch: int, max_tokens: int, max_pages: int, page_size: int, device: torch.device | str | None = None
    ) -> None:
        check_positive(
            "AttentionState", max_batch=max_batch, max_tokens=max_tokens, max_pages=max_pages, page_size=page_size
        )
        self.max_batch, self.max_tokens, self.max_pages, self.page_size = max_batch, max_tokens, max_pages, page_size

        def zeros(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*size, dtype=dtype, device=device)

        self._page_table = zeros(max_batch, max_pages)
        self._seq_lens, self._starts, self._cu = zeros(max_batch), zeros(max_batch), zeros(max_batch + 1)
        self._request = zeros(max_tokens)
        self._positions, self._loc = zeros(max_tokens, dtype=torch.int64), zeros(max_tokens, dtype=torch.int64)
        self.plans, self._step = StepPlans(), 0
        self._debug = env.debug()

    def plan(self, batch: AttentionBatch, *, bucket: int | None = None, num_pages: int | None = None) -> AttentionMeta:
        """Do the host work of one step and copy its metadata into the static buffers.

        Parameters
        ----------
        batch : AttentionBatch
        bucket : int, optional
            For decode under capture: pad to this many requests of one token. Host bounds then come from the
            state's capacity.
        num_pages : int, optional
            With ``FASTLAYERS_DEBUG``: size of the cache, against which the page table is checked.

        Raises
        ------
        ArgumentError
            The batch does not fit the state, a page row is too short for its request, or (debug) a page is out
            of range.
        """
        self._check(batch, bucket, num_pages)
        count, tokens = len(batch.query_lens), batch.num_tokens
        rows, width = (bucket, bucket) if bucket is not None else (count, tokens)
        table = torch.zeros(rows, self.max_pages, dtype=torch.int32)
        for row, pages in enumerate(batch.page_table):
            table[row, : len(pages)] = torch.as_tensor(pages, dtype=torch.int32)
        seq_lens = torch.ones(rows, dtype=torch.int64)
        seq_lens[:count] = torch.tensor(batch.seq_lens, dtype=torch.int64)
        query_lens = torch.ones(rows, dtype=torch.int64)
        query_lens[:count] = torch.tensor(batch.query_lens, dtype=torch.int64)
        starts = torch.zeros(rows, dtype=torch.int64)
        if batch.starts:
            starts[:count] = torch.tensor(batch.starts, dtype=torch.int64)
        cu = torch.zeros(rows + 1, dtype=torch.int64)
        cu[1:] = query_lens.cumsum(0)
        request = torch.repeat_interleave(torch.arange(rows), query_lens)
        positions = torch.arange(width) - cu[request] + (seq_lens - query_lens)[request]
        loc = table[request, positions // self.page_size].long() * self.page_size + positions % self.page_size
        self._step += 1
        meta = self._views(batch, rows, width, bucket)
        for target, value in (
            (meta.page_table, table), (meta.seq_lens, seq_lens), (meta.starts, starts), (meta.cu_seqlens_q, cu),
            (meta.request_of_token, request), (meta.positions, positions), (meta.out_cache_loc, loc),
        ):  # fmt: skip
            target.copy_(value.to(target.dtype), non_blocking=True)
        if bucket is not None:
            self.plans.refresh(meta)
        return meta

    def _views(self, batch: AttentionBatch, rows: int, width: int, bucket: int | None) -> AttentionMeta:
        captured = bucket is not None
        return AttentionMeta(
            page_table=self._page_table[:rows],
            seq_lens=self._seq_lens[:rows],
            starts=self._starts[:rows],
            cu_seqlens_q=self._cu[: rows + 1],
            request_of_token=self._request[:width],
            positions=self._positions[:width],
            out_cache_loc=self._loc[:width],
            page_size=self.page_size,
            max_query_len=1 if captured else max(batch.query_lens, default=0),
            max_seq_len=self.max_pages * self.page_size if captured else max(batch.seq_lens, default=0),
            batch=batch,
            bucket=bucket,
            step=self._step,
            plans=self.plans,
        )

    def _check(self, batch: AttentionBatch, bucket: int | None, num_pages: int | None) -> None:
        name, count = "AttentionState.plan", len(batch.query_lens)
        if bucket is not None and not (batch.is_decode and count <= bucket <= min(self.max_batch, self.max_tokens)):
            limit = min(self.max_batch, self.max_tokens)
            raise ArgumentError(name, "bucket", bucket, f"for decode only, {count} <= bucket <= {limit}")
        if count > self.max_batch or batch.num_tokens > self.max_tokens:
            given = f"{count} requests, {batch.num_tokens} tokens"
            raise ArgumentError(name, "batch", given, f"at most {self.max_batch} requests, {self.max_tokens} tokens")
        for row, (length, pages) in enumerate(zip(batch.seq_lens, batch.page_table, strict=True)):
            if len(pages) > self.max_pages or len(pages) * self.page_size < length:
                wanted = f"{-(-length // self.page_size)} to {self.max_pages} pages of {self.page_size} tokens"
                raise ArgumentError(name, f"page_table[{row}]", f"{len(pages)} pages for {length} tokens", wanted)
            if self._debug and num_pages is not None and any(not 0 <= page < num_pages for page in pages):
                raise ArgumentError(name, f"page_table[{row}]", list(pages), f"pages in [0, {num_pages})")


def whole_pages(lengths: Sequence[int], page_size: int, first_page: int = 1) -> list[list[int]]:
    """Return a page table in which request after request takes the next free pages (tests, examples)."""
    table, page = [], first_page
    for length in lengths:
        needed = -(-length // page_size)
        table.append(list(range(page, page + needed)))
        page += needed
    return table


def check_step(layer: str, meta: object, cache: object) -> None:
    """Raise :class:`ArgumentError` unless these are a step's metadata and a layer's cache."""
    if not isinstance(meta, AttentionMeta):
        raise ArgumentError(layer, "meta", describe(meta), "an AttentionMeta, as AttentionState.plan returns")
    if not isinstance(cache, LayerCache):
        raise ArgumentError(layer, "cache", describe(cache), "a LayerCache, as KVCacheSpec.allocate returns")


def check_loc(layer: str, loc: torch.Tensor, num_slots: int, debug: bool) -> None:
    """Raise :class:`ArgumentError` if a slot is out of range; reads data, so only when ``debug`` is set."""
    if debug and loc.numel():
        low, high = int(loc.min()), int(loc.max())
        if low < 0 or high >= num_slots:
            raise ArgumentError(layer, "loc", f"slots from {low} to {high}", f"slots in [0, {num_slots})")


def check_pages(layer: str, meta: AttentionMeta, num_pages: int, debug: bool) -> None:
    """Raise :class:`ArgumentError` if a page is not one of the cache's; reads data, so only when ``debug`` is set."""
    if debug and meta.page_table.numel():
        low, high = int(meta.page_table.min()), int(meta.page_table.max())
        if low < 0 or high >= num_pages:
            raise ArgumentError(layer, "meta.page_table", f"pages from {low} to {high}", f"pages in [0, {num_pages})")


def as_tensors(meta: AttentionMeta) -> dict[str, Any]:
    """Return the tensors of ``meta`` by name (tests and debugging)."""
    return {name: value for name, value in vars(meta).items() if isinstance(value, torch.Tensor)}
