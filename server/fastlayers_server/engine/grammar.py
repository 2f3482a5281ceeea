"""Structured output by xgrammar: compiled in a process that can be killed, matched and masked in the engine.

front ── structural tag ─► worker ── serialised grammar ─► front ── Grammar ─► engine: one matcher a request

sources ─► GrammarWorker (front)        GrammarMasks (engine): fill masks behind the tokens known, advance at commit
"""

from __future__ import annotations

import asyncio
import re
import resource
import signal
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from fastlayers_server.engine.protocol import EngineInfo
from fastlayers_server.engine.request import ENDED, Request, TickPlan

PLACE = re.compile(r"^\[[\d:]+\] \S+:\d+: (Check failed: \(.*\) is false: )?")
START_SECONDS = 60.0  # for the worker to read the tokenizer
# A row whose mask takes longer, so often, ends. Of this thread's processor time: a busy machine is nobody's grammar.
SLOW_SECONDS, PATIENCE = 0.005, 3


class GrammarWorker:
    """Compiles grammars in a process of its own, one at a time, within limits; a front's, for asyncio.

    Parameters
    ----------
    folder : Path
        With the model's tokenizer.
    told : callable
        Returns the model's vocabulary, which may be larger than the tokenizer's, and the tokens that may follow a
        finished grammar; called when the first grammar is compiled, and raises while nobody knows.
    timeout : float
        Seconds for one grammar; then the process is killed, and the next request starts another.
    memory : int
        Bytes that the process may take.
    """

    def __init__(
        self, folder: Path, told: Callable[[], EngineInfo], timeout: float = 5.0, memory: int = 4 << 30
    ) -> None:
        self._folder, self._told, self.timeout, self._memory = folder, told, timeout, memory
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def _start(self) -> None:
        """Start the process, if it does not run, and wait until it takes sources; within a turn."""
        if self._process is not None and self._process.returncode is None:
            return
        pipe, info = asyncio.subprocess.PIPE, self._told()
        arguments = str(self._folder), str(info.vocab_size), ",".join(map(str, info.eos_ids)), str(self._memory)
        command = (sys.executable, "-m", "fastlayers_server.engine.grammar", *arguments)
        # In a session of its own: an interrupt from the terminal is the front's, which compiles while it drains.
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, limit=self._memory, start_new_session=True
        )
        try:
            await self._answer(START_SECONDS)
        except (ValueError, TimeoutError) as error:  # no grammar is to blame for that
            said = f"no process that compiles grammars starts with the tokenizer of {self._folder}"
            raise RuntimeError(said) from error

    async def compile(self, source: str) -> str:
        """Return the serialised compiled grammar of a structural tag, as JSON.

        Raises
        ------
        ValueError
            The source is no grammar, or the process ended over it; the message is for the client.
        RuntimeError
            The process does not start.
        TimeoutError
            Compiling took too long; the process was killed.
        """
        async with self._turn:
            await self._start()
            assert self._process is not None and self._process.stdin is not None
            self._process.stdin.write(msgspec.json.encode(source) + b"\n")
            serialized, wrong = await self._answer(self.timeout)
        if wrong:
            raise ValueError(wrong)
        return serialized

    async def close(self) -> None:
        """End the process."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def _answer(self, seconds: float) -> tuple[str, str]:
        """Return a serialised grammar, or what is wrong with the source; "" for the other one."""
        assert self._process is not None and self._process.stdout is not None
        try:
            async with asyncio.timeout(seconds):
                return msgspec.json.decode(await self._process.stdout.readuntil(), type=tuple[str, str])
        except asyncio.IncompleteReadError as error:
            await self._process.wait()
            raise ValueError("the grammar could not be compiled within the memory allowed") from error
        except (TimeoutError, asyncio.CancelledError):
            # Cancelled: the answer would be taken for that of the next source.
            await self.close()
            raise


def tokenizer_info(folder: Path, vocab_size: int, end_ids: Sequence[int]) -> Any:
    """Return xgrammar's description of a folder's tokenizer; both sides must have the same."""
    # transformers replaces itself by another module: "from transformers import", which xgrammar says, too, fails while
    # another thread imports it first.
    transformers: Any = import_module("transformers")
    from xgrammar import TokenizerInfo

    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    return TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=list(end_ids))


def work(arguments: Sequence[str]) -> None:
    """Answer sources from stdin on stdout until it is closed: the worker's process."""
    from xgrammar import GrammarCompiler

    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # systemd sends it to all processes of a service; the front kills
    folder, vocab_size, ends, memory = arguments
    info = tokenizer_info(Path(folder), int(vocab_size), [int(i) for i in ends.split(",") if i])
    compiler = GrammarCompiler(info, cache_enabled=False)
    resource.setrlimit(resource.RLIMIT_DATA, (int(memory), int(memory)))

    def answer(serialized: str, wrong: str) -> None:
        sys.stdout.buffer.write(msgspec.json.encode((serialized, wrong)) + b"\n")
        sys.stdout.buffer.flush()

    answer("", "")
    for line in sys.stdin.buffer:
        text = msgspec.json.decode(line, type=str)
        try:
            answer(str(compiler.compile_structural_tag(text).serialize_json()), "")
        except (RuntimeError, ValueError, TypeError) as error:
            # Its time, place and condition in the library's own source are nothing to a client.
            said = PLACE.sub("", (str(error).strip().splitlines() or [type(error).__name__])[-1])
            answer("", said[:500])


