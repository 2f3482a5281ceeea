"""Drafts of a model's own NextN layer: a chain of its likeliest tokens, behind hidden rows of the model itself.

    row i of the layer = (hidden state of token i, token i + 1), and predicts token i + 2

Rows of tokens that count are always computed from the model's hidden states; those of drafts, from the layer's own
states, are written over by the next step. The layer's cache lies on the requests' pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from fastlayers.attention.kv_cache.spec import LayerCache
from fastlayers.attention.meta import AttentionBatch, AttentionState
from fastlayers.sampler.layer import Sampler
from fastlayers.sampler.torch import probabilities
from fastlayers_models.rows import RowTable
from fastlayers_server.engine.config import SchedulerConfig
from fastlayers_server.engine.request import RUNNING, Chunk, Request
from fastlayers_server.engine.step import DRAFTS, on_device


class MTPDrafts:
    """The draft layer of a DeepSeek model.

    Parameters
    ----------
    model : DeepseekForCausalLM
    caches : sequence of LayerCache
        Of all layers, the draft layer's behind the decoder's.
    config : SchedulerConfig
    draws : (Sampler, RowTable), optional
        Draft as requests draw, instead of the likeliest tokens: for verification by rejection.

    Attributes
    ----------
    active : bool
        Whether hidden rows are noted. A request that ran while they were not is not drafted for any more.
    """

    def __init__(
        self,
        model: Any,
        caches: Sequence[LayerCache],
        config: SchedulerConfig,
        draws: tuple[Sampler, RowTable] | None = None,
    ) -> None:
        self.model, self.active, self._draws = model, True, draws
        self._cache, self._size = caches[model.config.num_hidden_layers], config.page_size
        self._tokens = config.max_batched_tokens + 16 * config.max_running
        pages = -(-config.max_model_len // config.page_size)
        self._state = AttentionState(config.max_running, self._tokens, pages, config.page_size, model.device)
        self._covered: dict[Request, int] = {}  # positions whose rows of this layer are there
        self._news: dict[Request, list[torch.Tensor]] = {}  # hidden rows of the positions behind
        self._noted: dict[Request, int] = {}
        self._drafts: dict[Request, list[int]] = {}
        self._proposed: dict[Request, list[torch.Tensor]] = {}  # of what each of them was drawn

    def begin(self, request: Request, start: int) -> None:
        """Take a request whose rows before ``start`` came with the prefix cache."""
        self._covered[request] = self._noted[request] = start
        self._news[request] = []

    def note(self, request: Request, start: int, rows: torch.Tensor) -> None:
        """Take the hidden rows that a step computed, of tokens and drafts from ``start`` on."""
        if self._noted.get(request) == start:
            self._news[request].append(rows)
            self._noted[request] = start + rows.shape[0]

    def rest(self) -> None:
        """Note nothing from now on, until :meth:`prepare`."""
        self.active = False
        for kept in (self._covered, self._noted, self._news, self._drafts, self._proposed):
            kept.clear()

    def draft(self, request: Request, count: int) -> Sequence[int]:
        """Return up to ``count`` tokens that may come next."""
        return self._drafts.get(request, [])[:count]

    @torch.inference_mode()
    def prepare(self, count: int) -> None:
        """Compute the rows of everything that is known now, and draft up to ``count`` tokens for each who decodes."""
        self.active, self._drafts, self._proposed = True, {}, {}
        work: list[tuple[Request, int, torch.Tensor]] = []
        room = self._tokens
        for request in list(self._covered):
            start, rows = self._covered[request], self._news[request]
            found = torch.cat(rows)[: len(request.tokens) - 1 - start] if rows else None
            if request.state != RUNNING or (found is not None and found.shape[0] > room):
                for kept in (self._covered, self._noted, self._news):
                    del kept[request]
            elif found is not None and found.shape[0]:
                work.append((request, start, found))
                room -= found.shape[0]
                self._news[request] = []
                self._covered[request] = self._noted[request] = start + found.shape[0]
        if not work:
            return
        lengths = [rows.shape[0] for _, _, rows in work]
        follow = [t for r, start, rows in work for t in r.tokens[start + 1 : start + 1 + rows.shape[0]]]
        states = self.model.model.norm(torch.cat([rows for _, _, rows in work]))
        pages = [request.pages for request, _, _ in work]
        states = self._run(states, follow, lengths, [start for _, start, _ in work], pages)
        ends = list(accumulate(lengths))
        last = [i for i, (request, _, _) in enumerate(work) if self._covered[request] == len(request.tokens) - 1]
        if last:
            states = states.index_select(0, on_device([ends[i] - 1 for i in last], states.device))
            self._chain([work[i][0] for i in last], states, count)

    def _chain(self, requests: list[Request], states: torch.Tensor, count: int) -> None:
        """Draft one token after the other, as far as each request has pages."""
        for depth in range(count):
            ids = self._chosen(requests, self.model.mtp_logits(states), depth)
            for request, token in zip(requests, ids, strict=True):
                self._drafts.setdefault(request, []).append(token)
            if depth + 1 == count:
                return
            places = [len(request.tokens) - 1 + depth for request in requests]
            kept = [i for i, r in enumerate(requests) if places[i] < len(r.pages) * self._size]
            if not kept:
                return
            states = states.index_select(0, on_device(kept, states.device))
            requests = [requests[i] for i in kept]
            starts, pages = [places[i] for i in kept], [request.pages for request in requests]
            states = self._run(states, [ids[i] for i in kept], [1] * len(kept), starts, pages)

    def _chosen(self, requests: list[Request], logits: torch.Tensor, depth: int) -> list[int]:
        """Return each request's next draft: the likeliest token, or one drawn in a stream of its own."""
        if self._draws is None:
            return logits.argmax(-1).tolist()
        sampler, table = self._draws
        params = table.gather(on_device([request.slot - 1 for request in requests], logits.device))
        params = params._replace(seed=params.seed ^ DRAFTS, offset=params.offset + depth)
        for request, proposed in zip(requests, probabilities(logits, params), strict=True):
            self._proposed.setdefault(request, []).append(proposed)
        return sampler(logits, params, "filtered").tolist()

    def proposed(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Return the distribution of the draft behind each place, 0 where there is none."""
        none = torch.zeros_like(next(iter(self._proposed.values()))[0])
        return torch.stack([q for c in chunks for q in [*self._proposed[c.request][: len(c.ids) - 1], none]])

    def _run(
        self, states: torch.Tensor, follow: list[int], lengths: list[int], starts: list[int], pages: list[list[int]]
    ) -> torch.Tensor:
        meta = self._state.plan(AttentionBatch(tuple(lengths), tuple(starts), pages))
        found: torch.Tensor = self.model.mtp_states(states, on_device(follow, states.device), meta, self._cache)
        return found
