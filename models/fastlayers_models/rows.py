"""Static tensors of a step: requests' rows, what an extend brings, and tokens on their way to the host.

RowTable       how each row samples, and its last token; one row more than requests, which is nobody's
ExtendInputs   ids, which row each token or request belongs to, which hidden rows are the last ones
Outbox         pinned buffers that tokens are copied to; Pending waits for one
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from fastlayers.attention.buckets import ExtendBucket
from fastlayers.attention.step_buffers import Mirrored
from fastlayers.comm.processes import rank_lost
from fastlayers.comm.seam import SILENT, Late, late_of
from fastlayers.comm.watch import Watch
from fastlayers.errors import ArgumentError, RankLostError
from fastlayers.integers import cdiv
from fastlayers.sampler.layer import RowParams, SamplingParams

# Steps whose tokens may be on their way at a time.
IN_FLIGHT = 4


@dataclass(frozen=True)
class Row:
    """One request as a step sees it: its last token, how it samples, how many tokens it drew so far.

    ``rope_delta``: with images, what is added to a token's place to find its rotary position.
    """

    token: int
    params: SamplingParams
    seed: int
    drawn: int
    rope_delta: int = 0


# Kernels are compiled anew for addresses that are not multiples of this.
ALIGNMENT = 16


def _stride(count: int, dtype: torch.dtype) -> int:
    """Return the numbers from one field to the next where each begins at an aligned address."""
    step = ALIGNMENT // dtype.itemsize
    return cdiv(count, step) * step


def _aligned(fields: int, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return unwritten memory ``[fields, count]`` in which each field begins at an aligned address."""
    return torch.empty(fields, _stride(count, dtype), dtype=dtype, device=device)[:, :count]


