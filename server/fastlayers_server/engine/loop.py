"""The engine's loop: take what arrived, plan, launch, take the tokens of the step before, tell the front.

    overlapped:    plan n+1 ► launch n+1 ► tokens of n      the host plans while the device works
    synchronous:   plan n ► launch n ► tokens of n          on a CPU, and where drafts need to know them

Rows beside chunks are part of their extend, so that weights are read once. Where they may not be, a step with chunks
and rows is waited for in two parts. When the chunks are done the next step is planned, so that whoever arrived
meanwhile is in it, while the device does the rows; and first tokens are told if those take long. Of a step with both in
one they are told first.

A stop is known one step late; the token drawn meanwhile is wasted. Steps with a grammar are launched in two parts: the
forward pass needs no mask, so the tokens of the step before are taken while it runs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from fastlayers_server.engine import protocol as p
from fastlayers_server.engine.budget import Patience
from fastlayers_server.engine.grammar import GrammarMasks
from fastlayers_server.engine.request import ENDED, TickPlan, TickResult
from fastlayers_server.engine.scheduler import Scheduler
from fastlayers_server.engine.speculation import Speculation
from fastlayers_server.stalls import LONG, Stalls, freeze, thaw

log = logging.getLogger(__name__)
STATS_SECONDS = 1.0
EARLY = 0.010  # rows that take longer are not waited for before a prompt's first token is told
RECENT = 1.0  # seconds after an arrival in which more are thought to come
NAP = 0.0005  # between ticks in which requests wait for others and nothing runs


class Step(Protocol):
    """A launched plan."""

    def sample(self, masks: Any = None) -> None:
        """Draw the tokens of a plan that is ``masked``; others were drawn by the launch."""

    def first(self) -> list[list[int]]:
        """Wait for the first tokens of prompts, and return them; none where they come with the rest."""

    def done(self) -> bool:
        """Whether all tokens are there."""

    def result(self) -> TickResult:
        """Wait for all tokens."""


class Executor(Protocol):
    """What computes plans, in the order in which they are launched."""

    def launch(self, plan: TickPlan) -> Step:
        """Begin a plan's work, without waiting for it."""

    def explain(self) -> Any:
        """Return what runs here, as JSON values."""

    def backends(self) -> list[dict[str, Any]]:
        """Return the backend of every layer, and why not the others, as JSON values."""

    def profile(self, start: bool) -> str:
        """Start or stop a profile; returns where it is written, or raises ``RuntimeError``."""

    def counters(self) -> dict[str, dict[str, float]]:
        """Return those counters of :data:`~fastlayers_server.engine.protocol.COUNTERS` that are kept here."""


