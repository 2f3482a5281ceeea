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
from operator import index
from typing import Any, Protocol

import numpy as np
import torch

from fastlayers.attention.batch import MAX_TREE, AttentionBatch
from fastlayers.attention.buckets import ExtendBucket
from fastlayers.attention.context_buckets import context_of
from fastlayers.attention.kv_cache.pool import MAX_PAGES
from fastlayers.attention.kv_cache.spec import LayerCache
from fastlayers.attention.step_buffers import Mirrored, PageTable, StepBuffers, is_array
from fastlayers.errors import (
    ArgumentError,
    CaptureError,
    as_integers,
    check_device,
    check_plain,
    check_positive,
    describe,
)
from fastlayers.memory import memory_for
from fastlayers.moved import renamed

# What a step is padded to under capture: so many requests of one token, a bucket of extends, or nothing.
Bucket = int | ExtendBucket | None
# Steps of so many tokens have short buffers: what is copied is a buffer, not a step.
FEW_TOKENS = 256


class BackendScratch(Protocol):
    """Host work and static buffers of one backend (a split schedule, say) for steps of one kind."""

    def plan(self, meta: AttentionMeta) -> None:
        """Bring the buffers up to date for ``meta``; never called inside a capture."""


class StepScratch:
    """What backends planned for the steps of an :class:`AttentionState`, by backend and bucket.

    Attributes
    ----------
    made : dict
        Backend's key and bucket to its scratch.
    planned : dict
        The same to the number of the step that it is planned for.
    """

    def __init__(self) -> None:
        self.made: dict[tuple[Hashable, Bucket], BackendScratch] = {}
        self.planned: dict[tuple[Hashable, Bucket], int] = {}

    def refresh(self, meta: AttentionMeta) -> None:
        """Plan everything that was used with this bucket before."""
        for own, plan in self.made.items():
            if own[1] == meta.bucket:
                plan.plan(meta)
                self.planned[own] = meta.step


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
        Which way an MLA layer takes for this batch, see :mod:`fastlayers.attention.mla.prefix_chunks`; "" before it is
        set.
    bucket : int or ExtendBucket, optional
        What a captured step is padded to: requests of a decode step, or tokens and requests of an extend; ``None``
        outside capture.
    step : int
        Number of the step, by which plans know whether they are up to date.
    plans : StepScratch
        What backends planned for steps of this state, see :meth:`plan_of`.
    rope_positions : Tensor int64 ``[3, T]``, optional
        Time, height and width of each new token, for MRoPE; masks and slots still follow ``positions``. Not planned
        here: ``dataclasses.replace(meta, rope_positions=...)``, under capture always with the same tensor.
    tree : Tensor int64 ``[T]``, optional
        Which new tokens of its request each new token sees, one bit each; see :func:`seen_in_tree`.
    is_decode : bool
        Whether each request brings one token (host data that a bucket fixes).
    context : int
        The class of ``max_seq_len``, see :mod:`fastlayers.attention.context_buckets`.
    is_extend_bucket : bool
        Whether this is a captured step of several tokens a request: the batch on the host says nothing of it.
    phase : str
        ``"captured"`` or ``"captured tree"`` for such a step, else the batch's: see :mod:`fastlayers.attention.core`.
    checked : bool
        Whether a model has checked the step, see :meth:`vouch`: then its attention layers do not.
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
    tree: torch.Tensor | None = None
    bucket: Bucket = None
    step: int = 0
    plans: StepScratch = field(default_factory=StepScratch, repr=False, compare=False)
    is_decode: bool = field(init=False, repr=False, compare=False)
    context: int = field(init=False, repr=False, compare=False)
    is_extend_bucket: bool = field(init=False, repr=False, compare=False)
    phase: str = field(init=False, repr=False, compare=False)
    checked: bool = field(init=False, repr=False, compare=False, default=False)

    def __post_init__(self) -> None:
        one_each = self.max_query_len == 1 and self.positions.shape[0] == self.seq_lens.shape[0]
        captured = isinstance(self.bucket, ExtendBucket)
        object.__setattr__(self, "is_extend_bucket", captured)
        phase = self.batch.phase if not captured else "captured" if self.tree is None else "captured tree"
        object.__setattr__(self, "phase", phase)
        object.__setattr__(self, "is_decode", one_each)
        object.__setattr__(self, "context", context_of(self.max_seq_len))

    def vouch(self) -> AttentionMeta:
        """Say that this step was checked, or that nobody reads what it computes, and return it."""
        object.__setattr__(self, "checked", True)
        return self

    def plan_of(self, key: Hashable, make: Callable[[AttentionMeta], BackendScratch]) -> Any:
        """Return the plan of a backend for this step; ``key`` is shared by all layers of an attention group.

        Made by ``make(self)`` at first use and kept by the state, so that a captured graph finds its buffers; planned
        once a step. For a bucket, :meth:`AttentionState.plan` plans it again before every replay.

        Raises
        ------
        CaptureError
            It does not exist yet and a capture is under way: run the step once before capturing it.
        """
        own, made, planned = (key, self.bucket), self.plans.made, self.plans.planned
        found = made.get(own)
        # A bucket's plans are made anew before its steps; a compiler would take this step's number for a constant.
        if found is not None and self.bucket is not None and torch.compiler.is_compiling():
            return found
        if found is not None and planned.get(own) == self.step:
            return found
        if self.positions.is_cuda and torch.cuda.is_current_stream_capturing():
            if found is None:
                raise CaptureError(f"attention: {key} has no plan yet; run the step once before it is captured")
            return found
        if found is None:
            found = make(self)
        found.plan(self)
        made[own], planned[own] = found, self.step
        return found

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
        max_batch, max_tokens, max_pages, page_size = as_integers(max_batch, max_tokens, max_pages, page_size)
        self.max_batch, self.max_tokens, self.max_pages, self.page_size = max_batch, max_tokens, max_pages, page_size
        self.capacity = max_pages * page_size  # tokens of one request
        where = check_device("AttentionState", device)
        if where.type == "meta":
            raise ArgumentError("AttentionState", "device", "'meta'", "a device with memory: steps are written there")
        with memory_for("AttentionState", max_batch=max_batch, max_tokens=max_tokens, max_pages=max_pages):
            # Steps of one token a request have buffers of their own: small, and half of them never change.
            self._decode = StepBuffers(max_batch, min(max_batch, max_tokens), where)
            self._extend = StepBuffers(max_batch, max_tokens, where)
            self._few = StepBuffers(max_batch, min(FEW_TOKENS, max_tokens), where)
            self._table = PageTable(max_batch, max_pages, where)
            self._rows = np.arange(max_batch)
        self._trees: Mirrored | None = None  # of tokens in trees: made when the first come
        self._views_of: dict[int | ExtendBucket, dict[str, Any]] = {}
        self.plans, self._step = StepScratch(), 0

    def __getstate__(self) -> tuple[Any, ...]:
        # Host and device views share storage, which copies of them would not: a copy has planned nothing yet.
        return self.max_batch, self.max_tokens, self.max_pages, self.page_size, self._table.device.device

    def __setstate__(self, made_of: tuple[Any, ...]) -> None:
        AttentionState.__init__(self, *made_of)

    def plan(self, batch: AttentionBatch, *, bucket: Bucket = None, num_pages: int | None = None) -> AttentionMeta:
        """Do the host work of one step and copy its metadata into the static buffers.

        Parameters
        ----------
        batch : AttentionBatch
        bucket : int or ExtendBucket, optional
            Under capture: pad to this many requests of one token, or to an extend's tokens and requests. Host bounds
            then come from the bucket and the state's capacity.
        num_pages : int, optional
            Size of the cache, against which the page table is checked.

        Raises
        ------
        ArgumentError
            The batch does not fit the state, a page row is too short for its request, or a page is no page of the
            cache; nothing was written. Or a new token's page is page 0; nothing but the page table was.
        """
        if not isinstance(batch, AttentionBatch):
            raise ArgumentError("AttentionState.plan", "batch", describe(batch), "an AttentionBatch")
        check_plain("AttentionState.plan", "int | None", num_pages=num_pages)
        bucket = bucket if bucket is None or type(bucket) in (int, ExtendBucket) else _bucket(bucket)
        lengths = batch.seq_lens
        extend = bucket if isinstance(bucket, ExtendBucket) else None
        decode = extend is None and batch.is_decode and (bucket is not None or len(lengths) > 0)
        self._check(batch, lengths, decode, bucket)
        rows = bucket.requests if isinstance(bucket, ExtendBucket) else len(lengths) if bucket is None else bucket
        width = rows if decode else batch.num_tokens if extend is None else extend.tokens
        self._table.write(self._table.changes(batch.page_table, rows, num_pages))
        buffers = self._buffers(decode, width)
        if decode:
            self._write_decode(batch, lengths, rows)
        else:
            self._write_extend(buffers, batch, lengths, rows, width)
        buffers.mirrored.send()
        if batch.parents or (extend is not None and extend.tree):
            self._send_tree(batch, width)
        self._step += 1
        meta = self._meta(batch, decode, rows, width, bucket, max(lengths, default=0))
        if bucket is not None:
            self.plans.refresh(meta)
        return meta

    def _buffers(self, decode: bool, width: int) -> StepBuffers:
        """Return where a step's metadata lies: of each bucket always in the same place."""
        return self._decode if decode else self._few if width <= FEW_TOKENS else self._extend

    def _write_decode(self, batch: AttentionBatch, lengths: tuple[int, ...], rows: int) -> None:
        count, host = len(lengths), self._decode
        at = np.array(batch.prefix_lens, np.int64)
        host.loc[1][:count] = self._slots(self._rows[:count], at)
        host.seq_lens[1][:count] = lengths
        host.seq_lens[1][count:rows] = 1
        host.positions[1][:count] = at
        host.positions[1][count:rows] = host.loc[1][count:rows] = 0
        if batch.starts or host.has_starts:
            host.starts[1][:] = 0
            host.starts[1][:count] = batch.starts or 0
            host.has_starts = bool(batch.starts)

    def _send_tree(self, batch: AttentionBatch, width: int) -> None:
        if self._trees is None:
            self._trees = Mirrored([(self.max_tokens, torch.int64)], self._table.device.device)
        host = self._trees.fields[0][1]
        host[: batch.num_tokens] = batch.tree()[1]
        host[batch.num_tokens : width] = 0  # nobody's tokens see nothing of a tree
        self._trees.send(0, 8 * width)

    def _slots(self, requests: Any, positions: Any) -> Any:
        pages = self._table.host[requests, positions // self.page_size].astype(np.int64)
        if not pages.all():
            row = int(np.broadcast_to(requests, pages.shape)[pages == 0][0])
            accepted = "pages from 1 on for the new tokens: page 0 is nobody's, padded rows write there"
            given = self._table.host[row, : self._table.width].tolist()
            raise ArgumentError("AttentionState.plan", f"page_table[{row}]", given, accepted)
        return pages * self.page_size + positions % self.page_size

    def _write_extend(
        self, host: StepBuffers, batch: AttentionBatch, lengths: tuple[int, ...], rows: int, width: int
    ) -> None:
        count, tokens = len(lengths), batch.num_tokens
        query_lens = np.array(batch.query_lens, np.int64)
        ends = query_lens.cumsum()
        request = np.repeat(self._rows[:count], query_lens)
        first = np.array(batch.prefix_lens, np.int64) - (ends - query_lens)
        positions = np.arange(tokens) + first[request]
        host.loc[1][:tokens] = self._slots(request, positions)
        host.seq_lens[1][:count] = lengths
        host.starts[1][:count] = batch.starts or 0
        host.cu[1][1 : count + 1] = ends
        host.request[1][:tokens] = request
        host.positions[1][:tokens] = positions
        if batch.parents:
            host.positions[1][:tokens] = np.array(batch.prefix_lens, np.int64)[request] + batch.tree()[0]
        # Of a bucket: requests without tokens, and tokens that are nobody's.
        host.seq_lens[1][count:rows] = 1
        host.starts[1][count:rows] = 0
        host.cu[1][count + 1 : rows + 1] = tokens
        for each in (host.request, host.positions, host.loc):
            each[1][tokens:width] = 0

    def _meta(
        self, batch: AttentionBatch, decode: bool, rows: int, width: int, bucket: Bucket, longest: int
    ) -> AttentionMeta:
        buffers = self._buffers(decode, width)
        key = rows if decode else bucket
        views = self._views_of.get(key) if key is not None else None
        if views is None:
            views = {"page_table": self._table.device[:rows], **buffers.views(rows, width)}
            if self._trees is not None and (batch.parents or (isinstance(bucket, ExtendBucket) and bucket.tree)):
                views["tree"] = self._trees.fields[0][0][:width]
            if key is not None:  # as many as batch sizes and buckets; other extends have too many widths to keep
                self._views_of[key] = views
        return AttentionMeta(
            **views,
            page_size=self.page_size,
            max_query_len=1
            if decode
            else bucket.most
            if isinstance(bucket, ExtendBucket)
            else max(batch.query_lens, default=0),
            max_seq_len=longest if bucket is None else self._longest(bucket),
            batch=batch,
            # Latents are attended to as they are: to expand a prefix takes its length on the host.
            path="mqa" if isinstance(bucket, ExtendBucket) or batch.parents else "",
            bucket=bucket,
            step=self._step,
            plans=self.plans,
        )

    def _longest(self, bucket: int | ExtendBucket) -> int:
        """Return the most tokens of a request in a bucket's steps."""
        given = bucket.longest if isinstance(bucket, ExtendBucket) else 0
        return min(given, self.capacity) if given else self.capacity

    def _check(
        self,
        batch: AttentionBatch,
        lengths: tuple[int, ...],
        decode: bool,
        bucket: Bucket,
    ) -> None:
        name, count = "AttentionState.plan", len(lengths)
        if isinstance(bucket, ExtendBucket):
            fits = count <= bucket.requests <= self.max_batch and batch.num_tokens <= bucket.tokens <= self.max_tokens
            if not fits:
                most = f"ExtendBucket(tokens={self.max_tokens}, requests={self.max_batch})"
                accepted = f"at least {batch.num_tokens} tokens and {count} requests, at most {most}"
                raise ArgumentError(name, "bucket", bucket, accepted)
            if max(batch.query_lens, default=0) > bucket.most:
                raise ArgumentError(name, "bucket", bucket, f"each >= {max(batch.query_lens)}, or 0")
            if bucket.longest and max(lengths, default=0) > bucket.longest:
                raise ArgumentError(name, "bucket", bucket, f"longest >= {max(lengths)}, or 0")
            if bucket.tree and batch.num_tokens and not batch.parents:
                raise ArgumentError(name, "bucket", bucket, "one without tree for a batch without parents")
        if batch.parents and not (bucket is None or (isinstance(bucket, ExtendBucket) and bucket.tree)):
            raise ArgumentError(name, "bucket", bucket, "None for a tree, or an ExtendBucket with tree=True")
        if isinstance(bucket, int) and not (decode and count <= bucket <= min(self.max_batch, self.max_tokens)):
            limit = min(self.max_batch, self.max_tokens)
            raise ArgumentError(name, "bucket", bucket, f"for decode only, {count} <= bucket <= {limit}")
        if count > self.max_batch or batch.num_tokens > self.max_tokens:
            given = f"{count} requests, {batch.num_tokens} tokens"
            raise ArgumentError(name, "batch", given, f"at most {self.max_batch} requests, {self.max_tokens} tokens")
        table: Any = batch.page_table
        if is_array(table) and max(lengths, default=0) <= table.shape[1] * self.page_size <= self.capacity:
            return
        for row, (length, pages) in enumerate(zip(lengths, table, strict=True)):
            if not hasattr(pages, "__len__") or getattr(pages, "ndim", 1) != 1:
                raise ArgumentError(name, f"page_table[{row}]", describe(pages), "a sequence of page numbers")
            if len(pages) > self.max_pages or len(pages) * self.page_size < length:
                least, of = -(-length // self.page_size), f"{self.max_pages} pages of {self.page_size} tokens"
                wanted = f"{least} to {of}" if least <= self.max_pages else f"at most {self.capacity} tokens, on {of}"
                raise ArgumentError(name, f"page_table[{row}]", f"{len(pages)} pages for {length} tokens", wanted)


def _bucket(given: Any) -> int:
    check_plain("AttentionState.plan", "int | None", bucket=given)
    return index(given)


def seen_in_tree(tree: torch.Tensor, keys: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Return which of the rows ``keys [B, S]`` of its request each new token of ``tree [B, Q]`` sees: ``[B, Q, S]``.

    It sees all rows before ``first [B]``, and of the new tokens' those on its path.
    """
    new = (keys - first[:, None])[:, None]
    return (new < 0) | ((tree[..., None] >> new.clamp(0, MAX_TREE) & 1) > 0)


def whole_pages(lengths: Sequence[int], page_size: int, first_page: int = 1) -> list[list[int]]:
    """Return a page table in which request after request takes the next free pages (tests, examples)."""
    check_positive("whole_pages", page_size=page_size)
    check_plain("whole_pages", "int >= 0", first_page=first_page)
    check_plain("whole_pages", "tuple[int, ...]", lengths=tuple(lengths) if isinstance(lengths, Sequence) else lengths)
    page_size, first_page, *lengths = as_integers(page_size, first_page, *lengths)
    if min(lengths, default=0) < 0 or sum(lengths) // page_size > MAX_PAGES:
        raise ArgumentError("whole_pages", "lengths", lengths, f"lengths of at most {MAX_PAGES} pages together")
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


def check_slots(layer: str, meta: AttentionMeta) -> None:
    """Raise :class:`ArgumentError` if new tokens of a step share a slot: one would be read for all; reads data."""
    slots, tokens = meta.out_cache_loc.unique(return_counts=True)
    shared = slots[(tokens > 1) & (slots >= meta.page_size)].tolist()  # page 0 is nobody's
    if shared:
        given = f"slot {shared[0]} of page {shared[0] // meta.page_size} for several new tokens"
        raise ArgumentError(layer, "meta.out_cache_loc", given, "a slot of its own for each: see meta.page_table")


__getattr__ = renamed(__name__, {"StepPlan": "BackendScratch", "StepPlans": "StepScratch"})
