"""Drafts of a model's own NextN layer, behind hidden rows of the model, or of another model: chains and trees.

    row i of the layer = (hidden state of token i, token i + 1), and predicts token i + 2

Rows of tokens that count are always computed from the model's hidden states; those of drafts, from the layer's own
states, are written over by the next step. The layer's cache lies on the requests' pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from fastlayers.attention.meta import AttentionBatch, AttentionMeta, AttentionState
from fastlayers.sampler.layer import Sampler
from fastlayers.sampler.torch import probabilities
from fastlayers_models.rows import RowTable
from fastlayers_server.engine.config import SchedulerConfig
from fastlayers_server.engine.request import RUNNING, Chunk, Request, Tree
from fastlayers_server.engine.step import DRAFTS, on_device

Draws = tuple[Sampler, RowTable]


class Growing:
    """One request's drafts while they grow.

    Attributes
    ----------
    ids, parents, scores : list
        Of each draft: token, place of the draft before it (-1: none), log-probability of the path.
    front : list of int
        The drafts that grow; -1: what is known.
    states : Tensor ``[front, D]``
    rows : int
        Of known tokens in the drafter's cache.
    spine, inputs : list
        All that grew or grow, and the state that each follows.
    """

    def __init__(self, request: Request, states: torch.Tensor, rows: int) -> None:
        self.request, self.states, self.rows, self.front = request, states, rows, [-1]
        self.ids: list[int] = []
        self.parents: list[int] = []
        self.scores: list[float] = []
        self.spine: list[int] = []
        self.inputs: list[torch.Tensor] = []

    def add(self, scores: list[list[float]], ids: list[list[int]], keep: int) -> None:
        """Add drafts behind each of the front, of which the best are the next one."""
        first = len(self.ids)
        for node, more, tokens in zip(self.front, scores, ids, strict=True):
            self.ids += tokens
            self.parents += [node] * len(tokens)
            self.scores += [score + (self.scores[node] if node >= 0 else 0.0) for score in more]
        front = sorted(sorted(range(first, len(self.ids)), key=lambda node: -self.scores[node])[:keep])
        self.inputs += [self.states[self.front.index(self.parents[node])] for node in front]
        self.spine += front
        self.front = front

    def before(self) -> tuple[int, ...]:
        """Return the place in the spine of the draft before each of it."""
        at = {node: place for place, node in enumerate(self.spine)}
        return tuple(at.get(self.parents[node], -1) for node in self.spine)

    def best(self, count: int) -> Tree:
        """Return the likeliest drafts; none is likelier than the one before it."""
        kept = sorted(sorted(range(len(self.ids)), key=lambda node: -self.scores[node])[:count])
        at = {node: place for place, node in enumerate(kept)}
        parents = [at.get(self.parents[node], -1) for node in kept]
        return Tree([self.ids[node] for node in kept], parents)


class MTPDrafts:
    """The draft layer of a DeepSeek model.

    Parameters
    ----------
    model : DeepseekForCausalLM
    cache : LayerCache
        The draft layer's.
    config : SchedulerConfig
    draws : (Sampler, RowTable), optional
        Draft as requests draw, instead of the likeliest tokens: for verification by rejection.
    topk : int
        More than 1: a tree, grown as EAGLE-2 does: in each depth the likeliest ``topk`` paths grow by ``topk`` tokens
        each, and of all tokens ``topk`` times the depth are kept, those of the likeliest paths.

    Attributes
    ----------
    active : bool
        Whether hidden rows are noted. A request that ran while they were not is not drafted for any more.
    watches : bool
        Whether :meth:`watch` learns anything of ticks without drafts.
    """

    watches = False

    def __init__(
        self, model: Any, cache: Any, config: SchedulerConfig, draws: Draws | None = None, topk: int = 1
    ) -> None:
        self.model, self.active, self._draws, self.topk = model, True, draws, topk
        self._cache, self._size = cache, config.page_size
        self._tokens = config.max_batched_tokens + 8 * topk * config.max_running
        pages = -(-config.max_model_len // config.page_size)
        self._state = AttentionState(config.max_running, self._tokens, pages, config.page_size, model.device)
        self._covered: dict[Request, int] = {}  # positions whose rows of this layer are there
        self._news: dict[Request, list[torch.Tensor]] = {}  # hidden rows of the positions behind
        self._drafts: dict[Request, Growing] = {}
        self._noted = 0  # hidden rows since drafts were made last
        self._proposed: dict[Request, list[torch.Tensor]] = {}  # of what each of them was drawn

    def begin(self, request: Request, start: int) -> None:
        """Take a request whose rows before ``start`` came with the prefix cache."""
        self._covered[request], self._news[request] = start, []

    def note(self, request: Request, start: int, rows: torch.Tensor) -> None:
        """Take the hidden rows that a step computed, of tokens and drafts from ``start`` on."""
        news = self._news.get(request)
        if news is None:
            return
        self._noted += len(rows)
        passed = self._covered[request] + sum(map(len, news)) - start
        if self._noted > self._tokens:  # more than can be computed at once
            del self._covered[request], self._news[request]
        elif passed >= 0:
            if passed:  # drafts of the step before, that did not count
                news[-1] = news[-1][:-passed]
            news.append(rows)

    def rest(self) -> None:
        """Note nothing from now on, until :meth:`prepare`."""
        self.active, self._noted = False, 0
        for kept in (self._covered, self._news, self._drafts, self._proposed):
            kept.clear()

    def watch(self, rows: Sequence[Request]) -> tuple[int, int]:
        """Return that no draft was right or wrong: while it rests, nothing is computed."""
        return 0, 0

    def draft(self, request: Request, count: int) -> Sequence[int]:
        """Return up to ``count`` tokens that may come next, of a tree the likeliest."""
        found = self._drafts.get(request)
        if found is None:
            return []
        return found.best(count) if self.topk > 1 else found.ids[:count]

    @torch.inference_mode()
    def prepare(self, count: int) -> None:
        """Compute the rows of everything that is known now, and draft up to ``count`` tokens for each who decodes."""
        self.active, self._drafts, self._proposed, self._noted = True, {}, {}, 0
        work = self._work()
        if not work:
            return
        lengths = [len(follow) for _, _, follow, _ in work]
        states = self._run(
            torch.cat([rows for *_, rows in work]), [token for _, _, follow, _ in work for token in follow], lengths,
            [start for _, start, _, _ in work], [request.pages for request, *_ in work],
        )  # fmt: skip
        ends = list(accumulate(lengths))
        last = [i for i, (request, *_) in enumerate(work) if self._covered[request] == self._rows(request)]
        if last:
            states = states.index_select(0, on_device([ends[i] - 1 for i in last], states.device))
            grown = [(work[i][0], row[None]) for i, row in zip(last, states, strict=True)]
            self._grow([Growing(request, row, self._rows(request)) for request, row in grown], count)

    @staticmethod
    def _rows(request: Request) -> int:
        """Return how many rows of this layer follow from the tokens that are known."""
        return len(request.tokens) - 1

    def _work(self) -> list[tuple[Request, int, list[int], torch.Tensor]]:
        """Return whose rows are missing, from which position on: the token behind each, and the state before it."""
        work = []
        room = self._tokens
        for request in list(self._covered):
            start, rows = self._covered[request], self._news[request]
            found = torch.cat(rows)[: len(request.tokens) - 1 - start] if rows else None
            if request.state != RUNNING or (found is not None and found.shape[0] > room):
                del self._covered[request], self._news[request]
            elif found is not None and found.shape[0]:
                follow = request.tokens[start + 1 : start + 1 + found.shape[0]]
                work.append((request, start, follow, self.model.model.norm(found)))
                room -= found.shape[0]
                self._covered[request], self._news[request] = start + found.shape[0], []
        return work

    def _grow(self, growing: list[Growing], count: int) -> None:
        """Draft one depth after the other, as far as each request has pages."""
        for depth in range(count):
            requests = [g.request for g in growing for _ in g.front]
            states = torch.cat([g.states for g in growing])
            scores, ids = self._chosen(requests, self._logits(states), depth)
            place = 0
            for g in growing:
                part = slice(place, place + len(g.front))
                g.add(scores[part], ids[part], self.topk)
                self._drafts[g.request] = g
                place = part.stop
            growing = [g for g in growing if g.rows + len(g.spine) <= len(g.request.pages) * self._size]
            if depth + 1 == count or not growing:
                return
            # Of a chain only the last row is new; a tree's are computed again, so that one mask tells who sees whom.
            parts = [slice(len(g.spine) - 1 if self.topk == 1 else 0, len(g.spine)) for g in growing]
            lengths = [part.stop - part.start for part in parts]
            starts = [g.rows + part.start for g, part in zip(growing, parts, strict=True)]
            found = self._run(
                torch.stack([row for g, part in zip(growing, parts, strict=True) for row in g.inputs[part]]),
                [g.ids[node] for g, part in zip(growing, parts, strict=True) for node in g.spine[part]],
                lengths, starts, [g.request.pages for g in growing],
                tuple(g.before() for g in growing) if self.topk > 1 else (),
            )  # fmt: skip
            for g, rows in zip(growing, found.split(lengths), strict=True):
                g.states = rows[len(rows) - len(g.front) :]

    def _chosen(
        self, requests: list[Request], logits: torch.Tensor, depth: int
    ) -> tuple[list[list[float]], list[list[int]]]:
        """Return the drafts behind each state and their log-probabilities: the likeliest, or one that is drawn."""
        if self._draws is None:
            found = logits.float().log_softmax(-1).topk(self.topk)
            return found.values.tolist(), found.indices.tolist()
        sampler, table = self._draws
        params = table.gather(on_device([request.slot - 1 for request in requests], logits.device))
        params = params._replace(seed=params.seed ^ DRAFTS, offset=params.offset + depth)
        for request, proposed in zip(requests, probabilities(logits, params), strict=True):
            self._proposed.setdefault(request, []).append(proposed)
        return [[0.0]] * len(requests), sampler(logits, params, "filtered")[:, None].tolist()

    def proposed(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Return the distribution of the draft behind each place, 0 where there is none."""
        none = torch.zeros_like(next(iter(self._proposed.values()))[0])
        return torch.stack([q for c in chunks for q in [*self._proposed[c.request][: len(c.ids) - 1], none]])

    def _logits(self, states: torch.Tensor) -> Any:
        return self.model.mtp_logits(states)

    def _run(
        self, states: torch.Tensor, follow: list[int], lengths: list[int], starts: list[int], pages: list[list[int]],
        parents: tuple[tuple[int, ...], ...] = (),
    ) -> torch.Tensor:  # fmt: skip
        meta = self._state.plan(AttentionBatch(tuple(lengths), tuple(starts), pages, (), parents))
        found: torch.Tensor = self._states(states, on_device(follow, self.model.device), meta)
        return found

    def _states(self, states: torch.Tensor, ids: torch.Tensor, meta: AttentionMeta) -> Any:
        return self.model.mtp_states(states, ids, meta, self._cache)


class ModelDrafts(MTPDrafts):
    """Another, smaller model, over a cache of its own on the requests' pages.

    Whose rows it lacks, because a block was cached while it rested, is drafted for worse, not otherwise.
    """

    @staticmethod
    def _rows(request: Request) -> int:
        return len(request.tokens)

    def _work(self) -> list[tuple[Request, int, list[int], torch.Tensor]]:
        work, room = [], self._tokens
        for request, start in list(self._covered.items()):
            follow = request.tokens[start : start + room]
            if request.state != RUNNING:
                del self._covered[request], self._news[request]
            elif request.kv >= request.goal and follow and len(request.tokens) <= len(request.pages) * self._size:
                work.append((request, start, follow, torch.empty(0)))
                room -= len(follow)
                self._covered[request] = start + len(follow)
        return work

    def _logits(self, states: torch.Tensor) -> Any:
        return self.model.compute_logits(states)

    def _states(self, states: torch.Tensor, ids: torch.Tensor, meta: AttentionMeta) -> Any:
        return self.model(ids, meta, self._cache)
