"""Speculation: prompt lookup, where the request's own text is the draft model, and how many tokens to draft.

    draft    by lookup: the tokens that followed the last 2 to 4 tokens where they occurred before
    verify   each draft is kept if it is what the request draws there by its own seed: the text is that without drafts
    k        what makes Σ a^i (i = 0 … k) over the measured seconds of a tick largest; a: how often a draft is right

k = 0 is among the candidates: then nothing is drafted and ticks overlap. Whether drafts would be right is seen
meanwhile of a few requests' tokens as they come (lookup), or tried every :data:`PROBE`-th tick (a draft layer).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from fastlayers_server.engine.metrics import Metrics
from fastlayers_server.engine.request import Request, TickPlan, TickResult

if TYPE_CHECKING:
    from fastlayers_server.engine.mtp import MTPDrafts

PROBE = 50
# What a tick of drafts costs, over one without, until it was measured: four rows to verify, and no overlap.
UNSEEN = 1.25
WATCHED = 4  # requests whose tokens lookup is compared with while nothing is drafted
READ = 512  # of a prompt, before it is watched, in a tick
LONGEST, KEPT = 4, 4  # tokens of a suffix that are compared; places of a pair of tokens that are remembered
SMOOTH = 0.1


class Lookup:
    """Where each pair of tokens of one request occurred."""

    def __init__(self) -> None:
        self._places: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        self._done = 1

    def read(self, tokens: Sequence[int], most: int) -> bool:
        """Take so many more pairs of ``tokens`` at most; returns whether none is left."""
        last = len(tokens) - 1
        for _ in range(min(most, last - self._done)):  # the suffix itself is no earlier occurrence
            places = self._places[tokens[self._done - 1], tokens[self._done]]
            places.append(self._done)
            del places[:-KEPT]
            self._done += 1
        return self._done >= last

    def draft(self, tokens: Sequence[int], count: int) -> Sequence[int]:
        """Return what followed the longest suffix of ``tokens`` that occurred before, the latest of several."""
        self.read(tokens, len(tokens))
        last = len(tokens) - 1
        if last < 1 or count < 1:
            return ()
        best, length = -1, 1
        for place in reversed(self._places.get((tokens[last - 1], tokens[last]), ())):
            same = 2
            while same < LONGEST and place >= same and tokens[place - same] == tokens[last - same]:
                same += 1
            if same > length:
                best, length = place, same
        return tokens[best + 1 : best + 1 + count] if best >= 0 else ()


class Lookups:
    """Prompt lookup for every request; ``topk``: drafts of each depth; ``watches``: it says of ticks without drafts."""

    topk, watches = 1, True

    def __init__(self) -> None:
        self._lookups: WeakKeyDictionary[Request, Lookup] = WeakKeyDictionary()
        # Of watched requests: how many tokens were known, and the one that was thought to be next.
        self._expected: WeakKeyDictionary[Request, tuple[int, Sequence[int]]] = WeakKeyDictionary()

    def watch(self, rows: Sequence[Request]) -> tuple[int, int]:
        """Return how many first drafts would have been right, and wrong, of requests that got tokens without any."""
        right = wrong = 0
        # Requests of a general kind may not draft.
        watched = list(islice((r for r in rows if not r.general and r in self._expected), WATCHED))
        for request in watched:
            known, draft = self._expected[request]
            if len(request.tokens) > known:
                hit = len(draft) > 0 and draft[0] == request.tokens[known]
                right, wrong = right + hit, wrong + (not hit)
                self._expected[request] = len(request.tokens), self.draft(request, 1)
        for request in rows if len(watched) < WATCHED else ():
            if not request.general and request not in self._expected:
                # One at a time, and a long prompt over eight ticks at most: the device may wait for this.
                lookup = self._lookups.setdefault(request, Lookup())
                if lookup.read(request.tokens, max(READ, len(request.tokens) // 8)):
                    self._expected[request] = len(request.tokens), self.draft(request, 1)
                break
        return right, wrong

    def rest(self) -> None:
        """Nothing is kept up."""

    def prepare(self, count: int) -> None:
        """Nothing is made beforehand."""

    def draft(self, request: Request, count: int) -> Sequence[int]:
        """Return up to ``count`` tokens that may come next."""
        return self._lookups.setdefault(request, Lookup()).draft(request.tokens, count)


class Speculation:
    """Drafts of a source, as many as pay.

    Parameters
    ----------
    source : Lookups or MTPDrafts
    max_k : int
        Drafts a request and tick at most.
    metrics : Metrics
    clock : callable
    """

    def __init__(
        self, source: Lookups | MTPDrafts, max_k: int, metrics: Metrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.source, self.max_k, self.metrics, self._clock = source, max_k, metrics, clock
        self.k = 0
        self.acceptance = 0.5
        self._seconds: dict[tuple[int, int], float] = {}  # (rows to the next power of two, k): of a tick
        self._ticks, self._before = 0, (0, 0, 0.0)

    def wanted(self, running: int) -> bool:
        """Whether to draft in the next tick; settles :attr:`k`."""
        self._ticks += 1
        known = (running.bit_length(), 0) in self._seconds
        self.k = self._best(running) if known else 0
        if not self.k and self._ticks % PROBE == 0 and not self.source.watches:
            self.k = min(2, self.max_k)
        if not self.k and known:
            self.source.rest()
        return self.k > 0 and running > 0

    def prepare(self) -> None:
        """Make the drafts of the next tick."""
        self.source.prepare(self.k)

    def _best(self, running: int) -> int:
        size = running.bit_length()
        base = self._seconds[size, 0]
        best, most = 0, 0.0
        for k in range(self.max_k + 1):
            seconds = self._seconds.get((size, k), UNSEEN * base if k else base)
            gain = sum(self.acceptance**i for i in range(k + 1)) / seconds
            if gain > most:
                best, most = k, gain
        return best

    def draft(self, request: Request, limit: int) -> Sequence[int]:
        """Return up to so many tokens that may come next; one more at least may be launched."""
        return self.source.draft(request, min(limit, self.k * self.source.topk))

    def observe(self, plan: TickPlan, result: TickResult, seconds: float) -> None:
        """Learn how many drafts were right, and what the tick took."""
        k = plan.drafts if plan.verify else 0
        if plan.drafts:
            right, wrong = 0, len(plan.rows)  # a row without a draft gains nothing from the tick
        else:
            right, wrong = self.source.watch(plan.rows)
        for chunk, tokens in zip(plan.verify, result.tokens[len(result.tokens) - len(plan.verify) :], strict=True):
            accepted = len(tokens) - 1
            right += accepted
            wrong += accepted < max(chunk.depths)
            self.metrics.add("spec_drafts_total")
            self.metrics.add("spec_draft_tokens_total", "", len(chunk.ids) - 1)
            for position in range(accepted):
                self.metrics.add("spec_accepted_tokens_total", str(position + 1))
        if right + wrong:
            self.acceptance += SMOOTH * (right / (right + wrong) - self.acceptance)
        # Ticks overlap: what one takes is the time between the ends of two alike, without prompts. Where drafts were
        # wanted and nobody had one, nothing was verified, but nothing overlapped either.
        size, now = (len(plan.rows) + len(plan.verify)).bit_length(), self._clock()
        counts = not plan.chunks and k == plan.drafts
        before, self._before = self._before, (size if counts else 0, k, now)
        if before[:2] == (size, k) and counts:
            taken = now - before[2]
            known = self._seconds.get((size, k), taken)
            self._seconds[size, k] = known + SMOOTH * (min(taken, 4 * known) - known)

    def explain(self) -> dict[str, object]:
        """Return what the choice of k rests on."""
        table = {f"rows < {1 << size}, k {k}": round(1e3 * s, 3) for (size, k), s in sorted(self._seconds.items())}
        return {"k": self.k, "acceptance": round(self.acceptance, 4), "tick_ms": table}
