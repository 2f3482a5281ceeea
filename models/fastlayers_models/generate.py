"""Prefill and decode over a paged cache: :class:`Generator`, a loop that streams tokens.

    prompts ─► prefill in chunks of at most prefill_tokens ─► sample ─► decode, one token a request and step ─► …

Requests leave the batch when they end, and their pages go back to the pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

import fastlayers as fl
from fastlayers.attention.kv_cache.spec import LayerCache
from fastlayers.attention.meta import AttentionBatch, AttentionMeta, AttentionState
from fastlayers.errors import ArgumentError, check_positive
from fastlayers.sampler.layer import Sampler, SamplingParams, SamplingState


class CausalLM(Protocol):
    """What a generator needs of a model."""

    config: Any
    device: torch.device
    page_size: int
    kv_dtype: torch.dtype

    def __call__(self, input_ids: torch.Tensor, meta: AttentionMeta, caches: Sequence[LayerCache]) -> torch.Tensor:
        """Return hidden states ``[T, D]``."""

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return logits ``[R, vocab]``."""


@dataclass(frozen=True)
class Token:
    """One generated token: which prompt it continues, its id, and why the request ended (or ``None``)."""

    request: int
    id: int
    finished: str | None = None


@dataclass
class _Request:
    index: int
    prompt: list[int]
    params: SamplingParams
    pages: list[int] = field(default_factory=list)
    cached: int = 0
    output: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


