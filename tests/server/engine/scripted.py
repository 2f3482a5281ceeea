"""An executor without a model, and an engine on it: for tests of a front, and of the scheduler.

    script(prompt, seed, position) -> the token at that place of the output; a pure function

The cache is simulated: each cell holds a hash of the tokens up to it, and every read checks all cells of its prefix. A
page that is freed twice, handed out too early or found by mistake shows as a wrong prefix.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from fastlayers_server.engine.child import Phase
from fastlayers_server.engine.client import EngineClient
from fastlayers_server.engine.config import EngineConfig, SchedulerConfig
from fastlayers_server.engine.loop import Engine
from fastlayers_server.engine.protocol import EngineInfo, TokenLogprobs
from fastlayers_server.engine.request import ENDED, WAITING, Chunk, Request, TickPlan, TickResult
from fastlayers_server.engine.scheduler import Scheduler

FORGET = 4096  # so many requests are remembered before those that ended are forgotten
Script = Callable[[Sequence[int], int, int], int]


def hashed(vocab_size: int) -> Script:
    """Return a script of tokens that look random; ids 0 to 2 do not occur."""

    def script(prompt: Sequence[int], seed: int, position: int) -> int:
        return 3 + (hash((hash(tuple(prompt)), seed, position)) >> 7) % (vocab_size - 3)

    return script


def saying(ids: Sequence[int], eos: int) -> Script:
    """Return a script that answers every prompt with ``ids`` and then the end token."""
    return lambda prompt, seed, position: ids[position] if position < len(ids) else eos


class SimulationError(AssertionError):
    """The scheduler broke a rule of the cache."""


class _Truth:
    """What a request's tokens are, and the hash of each prefix."""

    def __init__(self, request: Request) -> None:
        self.prompt = request.tokens[: request.prompt_len]
        self.tokens: list[int] = []
        self.root = hash(request.submit.namespace)
        self.hashes: list[int] = []
        self.extend(self.prompt)

    def extend(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.hashes += chain(self.before(len(self.hashes)), tokens)

    def rewind(self, length: int) -> None:
        """Forget what is behind."""
        del self.tokens[length:], self.hashes[length:]

    def before(self, position: int) -> int:
        """Return the hash of everything before a position, the namespace included."""
        return self.hashes[position - 1] if position else self.root


def chain(state: int, tokens: Sequence[int]) -> list[int]:
    """Return the hash of each prefix that ``tokens`` extend."""
    found = []
    for token in tokens:
        state = hash((state, token))
        found.append(state)
    return found


class ScriptedStep:
    """Tokens that are known at launch, and told at :meth:`result`."""

    def __init__(self, found: TickResult, ready_at: float, first: list[list[int]]) -> None:
        self._found, self._ready_at, self._first = found, ready_at, first

    def sample(self, masks: object = None) -> None:
        """Nothing is left to do."""

    def first(self) -> list[list[int]]:
        """Return those of prompts, where they have no log-probabilities."""
        return self._first

    def done(self) -> bool:
        """Return whether the tick's time is over."""
        return time.monotonic() >= self._ready_at

    def result(self) -> TickResult:
        """Return the tokens; not before the tick's time is over."""
        if self._ready_at:
            time.sleep(max(0.0, self._ready_at - time.monotonic()))
        return self._found


class ScriptedExecutor:
    """Computes plans by a script, over a simulated cache.

    Parameters
    ----------
    script : callable
    page_size : int
    tick_seconds : float
        How long a tick takes.
    nonfinite : callable, optional
        ``nonfinite(rid, position)``: whether the logits are not finite there.

    Attributes
    ----------
    steps : int
        Rows and chunks that were executed and checked.
    sampled : int
        Tokens that were drawn.
    dirty : dict
        Pages of requests whose logits were not finite, until they are zeroed.
    """

    def __init__(
        self,
        script: Script,
        page_size: int,
        tick_seconds: float = 0.0,
        nonfinite: Callable[[int, int], bool] | None = None,
    ) -> None:
        self.script, self.page_size, self.tick_seconds, self.nonfinite = script, page_size, tick_seconds, nonfinite
        self.cells: dict[int, list[int]] = {}
        self.tables: dict[int, list[int]] = {}
        self.truths: dict[Request, _Truth] = {}
        self.dirty: dict[int, Request] = {}
        self.steps = self.sampled = 0

    def launch(self, plan: TickPlan) -> ScriptedStep:
        """Check and execute a plan."""
        if len(self.truths) > FORGET:
            self.truths = {request: truth for request, truth in self.truths.items() if request.state != ENDED}
        for request in plan.admitted:
            truth = self.truths.setdefault(request, _Truth(request))
            if request.replay:
                truth.rewind(request.prompt_len)
            self._demand(truth.tokens == request.tokens, request, "resumes with tokens that were not drawn")
            self.tables[request.slot] = []
        for page in plan.poisoned:
            self.dirty.pop(page, None)
        # Of a row in flight whose request was preempted, nobody could know it in time.
        self.dirty = {page: request for page, request in self.dirty.items() if request.state != WAITING}
        for slot, column, page in plan.pages:
            table = self.tables[slot]
            table += [0] * (column + 1 - len(table))
            table[column] = page
        special = {place: drawn for place, _, drawn in plan.special}
        for place, request in enumerate(plan.sampled[: len(plan.sampled) - len(plan.verify)]):
            drawn = len(self.truths[request].tokens) - request.prompt_len
            wanted = drawn if request.general or drawn + 1 < request.submit.min_new_tokens else None
            self._demand(special.get(place) == wanted, request, f"draws as {special.get(place)}, not as {wanted}")
        tokens: list[list[int]] = []
        for request, start in zip(plan.rows, plan.starts, strict=True):
            truth = self.truths[request]
            self._demand(start == len(truth.tokens) - 1, request, f"decodes at {start}, has {len(truth.tokens)} tokens")
            self._run(request, start, truth.tokens[-1:])
            tokens.append(self._draw(request))
        for chunk in plan.chunks:
            expected = self.truths[chunk.request].tokens[chunk.start : chunk.start + len(chunk.ids)]
            self._demand(chunk.ids == expected, chunk.request, "extends by tokens that are not its own")
            self._run(chunk.request, chunk.start, chunk.ids)
            if chunk.samples:
                tokens.append(self._draw(chunk.request))
        tokens += [self._verify(chunk) for chunk in plan.verify]
        self.sampled += sum(chunk.samples for chunk in plan.verify) + len(plan.sampled) - len(plan.verify)
        logprobs = {
            index: TokenLogprobs(-1.0, tuple((i, -1.0 - i) for i in range(request.submit.logprobs)))
            for index, request, _ in plan.special
            if request.submit.logprobs >= 0
        }
        rows, prompts = len(plan.rows), sum(chunk.samples > 0 for chunk in plan.chunks)
        first = [] if logprobs else tokens[rows : rows + prompts]
        ready_at = self.tick_seconds and time.monotonic() + self.tick_seconds
        return ScriptedStep(TickResult(tokens, logprobs), ready_at, first)

    def _demand(self, holds: bool, request: Request, what: str) -> None:
        if not holds:
            raise SimulationError(f"request {request.rid}: {what}")

    def _run(self, request: Request, start: int, ids: Sequence[int]) -> None:
        """Read the prefix, write the rows of ``ids``."""
        self.steps += 1
        truth, table, size = self.truths[request], self.tables[request.slot], self.page_size
        end = start + len(ids)
        columns = -(-end // size)
        exact = len(table) >= columns and all(table[:columns]) and not any(table[columns:])
        if not exact:  # I4
            self._demand(False, request, f"has the table {table} for {end} tokens")
        # I3: a page that it gave away, as another holds the same block, still has what it wrote, until somebody writes
        if table[:columns] != request.pages[:columns]:  # as often as this is asked, a table's text takes a while
            self._demand(False, request, f"has the table {table}, not its pages")
        cells = self.cells
        found: list[int] = []
        for page in table[: -(-start // size)]:
            found += cells[page]
        del found[start:]
        self._demand(found == truth.hashes[:start], request, f"reads a prefix that is not its own, at {start}")
        self._write(request, start, chain(truth.before(start), ids))

    def _write(self, request: Request, start: int, values: Sequence[int]) -> None:
        table, size, at, end = self.tables[request.slot], self.page_size, start, start + len(values)
        while at < end:  # page by page
            column, place = divmod(at, size)
            page, count = table[column], min(size - place, end - at)
            dirty = self.dirty.get(page, request)
            # Of a row in flight whose request ended otherwise, nobody could know it in time.
            if dirty is not request and (dirty.state != ENDED or dirty.ended_reason == "error"):
                self._demand(False, request, f"gets page {page}, which is in doubt and was not zeroed")
            if page not in self.cells:
                self.cells[page] = [0] * size
            self.cells[page][place : place + count] = values[at - start : at - start + count]
            at += count

    def _draw(self, request: Request) -> list[int]:
        truth, submit = self.truths[request], request.submit
        position = len(truth.tokens) - request.prompt_len
        token = self.script(truth.prompt, submit.sampling.seed, position)
        while token in request.ends and position + 1 < submit.min_new_tokens:
            token += 1
        truth.extend([token])
        bad = self.nonfinite is not None and self.nonfinite(request.rid, position)
        if bad:
            published = sum(len(node.pages) for node in request.path)
            self.dirty |= dict.fromkeys(filter(None, self.tables[request.slot][published:]), request)
        return [-1 if bad else token]

    def _verify(self, chunk: Chunk) -> list[int]:
        truth = self.truths[chunk.request]
        self._demand(chunk.ids[0] == truth.tokens[-1], chunk.request, "verifies behind a token that is not its last")
        self._run(chunk.request, chunk.start, chunk.ids)
        before, end = chunk.parents or range(-1, len(chunk.ids) - 1), len(truth.tokens)
        drawn, path = self._draw(chunk.request), [0]
        while right := [i for i, p in enumerate(before) if p == path[-1] and chunk.ids[i] == drawn[-1]]:
            path += right
            drawn += self._draw(chunk.request)
        if chunk.parents:  # the rows of the path are moved together
            self._write(chunk.request, chunk.start, truth.hashes[chunk.start : end + len(path) - 1])
        return drawn

    def explain(self) -> Any:
        """Say that this is a script."""
        return {"executor": "scripted"}

    def backends(self) -> list[dict[str, Any]]:
        """There are no layers."""
        return []

    def profile(self, start: bool) -> str:
        """There is nothing to profile."""
        raise RuntimeError("a scripted engine has no profile")

    def counters(self) -> dict[str, dict[str, float]]:
        """There are no graphs, and nothing compiles."""
        return {}


class ScriptedEngine(EngineClient):
    """An engine in this process that answers as a script says, through the scheduler that serves models.

    Parameters
    ----------
    script : callable
        Default: :func:`hashed`.
    tick_seconds : float
        How long a tick takes.
    overlap : bool
    vocab_size, max_model_len, eos_ids, num_pages, page_size, max_running, max_queued_requests
        As of :class:`SchedulerConfig`.
    nonfinite : callable, optional
        See :class:`ScriptedExecutor`.
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        tick_seconds: float = 0.001,
        overlap: bool = True,
        vocab_size: int = 512,
        max_model_len: int = 4096,
        eos_ids: Sequence[int] = (1,),
        num_pages: int = 1025,
        page_size: int = 16,
        max_running: int = 64,
        max_queued_requests: int = 2048,
        nonfinite: Callable[[int, int], bool] | None = None,
    ) -> None:
        config = SchedulerConfig(
            vocab_size=vocab_size, max_model_len=max_model_len, num_pages=num_pages, page_size=page_size,
            eos_ids=tuple(eos_ids), max_running=max_running, max_queued_requests=max_queued_requests,
            features=("penalties", "logit_bias", "logprobs"),
        )  # fmt: skip

        def make(phase: Phase, epoch: int) -> Engine:
            executor = ScriptedExecutor(script or hashed(vocab_size), page_size, tick_seconds, nonfinite)
            info = EngineInfo(
                epoch, vocab_size, max_model_len, tuple(eos_ids), page_size, num_pages, max_running,
                max_queued_requests, config.max_logprobs, config.features, "scripted", "cpu",
            )  # fmt: skip
            return Engine(Scheduler(config), executor, info=info, overlap=overlap)

        super().__init__(EngineConfig(), make=make)

    @property
    def _engine(self) -> Engine | None:
        return self._beside.child.engine if self._beside is not None else None