class GrammarMasks:
    """The engine's grammars; each request that has one keeps its matcher.

    Parameters
    ----------
    info
        See :func:`tokenizer_info`; or a function that returns it, called once, by :meth:`read` or when the first
        grammar comes.
    vocab_size : int
    max_rows : int
        Rows of a tick that are drawn for.
    pinned : bool
        Masks travel to a GPU.
    cache_bytes : int
        Of compiled grammars; beyond it those used longest ago are forgotten.
    """

    def __init__(
        self, info: Any, vocab_size: int, max_rows: int, pinned: bool = False, cache_bytes: int = 256 << 20
    ) -> None:
        import torch

        self._info, self._cache_bytes, self._reading = info, cache_bytes, threading.Lock()
        self._grammars: OrderedDict[str, Any] = OrderedDict()
        self._masks = torch.full((max_rows, -(-vocab_size // 32)), -1, dtype=torch.int32, pin_memory=pinned)

    def read(self) -> Any:
        """Return the description of the tokenizer; from any thread."""
        with self._reading:
            if callable(self._info):
                self._info = self._info()
            return self._info

    def add(self, key: str, serialized: str) -> list[str]:
        """Keep a compiled grammar, and return the keys of those forgotten for it.

        One that cannot be read is not known, and its requests are told so.
        """
        info = self.read()
        from xgrammar import CompiledGrammar

        try:
            self._grammars[key] = CompiledGrammar.deserialize_json(serialized, info)
        except (RuntimeError, ValueError):
            return []
        forgotten = []
        while len(self._grammars) > 1 and sum(g.memory_size_bytes for g in self._grammars.values()) > self._cache_bytes:
            forgotten.append(self._grammars.popitem(last=False)[0])
        return forgotten

    def known(self, key: str) -> bool:
        """Whether a request may name this grammar."""
        if key in self._grammars:
            self._grammars.move_to_end(key)
        return key in self._grammars

    def begin(self, request: Request) -> None:
        """Make a request's matcher: its grammar may be forgotten while it waits."""
        from xgrammar import GrammarMatcher

        request.matcher = GrammarMatcher(self._grammars[request.submit.grammar])

    def open(self, rows: int) -> Any:
        """Return masks that forbid nothing, where those of the next plan will be."""
        return self._masks[:rows].fill_(-1)

    def masks(self, plan: TickPlan) -> Any:
        """Return which tokens each sampled request of a plan may draw, one bit each: int32 ``[rows, words]``."""
        masks = self.open(len(plan.sampled))
        for place, request, drawn in plan.special:
            if request.submit.grammar and request.state != ENDED:
                begin = time.thread_time()
                if not drawn:  # perhaps once more, in deterministic mode
                    request.matcher.reset()
                request.matcher.fill_next_token_bitmask(masks, place)
                request.slow_masks += time.thread_time() - begin > SLOW_SECONDS
                if not masks[place].numpy().any():
                    masks[place] = -1  # a draw among no tokens is none; what is drawn among all is refused at commit
        return masks

    def accept(self, request: Request, tokens: Sequence[int]) -> tuple[str, str]:
        """Advance a request's matcher by tokens that it drew; returns an error's code and message, or nothing twice."""
        for token in tokens:
            if token < 0:  # the logits were not finite, and the scheduler ends the request for that
                break
            if not request.matcher.accept_token(token):
                left = self._masks[:1].clone()
                request.matcher.fill_next_token_bitmask(left, 0)
                if not left.any():
                    return "invalid_grammar", "the grammar leads to where no token may follow, nor the end"
                return "internal_error", f"token {token} does not follow the grammar"
        if request.slow_masks > PATIENCE:
            return "invalid_grammar", f"the grammar's masks take longer than {1e3 * SLOW_SECONDS:g} ms a token"
        return "", ""


if __name__ == "__main__":
    work(sys.argv[1:])
