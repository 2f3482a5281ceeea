"""The engine as the front's event loop holds it: rows by rid, controls by id, life signs."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from fastlayers_server.engine import protocol as p
from fastlayers_server.front.errors import ApiError
from fastlayers_server.stalls import Stalls

if TYPE_CHECKING:
    from fastlayers_server.engine.client import EngineClient

log = logging.getLogger("fastlayers.front")

BEAT_SECONDS = 5.0
AT_ONCE = 8  # news that are fed before whoever came meanwhile has a turn


class Link:
    """An engine's client, its messages brought onto the event loop.

    Parameters
    ----------
    client : EngineClient
    watchdog : float
        Seconds after which a tick in progress counts as hung.

    Attributes
    ----------
    on_death : callable
        Told the reason when the engine is gone for good.
    stalls : Stalls
        Of this front.
    """

    def __init__(self, client: EngineClient, watchdog: float = 30.0) -> None:
        self.client, self.watchdog = client, watchdog
        self.on_death: Callable[[str], None] = lambda reason: None
        self.info: p.EngineInfo | None = None
        self.stats: p.Stats | None = None
        # Said by /ready at once on a signal, and then acted on.
        self.leaving = self.draining = False
        self.death, self.was_ready = "", False
        self._rids = itertools.count(1)
        self._ids = itertools.count(1)
        self._feeds: dict[int, Callable[[p.Output], None]] = {}
        self._news: deque[p.Output] = deque()
        self._next_turn: asyncio.Handle | None = None
        self._answers: dict[int, asyncio.Future[p.Reply]] = {}
        self.grammar_keys: set[str] = set()
        # When the engine was heard last, and what it said of its tick.
        self._beat: tuple[float, float] | None = None
        self._nonfinite: list[float] = []
        self._begun, self._restarted = False, False
        self.started = asyncio.Event()
        self.stalls = Stalls()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to start the engine, whose messages come to this loop, once it runs; a second call does nothing."""
        if self._begun:
            return
        self._begun = True

        def deliver(message: p.FromEngine) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._handle, message)

        self.client.start(deliver)

    @property
    def live(self) -> int:
        """How many requests have not ended."""
        return len(self._feeds)

    def next_rid(self) -> int:
        """Return a rid that was never used."""
        return next(self._rids)

    def submit(self, request: p.Submit, feed: Callable[[p.Output], None]) -> None:
        """Hand over a request, whose news ``feed`` takes; after a terminal one nothing follows."""
        self._feeds[request.rid] = feed
        self.client.submit(request)

    def abort(self, rids: list[int], finish: Literal["abort", "stop"] = "abort") -> None:
        """End requests; those that ended are left out. With "stop": a stop string was found."""
        live = [rid for rid in rids if rid in self._feeds]
        if live:
            self.client.send(p.Abort(tuple(live), finish))

    def grammar(self, key: str, serialized: str) -> None:
        """Bring a compiled grammar, once a key and engine."""
        if key not in self.grammar_keys:
            self.grammar_keys.add(key)
            self.client.send(p.Grammar(key, serialized))

    async def control(self, what: str, timeout: float = 10.0) -> Any:
        """Ask the engine something and return its answer.

        Raises
        ------
        ApiError
            504 if there is none in time, 503 if the engine is not there, 409 if it refuses.
        """
        self.check_ready(draining=True)
        number = next(self._ids)
        answer: asyncio.Future[p.Reply] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            self.client.send(p.Control(number, what))
            reply = await asyncio.wait_for(answer, timeout)
        except TimeoutError as error:
            raise ApiError(504, f"the engine did not answer {what!r} within {timeout:g} s", "engine_timeout") from error
        finally:
            self._answers.pop(number, None)
        if not reply.ok:
            raise ApiError(409, str(reply.value or f"the engine refuses {what!r}"), "refused_by_engine")
        return reply.value

    def check_ready(self, draining: bool = False) -> p.EngineInfo:
        """Return what the engine is, or raise the 503 that says why requests are not taken."""
        phase = self.phase
        if phase == "serving" or (draining and phase == "draining"):
            assert self.info is not None
            return self.info
        if phase == "draining":
            raise ApiError(503, "the server is draining and takes no new requests", "draining")
        if phase == "restarting":
            raise ApiError(503, "the engine is being restarted", "engine_restarting")
        raise ApiError(503, f"the server is not ready: {phase}", "not_ready")

    @property
    def phase(self) -> str:
        """What the engine is doing, or "restarting", or "draining" because this front is: the engine says it later."""
        if self.draining:
            return "draining"
        phase = self.client.phase
        if self.info is not None:
            return "dead" if phase == "dead" else "serving"
        if self._restarted:
            return "restarting"
        return "starting" if phase == "serving" else phase

    def unhealthy(self) -> str:
        """Return why the server is not well, or ""."""
        if self.death:
            return f"the engine is gone: {self.death}"
        if self.phase not in ("serving", "draining"):
            return ""
        if self._beat is not None:
            at, tick_age = self._beat
            age = time.monotonic() - at
            if age > BEAT_SECONDS:
                return f"no sign of life from the engine for {age:.1f} s"
            if tick_age + age > self.watchdog and tick_age > 0:
                return f"the engine's tick runs for {tick_age + age:.1f} s"
        recent = [t for t in self._nonfinite if time.monotonic() - t < 60]
        if len(recent) >= 3:
            return f"degraded: {len(recent)} requests within a minute ended with logits that are not finite"
        return ""

    def _handle(self, message: p.FromEngine) -> None:
        if isinstance(message, p.StepOut):
            self.stalls.note("news", time.monotonic() - message.at if message.at else 0.0)
            self._feed_all()  # of the step before: there is more to write than turns for it
            self._news.extend(message.outputs)
            self._feed_some()
        elif isinstance(message, p.Stats):
            self.stats = message
        elif isinstance(message, p.Reply):
            answer = self._answers.get(message.id)
            if answer is not None and not answer.done():
                answer.set_result(message)
        elif isinstance(message, p.Beat):
            self._beat = (time.monotonic(), message.tick_age)
        elif isinstance(message, p.EngineInfo):
            self.info, self._beat, self.was_ready = message, (time.monotonic(), 0.0), True
            self.grammar_keys.clear()
            self.started.set()
        elif isinstance(message, p.Forgotten):
            self.grammar_keys.difference_update(message.keys)
        elif isinstance(message, p.Died):
            self._died(message)

    def _feed_some(self) -> None:
        """Feed some news and, in the next turn of the loop, the others.

        What a step says of hundreds of rows takes milliseconds to write. Between them requests are taken, and answers
        that begin take the turns that they need for it.
        """
        for _ in range(min(AT_ONCE, len(self._news))):
            self._output(self._news.popleft())
        self._next_turn = asyncio.get_running_loop().call_soon(self._feed_some) if self._news else None

    def _feed_all(self) -> None:
        if self._next_turn is not None:
            self._next_turn.cancel()
        while self._news:
            self._output(self._news.popleft())

    def _output(self, output: p.Output) -> None:
        feed = self._feeds.get(output.rid)
        if feed is None:
            return
        if output.finish:
            del self._feeds[output.rid]
            if output.code == "grammar_lost":
                # Whichever it was: each is brought again when it is next asked for.
                self.grammar_keys.clear()
            if output.code == "nonfinite_logits":
                self._nonfinite = [*self._nonfinite[-8:], time.monotonic()]
        try:
            feed(output)
        except Exception as error:  # one request's text must not stop the others' news
            log.error("rid %d: its output cannot be read", output.rid, exc_info=error)
            self.abort([output.rid])
            self._feeds.pop(output.rid, None)
            feed(p.Output(output.rid, finish="error", code="internal_error", message="the output cannot be read"))

    def end(self, code: str, reason: str) -> None:
        """End every request that lives with an error; nothing that the engine says of it later is heard."""
        self._feed_all()
        for rid in list(self._feeds):
            self._output(p.Output(rid, finish="error", code=code, message=reason))

    def _died(self, message: p.Died) -> None:
        self.info, self._beat, self._restarted = None, None, message.restarting
        code = "engine_restarting" if message.restarting else "draining"
        self.end(code, message.reason)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(ApiError(503, "the engine ended", code))
        self.started.set()
        if self.draining and not message.restarting:
            return
        log.error("the engine ended: %s%s", message.reason, ", restarting" if message.restarting else "")
        if not message.restarting:
            self.death = message.reason
            self.on_death(message.reason)
