"""A model's steps by slot: what a captured step reads and writes are rows of tables that requests keep while they run.

    decode   slots ─► last token of each ─► model ─► logits ─► sampler ─► last token of each
    extend   ids   ─► model ─► hidden row of each request's last token ─► logits
    verify   ids and drafts ─► model ─► logits of every token ─► sampler ─► as far as drafts are what was drawn
    tree     the same of drafts in a tree, whose rows in the cache are then moved together

``RowTable`` holds the rows; slot s is row s - 1, and the row behind the last one is nobody's. A decode step may end at
its logits too, where a request wants something else than the likeliest token. Logits that are not finite draw -1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from operator import add
from typing import Any

import numpy as np
import torch

from fastlayers.attention.buckets import SHORT_CONTEXT, ExtendBucket
from fastlayers.attention.core import AttentionCore
from fastlayers.attention.meta import AttentionBatch, AttentionMeta
from fastlayers.attention.step_buffers import Mirrored
from fastlayers.runtime.graphs import bucket_of
from fastlayers.sampler.layer import RowParams
from fastlayers.sampler.philox import uniform
from fastlayers.sampler.torch import probabilities
from fastlayers_models.step import ModelStep, StepKey
from fastlayers_server.engine.request import Chunk, Request, TickPlan

GREEDY, LOGITS, VERIFY, TREE, ALL = "greedy", "logits", "verify", "verify a tree", "all logits"
COINS = 0x5EED  # what tells the generator's streams apart: of draws, of coins, of drafts
DRAFTS = 0xD7AF
DOUBLINGS = 3  # 2^3 drafts in a row at most
RIGHT, PASSED = -2, -2  # a draft that is right whatever is drawn there; what is told of draws that do not count
# What is captured of decode; whoever does not take the likeliest token is drawn for behind the logits.
DECODES = (GREEDY, LOGITS)


def finite_or_minus_one(logits: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """Return the tokens, -1 where a row's logits hold NaN or +inf, or nothing but -inf."""
    return torch.where(logits.amax(-1).abs() < torch.inf, drawn, -1)  # isfinite launches twice as much


