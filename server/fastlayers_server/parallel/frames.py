"""Plans as bytes: what the first rank's scheduler decided, for ranks that have none.

Requests are named by slot: a rank keeps what it was told of the one that was admitted there last.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fastlayers_server.engine.protocol import Submit, pack_ids, unpack_ids
from fastlayers_server.engine.request import ENDED, Chunk, Request, TickPlan


class Admitted(msgspec.Struct, frozen=True, array_like=True):
    """A request with a slot since this tick: its prompt and output so far, of which ``prompt_len`` is prompt."""

    slot: int
    submit: Submit
    tokens: bytes
    prompt_len: int
    ends: tuple[int, ...]


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A :class:`~fastlayers_server.engine.request.Chunk`."""

    slot: int
    start: int
    ids: bytes
    samples: int
    parents: tuple[int, ...]


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """A :class:`~fastlayers_server.engine.request.TickPlan`, and which digest the ranks' tokens must have.

    ``rows``: slots and positions, as packed integers. ``special``: place, slot and number of the draw. ``told``,
    ``digest``: of the first so many plans whose tokens the first rank has, see :class:`Digest`.
    """

    tick: int
    admitted: tuple[Admitted, ...]
    pages: bytes
    poisoned: bytes
    chunks: tuple[Piece, ...]
    verify: tuple[Piece, ...]
    rows: bytes
    starts: bytes
    special: tuple[tuple[int, int, int], ...]
    masked: bool
    mixed: bool
    told: int
    digest: int


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Frame).decode


def encode(plan: TickPlan, told: int = 0, digest: int = 0) -> bytes:
    """Return a plan as bytes."""

    def pieces(chunks: Sequence[Chunk]) -> tuple[Piece, ...]:
        return tuple(Piece(c.request.slot, c.start, pack_ids(c.ids), c.samples, tuple(c.parents)) for c in chunks)

    return _encode(
        Frame(
            plan.tick,
            tuple(
                Admitted(r.slot, _without_prompt(r.submit), pack_ids(r.tokens), r.prompt_len, tuple(sorted(r.ends)))
                for r in plan.admitted
            ),
            pack_ids([number for change in plan.pages for number in change]), pack_ids(plan.poisoned),
            pieces(plan.chunks), pieces(plan.verify), pack_ids([r.slot for r in plan.rows]), pack_ids(plan.starts),
            tuple((place, request.slot, drawn) for place, request, drawn in plan.special), plan.masked, plan.mixed,
            told, digest,
        )
    )  # fmt: skip


def _without_prompt(submit: Submit) -> Submit:
    return msgspec.structs.replace(submit, prompt=b"")  # it is among the tokens


class Mirror:
    """The requests of a rank without a scheduler, by slot."""

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}

    def plan(self, frame: bytes) -> tuple[TickPlan, int, int]:
        """Return the plan of a frame, ``told`` and ``digest``."""
        found = _decode(frame)
        plan = TickPlan(found.tick)
        for each in found.admitted:
            request = Request(each.submit, 0, unpack_ids(each.tokens), frozenset(each.ends), each.submit.priority)
            request.prompt_len, request.slot = each.prompt_len, each.slot
            before = self.requests.get(each.slot)
            if before is not None:
                before.state = ENDED
            self.requests[each.slot] = request
            plan.admitted.append(request)
        pages = unpack_ids(found.pages)
        plan.pages = list(zip(pages[::3], pages[1::3], pages[2::3], strict=True))
        plan.poisoned = unpack_ids(found.poisoned)
        plan.chunks, plan.verify = self._chunks(found.chunks), self._chunks(found.verify)
        plan.rows, plan.starts = [self.requests[slot] for slot in unpack_ids(found.rows)], unpack_ids(found.starts)
        plan.sampled = [*plan.rows, *(c.request for c in plan.chunks if c.samples), *(c.request for c in plan.verify)]
        plan.special = [(place, self.requests[slot], drawn) for place, slot, drawn in found.special]
        plan.masked, plan.mixed = found.masked, found.mixed
        return plan, found.told, found.digest

    def _chunks(self, pieces: Sequence[Piece]) -> list[Chunk]:
        return [Chunk(self.requests[p.slot], p.start, unpack_ids(p.ids), p.samples, p.parents) for p in pieces]
