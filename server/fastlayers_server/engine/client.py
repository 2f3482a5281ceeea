"""How a front holds an engine: :class:`EngineClient`, and the one whose engine is on threads of its own process."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from fastlayers.errors import FastlayersError
from fastlayers_server.engine.loop import Engine
from fastlayers_server.engine.protocol import (
    Abort,
    Beat,
    Died,
    FromEngine,
    Output,
    Shutdown,
    StepOut,
    Submit,
    ToEngine,
)

log = logging.getLogger(__name__)
BEAT_SECONDS = 1.0
Phase = Callable[[str], None]
Make = Callable[[Phase, int], Engine]  # given the epoch; tells each phase of the start


def unforeseen(error: Exception) -> bool:
    """Return whether a traceback helps: our own errors are sentences for whoever started the engine."""
    return not isinstance(error, FastlayersError)


def beat(engine: Engine | None, epoch: int, phase: str) -> Beat:
    """Return the sign of life of an engine that may not be there yet."""
    if engine is None:
        return Beat(epoch, phase, 0, 0.0)
    started = engine.tick_started
    phase = "draining" if phase == "serving" and engine.scheduler.draining else phase
    return Beat(epoch, phase, engine.scheduler.ticks, time.monotonic() - started if started else 0.0)


class EngineClient(ABC):
    """An engine as a front holds it, in this process or in one of its own.

    Methods may be called from any thread and do not block (:meth:`start` and :meth:`shutdown` excepted).

    Attributes
    ----------
    phase : str
        One of :data:`~fastlayers_server.engine.protocol.PHASES`, now.
    epoch : int
        Number of the engine's start, from 1; messages of older epochs are not delivered.
    """

    phase: str
    epoch: int

    def __init__(self) -> None:
        self._lock, self._delivering = threading.Lock(), threading.Lock()
        self._live: set[int] = set()
        self._early: list[ToEngine] = []  # what came before the engine was there
        self._reason = ""
        self._deliver_to: Callable[[FromEngine], None] = lambda message: None

    @abstractmethod
    def start(self, deliver: Callable[[FromEngine], None]) -> None:
        """Begin to start the engine, and return.

        Parameters
        ----------
        deliver : callable
            Given every message of the engine, on a thread of the client's, one at a time. It must not block: an
            asyncio front passes ``lambda m: loop.call_soon_threadsafe(handle, m)``. The first message of a start that
            succeeds is an :class:`~fastlayers_server.engine.protocol.EngineInfo`; of one that fails, a
            :class:`~fastlayers_server.engine.protocol.Died`.
        """

    @abstractmethod
    def shutdown(self, timeout: float = 0.0) -> None:
        """Refuse what comes from now on, let what runs and waits end for ``timeout`` seconds, then end the rest.

        Requests that did not end get "draining". Returns when the engine is gone; may be called twice.
        """

    def abandon(self) -> None:  # noqa: B027
        """End at once, with nothing left behind, because the front does not go on; it may not have begun to start.

        Threads end with the process.
        """

    def submit(self, request: Submit) -> None:
        """Hand over a request. Whatever happens, one terminal output of its rid is delivered."""
        with self._lock:
            self._live.add(request.rid)
        self.send(request)
        if self.phase == "dead":
            self._tell_orphans()

    def abort(self, rids: Sequence[int]) -> None:
        """End requests, see :class:`~fastlayers_server.engine.protocol.Abort`."""
        self.send(Abort(tuple(rids)))

    def send(self, message: ToEngine) -> None:
        """Hand over any other message."""
        with self._lock:
            if not self._pass(message):
                self._early.append(message)

    @abstractmethod
    def _pass(self, message: ToEngine) -> bool:
        """Give a message to the engine, if it is there; under the lock."""

    def _pass_early(self) -> None:
        """Give the engine, which is there now, what came before; under the lock."""
        for message in self._early:
            self._pass(message)
        self._early.clear()

    def _deliver(self, message: FromEngine) -> None:
        with self._delivering:
            if isinstance(message, StepOut):
                with self._lock:
                    self._live.difference_update([output.rid for output in message.outputs if output.finish])
            self._deliver_to(message)

    def _tell_orphans(self) -> None:
        """End everything that lives; whoever may come back is told of no restart where there is none."""
        code = "draining" if self.phase == "dead" else "engine_restarting"
        with self._lock:
            left, self._live = sorted(self._live), set()
        if left:
            outputs = tuple(Output(rid, (), "error", code, self._reason) for rid in left)
            self._deliver(StepOut(self.epoch, outputs))


class InProcessEngine(EngineClient):
    """An engine on threads of this process.

    Parameters
    ----------
    make : callable
        ``make(phase, epoch)``: build the engine, telling each phase of the start.
    """

    def __init__(self, make: Make) -> None:
        super().__init__()
        self._make, self._phase, self.epoch = make, "starting", 1
        self._engine: Engine | None = None
        self._gone = threading.Event()
        self._threads: list[threading.Thread] = []

    @property
    def phase(self) -> str:  # type: ignore[override]
        """One of :data:`~fastlayers_server.engine.protocol.PHASES`, now."""
        return beat(self._engine, self.epoch, self._phase).phase

    def start(self, deliver: Callable[[FromEngine], None]) -> None:
        """Begin to start, see :class:`EngineClient`."""
        self._deliver_to = deliver
        for target in (self._run, self._beat):
            thread = threading.Thread(target=target, name=f"engine-{target.__name__}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _pass(self, message: ToEngine) -> bool:
        if self._engine is not None:
            self._engine.post(message)
        return self._engine is not None

    def shutdown(self, timeout: float = 0.0) -> None:
        """End, see :class:`EngineClient`."""
        super().send(Shutdown(timeout))
        for thread in self._threads:
            thread.join()

    def _tell_phase(self, phase: str) -> None:
        self._phase = phase

    def _run(self) -> None:
        reason = "the engine was shut down"
        try:
            engine = self._make(self._tell_phase, self.epoch)
            engine.begin(self._deliver)
            with self._lock:
                self._engine = engine
                self._pass_early()
            self._phase = "serving"
            engine.run()
        except Exception as error:
            log.error("the engine died: %s", error, exc_info=unforeseen(error))
            reason = f"{type(error).__name__}: {error}"
        self._reason, self._phase = reason, "dead"
        self._gone.set()
        self._tell_orphans()
        self._deliver(Died(self.epoch, reason, restarting=False))

    def _beat(self) -> None:
        while not self._gone.wait(BEAT_SECONDS):
            self._deliver(beat(self._engine, self.epoch, self._phase))
