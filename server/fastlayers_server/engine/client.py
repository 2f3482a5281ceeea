"""How a front holds an engine: on threads of its own process."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fastlayers_server.engine.loop import Drafts, Engine, Executor, Grammars
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

log = logging.getLogger(__name__)
BEAT_SECONDS = 1.0


@dataclass
class Parts:
    """What an engine is made of."""

    scheduler: Scheduler
    executor: Executor
    info: EngineInfo
    overlap: bool = True
    grammars: Grammars | None = None
    drafts: Drafts | None = None


class Ledger:
    """Which requests have not ended, so that each is told so if the engine dies."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: set[int] = set()

    def submitted(self, rid: int) -> None:
        """Note a request."""
        with self._lock:
            self._live.add(rid)

    def delivered(self, message: FromEngine) -> None:
        """Note the ends among the news."""
        if isinstance(message, StepOut):
            ended = [output.rid for output in message.outputs if output.finish]
            if ended:
                with self._lock:
                    self._live.difference_update(ended)

    def orphans(self, epoch: int, why: str) -> StepOut | None:
        """Return the ends of everything that lives, and forget it."""
        with self._lock:
            left, self._live = sorted(self._live), set()
        outputs = tuple(Output(rid, (), "error", "engine_restarting", why) for rid in left)
        return StepOut(epoch, outputs) if outputs else None


class InProcessEngine:
    """An :class:`~fastlayers_server.engine.protocol.EngineClient` on threads of this process.

    Parameters
    ----------
    make : callable
        ``make(phase, epoch)``: build the engine's parts, telling each phase of the start.
    """

    def __init__(self, make: Callable[[Callable[[str], None], int], Parts]) -> None:
        self._make, self._ledger = make, Ledger()
        self._phase, self._reason, self.epoch = "starting", "", 1
        self._engine: Engine | None = None
        self._early: list[ToEngine] = []  # what came before the engine was there
        self._lock, self._delivering = threading.Lock(), threading.Lock()
        self._gone = threading.Event()
        self._timeout: float | None = None
        self._threads: list[threading.Thread] = []

    @property
    def phase(self) -> str:
        """One of :data:`~fastlayers_server.engine.protocol.PHASES`, now."""
        draining = self._phase == "serving" and self._engine is not None and self._engine.scheduler.draining
        return "draining" if draining else self._phase

    def start(self, deliver: Callable[[FromEngine], None]) -> None:
        """Begin to start, see :class:`EngineClient`."""
        self._deliver_to = deliver
        for target in (self._run, self._beat):
            thread = threading.Thread(target=target, name=f"engine-{target.__name__}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _deliver(self, message: FromEngine) -> None:
        with self._delivering:
            self._ledger.delivered(message)
            self._deliver_to(message)

    def submit(self, request: Submit) -> None:
        """Hand over a request."""
        self._ledger.submitted(request.rid)
        self.send(request)
        if self._gone.is_set():
            self._tell_orphans()

    def abort(self, rids: Sequence[int]) -> None:
        """End requests."""
        self.send(Abort(tuple(rids)))

    def send(self, message: ToEngine) -> None:
        """Hand over any message."""
        with self._lock:
            if self._engine is None:
                self._early.append(message)
            else:
                self._engine.post(message)

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
            engine = Engine(
                parts.scheduler, parts.executor, self._deliver, overlap=parts.overlap, grammars=parts.grammars,
                drafts=parts.drafts, epoch=self.epoch,
            )  # fmt: skip
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
            log.exception("the engine died")
            reason = f"{type(error).__name__}: {error}"
        self._phase, self._reason = "dead", reason
        self._gone.set()
        self._tell_orphans()
        self._deliver(Died(self.epoch, reason, restarting=False))

    def _tell_orphans(self) -> None:
        orphans = self._ledger.orphans(self.epoch, self._reason)
        if orphans is not None:
            self._deliver(orphans)

    def _beat(self) -> None:
        while not self._gone.wait(BEAT_SECONDS):
            engine = self._engine
            started = engine.tick_started if engine is not None else 0.0
            ticks = engine.scheduler.ticks if engine is not None else 0
            age = time.monotonic() - started if started else 0.0
            self._deliver(Beat(self.epoch, self.phase, ticks, age))
