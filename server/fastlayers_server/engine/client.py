"""How a front holds an engine: on threads of its own process."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fastlayers.errors import FastlayersError
from fastlayers_server.engine.grammar import GrammarMasks
from fastlayers_server.engine.loop import Engine, Executor
from fastlayers_server.engine.protocol import (
    Abort,
    Beat,
    Died,
    EngineInfo,
    FromEngine,
    Output,
    StepOut,
    Submit,
    ToEngine,
)
from fastlayers_server.engine.scheduler import Scheduler
from fastlayers_server.engine.speculation import Speculation

log = logging.getLogger(__name__)
BEAT_SECONDS = 1.0


@dataclass
class Parts:
    """What an engine is made of."""

    scheduler: Scheduler
    executor: Executor
    info: EngineInfo
    overlap: bool = True
    grammars: GrammarMasks | None = None
    drafts: Speculation | None = None
    close: Callable[[], None] = lambda: None  # called when the engine has ended

    def engine(self, deliver: Callable[[FromEngine], None], epoch: int) -> Engine:
        """Put them together."""
        return Engine(
            self.scheduler, self.executor, deliver, overlap=self.overlap, grammars=self.grammars, drafts=self.drafts,
            epoch=epoch,
        )  # fmt: skip


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


class ClientBase(ABC):
    """What both ways to hold an engine share: who has not ended, and what came before the engine was there."""

    phase: str
    epoch: int

    def __init__(self) -> None:
        self._lock, self._delivering = threading.Lock(), threading.Lock()
        self._live: set[int] = set()
        self._early: list[ToEngine] = []
        self._reason = ""
        self._deliver_to: Callable[[FromEngine], None] = lambda message: None

    def submit(self, request: Submit) -> None:
        """Hand over a request."""
        with self._lock:
            self._live.add(request.rid)
        self.send(request)
        if self.phase == "dead":
            self._tell_orphans()

    def abort(self, rids: Sequence[int]) -> None:
        """End requests."""
        self.send(Abort(tuple(rids)))

    def send(self, message: ToEngine) -> None:
        """Hand over any message."""
        with self._lock:
            if not self._pass(message):
                self._early.append(message)

    @abstractmethod
    def _pass(self, message: ToEngine) -> bool:
        """Give a message to the engine, if it is there; under the lock."""

    def _deliver(self, message: FromEngine) -> None:
        with self._delivering:
            if isinstance(message, StepOut):
                with self._lock:
                    self._live.difference_update([output.rid for output in message.outputs if output.finish])
            self._deliver_to(message)

    def _tell_orphans(self) -> None:
        """End everything that lives."""
        with self._lock:
            left, self._live = sorted(self._live), set()
        if left:
            outputs = tuple(Output(rid, (), "error", "engine_restarting", self._reason) for rid in left)
            self._deliver(StepOut(self.epoch, outputs))


class InProcessEngine(ClientBase):
    """An :class:`~fastlayers_server.engine.protocol.EngineClient` on threads of this process.

    Parameters
    ----------
    make : callable
        ``make(phase, epoch)``: build the engine's parts, telling each phase of the start.
    """

    def __init__(self, make: Callable[[Callable[[str], None], int], Parts]) -> None:
        super().__init__()
        self._make, self._phase, self.epoch = make, "starting", 1
        self._engine: Engine | None = None
        self._gone = threading.Event()
        self._timeout: float | None = None
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
        with self._lock:
            self._timeout = timeout
            if self._engine is not None:
                self._engine.stop(timeout)
        for thread in self._threads:
            thread.join()

    def _tell_phase(self, phase: str) -> None:
        self._phase = phase

    def _run(self) -> None:
        reason = "the engine was shut down"
        try:
            parts = self._make(self._tell_phase, self.epoch)
            engine = parts.engine(self._deliver, self.epoch)
            self._deliver(parts.info)
            with self._lock:
                self._engine = engine
                for message in self._early:
                    engine.post(message)
                self._early.clear()
                if self._timeout is not None:
                    engine.stop(self._timeout)
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
