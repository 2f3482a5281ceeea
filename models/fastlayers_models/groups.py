"""Steps of several attention groups at once: each has requests and a cache of its own, the MLPs see all rows.

    rank of group g:  what it would do next ─► exchange ─► one step of all groups, of a kind that all agree on

    some group extends     all do, uncaptured: decoding groups bring one token a request, idle ones none
    all decode or idle     the bucket that holds the largest group, captured where there are graphs; rows that pad a
                           group are skipped by the experts
    all idle               the end

Every rank makes the same steps until the last group has ended. On one host the exchange takes no call of the device or
of the system, and lies behind the step that runs meanwhile.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fastlayers.attention.buckets import ExtendBuckets
from fastlayers.attention.kv_cache.spec import LayerCache
from fastlayers.attention.meta import AttentionBatch, AttentionMeta
from fastlayers.comm.collectives import collectives
from fastlayers.comm.padding import StepTokens
from fastlayers.comm.parallel import ParallelSpec
from fastlayers.comm.processes import gather_objects
from fastlayers.comm.trail import TRAIL
from fastlayers.errors import ArgumentError, RankLostError
from fastlayers.runtime.graphs import bucket_of
from fastlayers.sampler.layer import MODES
from fastlayers_models.between_ranks import RankStep, SplitStep
from fastlayers_models.overlap import Planned, token_cut
from fastlayers_models.requests import Request, Token
from fastlayers_models.rows import Pending
from fastlayers_models.step import ModelStep, Part

IDLE, DECODE, EXTEND = 0, 1, 2
_INTENT = struct.Struct("<5q")


class Intent(NamedTuple):
    """What a group would do next: its kind, its new tokens, how it samples (an index of ``MODES``), its first half."""

    kind: int = IDLE
    tokens: int = 0
    mode: int = 0
    cut: int = 0


class Together:
    """How many tokens all groups bring to a step, and in a captured one, which of its rows are real.

    Attributes
    ----------
    tokens : StepTokens or None
        Of the step that is run, where that is not captured.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._attn_tp = model, model.parallel.attn_tp.size
        self.groups = model.parallel.attn_dp.size
        self.tokens: StepTokens | None = None
        self._masks: dict[int, torch.Tensor] = {}
        self._told: dict[int, tuple[int, ...]] = {}

    def plan(self, counts: Sequence[int], *, extend: bool) -> None:
        """Let the next step that is not captured be of so many tokens of each group."""
        self.tokens = StepTokens.plan(counts, attn_tp=self._attn_tp, extend=extend)

    def refresh(self, counts: Sequence[int], bucket: int) -> None:
        """Let the next replay of a bucket be of so many tokens of each group."""
        step = self._of_bucket(counts, bucket)
        if self._told.get(bucket) != step.real:  # a copy waits for the step before
            step.valid_rows(self._masks[bucket])
            self._told[bucket] = step.real

    def of(self, meta: AttentionMeta) -> tuple[StepTokens | None, torch.Tensor | None]:
        """Return what a model takes as ``step`` and ``valid``."""
        bucket = meta.bucket
        if bucket is None:
            return self.tokens, None
        assert isinstance(bucket, int)
        return self._of_bucket([0] * self.groups, bucket), self._masks[bucket]

    def compute(
        self, ids: torch.Tensor, meta: AttentionMeta, caches: Sequence[LayerCache], images: Any = None,
        halves: Sequence[Planned] = (),
    ) -> torch.Tensor:  # fmt: skip
        """Return the model's hidden states of a step."""
        hidden: torch.Tensor = self._model(ids, meta, caches, *self.of(meta), images, halves)
        return hidden

    def _of_bucket(self, counts: Sequence[int], bucket: int) -> StepTokens:
        rows = -(-bucket // self._attn_tp) * self._attn_tp
        step = StepTokens.plan(counts, attn_tp=self._attn_tp, extend=False, graph=True, bucket=rows)
        if bucket not in self._masks:
            self._masks[bucket], self._told[bucket] = step.valid_rows().to(self._model.device), step.real
        return step


class GroupStep(RankStep):
    """The steps of one attention group, which all other groups make, too; parameters as of :class:`ModelStep`."""

    real_rows = Together

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        axis = self.model.parallel.attn_dp
        self._groups, self._together = collectives(axis), Together(self.model)
        self._board = self._meet(axis)
        self.extend_buckets = ExtendBuckets((), ())

    def exchange(self, intent: Intent) -> list[Intent]:
        """Return what all groups would do, in order of their ranks; waits for them.

        What ranks called between each other since the exchange before is compared beside it.

        Raises
        ------
        CollectiveOrderError
            That differs; on all ranks.
        RankLostError
            A rank of this host is gone.
        """
        axis = self.model.parallel.attn_dp
        value, told = TRAIL.take(axis)
        if self._board is not None:
            try:
                found = [_INTENT.unpack(each) for each in self._board.exchange(_INTENT.pack(*intent, value))]
            except RankLostError as error:
                if self._outbox.watch is not None:  # the step that runs may need that rank, too
                    self._outbox.watch.give_up("a rank is lost, as the exchange before a step has said", error.rank)
                raise
        else:
            mine = torch.tensor([[*intent, value]], dtype=torch.int64, device=self.model.device)
            found = self._groups.all_gather(mine).tolist()
            TRAIL.take(axis)  # this exchange is no call of a step
        if any(each[-1] != value for each in found):
            self._name_difference(self._board, told())
        return [Intent(*each[:-1]) for each in found]

    def of_all_groups(self, outputs: list[list[int]]) -> list[list[int]]:
        """Return the outputs of all groups' requests: request ``i`` is group ``i % groups``'s."""
        found = gather_objects(outputs, self.model.parallel.attn_dp, "gathering outputs")
        return [found[index % self._groups.size][index] for index in range(len(outputs))]

    def decode_together(self, batch: AttentionBatch, intents: Sequence[Intent]) -> Pending:
        """Run one decode step of the loaded rows; ``batch`` is of this group, and empty where it is idle."""
        self.begin()
        counts = [each.tokens for each in intents]
        mode = MODES[max(each.mode for each in intents)]
        bucket = bucket_of(self.buckets, max(counts))
        if bucket is not None and not self._is_captured(self._key(bucket, mode)):
            self._capture_keeping_rows(bucket, mode)
            bucket = bucket_of(self.buckets, max(counts))  # none, if it could not be captured
        self._size, self._mode, self._bucket = batch.num_tokens, mode, bucket
        meta = self._plan("decode", batch, bucket, [(each.tokens, each.cut) for each in intents])
        if bucket is None:
            self._together.plan(counts, extend=False)
            self._run(meta, mode)
        else:
            assert self.graphs is not None
            self._together.refresh(counts, bucket)
            self.graphs.replay(self._key(bucket, mode))
        return self.collect()

    def extend_together(self, parts: Sequence[Part], intents: Sequence[Intent]) -> Pending:
        """Run one step in which some group extends; ``parts`` are this group's, none where it is idle."""
        self._together.plan([each.tokens for each in intents], extend=True)
        return super().extend(parts, shares=[(each.tokens, each.cut) for each in intents])

    def extend(self, parts: Sequence[Part], capture: bool = False, shares: Any = None) -> Pending:
        """Refuse: a group cannot make a step by itself."""
        raise ArgumentError("GroupStep", "extend", "called", "extend_together, in every group")

    def launch(self, batch: AttentionBatch) -> Pending:
        """Refuse: a group cannot make a step by itself."""
        raise ArgumentError("GroupStep", "launch", "called", "decode_together, in every group")

    def _run(self, meta: AttentionMeta, mode: str) -> torch.Tensor:
        if meta.num_tokens:  # all ranks of a group have the same rows
            return super()._run(meta, mode)
        ids = self.table.tokens[:0]
        self._compute(ids, meta, None)
        return ids

    def _compute(
        self, ids: torch.Tensor, meta: AttentionMeta, valid: torch.Tensor | None, images: Any = None
    ) -> torch.Tensor:
        halves = () if self.halves is None else self.halves.of(meta)
        return self._together.compute(ids, meta, self.caches, images, halves)


def step_class(parallel: ParallelSpec | None) -> type[ModelStep]:
    """Return what makes the steps of a model that is split so."""
    import torch.distributed as dist

    if parallel is None or parallel.tp.size == 1:
        return ModelStep
    if parallel.attn_dp.size > 1:
        return GroupStep
    # Ranks that are threads have one trail between them.
    return SplitStep if isinstance(parallel.tp.group, dist.ProcessGroup) else ModelStep


Drawn = tuple[list[Request], Pending]


@torch.inference_mode()
def run_groups(generator: Any, waiting: list[Request], max_new_tokens: int, stop: set[int]) -> Iterator[Token]:
    """Run the requests of a generator's group, in step with the other groups.

    The next step is launched before the last one's tokens are read, as with one group. A stream that is closed early
    goes on idle.
    """
    active: list[Request] = []
    flying: Drawn | None = None  # a step whose tokens are on their way, and whose they are
    try:
        while True:
            if flying is None and not active and waiting:
                active = generator._next_batch(waiting)
                generator.step.load([request.row for request in active], capture=False)
            following: Drawn | None = None
            over = False
            if flying is None or _may_follow(generator, flying[0], active, waiting, max_new_tokens):
                following = _step_together(generator, active)
                over = following is None  # in all groups
            for request, token in zip(*_tokens_of(flying), strict=True):
                yield from generator._taken(request, token, max_new_tokens, stop)
            if over:
                return
            flying = following
            prompts_cached = all(request.cached >= len(request.prompt) for request in active)
            if flying is None and prompts_cached and any(request.done for request in active):
                active = [request for request in active if not request.done]
                if active:
                    generator.step.load([request.row for request in active], capture=False)
    except GeneratorExit:
        waiting.clear()
        while _step_together(generator, []) is not None:
            pass
        raise


def _tokens_of(flying: Drawn | None) -> tuple[list[Request], list[int]]:
    return ([], []) if flying is None else (flying[0], flying[1].tokens())


def _may_follow(
    generator: Any, drawing: list[Request], active: list[Request], waiting: list[Request], max_new_tokens: int
) -> bool:
    """Whether one more step of the same requests may be launched before the tokens that are on their way are read."""
    if not generator.ahead:
        return False
    if not active:
        return not waiting
    on_their_way = set(map(id, drawing))
    return generator._room(active) and all(
        not request.done and len(request.output) + (id(request) in on_their_way) < max_new_tokens for request in active
    )


def _step_together(generator: Any, active: list[Request]) -> Drawn | None:
    """Launch one step with the other groups; return whose tokens are drawn, or ``None``: all groups have ended."""
    step, pool = generator.step, generator.pool
    mode = max((MODES.index(request.params.mode) for request in active), default=0)
    parts, drawing = generator._chunks(active)
    lengths = [len(part.ids) for part in parts] or [1] * len(active)
    kind = EXTEND if parts else int(bool(active))
    intents = step.exchange(Intent(kind, sum(lengths), mode, token_cut(lengths)))
    kind = max(each.kind for each in intents)
    if kind == IDLE:
        return None
    if not parts:
        drawing = list(active)
        for request in active:
            pool.extend(request.pages, request.cached + 1, f"request {request.index}")
        parts = [
            Part((), request.cached, request.pages, row, request.params.mode) for row, request in enumerate(active)
        ]
        for request in active:
            request.cached += 1
    if kind == EXTEND:
        return drawing, step.extend_together(parts, intents)
    batch = AttentionBatch((1,) * len(parts), tuple(part.prefix for part in parts), [part.pages for part in parts])
    return drawing, step.decode_together(batch, intents)