class RowTable:
    """Rows of requests on the device: three tensors ``[fields, max_batch + 1]``, by number format.

    Attributes
    ----------
    tokens : Tensor int64 ``[max_batch + 1]``
        Each row's last token.
    rope_deltas : Tensor int64 ``[max_batch + 1]``
        What is added to a place to find its rotary position.
    """

    def __init__(self, max_batch: int, device: torch.device) -> None:
        self.max_batch, self.device = max_batch, device
        # temperature, top_p, min_p; top_k; seed, offset, token, delta of rotary positions
        kinds = ((3, torch.float32), (1, torch.int32), (4, torch.int64))
        strides = [_stride(max_batch + 1, dtype) for _, dtype in kinds]
        sizes = [(fields * stride, dtype) for (fields, dtype), stride in zip(kinds, strides, strict=True)]
        # What the host writes, laid out as the table is, and behind it which rows these are.
        self._inbox = Mirrored([*sizes, (max_batch, torch.int64)], device)
        (*arriving, (self._at, at)) = self._inbox.fields
        self._arriving = [field.view(-1, n) for (field, _), n in zip(arriving, strides, strict=True)]
        self._host = [torch.from_numpy(host).view(-1, n) for (_, host), n in zip(arriving, strides, strict=True)]
        self._host_at = torch.from_numpy(at)
        self._bytes = torch.zeros(self._at.storage_offset() * self._at.itemsize, dtype=torch.uint8, device=device)
        pieces = self._bytes.split([field.numel() * field.itemsize for field in self._arriving])
        self._floats, self._ints, self._longs = (
            piece.view(field.dtype).view(field.shape)[:, : max_batch + 1]
            for piece, field in zip(pieces, self._arriving, strict=True)
        )
        self._host[0][1] = self._floats[1] = 1.0
        self._idle = self._inbox.host_bytes.copy()  # greedy, as rows of nobody are
        self.tokens, self.rope_deltas = self._longs[2], self._longs[3]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that the table holds."""
        return self._floats, self._ints, self._longs

    def params(self, count: int) -> RowParams:
        """Return views of the first ``count`` rows."""
        floats, longs = self._floats[:, :count], self._longs[:, :count]
        return RowParams(floats[0], self._ints[0, :count], floats[1], floats[2], longs[0], longs[1])

    def gather(self, rows: torch.Tensor) -> RowParams:
        """Return copies of these rows."""
        count = rows.shape[0]
        floats, longs = (_aligned(n, count, t.dtype, self.device) for n, t in ((3, self._floats), (2, self._longs)))
        torch.index_select(self._floats, 1, rows, out=floats)
        torch.index_select(self._longs[:2], 1, rows, out=longs)
        return RowParams(floats[0], self._ints[0].index_select(0, rows), floats[1], floats[2], longs[0], longs[1])

    def scatter(self, rows: torch.Tensor, offset: torch.Tensor, tokens: torch.Tensor) -> None:
        """Write back what a draw changed."""
        self._longs[1:3].index_copy_(1, rows, torch.stack((offset, tokens)))

    def load(self, requests: Sequence[Row]) -> None:
        """Put requests into the rows from 0 on; the others become idle."""
        self._inbox.host_bytes[:] = self._idle
        self._write(requests)
        self._inbox.send(0, self._bytes.numel())
        self._bytes.copy_(self._inbox.device_bytes[: self._bytes.numel()])

    def put(self, requests: Mapping[int, Row]) -> None:
        """Put requests into some rows; the others, whose tokens may be on their way, stay as they are.

        Raises
        ------
        ArgumentError
            There is no such row.
        """
        wrong = [row for row in requests if not 0 <= row < self.max_batch]
        if wrong:
            raise ArgumentError("RowTable.put", "row", wrong[0], f"0 to {self.max_batch - 1}")
        if not requests:
            return
        count = len(requests)
        self._write(list(requests.values()))
        self._host_at[:count] = torch.tensor(list(requests))
        self._inbox.send()
        for target, values in zip(self.tensors, self._arriving, strict=True):
            target.index_copy_(1, self._at[:count], values[:, :count])

    def _write(self, rows: Sequence[Row]) -> None:
        """Write rows where the host keeps what it sends; nothing that waits for the device."""
        ways = [row.params for row in rows]
        floats = torch.tensor([[p.temperature for p in ways], [p.top_p for p in ways], [p.min_p for p in ways]])
        ints = torch.tensor([[max(p.top_k, 0) for p in ways]], dtype=torch.int32)
        numbers = [[r.seed for r in rows], [r.drawn for r in rows], [r.token for r in rows]]
        longs = torch.tensor([*numbers, [r.rope_delta for r in rows]])
        for host, values in zip(self._host, (floats, ints, longs), strict=True):
            host[:, : len(rows)] = values

    def arrange(self, order: Sequence[int]) -> None:
        """Move rows on the device: row ``i`` becomes what row ``order[i]`` was; rows behind ``order`` are stale.

        Raises
        ------
        ArgumentError
            There is no such row.
        """
        wrong = [row for row in order if not 0 <= row < self.max_batch]
        if wrong:
            raise ArgumentError("RowTable.arrange", "order", wrong[0], f"rows from 0 to {self.max_batch - 1}")
        if list(order) == list(range(len(order))):
            return
        rows = torch.tensor(list(order)).to(self.device, non_blocking=True)
        for tensor in (self._floats, self._ints, self._longs):
            tensor[:, : len(order)] = tensor.index_select(1, rows)


class ExtendInputs:
    """What the host gives to an extend step, copied to the device at once.

    Attributes
    ----------
    last : Tensor int64 ``[max_batch]``
        Hidden row of each request's last token.
    rows : Tensor int64 ``[max_batch]``
        Row of the table that each request draws by; the row after the last one: nobody's.
    count : Tensor int32 ``[1]``
        Tokens that are real.
    images : ImageRows, optional
        Of an uncaptured step with images, set after :meth:`write`.
    """

    def __init__(self, max_tokens: int, max_batch: int, device: torch.device) -> None:
        sizes = [1, max_batch, max_batch, max_tokens, max_tokens]
        self._mirrored, self._nobody = Mirrored([(size, torch.int64) for size in sizes], device), max_batch
        (count, self.last, self.rows, self._ids, self._source), self._host = zip(*self._mirrored.fields, strict=True)
        self.count = count.view(torch.int32)[:1]
        self.images: Any = None

    def ids(self, tokens: int, last_tokens: torch.Tensor) -> torch.Tensor:
        """Return the step's ids ``[tokens]``: given ones, or (where -1 is given) the last token of a row."""
        ids = self._ids[:tokens]
        return torch.where(ids < 0, last_tokens.index_select(0, self._source[:tokens]), ids)

    def write(
        self, parts: Sequence[tuple[Sequence[int], int | None]], lengths: Sequence[int], bucket: ExtendBucket | None
    ) -> None:
        """Copy a step's ids and rows to the device.

        Parameters
        ----------
        parts : sequence of (ids, row)
            Without ids: one token, the last of ``row``.
        lengths : sequence of int
            New tokens of each part.
        bucket : ExtendBucket, optional
            What the step is padded to.

        Raises
        ------
        ArgumentError
            A part has neither ids nor a row, or a row that does not exist.
        """
        for ids, row in parts:
            if (row is None and not ids) or (row is not None and not 0 <= row < self._nobody):
                accepted = f"0 to {self._nobody - 1}, or None for a part with ids that draws nothing"
                raise ArgumentError("ModelStep.extend", "row", row, accepted)
        count, last, rows, ids_at, source = self._host
        self.images = None
        tokens = sum(lengths)
        requests, width = (bucket.requests, bucket.tokens) if bucket is not None else (len(parts), tokens)
        idle = requests - len(parts)
        count[0] = tokens
        last[:requests] = [end - 1 for end in accumulate(lengths)] + [0] * idle
        rows[:requests] = [self._nobody if row is None else row for _, row in parts] + [self._nobody] * idle
        given, origins = array("q"), []
        for ids, row in parts:
            if not ids:
                origins.append((len(given), row or 0))
            given.extend(ids or (-1,))
        source[:width] = 0
        for place, row in origins:
            source[place] = row
        ids_at[tokens:width] = 0
        ids_at[:tokens] = given
        # Without tokens of rows nobody reads ``source``: what an earlier step left there are rows, too.
        self._mirrored.send(0, None if origins else 8 * (self._ids.storage_offset() + width))


