"""An engine without a model: it answers as a script says. For tests of a front, and of the scheduler.

script(prompt, seed, position) -> the token at that place of the output; a pure function
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fastlayers_server.engine.protocol import (
    Abort,
    Beat,
    Control,
    EngineInfo,
    Finish,
    FromEngine,
    Output,
    Reply,
    Stats,
    StepOut,
    Submit,
    ToEngine,
    TokenLogprobs,
    unpack_ids,
)

Script = Callable[[Sequence[int], int, int], int]


def hashed(vocab_size: int) -> Script:
    """Return a script of tokens that look random; ids 0 to 2 do not occur."""

    def script(prompt: Sequence[int], seed: int, position: int) -> int:
        state = seed * 1_000_003 + position
        for token in prompt:
            state = (state * 6_364_136_223_846_793_005 + token + 1) & (2**64 - 1)
        return 3 + (state >> 33) % (vocab_size - 3)

    return script


def saying(ids: Sequence[int], eos: int) -> Script:
    """Return a script that answers every prompt with ``ids`` and then the end token."""
    return lambda prompt, seed, position: ids[position] if position < len(ids) else eos


@dataclass
class _Live:
    request: Submit
    prompt: list[int]
    output: list[int] = field(default_factory=list)


class ScriptedEngine:
    """An :class:`EngineClient` on a thread, one token a request and tick.

    Parameters
    ----------
    script : callable
        Default: :func:`hashed`.
    tick_seconds : float
        How long a tick takes.
    vocab_size, max_model_len : int
    eos_ids : sequence of int
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        tick_seconds: float = 0.001,
        vocab_size: int = 512,
        max_model_len: int = 4096,
        eos_ids: Sequence[int] = (1,),
    ) -> None:
        self.script = script or hashed(vocab_size)
        self.tick_seconds = tick_seconds
        self.eos_ids = frozenset(eos_ids)
        self.info = EngineInfo(
            1, vocab_size, max_model_len, tuple(eos_ids), 16, 1024, 256, 2048, 20, ("logprobs",), "scripted", "cpu"
        )
        self.phase, self.epoch = "starting", 1
        self._wake = threading.Condition()
        self._inbox: list[ToEngine] = []
        self._live: dict[int, _Live] = {}
        self._tick, self._stopping = 0, False
        self._thread: threading.Thread | None = None

    def start(self, deliver: Callable[[FromEngine], None]) -> None:
        """Begin; see :class:`EngineClient`."""
        self._deliver = deliver
        self._thread = threading.Thread(target=self._run, name="scripted-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Submit) -> None:
        """Hand over a request."""
        self.send(request)

    def abort(self, rids: Sequence[int]) -> None:
        """End requests."""
        self.send(Abort(tuple(rids)))

    def send(self, message: ToEngine) -> None:
        """Hand over any message."""
        with self._wake:
            self._inbox.append(message)
            self._wake.notify()

    def shutdown(self, timeout: float = 0.0) -> None:
        """End; see :class:`EngineClient`."""
        end = time.monotonic() + timeout
        while self._live and time.monotonic() < end:
            time.sleep(self.tick_seconds or 0.001)
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        self.phase = "serving"
        self._deliver(self.info)
        while True:
            with self._wake:
                while not (self._inbox or self._live or self._stopping):
                    if not self._wake.wait(1.0):
                        self._deliver(Beat(self.epoch, self.phase, self._tick, 0.0))
                messages, self._inbox = self._inbox, []
            outputs = [output for message in messages for output in self._receive(message)]
            if self._stopping:
                outputs += [Output(rid, finish="error", code="engine_restarting") for rid in self._live]
                self._live.clear()
            outputs += [self._step(rid, live) for rid, live in list(self._live.items())]
            self._tick += 1
            if outputs:
                self._deliver(StepOut(self.epoch, tuple(outputs)))
            if self._stopping:
                self.phase = "dead"
                return
            time.sleep(self.tick_seconds)

    def _receive(self, message: ToEngine) -> list[Output]:
        if isinstance(message, Submit):
            prompt = unpack_ids(message.prompt)
            if not prompt or not all(0 <= token < self.info.vocab_size for token in prompt):
                return [Output(message.rid, finish="error", code="invalid_prompt", message="token ids out of range")]
            self._live[message.rid] = _Live(message, prompt)
        elif isinstance(message, Abort):
            return [Output(rid, finish="abort") for rid in message.rids if self._live.pop(rid, None)]
        elif isinstance(message, Finish):
            return [Output(message.rid, finish="stop")] if self._live.pop(message.rid, None) else []
        elif isinstance(message, Control) and message.what == "stats":
            pages = {"free": self.info.num_pages - 1, "private": 0, "locked": 0, "evictable": 0}
            self._deliver(Stats(self.epoch, self._tick, len(self._live), 0, 0, pages, {}, {}, message.id))
        elif isinstance(message, Control):
            self._deliver(Reply(self.epoch, message.id, True))
        return []

    def _step(self, rid: int, live: _Live) -> Output:
        request, position = live.request, len(live.output)
        token = self.script(live.prompt, request.sampling.seed, position)
        live.output.append(token)
        ends = set() if request.ignore_eos else self.eos_ids
        stop = token in ends or token in request.stop_ids
        finish = "stop" if stop else "length" if len(live.output) == request.max_new_tokens else ""
        if finish:
            del self._live[rid]
        top = tuple((token + i, -1.0 - i) for i in range(request.logprobs))
        logprobs = (TokenLogprobs(-1.0, top),) if request.logprobs >= 0 else ()
        return Output(rid, (token,), finish, cached_tokens=-1 if position else 0, logprobs=logprobs)
