"""The outputs of one request on their way to text: a :class:`Row` for each choice, and the :class:`Job` of all."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fastlayers_server.engine.protocol import Output, TokenLogprobs
from fastlayers_server.front.errors import ApiError, of_output
from fastlayers_server.front.metrics import Metrics
from fastlayers_server.front.tokens import Detokenizer, StopStrings

# Tokens of an answer with what is told of each.
Told = list[tuple[int, TokenLogprobs]]


@dataclass
class Delta:
    """New text of a choice: "content", "reasoning", or "tool" with the call's index; a name begins a call."""

    kind: str
    text: str = ""
    index: int = 0
    name: str = ""


class Parser:
    """Splits what a model says into content, reasoning and tool calls. This one: all is content."""

    @property
    def part(self) -> str:
        """Of what the text is that comes now: "content", "reasoning", "tool", or another word for none of them."""
        return "content"

    def feed(self, token: int, text: str) -> list[Delta]:
        """Take a token and the text that it completed."""
        return [Delta("content", text)] if text else []

    def finish(self, text: str) -> list[Delta]:
        """Take the rest of the text; nothing follows."""
        return self.feed(-1, text)


class Row:
    """One choice: feeds on the engine's outputs, and is emptied by who writes the answer."""

    def __init__(
        self, job: Job, rid: int, prompt: Sequence[int], detokenizer: Detokenizer, parser: Parser, stops: StopStrings,
        end_ids: frozenset[int], hidden: frozenset[int],
    ) -> None:  # fmt: skip
        self.job, self.index, self.rid, self.prompt = job, len(job.rows), rid, prompt
        job.rows.append(self)
        self.first_token = 0.0
        self.finish, self.error = "", None  # type: str, ApiError | None
        self.ids: list[int] = []
        self.cached, self.reasoning_tokens = 0, 0
        self.calls: list[str] = []  # the arguments of each
        self.prompt_logprobs: Sequence[TokenLogprobs] = ()
        self._detokenizer, self._parser, self._stops = detokenizer, parser, stops
        self._end_ids, self._hidden = end_ids, hidden
        self._deltas: list[Delta] = []
        # Tokens that nothing was said of yet; those of the content, with where it begins that they are part of; how
        # much of it came, and is shown.
        self._held: list[tuple[int, TokenLogprobs | None]] = []
        self._logprobs: list[tuple[int, tuple[int, TokenLogprobs]]] = []
        self._said = self._shown = 0
        self._new_ids: list[int] = []
        self._last, self._told = 0.0, False

    def feed(self, output: Output) -> None:
        """Take news of the engine; see :class:`Link`."""
        metrics = self.job.metrics
        if output.finish:
            metrics.ended(output, self)
        if self.finish or self.error:
            return
        if output.prompt_logprobs:
            self.prompt_logprobs = output.prompt_logprobs
        if output.ids:
            now = time.monotonic()
            if not self.ids:
                self.cached = max(0, output.cached_tokens)
            (metrics.itl if self.ids else metrics.ttft).observe(now - (self._last or self.job.arrival))
            self._last, self.first_token = now, self.first_token or now
            self._tokens(output)
        if output.finish in ("error", "abort"):
            self.error = self.error or (None if self.finish else of_output(output))
        elif output.finish and not self.finish:
            self._end(output.finish)
        if self.finish:
            self._check_calls()
        self.job.event.set()

    def _tokens(self, output: Output) -> None:
        for at, token in enumerate(output.ids):
            self.ids.append(token)
            self._new_ids.append(token)
            last = output.finish == "stop" and at == len(output.ids) - 1
            if last and token in self._end_ids and not self._stops.include:
                return
            before = self._parser.part
            deltas = self._parser.feed(token, self._detokenizer.feed(token))
            self._held.append((token, output.logprobs[at] if output.logprobs else None))
            if deltas or before != self._parser.part:
                self._place({d.kind for d in deltas})
            if self._take(deltas):
                if not output.finish:
                    self.job.link.abort([self.rid], "stop")
                self.finish = "stop"
                return

    def _place(self, kinds: set[str]) -> None:
        """Count tokens where their text went to: an incomplete character, or half of a marker, does not tell yet."""
        held, self._held = self._held, []
        if "content" in kinds:
            shown = [(token, entry) for token, entry in held if entry is not None and token not in self._hidden]
            self._logprobs += [(self._said, (token, entry)) for token, entry in shown]
        elif "reasoning" in kinds:
            self.reasoning_tokens += len(held)

    def _take(self, deltas: list[Delta]) -> bool:
        """Add deltas; return whether a stop string ended the content."""
        for delta in deltas:
            if delta.kind == "content":
                self._said += len(delta.text)
                stopped = False
                if len(self.ids) >= self._stops.after:
                    delta.text, stopped = self._stops.feed(delta.text)
                self._add(delta)
                if stopped:
                    return True
            else:
                self._add(Delta("content", self._stops.flush()))
                self._add(delta)
        return False

    def _add(self, delta: Delta) -> None:
        if delta.kind == "tool" and delta.name:
            self.calls.append("")
        elif not delta.text:
            return
        if delta.kind == "tool":
            self.calls[-1] += delta.text
        elif delta.kind == "content":
            self._shown += len(delta.text)
        before = self._deltas[-1] if self._deltas else None
        if before and not delta.name and (before.kind, before.index) == (delta.kind, delta.index):
            before.text += delta.text
        else:
            self._deltas.append(delta)

    def _end(self, finish: str) -> None:
        part, deltas = self._parser.part, self._parser.finish(self._detokenizer.flush())
        self._place({d.kind for d in deltas} or {part})
        stopped = self._take(deltas)
        if not stopped:
            self._add(Delta("content", self._stops.flush()))
        self.finish = "stop" if stopped else finish

    def _check_calls(self) -> None:
        """Count arguments that are no JSON; they are told as they are."""
        for arguments in self.calls:
            try:
                json.loads(arguments)
            except (ValueError, RecursionError):
                self.job.metrics.tool_failures.inc()

    def take(self) -> tuple[list[Delta], Told, list[int]]:
        """Return what is new since the last call: text, log-probabilities, token ids."""
        if not self._deltas and not self.finish:
            return [], [], []
        # What a stop string cuts, or may cut, has none.
        shown = [entry for begin, entry in self._logprobs if begin < self._shown]
        news = self._deltas, shown, self._new_ids
        self._deltas, self._logprobs, self._new_ids = [], self._logprobs[len(shown) :], []
        self._told = bool(self.finish)
        return news

    @property
    def readable(self) -> bool:
        """Whether :meth:`take` has something, or an error is to be told."""
        return bool(self._deltas or self.error or (self.finish and not self._told))

    @property
    def done(self) -> bool:
        """Whether nothing follows."""
        return bool(self.finish or self.error)