def _nothing() -> None:
    pass


def _again(error: Exception) -> None:
    raise error


class Pending:
    """Tokens on their way to the host, one a row (or one for each part of an extend that draws)."""

    def __init__(self, slot: _Slot, size: int, kept: Sequence[int] | None) -> None:
        self._slot, self._size, self._kept = slot, size, kept
        self._found: list[int] | None = None
        self.before: Callable[[], None] = _nothing  # what is done before the host waits

    def arrived(self) -> bool:
        """Whether nobody would wait for the tokens."""
        return self._found is not None or self._slot.arrived is None or bool(self._slot.arrived.query())

    def tokens(self) -> list[int]:
        """Wait, and return the tokens.

        Raises
        ------
        ArgumentError
            More than :data:`IN_FLIGHT` steps were launched since, and the tokens were not read.
        RankLostError
            Another rank was waited for in vain.
        CollectiveOrderError
            Of several ranks: they called differently between each other, see :class:`SplitStep`.
        """
        if self._found is None:
            if self._slot.owner is not self:
                accepted = f"tokens read before {IN_FLIGHT} more steps are launched"
                raise ArgumentError("Pending.tokens", "step", "overwritten", accepted)
            before, self.before = self.before, _nothing
            try:
                before()
                self._slot.wait()
            except Exception as error:  # nothing of this step is right, whoever asks
                self.before = partial(_again, error)
                if isinstance(error, RankLostError):
                    self._slot.give_up(error)
                raise
            all_tokens: list[int] = self._slot.buffer[: self._size].tolist()
            self._found = all_tokens if self._kept is None else [all_tokens[index] for index in self._kept]
        return self._found


class _Slot:
    def __init__(self, size: int, cuda: bool, late: Sequence[Late], watch: Watch | None) -> None:
        self._late = late
        self.statuses = [torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=cuda) for _ in late]
        self.buffer = torch.zeros(size, dtype=torch.int64, device="cpu", pin_memory=cuda)
        self.arrived: Any = torch.cuda.Event() if cuda else None
        self.owner: Pending | None = None
        self.watch = watch

    def wait(self) -> None:
        """Wait for the tokens; raise :class:`RankLostError` where another rank was waited for in vain."""
        if self.arrived is not None:
            self.arrived.synchronize() if self.watch is None else self.watch.wait(self.arrived)
        if (rank := self.lost()) is not None:
            lost = f"rank {rank} {SILENT}"
            again = "nothing of this step is right: make the model again, on all"
            raise rank_lost(f"Pending.tokens: {lost}; {again}", "a sum over ranks", rank)

    def give_up(self, error: RankLostError) -> None:
        """End what the device still does with other ranks, behind this step: nobody would ever end it."""
        if self.watch is not None:
            who = "a rank is lost" if error.rank is None else f"rank {error.rank} is lost"
            self.watch.give_up(f"{who}, as a step before has said", error.rank)

    def lost(self) -> int | None:
        """Return the rank that was waited for in vain before these tokens were made, or ``None``."""
        codes = zip(self._late, map(int, self.statuses), strict=True)
        return next((late.named(code) for late, code in codes if code), None)


def waits_of(model: Any, device: torch.device) -> tuple[tuple[Late, ...], Watch | None]:
    """Return what the boxes of a model's steps have to know of other ranks; one watch for all of them."""
    late = late_of(model)
    return late, Watch.of(model.parallel, device, late) if hasattr(model, "parallel") else None


class Outbox:
    """Pinned buffers, used in turn.

    ``late``: of the arenas that the step's sums over ranks use; their statuses travel with the tokens.
    ``watch``: of the ranks that the step needs.
    """

    def __init__(
        self, max_batch: int, device: torch.device, late: Sequence[Late] = (), watch: Watch | None = None
    ) -> None:
        self._late, self.watch = late, watch
        self._slots = [_Slot(max_batch, device.type == "cuda", late, watch) for _ in range(IN_FLIGHT)]
        self._next = 0

    def send(self, tokens: torch.Tensor, kept: Sequence[int] | None = None) -> Pending:
        """Start the copy of ``tokens [n]``; ``kept``: which of them anybody wants."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % IN_FLIGHT
        size = tokens.shape[0]
        slot.owner = pending = Pending(slot, size, kept)
        slot.buffer[:size].copy_(tokens, non_blocking=True)
        for here, there in zip(slot.statuses, self._late, strict=True):
            here.copy_(there.status, non_blocking=True)
        if slot.arrived is not None:
            slot.arrived.record()
        return pending
