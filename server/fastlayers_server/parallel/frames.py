"""Plans as bytes: what the first rank's scheduler decided, for ranks that have none.

Requests are named by slot: a rank keeps what it was told of the one that was admitted there last.
"""

from __future__ import annotations

import msgspec

from fastlayers_server.engine.protocol import Submit, pack_ids, unpack_ids
from fastlayers_server.engine.request import ENDED, Request, TickPlan


class Admitted(msgspec.Struct, frozen=True, array_like=True):
    """A request with a slot since this tick: its prompt and output so far, of which ``prompt_len`` is prompt."""

    slot: int
    submit: Submit
    tokens: bytes
    prompt_len: int
    ends: tuple[int, ...]


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """A plan behind the requests that are new in it, and which digest the ranks' tokens must have.

    ``told``, ``digest``: of the first so many plans whose tokens the first rank has, see :class:`Digest`. ``calls``,
    ``made``: what the first rank called between ranks since the plan before, see :class:`Calls`.
    """

    admitted: tuple[Admitted, ...]
    plan: msgspec.Raw
    told: int
    digest: int
    calls: int = 0
    made: str = ""


_encode = msgspec.msgpack.Encoder(enc_hook=lambda request: request.slot).encode
_decode = msgspec.msgpack.Decoder(Frame).decode


def encode(plan: TickPlan, told: int = 0, digest: int = 0, calls: int = 0, made: str = "") -> bytes:
    """Return a plan as bytes."""
    admitted = tuple(
        Admitted(
            r.slot, msgspec.structs.replace(r.submit, prompt=b""),  # it is among the tokens
            pack_ids(r.tokens), r.prompt_len, tuple(sorted(r.ends)),
        )
        for r in plan.admitted
    )  # fmt: skip
    return _encode(Frame(admitted, msgspec.Raw(_encode(plan)), told, digest, calls, made))


class Mirror:
    """The requests of a rank without a scheduler, by slot.

    Attributes
    ----------
    calls : tuple[int, str]
        What the last frame said that the first rank had called, see :class:`Calls`.
    """

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}
        self.calls = (0, "")
        self._plan = msgspec.msgpack.Decoder(TickPlan, dec_hook=lambda kind, slot: self.requests[slot]).decode

    def plan(self, frame: bytes) -> tuple[TickPlan, int, int]:
        """Return the plan of a frame, ``told`` and ``digest``."""
        found = _decode(frame)
        self.calls = found.calls, found.made
        for each in found.admitted:
            request = Request(each.submit, 0, unpack_ids(each.tokens), frozenset(each.ends), each.submit.priority)
            request.prompt_len, request.slot = each.prompt_len, each.slot
            before = self.requests.get(each.slot)
            if before is not None:
                before.state = ENDED
            self.requests[each.slot] = request
        return self._plan(found.plan), found.told, found.digest