@dataclass
class Job:
    """All choices of one response.

    Parameters
    ----------
    id : str
        Of the response.
    link
        Where requests are ended: a front's Link, or the LLM that computes on this thread.
    prompts : list of list of int
        Each has as many of the rows as the others.
    arrival : float
        ``time.monotonic()`` when the body was complete.
    key : str
        Under which it is among the front's jobs.
    """

    id: str
    link: Any
    metrics: Metrics
    arrival: float
    created: int
    prompts: list[list[int]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    seed: int = 0
    key: str = ""
    event: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def done(self) -> bool:
        """Whether every choice has ended."""
        return all(row.done for row in self.rows)

    @property
    def unread(self) -> bool:
        """Whether a choice has something to tell."""
        return any(row.readable for row in self.rows)

    @property
    def error(self) -> ApiError | None:
        """The first choice's error, if one has one."""
        return next((row.error for row in self.rows if row.error), None)

    async def news(self, timeout: float | None = None) -> bool:
        """Wait until a choice has news, and return whether one has."""
        if not self.event.is_set():
            try:
                # wait_for would make a task each time, which is most of what a token costs here.
                async with asyncio.timeout(timeout):
                    await self.event.wait()
            except TimeoutError:
                return False
        self.event.clear()
        return True

    async def finished(self) -> None:
        """Wait for the end of all choices; raises the error of one."""
        while not self.done and self.error is None:
            await self.news()
        if self.error is not None:
            raise self.error

    def close(self, cause: str = "disconnect") -> None:
        """End what has not ended; harmless afterwards."""
        live = [row.rid for row in self.rows if not row.done]
        if live:
            self.metrics.aborts.labels(cause).inc(len(live))
            self.link.abort(live)

    def usage(self) -> dict[str, Any]:
        """Return the usage of the response so far."""
        prompt, completion = sum(map(len, self.prompts)), sum(len(row.ids) for row in self.rows)
        siblings = max(1, len(self.rows) // max(1, len(self.prompts)))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(row.cached for row in self.rows[::siblings])},
            "completion_tokens_details": {
                "reasoning_tokens": sum(row.reasoning_tokens for row in self.rows),
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        }