class Engine:
    """One engine: a scheduler, what computes for it, and its front.

    Parameters
    ----------
    scheduler : Scheduler
    executor : Executor
    deliver : callable
        Takes what the front is told; called on the thread of :meth:`run`.
    info : EngineInfo, optional
        What the front is told first.
    overlap : bool
    grammars : GrammarMasks, optional
    drafts : Speculation, optional
    clock, pause : callable
        What time it is, and how it is let pass.

    Attributes
    ----------
    tick_started : float
        When the tick in progress began, or 0.0; read by whoever beats.
    ended : callable
        Called when :meth:`run` has ended as it was told to.
    stalls : Stalls
        Where this process stood.
    frozen : callable
        ``frozen(objects)``: told what the collector leaves alone here; has it do so on all ranks, and returns theirs.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        deliver: Callable[[p.FromEngine], None] = lambda message: None,
        *,
        info: p.EngineInfo | None = None,
        overlap: bool = True,
        grammars: GrammarMasks | None = None,
        drafts: Speculation | None = None,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.scheduler, self.executor, self.deliver, self.overlap = scheduler, executor, deliver, overlap
        self.info, self.grammars, self.drafts = info, grammars, drafts
        self.clock, self.pause = clock, pause
        self.tick_started = 0.0
        self.ended: Callable[[], None] = lambda: None
        self.frozen: Callable[[int], list[int]] = lambda objects: [objects]
        self._inbox: deque[p.ToEngine] = deque()
        self._arrived = threading.Event()
        self._stopping = False
        self._pending: tuple[TickPlan, Step, float] | None = None
        self._told_at = 0.0
        self.patience, self._waited = Patience(), False
        self.stalls = Stalls(clock)
        self._began = self._came = float("-inf")

    # --- from other threads

    def post(self, message: p.ToEngine) -> None:
        """Hand over a message."""
        self._inbox.append(message)
        self._arrived.set()

    # --- the engine's own thread

    def begin(self, deliver: Callable[[p.FromEngine], None]) -> p.EngineInfo:
        """Tell a front what it must know of the model, and from now on everything."""
        assert self.info is not None
        self.deliver = deliver
        deliver(self.info)
        return self.info

    def run(self) -> None:
        """Tick until a :class:`Shutdown`; what is left then ends with "draining"."""
        threading.Thread(target=self._read, name="engine-read", daemon=True).start()
        while not self._stopping:
            if self.scheduler.idle and self._pending is None and not self._inbox:
                self._arrived.wait(STATS_SECONDS)
            self._arrived.clear()
            if not self.tick() and not self.scheduler.idle:
                self._arrived.wait(NAP)
        self.close()
        with suppress(RuntimeError):  # none runs; one that does would take the process down at its exit
            self.executor.profile(False)
        self.ended()

    def _read(self) -> None:
        """Find what the first who asks should not wait for; without a GPU a start takes no longer than this."""
        if self.grammars is not None:
            self.grammars.read()
            self.executor.backends()

    def close(self) -> None:
        """End what runs and waits, with "draining"; for whoever ticks by hand."""
        self._settle()
        self._receive_all()
        why = "the server ended before the request did"
        self.scheduler.end(list(self.scheduler.live), self.clock(), "error", "draining", why)
        self._flush()
        self.tick_started = 0.0
        thaw()

    def tick(self) -> bool:
        """Do one tick; returns whether anything was launched."""
        scheduler = self.scheduler
        self._receive_all()
        if self._pending is not None:
            self._after_chunks(*self._pending[:2])
            self._leave_alone()
            self._receive_all()
        drafts = self.drafts
        if drafts is not None and not drafts.wanted(len(scheduler.running.requests)):
            drafts = None
        if drafts is not None or (self._pending is not None and self._pending[0].verify):
            self._settle()  # what drafts follow must be known, and how many of them count
        if drafts is not None:
            drafts.prepare()
        now = self.clock()
        plan = scheduler.plan(now, drafts.draft if drafts is not None else None)
        if drafts is not None:
            plan.drafts = drafts.k
        if plan.empty:
            self._settle()
        else:
            step = self.executor.launch(plan)
            self._stood("plan and launch", plan, now)
            if plan.masked or not self.overlap:
                self._settle()
            if plan.masked:
                assert self.grammars is not None
                step.sample(self.grammars.masks(plan))
            before, self._pending = self._pending, (plan, step, now)
            if self._waited and before is not None:
                self.patience.found(before[1].done())
            self._began = now  # or when the step before ended
            if before is not None:
                self._after_chunks(*before[:2], ending=True)
                self._commit(*before)
            if not self.overlap:
                self._settle()
        self._flush()
        self.tick_started = 0.0
        return not plan.empty

    def _after_chunks(self, plan: TickPlan, step: Step, ending: bool = False) -> None:
        """Wait for a step's chunks, and tell their first tokens if its rows take long; in a backlog only at its end.

        A whole step is launched by the host in nearly the time that the device needs: that must begin early. Rows that
        are part of the extend end with it; the first tokens are told before theirs all the same: writing the text of a
        hundred rows takes a front longer than anything else that a first token waits for behind its step.
        """
        scheduler = self.scheduler
        rows = len(plan.rows)
        if not (rows and plan.chunks) or plan.masked or plan.verify or plan.early:
            return
        if not ending and (plan.mixed or scheduler.backlog):
            return
        begin = self.clock()
        tokens = step.first()
        self._stood("device", plan, begin)
        if tokens and (plan.mixed or scheduler.budget.decode_seconds(rows) > EARLY):
            scheduler.commit_prompts(plan, tokens, self.clock())
            self._flush()

    def _leave_alone(self) -> None:
        """Plan late while requests arrive: whoever comes before the step in flight ends is in the next one."""
        assert self._pending is not None
        plan, scheduler = self._pending[0], self.scheduler
        rows, now, self._waited = len(plan.rows), self.clock(), False
        apart = plan.masked or plan.verify or (plan.chunks and not plan.mixed)
        if not (self.overlap and rows) or apart or now - self._came > RECENT or scheduler.backlog:
            return
        expected = scheduler.budget.seconds(plan.extend_tokens, rows)
        left = self.patience.left(expected, now - self._began)
        if left > 0.0:
            self._waited = True
            self.pause(left)

    def _settle(self) -> None:
        """Wait for the step in flight, if there is one."""
        before, self._pending = self._pending, None
        if before is not None:
            self._commit(*before)

    def _commit(self, plan: TickPlan, step: Step, launched: float) -> None:
        begin = self.clock()
        result = step.result()
        now = self._began = self._stood("device", plan, begin)
        if plan.masked and self.grammars is not None:  # what does not follow a grammar is not told, nor ends an answer
            for index, request, _ in plan.special:
                if request.submit.grammar and request.state != ENDED:
                    code, wrong = self.grammars.accept(request, result.tokens[index])
                    if code:
                        self.scheduler.end((request.rid,), now, "error", code, wrong)
        self.scheduler.commit(plan, result, now)
        if self.drafts is not None:
            self.drafts.observe(plan, result, now - launched)
        self.scheduler.metrics.observe("tick_seconds", now - launched)
        self._stood("commit", plan, now)

    def _stood(self, where: str, plan: TickPlan, begin: float) -> float:
        """Return the time, and note what was done since ``begin``, or waited for, if that took much longer than it may.

        The host launches a large step in nearly the time that the device needs; a commit takes next to nothing.
        """
        now = self.clock()
        if now - begin > LONG:
            rows, tokens = len(plan.rows), plan.extend_tokens
            expected = 0.0 if where == "commit" else self.scheduler.budget.apart(tokens, rows)
            self.stalls.note(where, now - begin, expected, tick=self.scheduler.ticks, rows=rows, tokens=tokens)
        return now

    def _flush(self) -> None:
        outputs = self.scheduler.outputs
        if outputs:
            told = tuple(outputs)
            outputs.clear()
            self.deliver(p.StepOut(told, self.clock()))
        now = self.clock()
        if now - self._told_at >= STATS_SECONDS:
            self._told_at = now
            self.deliver(self.stats())

    def _receive_all(self) -> None:
        """Take what arrived; to answer it may take long, as to write a profile, and is no tick that hangs."""
        self.tick_started = 0.0
        while self._inbox:
            self._receive(self._inbox.popleft())
        self.tick_started = self.clock()

    def _receive(self, message: p.ToEngine) -> None:
        scheduler, now = self.scheduler, self.clock()
        if isinstance(message, p.Submit):
            known = not message.grammar or (self.grammars is not None and self.grammars.known(message.grammar))
            if not known:
                told = f"grammar {message.grammar!r} did not arrive, or was forgotten"
                scheduler.outputs.append(p.Output(message.rid, (), "error", "grammar_lost", told))
            else:
                self._submit(message, now)
        elif isinstance(message, p.Abort):
            scheduler.end(message.rids, now, message.finish)
        elif isinstance(message, p.Shutdown):
            self._stopping = scheduler.draining = True
        elif isinstance(message, p.Grammar):
            forgotten = self.grammars.add(message.key, message.serialized) if self.grammars is not None else ()
            if forgotten:
                self.deliver(p.Forgotten(tuple(forgotten)))
        else:
            self.deliver(self._control(message))

    def _submit(self, message: p.Submit, now: float) -> None:
        """Take a request; what goes wrong with it alone ends it alone."""
        self._came = now
        scheduler = self.scheduler
        try:
            scheduler.submit(message, now)
            taken = scheduler.live.get(message.rid)
            if message.grammar and self.grammars is not None and taken is not None and taken.submit is message:
                self.grammars.begin(taken)
        except Exception as error:
            log.exception("request %d", message.rid)
            said = f"{type(error).__name__} in the engine"
            if message.rid in scheduler.live:
                scheduler.end((message.rid,), now, "error", "internal_error", said)
            else:
                scheduler.outputs.append(p.Output(message.rid, (), "error", "internal_error", said))

    def _control(self, message: p.Control) -> p.Reply:
        what, ok = message.what, True
        value: Any = None
        if what == "stats":
            self.deliver(self.stats())
        elif what == "backends":
            value = self.executor.backends()
        elif what == "explain":
            value = {"ticks": list(self.scheduler.history), "executor": self.executor.explain()}
            value["stalls"] = list(self.stalls.last)
            value["speculation"] = self.drafts.explain() if self.drafts is not None else None
        elif what == "flush_cache":
            value = {"pages": self.scheduler.cache.flush()}
        elif what == "freeze_gc":
            value = freeze()
            value["ranks"] = self.frozen(value["frozen"])
        elif what in ("start_profile", "stop_profile"):
            try:
                value = self.executor.profile(what == "start_profile")
            except RuntimeError as error:
                value, ok = str(error), False
        elif what in ("drain", "resume"):
            self.scheduler.draining = what == "drain" or self._stopping
        else:
            value, ok = f"{what!r} is not one of {', '.join(p.CONTROLS)}", False
        return p.Reply(message.id, ok, value)

    def stats(self) -> p.Stats:
        """Return the gauges and totals."""
        scheduler, cache = self.scheduler, self.scheduler.cache
        counters = {name: dict(found) for name, found in scheduler.metrics.counters.items()}
        counters["evicted_pages_total"] = {"": cache.evicted_pages}
        counters["stalls_total"] = {where: float(count) for where, count in self.stalls.counts.items()}
        counters |= self.executor.counters()
        pages = {state: getattr(cache, state) for state in ("free", "private", "locked", "evictable")}
        running, queue, histograms = len(scheduler.running.requests), scheduler.queue, scheduler.metrics.histograms
        return p.Stats(running, queue.count, queue.tokens, pages, counters, histograms)
