"""The engine in this process, for scripts: :class:`LLM`.

>>> from fastlayers_server import LLM, Params
>>> llm = LLM("tiny")  # doctest: +SKIP
>>> llm.generate(["Once upon a time"], Params(max_tokens=8))[0].outputs[0].text  # doctest: +SKIP
"""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastlayers_server.engine.client import InProcessEngine
from fastlayers_server.engine.config import EngineConfig
from fastlayers_server.engine.protocol import (
    Died,
    EngineInfo,
    Finish,
    FromEngine,
    Output,
    Sampling,
    StepOut,
    Submit,
    TokenLogprobs,
    pack_ids,
)
from fastlayers_server.front.generation import sibling_seed
from fastlayers_server.front.tokens import Detokenizer, StopStrings, TokenText


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


@dataclass
class Answer:
    """One answer: its tokens and text, and how it ended ("stop" or "length")."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass
class Completion:
    """What a prompt got."""

    prompt_token_ids: list[int]
    outputs: list[Answer]
    cached_tokens: int = 0


class LLM:
    """A model with its engine.

    Parameters
    ----------
    model : str
        Checkpoint directory, hub name, or "tiny".
    config : EngineConfig, optional
        Everything else; its own ``model`` is not used.

    Raises
    ------
    RuntimeError
        The engine did not start; why is said.
    """

    def __init__(self, model: str = "tiny", config: EngineConfig | None = None) -> None:
        import msgspec

        from fastlayers_server.engine.startup import build, model_folder

        settings = msgspec.structs.replace(config or EngineConfig(), model=model)
        self._inbox: queue.Queue[FromEngine] = queue.Queue()
        self.tokens = TokenText(model_folder(model))
        self.engine = InProcessEngine(lambda phase, epoch: build(settings, phase, epoch))
        self.engine.start(self._inbox.put)
        self._rid = 0
        while True:
            message = self._inbox.get()
            if isinstance(message, EngineInfo):
                self.info = message
                return
            if isinstance(message, Died):
                raise RuntimeError(message.reason)

    def generate(
        self, prompts: str | Sequence[str] | Sequence[Sequence[int]], params: Params | Sequence[Params] | None = None
    ) -> list[Completion]:
        """Return the completions of texts or rows of token ids, in their order.

        Raises
        ------
        ValueError
            The engine refused a request; the others have ended too.
        """
        given: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
        ids: list[list[int]] = [
            self.tokens.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in given
        ]
        ways = list(params) if isinstance(params, Sequence) else [params or Params()] * len(ids)
        if len(ways) != len(ids):
            raise ValueError(f"params: {len(ways)} entries for {len(ids)} prompts; accepted: one, or one a prompt")
        jobs: dict[int, _Job] = {}
        completions = []
        for prompt, way in zip(ids, ways, strict=True):
            completions.append(Completion(prompt, [Answer() for _ in range(way.n)]))
            first = 0
            for index, answer in enumerate(completions[-1].outputs):
                self._rid += 1
                jobs[self._rid] = _Job(self, completions[-1], answer, way)
                self.engine.submit(_submit(self._rid, prompt, way, index, first))
                first = first or self._rid
        errors = []
        for output in self._outputs(jobs):
            job = jobs[output.rid]
            job.take(output)
            if output.finish == "error":
                errors.append(f"{output.code}: {output.message}")
        if errors:
            raise ValueError(errors[0])
        return completions

    def chat(self, messages: Sequence[Mapping[str, Any]], params: Params | None = None) -> Completion:
        """Return the answer to a conversation, by the model's own template."""
        prompt = self.tokens.render(messages, None, {"add_generation_prompt": True})
        return self.generate([self.tokens.encode(prompt, False)], params)[0]

    def close(self) -> None:
        """End the engine."""
        self.engine.shutdown()

    def _outputs(self, jobs: Mapping[int, _Job]) -> Iterator[Output]:
        left = set(jobs)
        while left:
            message = self._inbox.get()
            if isinstance(message, StepOut):
                for output in message.outputs:
                    if output.rid in jobs:
                        yield output
                        if output.finish:
                            left.discard(output.rid)


class _Job:
    """One answer in the making."""

    def __init__(self, llm: LLM, completion: Completion, answer: Answer, params: Params) -> None:
        self._llm, self._completion, self._answer = llm, completion, answer
        self._ends = set() if params.ignore_eos else set(llm.info.eos_ids)
        self._ends |= set(params.stop_token_ids)
        self._detokenizer = Detokenizer(llm.tokens, completion.prompt_token_ids, True)
        self._stops = StopStrings([params.stop] if isinstance(params.stop, str) else params.stop, False)
        self._stopped = False

    def take(self, output: Output) -> None:
        """Add what came; a stop string ends the request in the engine."""
        answer = self._answer
        if output.cached_tokens > 0:
            self._completion.cached_tokens = max(self._completion.cached_tokens, output.cached_tokens)
        for place, token in enumerate(output.ids):
            if self._stopped:
                break
            answer.token_ids.append(token)
            answer.logprobs += output.logprobs[place : place + 1]
            last = output.finish == "stop" and place == len(output.ids) - 1 and token in self._ends
            text, self._stopped = self._stops.feed("" if last else self._detokenizer.feed(token))
            answer.text += text
            if self._stopped and not output.finish:
                self._llm.engine.send(Finish(output.rid, len(answer.token_ids)))
        if output.finish:
            answer.finish_reason = "stop" if self._stopped else output.finish
            if not self._stopped:
                text, self._stopped = self._stops.feed(self._detokenizer.flush())
                answer.text += text + ("" if self._stopped else self._stops.flush())


def _submit(rid: int, prompt: Sequence[int], params: Params, index: int, group: int) -> Submit:
    sampling = Sampling(
        params.temperature, params.top_k, params.top_p, params.min_p, sibling_seed(params.seed, index),
        params.frequency_penalty, params.presence_penalty, params.repetition_penalty, tuple(params.logit_bias.items()),
    )  # fmt: skip
    return Submit(
        rid, pack_ids(prompt), sampling, params.max_tokens, params.min_tokens, tuple(params.stop_token_ids),
        params.ignore_eos, arrival=time.monotonic(), logprobs=params.logprobs, group=group,
    )  # fmt: skip