def on_device(values: Any, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return numbers as a tensor there; the host does not wait for what runs."""
    pinned = device.type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=pinned).to(device, non_blocking=True)


class Staging:
    """Integers for the device, copied without waiting; sent again only if they changed."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._mirrored, self._known = Mirrored([(size, torch.int64)], device), False
        self.device, self._host = self._mirrored.fields[0]

    def forget(self) -> None:
        """Somebody else wrote to the device's buffer."""
        self._known = False

    def send(self, values: Sequence[int] | np.ndarray[Any, Any]) -> None:
        """Copy values to the front of the device's buffer, in stream order."""
        new, count = np.asarray(values, np.int64), len(values)
        if self._known and np.array_equal(new, self._host[:count]):
            return
        self._host[:count] = new
        self._mirrored.send(0, 8 * count if self._known else None)
        self._known = True


class SlotStep(ModelStep):
    """Steps of requests by slot; one for decode and one for extends share a table and the graphs."""

    def __init__(self, *args: Any, verify_each: int = 0, keep_hidden: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self.verify_each = verify_each  # most tokens that a request verifies, 0: it drafts none
        # Of the last step, where a draft layer reads them: hidden rows of all its tokens.
        self.keep_hidden, self._hidden = keep_hidden, torch.empty(0)
        self._eager_hidden: torch.Tensor | None = None
        self.nobody = self.max_batch
        # Pages by slot; 0 is nobody's.
        self.pages = np.zeros((self.max_batch + 1, self.state.max_pages), np.int32)
        # Of captured steps that end there: one buffer for all graphs, so that none keeps its own.
        self._logits: torch.Tensor | None = None
        # How many rows are real, and the row of each.
        self._decode_in = Staging(1 + self.max_batch, self.model.device)
        self._decode_in.send([0] + [self.nobody] * self.max_batch)
        self.count = self._decode_in.device[:1].view(torch.int32)[:1]
        # Of each token to verify: its row, how many drafts lead to it, the token before it (its own place, of a known
        # token), its id as a draft, its id; and behind the columns, how many tokens are real.
        # Each column is as long as the step is wide; a bucket may be twice the tokens.
        self._verify_in, self._width = Staging(5 * 2 * self.max_batch * verify_each + 1, self.model.device), 0
        # For benchmarks: which drafts count as right (RIGHT) or wrong (-1), whatever is drawn.
        self.scripted: Callable[[Chunk], list[int]] | None = None

    def capture(self, *args: Any, **options: Any) -> None:
        """Capture decode, see :class:`ModelStep`; before anybody runs."""
        super().capture(*args, **options)
        self._decode_in.forget()

    def _capture_extends(self, keys: list[StepKey], progress: Callable[[StepKey], None] | None) -> None:
        for key in keys:
            if key.mode in (VERIFY, TREE, ALL):
                self._send_drafts((), key.tokens)  # nobody's
            super()._capture_extends([key], progress)

    def turn_pages(self, plan: TickPlan) -> None:
        """Take what a plan changes in the page tables."""
        self.pages[[request.slot for request in plan.admitted]] = 0
        if plan.pages:
            slots, columns, pages = np.array(plan.pages).T
            self.pages[slots, columns] = pages

    def _pages_of(self, slots: Sequence[int] | np.ndarray[Any, Any], longest: int) -> np.ndarray[Any, Any]:
        return self.pages[slots, : -(-longest // self.state.page_size)]

    def decode(self, requests: Sequence[Request], starts: Sequence[int], mode: str) -> torch.Tensor:
        """Launch one token for each request; returns tokens, or with mode "logits" the logits ``[rows, vocab]``."""
        size, self._eager_hidden = len(requests), None
        slots = np.fromiter((request.slot for request in requests), np.int64, size)
        table: Any = self._pages_of(slots, max(starts) + 1) if size else []
        batch = AttentionBatch((1,) * size, tuple(starts), table)
        bucket = bucket_of(self.buckets, self._widest(size))
        key = None if bucket is None else self._key(bucket, mode)
        rows = np.full(1 + (bucket or size), self.nobody)
        rows[0], rows[1 : 1 + size] = size, slots - 1
        if key is None or bucket is None or not self._is_captured(key):
            meta = self.state.plan(batch, num_pages=self.num_pages)
            self._decode_in.send(rows[: 1 + size])
            self.uncaptured["CUDA graphs are off" if self.graphs is None else f"no graph for {mode}"] += 1
            self._agree(size, None)
            return self._run(meta, mode)
        self._agree(size, bucket)
        self.state.plan(batch, bucket=bucket, num_pages=self.num_pages)
        self._decode_in.send(rows)
        assert self.graphs is not None
        found: torch.Tensor = self.graphs.replay(key)
        return found[:size]

    def _widest(self, size: int) -> int:
        """Return the rows that a decode step's bucket holds: of whoever computes it together."""
        return size

    def _agree(self, size: int, bucket: int | None) -> None:
        """Tell whoever computes it together of a decode step that is about to run; here that is nobody."""

    def extend_chunks(
        self, chunks: Sequence[Chunk], mode: str, requests: Sequence[Request] = (), starts: Sequence[int] = ()
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Launch pieces of prompts (mode "logits"), or drafts behind known tokens ("verify", of trees or
        chains).

        Parameters
        ----------
        chunks : sequence of Chunk
        mode : str
        requests, starts : sequence, optional
            Who decodes beside prompts, as in :meth:`decode`: one token each, behind those of the chunks.

        Returns
        -------
        Tensor
            One row a chunk and request: the logits of its last token; with mode "verify" the token drawn at each
            place, and :data:`PASSED` behind a draft that is wrong.
        Tensor or None
            Hidden rows of all tokens, where the step was not captured.
        """
        lengths = (*(len(chunk.ids) for chunk in chunks), *[1] * len(requests))
        begins = (*(chunk.start for chunk in chunks), *starts)
        slots = [*(chunk.request.slot for chunk in chunks), *(request.slot for request in requests)]
        longest = max(map(add, begins, lengths))
        table = self._pages_of(slots, longest)
        tree = any(chunk.parents for chunk in chunks)
        parents = tuple(tuple(c.parents or range(-1, len(c.ids) - 1)) for c in chunks) if tree else ()
        mode = TREE if tree else mode
        batch = AttentionBatch(lengths, begins, table, (), parents)
        # Also when they are told already: a prompt that is computed again is computed alike.
        wants_all = any(chunk.request.submit.prompt_logprobs >= 0 for chunk in chunks)
        key = None if wants_all else self._extend_key(batch, mode, False)
        if key is not None and longest <= SHORT_CONTEXT and mode != LOGITS:
            short = key._replace(longest=SHORT_CONTEXT)
            key = short if self._is_captured(short) else key
        bucket = None if key is None else self._extend_bucket(key)
        meta = self.state.plan(batch, bucket=bucket, num_pages=self.num_pages)
        if mode == LOGITS:
            parts = [(chunk.ids, chunk.request.slot - 1 if chunk.samples else None) for chunk in chunks]
            self.inputs.write([*parts, *(((), request.slot - 1) for request in requests)], lengths, bucket)
        else:
            self._send_drafts(chunks, batch.num_tokens if bucket is None else bucket.tokens)
        self._eager_hidden = None  # of an earlier step, that nobody took
        if key is not None:
            assert self.graphs is not None
            return self.graphs.replay(key)[: len(slots)] if mode == LOGITS else self.graphs.replay(key), None
        hidden = self._forward(meta, mode)
        return self._finish(meta, hidden, mode), hidden

    def _outweighs_capture(self, batch: AttentionBatch, mode: str) -> bool:
        return mode == LOGITS and super()._outweighs_capture(batch, mode)  # drafts are few, and verified captured

    def _extend_bucket(self, key: StepKey) -> ExtendBucket:
        each = min(self.verify_each, key.tokens) if key.mode in (VERIFY, TREE, ALL) else 0
        return ExtendBucket(key.tokens, key.requests, each, key.mode == TREE, key.longest)

    def for_short_contexts(self, keys: Sequence[StepKey]) -> list[StepKey]:
        """Return those of steps that verify whose attention is another backend's where all contexts are short.

        Over several ranks those of which all say so: a capture is all ranks'.
        """
        capacity, buckets = self.state.capacity, [self._extend_bucket(key) for key in keys]
        if capacity <= SHORT_CONTEXT or not keys or self.graphs is None:
            return []
        cores = [part for part in self.model.modules() if isinstance(part, AttentionCore)]
        cores = list({(type(core), core.cfg): core for core in cores}.values())
        found = [
            not bucket.tree
            and any(
                bucket.most <= core.few and core.tells_contexts(bucket.tokens, (SHORT_CONTEXT, capacity))
                for core in cores
            )
            for bucket in buckets
        ]
        if self._ranks.size > 1:
            said = torch.tensor(found, dtype=torch.int32, device=self.model.device)
            found = [count == self._ranks.size for count in self._ranks.all_reduce_(said).tolist()]
        return [key._replace(longest=SHORT_CONTEXT) for key, short in zip(keys, found, strict=True) if short]

    def _send_drafts(self, chunks: Sequence[Chunk], width: int) -> None:
        columns: list[list[int]] = [[] for _ in range(5)]
        rows, depths, parents, drafts, ids = columns
        for chunk in chunks:
            count, first = len(chunk.ids), len(rows)
            rows += [chunk.request.slot - 1] * count
            depths += chunk.depths
            parents += [first + max(parent, 0) for parent in chunk.parents or range(-1, count - 1)]
            drafts += [RIGHT, *(chunk.ids[1:] if self.scripted is None else self.scripted(chunk))]
            ids += chunk.ids
        count, self._width = len(ids), width
        for column, padding in zip(columns, (self.nobody, 0, 0, -1, 0), strict=True):
            column += [padding] * (width - count)
        self._verify_in.send([*chain.from_iterable(columns), count])

    def _run(self, meta: AttentionMeta, mode: str) -> torch.Tensor:
        size = meta.num_tokens
        rows = self._decode_in.device[1 : 1 + size]
        ids = self.table.tokens.index_select(0, rows)
        valid = self.count if meta.bucket is not None and size > 1 else None
        hidden = self._noted(meta, self._compute(ids, meta, valid))
        logits: torch.Tensor = self.model.compute_logits(hidden)
        if mode == LOGITS:
            return logits if meta.bucket is None else self._kept(logits)
        params = self.table.gather(rows)
        drawn = self.sampler(logits, params, mode)
        self.table.scatter(rows, params.offset, drawn)
        return finite_or_minus_one(logits, drawn)

    def _run_extend(self, meta: AttentionMeta, mode: str) -> torch.Tensor:
        return self._finish(meta, self._forward(meta, mode), mode)

    def _forward(self, meta: AttentionMeta, mode: str = LOGITS) -> torch.Tensor:
        if mode == LOGITS:
            ids, count = self.inputs.ids(meta.num_tokens, self.table.tokens), self.inputs.count
        else:  # whoever verifies knows the last token
            ids, real = self._verify_in.device[4 * self._width : 5 * self._width + 1].split((self._width, 1))
            count = real.view(torch.int32)[:1]
        return self._noted(meta, self._compute(ids, meta, count if meta.bucket is not None else None))

    def _noted(self, meta: AttentionMeta, hidden: torch.Tensor) -> torch.Tensor:
        if not self.keep_hidden:
            return hidden
        if meta.bucket is None:
            self._eager_hidden = hidden
        else:
            if self._hidden.shape[0] < self.state.max_tokens:  # in the runs before the first capture
                self._hidden = hidden.new_empty(self.state.max_tokens, hidden.shape[1])
            self._hidden[: hidden.shape[0]].copy_(hidden)
        return hidden

    def take_hidden(self, tokens: int) -> torch.Tensor:
        """Return a copy of the hidden rows of the last step's tokens."""
        found, self._eager_hidden = self._eager_hidden, None
        return self._hidden[:tokens].clone() if found is None else found

    def _finish(self, meta: AttentionMeta, hidden: torch.Tensor, mode: str) -> torch.Tensor:
        if mode == VERIFY:
            return self._verify(hidden)
        if mode == TREE:
            told = self._verify(hidden)
            kept = self._eager_hidden if meta.bucket is None else self._hidden[: meta.num_tokens]
            self._compact(told, meta.out_cache_loc, kept if self.keep_hidden else None)
            return told
        rows = hidden if mode == ALL else hidden.index_select(0, self.inputs.last[: meta.num_requests])
        logits: torch.Tensor = self.model.compute_logits(rows)
        return logits if mode == ALL or meta.bucket is None else self._kept(logits)

    def _kept(self, logits: torch.Tensor) -> torch.Tensor:
        if self._logits is None:  # in the runs before the first capture
            self._logits = torch.empty(self.max_batch, *logits.shape[1:], dtype=logits.dtype, device=logits.device)
        return self._logits[: logits.shape[0]].copy_(logits)

    def _verify(self, hidden: torch.Tensor) -> torch.Tensor:
        """Draw at every place as if all drafts before it were right; one is if it is what was drawn before it.

        Draws are by the request's own seed and offset: so the text is the same as without drafts.
        """
        rows, depths, parents, drafts = self._verified(hidden.shape[0])
        logits = self.model.compute_logits(hidden)
        params = self.table.gather(rows)
        params.offset.add_(depths)
        drawn = self.sampler(logits, params, "filtered")
        if self.sampler.choice.name == "triton":
            from fastlayers.sampler.triton_drafts import settle_drafts  # a start on a CPU imports no Triton

            known, looks = self._verify_in.device[: 4 * self._width].view(4, -1), 1 << self._doublings
            told: torch.Tensor = settle_drafts(
                known, drawn, logits.amax(-1), params.offset, self.table.tensors[2], looks, RIGHT, PASSED
            )
            return told
        right = (drawn.index_select(0, parents) == drafts) | (drafts == RIGHT)
        return self._settle(finite_or_minus_one(logits, drawn), right, params.offset)

    @property
    def _doublings(self) -> int:
        """How often a look twice as far back is taken until it reaches the known token from every draft."""
        return min(DOUBLINGS, max(0, self.verify_each - 2).bit_length())

    def _verified(self, tokens: int) -> list[torch.Tensor]:
        return [column[:tokens] for column in self._verify_in.device[: 4 * self._width].view(4, -1)]

    def _settle(self, drawn: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Return the draws behind drafts that are right as all before them are; each row keeps its last one."""
        rows, depths, before, _ = self._verified(drawn.shape[0])
        parents = before
        for place in range(self._doublings):
            before = before.index_select(0, before) if place else before
            right = right & right.index_select(0, before)
        onward = torch.zeros_like(rows).index_add_(0, parents, (right & (depths > 0)).long())
        last = right & (onward == 0)
        self.table.scatter(torch.where(last, rows, self.nobody), offsets, drawn)
        return torch.where(right, drawn, PASSED)

    def _compact(self, told: torch.Tensor, slots: torch.Tensor, hidden: torch.Tensor | None) -> None:
        """Move what drafts of a tree that count left behind their known token, in order: in the cache, in ``hidden``.

        Of a bucket's padding each token moves to itself.
        """
        _, depths, first, _ = self._verified(told.shape[0])
        for _ in range(self._doublings):
            first = first.index_select(0, first)
        count = told.shape[0]
        places = torch.arange(count + 1, device=told.device)
        order = places.scatter(0, torch.where(told != PASSED, first + depths, count), places[:-1])[:-1]
        origins = slots.index_select(0, order)
        for cache in self.caches:
            for part in (cache.keys, cache.values):
                if part is not None:  # torch gathers no e4m3
                    rows = (part.view(torch.uint8) if part.dtype == torch.float8_e4m3fn else part).flatten(0, 1)
                    rows.index_copy_(0, slots, rows.index_select(0, origins))
        if hidden is not None:
            hidden.copy_(hidden.index_select(0, order))

    def reject(self, logits: torch.Tensor, proposed: torch.Tensor) -> torch.Tensor:
        """Verify chains of drafts that were drawn: the other rule, under which more of them are right.

        A draft d of distribution q is right with probability min(1, p(d) / q(d)); behind the first wrong one the token
        is drawn of max(0, p - q). So tokens are distributed as p, but the text depends on what was drafted.

        Parameters
        ----------
        logits : Tensor ``[T, V]``
            Of every place, see mode "all logits".
        proposed : Tensor fp64 ``[T, V]``
            The distribution of the draft behind each place; 0 where there is none.
        """
        rows, depths, parents, drafts = self._verified(logits.shape[0])
        params = self.table.gather(rows)
        params.offset.add_(depths)
        p = probabilities(logits, params)
        coins = uniform(params.seed ^ COINS, params.offset).index_select(0, parents)
        ids = drafts.clamp(min=0)
        right = (drafts == RIGHT) | (coins * proposed[parents, ids] < p[parents, ids])
        plain = RowParams(
            torch.ones_like(params.temperature), torch.zeros_like(params.top_k), torch.ones_like(params.top_p),
            torch.zeros_like(params.min_p), params.seed, params.offset,
        )  # fmt: skip
        drawn = finite_or_minus_one(logits, self.sampler((p - proposed).relu().log().float(), plain, "sampled"))
        accepted = right & (depths > 0)
        drawn = drawn.index_copy(0, parents[accepted], drafts[accepted])
        return self._settle(drawn, right, params.offset)
