"""The engine in this process, for scripts: :class:`LLM`.

>>> from fastlayers_server import LLM, Params
>>> llm = LLM("tiny")  # doctest: +SKIP
>>> llm.generate(["Once upon a time"], Params(max_tokens=8))[0].outputs[0].text  # doctest: +SKIP
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from operator import index
from typing import Any, Literal

from fastlayers_server.engine import protocol as p
from fastlayers_server.engine.config import EngineConfig
from fastlayers_server.engine.loop import NAP
from fastlayers_server.front.errors import ApiError
from fastlayers_server.front.generation import sibling_seed
from fastlayers_server.front.metrics import Metrics
from fastlayers_server.front.rows import Job, Parser, Row
from fastlayers_server.front.tokens import Detokenizer, StopStrings, TokenText


def _int(value: Any) -> int:
    return int(index(value))  # of a bool, too


@dataclass(frozen=True)
class Params:
    """How an answer is drawn and where it ends; the names are the API's.

    Parameters
    ----------
    temperature, top_p, min_p, top_k, frequency_penalty, presence_penalty, repetition_penalty, logit_bias
        See :class:`fastlayers_server.engine.protocol.Sampling`.
    seed : int
    n : int
        Answers to each prompt.
    max_tokens : int
    min_tokens : int
    stop : str or sequence of str
        The answer ends before these.
    stop_token_ids : sequence of int
    ignore_eos : bool
    logprobs : int
        -1: none; else the chosen token's, and so many alternatives.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    n: int = 1
    max_tokens: int = 64
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int = -1

    def __post_init__(self) -> None:
        """Refuse other types, and what the engine never sees or has other names for: it checks the rest.

        Numbers become Python's own: NumPy's have other methods, and do not travel in messages.
        """
        numbers: dict[str, Callable[[Any], float]] = {"float": float, "int": _int, "bool": bool}
        for name, kind in (each for each in Params.__annotations__.items() if each[1] in numbers):
            value = getattr(self, name)
            if not isinstance(value, Real if kind == "float" else Integral):
                raise ValueError(f"Params: {name} is {value!r}; accepted: {kind}")
            object.__setattr__(self, name, numbers[kind](value))
        for name in ("n", "max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"Params: {name} is {getattr(self, name)}; accepted: an integer of 1 or more")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"Params: min_tokens is {self.min_tokens}; accepted: 0 to max_tokens {self.max_tokens}")
        ids, biases = self.stop_token_ids, self.logit_bias
        if not isinstance(ids, Collection) or not all(isinstance(token, Integral) for token in ids):
            raise ValueError(f"Params: stop_token_ids is {ids!r}; accepted: token ids")
        pairs = biases.items() if isinstance(biases, Mapping) else [(None, None)]
        if not all(isinstance(token, Integral) and isinstance(bias, Real) for token, bias in pairs):
            raise ValueError(f"Params: logit_bias is {biases!r}; accepted: a mapping of token ids to floats")
        object.__setattr__(self, "stop_token_ids", tuple(map(_int, ids)))
        object.__setattr__(self, "logit_bias", {_int(token): float(bias) for token, bias in pairs})
        strings = [self.stop] if isinstance(self.stop, str) else self.stop
        if not isinstance(strings, Sequence) or not all(isinstance(stop, str) and stop for stop in strings):
            raise ValueError(f"Params: stop is {self.stop!r}; accepted: a string that is not empty, or several")


@dataclass
class Answer:
    """One answer: its tokens and text, and how it ended ("stop" or "length")."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    logprobs: list[p.TokenLogprobs] = field(default_factory=list)


@dataclass
class Completion:
    """What a prompt got."""

    prompt_token_ids: list[int]
    outputs: list[Answer]
    cached_tokens: int = 0


class LLM:
    """A model with its engine, which ticks on the caller's thread: nothing competes with it for the interpreter.

    Parameters
    ----------
    model : str
        Checkpoint directory, hub name, or "tiny".
    config : EngineConfig, optional
        Everything else; its own ``model`` is not used, nor what limits a queue that many share.
    loaded : CausalLM, optional
        The model itself, loaded with the page size of ``config``.
    tokens : TokenText, optional
        Default: of the model's folder.

    Raises
    ------
    RuntimeError
        The engine did not start; why is said.
    """

    def __init__(
        self, model: str = "tiny", config: EngineConfig | None = None, *, loaded: Any = None,
        tokens: TokenText | None = None,
    ) -> None:  # fmt: skip
        from fastlayers_server.engine.startup import build, model_folder

        settings = replace(config or EngineConfig(), model=model, max_queued_requests=2**20, max_queued_tokens=2**40)
        self.tokens = tokens or TokenText(model_folder(model))
        try:
            self.engine = build(settings, lambda phase: None, model=loaded)
        except (ValueError, LookupError, RuntimeError, OSError) as error:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        self._news: list[p.FromEngine] = []
        self._turn, self._whose = threading.Lock(), 0  # thread that is served
        self._rid, self._metrics, self._closed = 0, Metrics(model), False
        self.info = self.engine.begin(self._news.append)

    def generate(
        self, prompts: str | Sequence[str] | Sequence[Sequence[int]], params: Params | Sequence[Params] | None = None
    ) -> list[Completion]:
        """Return the completions of texts or rows of token ids, in their order.

        Raises
        ------
        ValueError
            An argument is of no use, or the engine refused a request; the others have ended too.
        RuntimeError
            A stream of this thread is still open, or this is closed.
        """
        if not isinstance(prompts, Iterable):
            raise ValueError(f"LLM.generate: prompts is {prompts!r}; accepted: a text, texts, or rows of token ids")
        ids = [self._ids(prompt) for prompt in ([prompts] if isinstance(prompts, str) else prompts)]
        ways = list(params) if isinstance(params, Sequence) else [params or Params()] * len(ids)
        if len(ways) != len(ids):
            raise ValueError(f"params: {len(ways)} entries for {len(ids)} prompts; accepted: one, or one a prompt")
        if wrong := [way for way in ways if not isinstance(way, Params)]:
            raise ValueError(f"LLM.generate: params is {wrong[0]!r}; accepted: Params, or one a prompt")
        completions = [Completion(prompt, [Answer() for _ in range(w.n)]) for prompt, w in zip(ids, ways, strict=True)]
        for _ in self._run(completions, ways):
            pass
        return completions

    def stream(self, prompt: str | Sequence[int], params: Params | None = None) -> Iterator[Answer]:
        """Yield the answer to one prompt again and again, as it grows; meanwhile nobody else is served.

        Raises
        ------
        ValueError
            The engine refused the request.
        RuntimeError
            Another stream of this thread is still open.
        """
        way = replace(params or Params(), n=1)
        completion = Completion(self._ids(prompt), [Answer()])
        for _ in self._run([completion], [way]):
            yield completion.outputs[0]

    def _ids(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            return self.tokens.encode(prompt)
        try:
            return [index(token) for token in prompt]
        except TypeError:
            raise ValueError(f"LLM: a prompt is {prompt!r}; accepted: a text, or a row of token ids") from None

    def _run(self, completions: Sequence[Completion], ways: Sequence[Params]) -> Iterator[None]:
        """Fill in the answers; yields after every tick that told something."""
        rows: dict[int, tuple[Row, Answer, Completion]] = {}
        asked: list[p.Submit] = []
        with self._alone():
            for completion, way in zip(completions, ways, strict=True):
                job = Job("", self, self._metrics, time.monotonic(), 0)
                first = 0
                for sibling, answer in enumerate(completion.outputs):
                    self._rid += 1
                    rows[self._rid] = self._row(job, self._rid, completion, way), answer, completion
                    asked.append(_submit(self._rid, completion.prompt_token_ids, way, sibling, first))
                    first = first or self._rid
            for submit in asked:  # now that none of them is wrong
                self.engine.post(submit)
            left, errors = set(rows), []
            try:
                while left:
                    if not self.engine.tick() and not self._news:
                        time.sleep(NAP)
                    told = [o for m in self._news if isinstance(m, p.StepOut) for o in m.outputs if o.rid in left]
                    self._news.clear()
                    for output in told:
                        row, answer, completion = rows[output.rid]
                        row.feed(output)
                        answer.token_ids, answer.finish_reason = row.ids, row.finish
                        answer.text += "".join(delta.text for delta in row.take()[0])
                        answer.logprobs = [*answer.logprobs, *output.logprobs][: len(row.ids)]
                        completion.cached_tokens = max(completion.cached_tokens, row.cached)
                        if output.finish:
                            left.discard(output.rid)
                        if row.error is not None:
                            errors.append(f"{row.error.code}: {row.error.message}")
                    if told:
                        yield
            finally:
                if left:  # whoever asked wants no more
                    self.abort(list(left))
                    self.engine.tick()
                    self._news.clear()
        if errors:
            raise ValueError(errors[0])

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Serve this call and no other; one of a thread whose stream is open would wait for itself."""
        if self._whose == threading.get_ident():
            accepted = "to read it to its end, or to close it, before anything else is asked"
            raise RuntimeError(f"LLM: a stream of this thread is still open; accepted: {accepted}")
        with self._turn:
            if self._closed:
                raise RuntimeError("LLM: it is closed; accepted: another LLM")
            self._whose = threading.get_ident()
            try:
                yield
            finally:
                self._whose = 0

    def _row(self, job: Job, rid: int, completion: Completion, way: Params) -> Row:
        prompt, ends = completion.prompt_token_ids, {*way.stop_token_ids}
        ends |= set() if way.ignore_eos else {*self.info.eos_ids}
        stops, detokenizer = StopStrings(way.stop, False, way.min_tokens), Detokenizer(self.tokens, prompt, True)
        return Row(job, rid, prompt, detokenizer, Parser(), stops, frozenset(ends), frozenset())

    def abort(self, rids: list[int], finish: Literal["abort", "stop"] = "abort") -> None:
        """End requests, as :meth:`fastlayers_server.front.link.Link.abort`."""
        self.engine.post(p.Abort(tuple(rids), finish))

    def chat(self, messages: Sequence[Mapping[str, Any]], params: Params | None = None) -> Completion:
        """Return the answer to a conversation, by the model's own template.

        Raises
        ------
        ValueError
            The messages are none, the template refuses them, or the engine refused the request.
        """
        roles = ("system", "developer", "user", "assistant", "tool")
        if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
            raise ValueError(f"LLM.chat: messages is {messages!r}; accepted: a list of messages")
        for message in messages:
            if not isinstance(message, Mapping) or message.get("role") not in roles:
                accepted = f"a mapping with a role of {', '.join(roles)}"
                raise ValueError(f"LLM.chat: a message is {message!r}; accepted: {accepted}")
        try:
            prompt = self.tokens.render(messages, None, {"add_generation_prompt": True})
        except ApiError as error:
            raise ValueError(f"LLM.chat: {error.message}") from error
        return self.generate([self.tokens.encode(prompt, False)], params)[0]

    def close(self) -> None:
        """End the engine; what runs ends with an error, and nothing is taken any more."""
        self._closed = True
        self.engine.close()


def _submit(rid: int, prompt: Sequence[int], params: Params, sibling: int, group: int) -> p.Submit:
    sampling = p.Sampling(
        params.temperature, params.top_k, params.top_p, params.min_p, sibling_seed(params.seed, sibling),
        params.frequency_penalty, params.presence_penalty, params.repetition_penalty, tuple(params.logit_bias.items()),
    )  # fmt: skip
    return p.Submit(
        rid, p.pack_ids(prompt), sampling, params.max_tokens, params.min_tokens, tuple(params.stop_token_ids),
        params.ignore_eos, arrival=time.monotonic(), logprobs=params.logprobs, group=group,
    )  # fmt: skip