class Generator:
    """Generates with a model of ``fastlayers_models``.

    Parameters
    ----------
    model : CausalLM
    max_batch : int
        Requests at a time; more prompts wait.
    max_length : int, optional
        Longest prompt plus output; default: the model's ``max_position_embeddings``.
    num_pages : int, optional
        Pages of the cache (page 0 included); default: enough for ``max_batch`` requests of ``max_length``.
    prefill_tokens : int
        Most new tokens a step; longer prompts are prefilled in chunks over their cached prefix.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        max_batch: int = 8,
        max_length: int | None = None,
        num_pages: int | None = None,
        prefill_tokens: int = 8192,
    ) -> None:
        check_positive("Generator", max_batch=max_batch, prefill_tokens=prefill_tokens)
        self.model, self.max_batch, self.prefill_tokens = model, max_batch, prefill_tokens
        limit = model.config.max_position_embeddings
        self.max_length = limit if max_length is None else max_length
        if not 0 < self.max_length <= limit:
            raise ArgumentError("Generator", "max_length", self.max_length, f"1 to {limit} (max_position_embeddings)")
        pages = -(-self.max_length // model.page_size)
        self.pool = fl.PagePool(num_pages if num_pages is not None else max_batch * pages + 1, model.page_size)
        spec = fl.kv_cache_spec(model, page_size=model.page_size, dtype=model.kv_dtype)
        self.caches = spec.allocate(self.pool.num_pages, model.device)
        tokens = max(prefill_tokens, max_batch)
        self.state = AttentionState(max_batch, tokens, pages, model.page_size, model.device)
        self.sampler = Sampler(model.config.vocab_size, device=model.device)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        max_new_tokens: int = 64,
        eos_ids: Sequence[int] | None = None,
    ) -> list[list[int]]:
        """Return the generated ids of every prompt (the end token included); arguments as for :meth:`stream`."""
        outputs: list[list[int]] = [[] for _ in prompts]
        for token in self.stream(prompts, params, max_new_tokens=max_new_tokens, eos_ids=eos_ids):
            outputs[token.request].append(token.id)
        return outputs

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        max_new_tokens: int = 64,
        eos_ids: Sequence[int] | None = None,
    ) -> Iterator[Token]:
        """Yield tokens as they are made.

        Parameters
        ----------
        prompts : sequence of sequences of int
            Token ids; at least one each.
        params : SamplingParams or one per prompt
            Default: greedy.
        max_new_tokens : int
        eos_ids : sequence of int, optional
            Default: the configuration's; ``()`` never stops early.

        Raises
        ------
        ArgumentError
            An empty prompt, an id outside the vocabulary, or a prompt that does not fit ``max_length``; found before
            anything runs.
        AllocatorOverflowError
            The cache is too small for a single request.
        """
        requests = self._requests(prompts, params, max_new_tokens)
        stop = set(self.model.config.eos_token_ids if eos_ids is None else eos_ids)
        waiting = list(reversed(requests))
        try:
            while waiting:
                group = [waiting.pop() for _ in range(min(self.max_batch, len(waiting)))]
                yield from self._run(group, max_new_tokens, stop)
        finally:
            for request in requests:
                self.pool.release(request.pages)

    def _requests(self, prompts: Sequence[Sequence[int]], params: Any, max_new_tokens: int) -> list[_Request]:
        check_positive("Generator", max_new_tokens=max_new_tokens)
        vocab = self.model.config.vocab_size
        each = (
            list(params) if isinstance(params, Sequence) else [params or SamplingParams(temperature=0.0)] * len(prompts)
        )
        if len(each) != len(prompts):
            raise ArgumentError(
                "Generator", "params", f"{len(each)} entries", f"one, or one per prompt ({len(prompts)})"
            )
        for index, prompt in enumerate(prompts):
            wrong = [i for i in prompt if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < vocab]
            if not prompt or wrong:
                given = f"token id {wrong[0]!r}" if wrong else "empty"
                raise ArgumentError("Generator", f"prompts[{index}]", given, f"token ids in [0, {vocab}), at least one")
            if len(prompt) + max_new_tokens > self.max_length:
                given = f"{len(prompt)} tokens and {max_new_tokens} new ones"
                raise ArgumentError("Generator", f"prompts[{index}]", given, f"at most max_length {self.max_length}")
        return [_Request(i, list(p), s) for i, (p, s) in enumerate(zip(prompts, each, strict=True))]

    @torch.inference_mode()
    def _forward(self, work: list[tuple[_Request, int]]) -> torch.Tensor:
        """Run one step: the next ``count`` uncached tokens of each request; return the last hidden row of each."""
        ids: list[int] = []
        for request, count in work:
            self.pool.extend(request.pages, request.cached + count, f"request {request.index}")
            ids += request.tokens[request.cached : request.cached + count]
        batch = AttentionBatch(
            tuple(count for _, count in work),
            tuple(request.cached for request, _ in work),
            [request.pages for request, _ in work],
        )
        meta = self.state.plan(batch, num_pages=self.pool.num_pages)
        hidden = self.model(torch.tensor(ids, device=self.model.device), meta, self.caches)
        for request, count in work:
            request.cached += count
        return hidden[meta.cu_seqlens_q[1:].long() - 1]

    def _prefill(self, group: list[_Request]) -> torch.Tensor:
        """Cache the prompts chunk by chunk; return the last hidden row of each request."""
        last: dict[int, torch.Tensor] = {}
        while len(last) < len(group):
            work, budget = [], self.prefill_tokens
            for request in group:
                count = min(len(request.prompt) - request.cached, budget)
                if count > 0:
                    work.append((request, count))
                    budget -= count
            rows = self._forward(work)
            for row, (request, _) in enumerate(work):
                if request.cached == len(request.prompt):
                    last[request.index] = rows[row]
        return torch.stack([last[request.index] for request in group])

    @torch.inference_mode()
    def _run(self, group: list[_Request], max_new_tokens: int, stop: set[int]) -> Iterator[Token]:
        active, state = list(group), self._sampling(group)
        hidden = self._prefill(group)
        while True:
            ids = self.sampler(self.model.compute_logits(hidden), state).tolist()
            running: list[_Request] = []
            for request, token in zip(active, ids, strict=True):
                request.output.append(token)
                done = "stop" if token in stop else "length" if len(request.output) == max_new_tokens else None
                yield Token(request.index, token, done)
                if done:
                    self.pool.release(request.pages)
                else:
                    running.append(request)
            if not running:
                return
            if len(running) < len(active):
                active, state = running, self._sampling(running)
            hidden = self._forward([(request, 1) for request in active])

    def _sampling(self, requests: list[_Request]) -> SamplingState:
        state = SamplingState(len(requests), device=self.model.device)
        for row, request in enumerate(requests):
            # The offset counts a request's draws, so that its tokens do not depend on who else is in the batch.
            state.set(row, request.params, offset=len(request.output))
        return state
