"""Who holds slots and pages: they grow by what a tick writes, and where pages run out somebody leaves."""

from __future__ import annotations

import math
from collections.abc import Iterable

from fastlayers_server.engine.cache import Node, PrefixCache
from fastlayers_server.engine.config import SchedulerConfig
from fastlayers_server.engine.request import ENDED, RUNNING, WAITING, Request, TickPlan

FAR = 4096  # an estimate of a request's output looks no further
RATIO_START, RATIO_END, RATIO_STEPS = 0.7, 0.098, 600  # the share of it that is expected


class Running:
    """The requests with a slot, in the order of their admission.

    Parameters
    ----------
    config : SchedulerConfig
    cache : PrefixCache
    """

    def __init__(self, config: SchedulerConfig, cache: PrefixCache) -> None:
        self.config, self.cache = config, cache
        self.requests: dict[Request, None] = {}
        self.poisoned: list[int] = []
        self.dropped: list[tuple[int, int, int]] = []  # entries of page tables to clear, as of ``TickPlan.pages``
        self._slots = list(range(config.max_running, 0, -1))
        self._ratio = RATIO_START

    @property
    def free(self) -> int:
        """How many slots are free."""
        return len(self._slots)

    def enter(self, plan: TickPlan, request: Request, path: list[Node]) -> None:
        """Give a slot to a request whose beginning is cached in ``path``."""
        self.cache.lock(path)
        request.path = list(path)
        request.pages = [page for node in path for page in node.pages]
        request.slot, request.state, request.goal = self._slots.pop(), RUNNING, len(request.tokens)
        request.kv = len(path) * self.cache.block
        self.requests[request] = None
        plan.admitted.append(request)
        plan.pages += [(request.slot, column, page) for column, page in enumerate(request.pages)]

    def leave(self, request: Request, *, forget: bool = False) -> None:
        """Take a request's slot and pages; what is published stays cached, unless its contents are in doubt."""
        if not forget:
            self.publish(request)
        freed = self.cache.release(request.path, request.pages, forget)
        if forget:
            self.poisoned += freed
        del self.requests[request]
        self._slots.append(request.slot)
        request.slot, request.state = 0, ENDED

    def doubt(self, request: Request) -> None:
        """Forget the blocks that a request without a slot left in the cache and nobody uses: see :meth:`leave`."""
        path = self.cache.match(request.submit.namespace, request.tokens, len(request.tokens))
        self.cache.lock(path)
        self.poisoned += self.cache.release(path, [], forget=True)

    def publish(self, request: Request, plan: TickPlan | None = None) -> None:
        """Remember the blocks whose tokens are known and whose rows are launched, if there are new ones."""
        known = min(request.kv, len(request.tokens))
        if piece := self.config.piece:
            # A request that asks for its prompt's log-probabilities computes it by another step, uncaptured.
            known = min(known, request.prompt_len) // piece * piece * (request.submit.prompt_logprobs < 0)
        blocks = known // self.cache.block
        if blocks > len(request.path):
            namespace = request.submit.namespace
            changed = self.cache.publish(namespace, request.path, request.tokens, request.pages, blocks)
            if plan is not None:
                plan.pages += [(request.slot, column, request.pages[column]) for column in changed]

    def grow(self, request: Request, length: int, plan: TickPlan) -> None:
        """Give a request the pages that so many tokens need; they are available."""
        pages = request.pages
        missing = self.cache.pages_for(length) - len(pages)
        if missing > 0:
            for page in self.cache.take(missing):
                plan.pages.append((request.slot, len(pages), page))
                pages.append(page)

    def shrink(self, request: Request) -> None:
        """Take back the pages behind a request's last position."""
        keep = self.cache.pages_for(request.kv)
        self.cache.give_back(request.pages[keep:])
        self.dropped += [(request.slot, column, 0) for column in range(keep, len(request.pages))]
        del request.pages[keep:]

    def make_room(self, lengths: dict[Request, int], plan: TickPlan) -> list[Request]:
        """Let everybody grow to ``lengths``; whoever must be preempted for that is taken from them, and returned."""
        size, wanted = self.config.page_size, {}
        for request, length in lengths.items():
            if length > len(request.pages) * size:
                wanted[request] = self.cache.pages_for(length) - len(request.pages)
        needed, victims = sum(wanted.values()), []
        while needed > self.cache.available:
            victim = self._victim()
            needed -= wanted.pop(victim, 0)
            lengths.pop(victim, None)
            self.leave(victim)
            victim.state, victim.kv, victim.goal = WAITING, 0, 0
            victims.append(victim)
        for request in wanted:
            self.grow(request, lengths[request], plan)
        self._ratio = RATIO_START if victims else max(RATIO_END, self._ratio - (RATIO_START - RATIO_END) / RATIO_STEPS)
        return victims

    def _victim(self) -> Request:
        """Return who loses least, of the lowest class; never the oldest of the highest, so that somebody proceeds."""
        oldest = min(self.requests, key=lambda r: (r.priority, r.seq))
        others = (request for request in self.requests if request is not oldest)
        return min(others, key=lambda r: (-r.priority, self._own_work(r), -r.seq))

    def _own_work(self, request: Request) -> int:
        """Return how many computed tokens of a request nobody else uses."""
        return request.kv - self.cache.block * sum(node.users > 1 for node in request.path)

    def promised(self, requests: Iterable[Request]) -> int:
        """Return the pages that these will probably still take, as far as can be guessed; of their prompts in full."""
        ratio, size, most, total = self._ratio, self.config.page_size, self.config.max_model_len, 0
        for request in requests:  # in one loop, as every tick that admits asks for all
            known = len(request.tokens) + request.inflight
            length = max(request.goal, known)
            more = max(1, math.ceil(min(request.end - known, FAR) * ratio))
            total += max(0, -(-min(length + more, most) // size) - len(request.pages))
        return total

    def fits(self, request: Request, path: list[Node], promised: int) -> bool:
        """Whether a request may enter beside those who run, to whom ``promised`` pages are promised."""
        cache = self.cache
        available = cache.available - cache.evictable_in(path)
        held = len(path) * cache.pages_per_block
        if not self.requests:  # alone, it fits: the cache holds one request of any length
            return cache.pages_for(len(request.tokens) + 1) - held <= available
        # Until the tick is planned each of them, the new one too, may come to expect a page more.
        watermark = max(self.config.num_pages // 100, len(self.requests) + 1)
        return self.promised((request,)) - held + promised + watermark <= available
