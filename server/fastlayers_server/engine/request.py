"""A request as the scheduler keeps it, one tick's plan, and what came of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from fastlayers_server.engine.cache import Node
from fastlayers_server.engine.protocol import Submit, TokenLogprobs

WAITING, RUNNING, ENDED = "waiting", "running", "ended"


class Request:
    """One request, from its submit to its end.

    Attributes
    ----------
    tokens : list of int
        Prompt and output, as far as they are known.
    kv : int
        Positions whose cache rows are written by what was launched so far.
    goal : int
        Positions that extends write; beyond them it decodes. All its tokens, at admission.
    inflight : int
        Tokens that were launched and are not known yet.
    pages, path : list
        Its page table; the nodes of the trie that its tokens begin with, of which it is a user.
    high : int
        Prompt positions that were computed, or found in the cache, once; what is computed again is accounted as such.
    replay : list of int
        Tokens that were told, and are computed once more.
    end : int
        How many tokens it has at most, prompt included.
    penalised, general : bool
        Its tokens need penalties; and more than temperature and filters: these, bias, log-probabilities, a grammar.
    matcher, slow_masks
        Of a grammar: the place in it; how many masks took too long.
    """

    def __init__(self, submit: Submit, seq: int, prompt: list[int], ends: frozenset[int], priority: int) -> None:
        self.submit, self.seq, self.tokens, self.ends, self.priority = submit, seq, prompt, ends, priority
        self.prompt_len, self.end = len(prompt), len(prompt) + submit.max_new_tokens
        self.state, self.slot, self.kv, self.goal, self.inflight = WAITING, 0, 0, 0, 0
        self.pages: list[int] = []
        self.path: list[Node] = []
        self.replay: list[int] = []
        self.cached, self.high, self.passed, self.told = -1, 0, 0, False
        self.held_since = self.admitted_at = self.first_at = 0.0
        self.ended_reason = "overlap"
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.matcher: Any = None
        self.slow_masks = 0
        s = submit.sampling
        self.penalised = bool(s.frequency_penalty or s.presence_penalty or s.repetition_penalty != 1.0)
        self.general = bool(self.penalised or s.logit_bias or submit.logprobs >= 0 or submit.grammar)

    def rewind(self) -> None:
        """Begin again behind the prompt: the same steps give the same tokens, and the same bits in the cache."""
        self.replay = self.tokens[self.prompt_len :] + self.replay
        del self.tokens[self.prompt_len :]

    @property
    def rid(self) -> int:
        """The front's name of the request."""
        return self.submit.rid

    @property
    def drawn(self) -> int:
        """Tokens drawn so far, those in flight included: the offset of the next draw."""
        return len(self.tokens) - self.prompt_len + self.inflight

    @property
    def left(self) -> int:
        """Tokens that may still be launched."""
        return self.end - len(self.tokens) - self.inflight

    @property
    def decodes(self) -> bool:
        """Whether it is a row of the next plan: its prompt is launched, and its end is not certain."""
        return self.kv >= self.goal and self.end > len(self.tokens) + self.inflight

    @property
    def may_draft(self) -> bool:
        """Whether more than one token may be launched, all before are known, and its draws need nothing special."""
        special = self.general or self.drawn < self.submit.min_new_tokens
        return self.left > 1 and not self.inflight and not special


class Tree(list[int]):
    """Drafts, and of each the place of the one before: -1 is the known token."""

    def __init__(self, ids: Iterable[int], parents: Iterable[int]) -> None:
        super().__init__(ids)
        self.parents = list(parents)


class Chunk(msgspec.Struct, array_like=True):
    """A piece of a request that an extend computes.

    ``ids`` stand at positions ``start`` and on. The last ``samples`` of them are drawn from: 0 in the middle of a
    prompt, 1 at its end, 1 + drafts where ``ids`` are a known token and drafts for the ones behind it. ``parents``:
    where drafts are a tree, the place in ``ids`` of the token before each, -1 for the known one.
    """

    request: Request
    start: int
    ids: list[int]
    samples: int
    parents: Sequence[int] = ()

    @property
    def depths(self) -> list[int]:
        """How many drafts lead to each of ``ids``, itself included."""
        found = list(range(0 if self.parents else len(self.ids)))
        for parent in self.parents:
            found.append(0 if parent < 0 else found[parent] + 1)
        return found

    @property
    def tells_prompt(self) -> bool:
        """Whether the log-probabilities of these prompt tokens are asked for, and not told yet."""
        request = self.request
        return request.submit.prompt_logprobs >= 0 and not request.told and self.start < request.prompt_len


def verifying(request: Request, draft: Sequence[int]) -> Chunk:
    """Return a request's last token and the drafts behind it."""
    ids = [request.tokens[-1], *draft]
    parents = [-1, *(parent + 1 for parent in draft.parents)] if isinstance(draft, Tree) else ()
    return Chunk(request, request.kv, ids, len(ids), parents)


class TickPlan(msgspec.Struct, array_like=True):
    """What one tick launches: prompts' chunks, drafts to verify, and one token for each decoding row.

    To other ranks it travels as it is, with requests by their slots.

    Attributes
    ----------
    admitted : list of Request
        Those that have a slot since this tick: their parameters and draws so far go to the device first.
    pages : list of (slot, column, page)
        What changes in the page tables.
    poisoned : list of int
        Freed pages whose rows are in doubt: zeroed before anybody gets them.
    chunks, verify : list of Chunk
        Two extends.
    rows, starts : list
        Requests that decode, and the position of each one's new cache row.
    special : list of (index, request, drawn)
        Those of :attr:`sampled` that need more than temperature and filters, by their place.
    early : int
        So many of the sampled chunks were committed before the rest.
    mixed : bool
        The rows are part of the chunks' extend.
    drafts : int
        So many tokens of each request were to be drafted; ``verify`` holds those that were.
    """

    tick: int
    admitted: list[Request] = []
    pages: list[tuple[int, int, int]] = []
    poisoned: list[int] = []
    chunks: list[Chunk] = []
    verify: list[Chunk] = []
    rows: list[Request] = []
    starts: list[int] = []
    sampled: list[Request] = []
    special: list[tuple[int, Request, int]] = []
    masked: bool = False
    early: int = 0
    mixed: bool = False
    drafts: int = 0

    def complete(self, mixed: bool = False) -> None:
        """List who is drawn for, and who of them needs more than temperature and filters; ``mixed``: if it can be."""
        self.mixed = mixed and bool(self.rows and self.chunks and not self.verify)
        self.sampled = [*self.rows, *(c.request for c in self.chunks if c.samples), *(c.request for c in self.verify)]
        for index, request in enumerate(self.sampled):
            fewest = request.submit.min_new_tokens
            if request.general or (fewest and request.drawn < fewest):
                self.special.append((index, request, request.drawn - 1))
                self.masked |= bool(request.submit.grammar)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to launch."""
        return not (self.rows or self.chunks or self.verify)

    @property
    def extend_tokens(self) -> int:
        """New prompt tokens of this tick."""
        return sum(len(chunk.ids) for chunk in self.chunks)


class TickResult(msgspec.Struct, array_like=True):
    """The tokens of a tick, one list for each of ``plan.sampled``: rows, chunks that sample, verified drafts.

    A token of -1: the logits of that row were not finite. Log-probabilities are by place in ``sampled``; those of
    prompts by request and place among its prompt's.
    """

    tokens: list[list[int]]
    logprobs: dict[int, TokenLogprobs] = {}
    prompt_logprobs: list[tuple[Request, int, list[TokenLogprobs]]] = []
