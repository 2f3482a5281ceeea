"""Ranks of several attention groups: each computes its own group's plan, in step with all others, and tells its tokens.

rank 0 ── plans of all groups ──► every rank      extends if any group does, decodes if any group does
rank 0 ── REPORT ──────────────► every rank ── tokens of the oldest plan ──► rank 0
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from fastlayers.attention.buckets import ExtendBuckets
from fastlayers.attention.meta import AttentionBatch, AttentionMeta
from fastlayers.comm.trail import TRAIL
from fastlayers.errors import CollectiveMismatch
from fastlayers_models.groups import Together
from fastlayers_server.engine.executor import TorchExecutor, TorchStep
from fastlayers_server.engine.request import Chunk, Request, TickPlan, TickResult
from fastlayers_server.engine.step import SlotStep
from fastlayers_server.parallel.channel import Calls, Channel
from fastlayers_server.parallel.frames import Mirror, encode
from fastlayers_server.parallel.groups import GroupsPlan
from fastlayers_server.parallel.leader import Leader, LeaderStep

REPORT = b"report"


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """The plans of all groups, and how many tokens each brings to the extend and to the decode step.

    ``calls``, ``made``: see :class:`Calls`; of those along all ranks.
    """

    frames: tuple[bytes, ...]
    extends: tuple[int, ...]
    rows: tuple[int, ...]
    calls: int = 0
    made: str = ""


_pack = msgspec.msgpack.Encoder().encode
_envelope, _result = msgspec.msgpack.Decoder(Envelope).decode, msgspec.msgpack.Decoder(TickResult).decode


class GroupSlotStep(SlotStep):
    """Steps by slot that all groups make at once, with requests or without."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._together = Together(self.model)
        # Prompts of several groups differ in length: their steps are not captured.
        self.extend_buckets = ExtendBuckets((), ())
        # Tokens of every group in the next step; None: as many in each as here.
        self.counts: Sequence[int] | None = None

    def _counts(self, own: int) -> Sequence[int]:
        return (own,) * self._together.groups if self.counts is None else self.counts

    def _widest(self, size: int) -> int:
        return max(self._counts(size))

    def _agree(self, size: int, bucket: int | None) -> None:
        # Groups replay a bucket by graphs of their own, as their requests are drawn.
        what = "a decode step" if bucket is None else f"a replay of bucket {bucket}"
        TRAIL.note(what, self.model.parallel.tp, None, None)
        if bucket is None:
            self._together.plan(self._counts(size), extend=False)
        else:
            self._together.refresh(self._counts(size), bucket)

    def extend_chunks(
        self, chunks: Sequence[Chunk], mode: str, requests: Sequence[Request] = (), starts: Sequence[int] = ()
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Launch pieces of prompts of this group, see :class:`SlotStep`; there may be none, and nobody decodes here."""
        assert not requests  # groups would not agree on what their steps are
        self._together.plan(self._counts(sum(len(chunk.ids) for chunk in chunks)), extend=True)
        if chunks:
            return super().extend_chunks(chunks, mode)
        meta = self.state.plan(AttentionBatch((), (), []), num_pages=self.num_pages)
        self.inputs.write([], (), None)
        hidden = self._forward(meta)
        return hidden, hidden

    def _run(self, meta: AttentionMeta, mode: str) -> torch.Tensor:
        if meta.num_tokens:
            return super()._run(meta, mode)
        ids = self.table.tokens[:0]
        self._compute(ids, meta, None)
        return ids

    def _compute(
        self, ids: torch.Tensor, meta: AttentionMeta, valid: torch.Tensor | None, images: Any = None
    ) -> torch.Tensor:
        return self._together.compute(ids, meta, self.caches, images)


class GroupExecutor(TorchExecutor):
    """Computes the plans of one group; parameters as of :class:`TorchExecutor`."""

    step_class = GroupSlotStep
    decoding: Any
    extending: Any

    def launch_together(self, plan: TickPlan, extends: Sequence[int], rows: Sequence[int]) -> TorchStep:
        """Begin a plan's work, with so many tokens of every group in each of its two steps."""
        self.extending.counts, self.decoding.counts = extends, rows
        try:
            return self.launch(plan)
        finally:
            self.extending.counts = self.decoding.counts = None

    def extends(self, plan: TickPlan) -> bool:
        return any(self.extending.counts or (plan.extend_tokens,))

    def decodes(self, plan: TickPlan) -> bool:
        return any(self.decoding.counts or (len(plan.rows),))


class TogetherStep(LeaderStep):
    """A launched plan of all groups, which is never masked."""

    def first(self) -> list[list[int]]:
        """None: tokens of other groups come all at once."""
        return []


class GroupLeader(Leader):
    """The first rank's executor over all ranks of several groups; parameters as of :class:`Leader`."""

    same_steps = False

    def __init__(self, executor: GroupExecutor, channel: Channel) -> None:
        super().__init__(executor, channel)
        parallel = executor.model.parallel
        self._groups, self._ranks_of_a_group = parallel.attn_dp.size, parallel.attn_tp.size

    def launch(self, plan: Any) -> Any:
        """Tell the others all plans, and begin the own one."""
        assert isinstance(plan, GroupsPlan) and isinstance(self._executor, GroupExecutor)
        extends = tuple(each.extend_tokens for each in plan.plans)
        rows = tuple(len(each.rows) for each in plan.plans)
        self.channel.tell(_pack(Envelope(tuple(map(encode, plan.plans)), extends, rows, *self._calls.take())))
        return TogetherStep(self._executor.launch_together(plan.plans[0], extends, rows), self)

    def reported(self, result: Any) -> list[TickResult]:
        """Return what all groups drew of their oldest plan.

        Raises
        ------
        CollectiveMismatch
            The ranks of a group drew other tokens.
        """
        self.channel.tell(REPORT)
        found = [_result(each) for each in self.channel.collect(_pack(result()))]
        size = self._ranks_of_a_group
        for group in range(self._groups):
            for rank in range(group * size + 1, (group + 1) * size):
                if found[rank].tokens != found[group * size].tokens:
                    raise CollectiveMismatch(
                        f"rank {rank} drew other tokens than rank {group * size} of its group; accepted: the same"
                    )
        return found[::size]

    def explain(self) -> Any:
        """Of this rank; how many there are, and in how many groups."""
        return {**super().explain(), "groups": self._groups}


def follow_together(executor: GroupExecutor, channel: Channel) -> None:
    """Compute what the first rank plans for this rank's group, until it says that nothing follows.

    Raises
    ------
    CollectiveOrderError
        What was called here between all ranks is not what the first rank called.
    """
    mirror, flying, group = Mirror(), deque[TorchStep](), executor.model.parallel.attn_dp.rank
    calls = Calls(channel.axis, steps=False)
    while (message := channel.hear()) is not None:
        if message == REPORT:
            channel.collect(_pack(flying.popleft().result()))
            continue
        told = _envelope(message)
        plan = mirror.plan(told.frames[group])[0]
        calls.compare(told.calls, told.made, plan.tick)
        flying.append(executor.launch_together(plan, told.extends, told.rows))
