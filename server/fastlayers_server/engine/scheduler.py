"""The scheduler: what each tick launches, and what its tokens mean. Pure Python over integers; no torch, no clock.

    submit ─► queue ─► admit ─► chunks of the prompt ─► rows that decode ─► end
                 ▲───────────── preempt ─────────────────┘

``plan`` may be called before the tokens of the last plan are known: it counts on lengths only. A request that turns
out to have ended was then launched once too often; that token is wasted, never told. Ends that are certain beforehand
are not launched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from fastlayers_server.engine.budget import Budget
from fastlayers_server.engine.cache import Node, PrefixCache
from fastlayers_server.engine.checks import refusal
from fastlayers_server.engine.config import SchedulerConfig
from fastlayers_server.engine.metrics import Metrics
from fastlayers_server.engine.protocol import Output, Submit, TokenLogprobs, unpack_ids
from fastlayers_server.engine.queue import WaitingQueue
from fastlayers_server.engine.request import ENDED, RUNNING, WAITING, Chunk, Request, TickPlan, TickResult, Tree
from fastlayers_server.engine.running import Running

HOLD_SECONDS = 1.0  # how long a request waits for one with the same beginning
SHARED_TOKENS = 32  # ... of at least so many tokens
Drafter = Callable[[Request, int], Sequence[int]]


class Scheduler:
    """The state of everything that was submitted.

    Parameters
    ----------
    config : SchedulerConfig
    budget : Budget, optional
        Which chunk fits beside decoding rows.

    Attributes
    ----------
    outputs : list of Output
        News for the front since the caller took them last.
    """

    def __init__(self, config: SchedulerConfig, budget: Budget | None = None) -> None:
        self.config = config
        self.cache = PrefixCache(config.num_pages, config.page_size, config.prefix_cache)
        if self.cache.pages_for(config.max_model_len) > config.num_pages - 1:
            raise ValueError(
                f"the cache of {config.num_pages - 1} pages of {config.page_size} tokens does not hold one request of "
                f"max_model_len {config.max_model_len}"
            )
        if config.piece % self.cache.block or config.piece > config.max_batched_tokens:
            accepted = f"a multiple of {self.cache.block}, at most max_batched_tokens {config.max_batched_tokens}"
            raise ValueError(f"piece is {config.piece}; accepted: 0, or {accepted}")
        self.budget = budget or Budget(config.max_batched_tokens, config.itl_target)
        self.queue = WaitingQueue(self._cached_tokens if config.policy == "lpm" else None)
        self.live: dict[int, Request] = {}
        self.running = Running(config, self.cache)
        self.outputs: list[Output] = []
        self.metrics = Metrics()
        self.ticks = 0
        self.draining = self._left_out = False
        self._seq = 0
        self._ends: deque[float] = deque(maxlen=64)
        self._eos = frozenset(config.eos_ids)
        self.history: deque[dict[str, object]] = deque(maxlen=256)

    # --- what the front says

    def submit(self, submit: Submit, now: float) -> None:
        """Queue a request, or refuse it."""
        refused = refusal(submit, self.config, self.live, self.draining, self.queue)
        if refused:
            self.metrics.add("rejections_total", refused[0])
            wait = self._retry_after(now) if refused[0] == "queue_full" else 0.0
            self.outputs.append(Output(submit.rid, (), "error", refused[0], refused[1], retry_after=wait))
            return
        ends = frozenset(submit.stop_ids) | (frozenset() if submit.ignore_eos else self._eos)
        self._seq += 1
        priority = submit.priority if self.config.enable_priority else 0
        request = Request(submit, self._seq, unpack_ids(submit.prompt), ends, priority)
        self.live[submit.rid] = request
        self.queue.push(request)

    def _retry_after(self, now: float) -> float:
        ends = self._ends
        rate = len(ends) / max(now - ends[0], 1e-3) if ends else 1.0
        return min(60.0, max(1.0, self.queue.count / rate))

    def abort(self, rids: Iterable[int], now: float) -> None:
        """End live requests of these exact rids."""
        for rid in rids:
            request = self.live.get(rid)
            if request is not None:
                request.ended_reason = "abort"
                self._end(request, "abort", now)

    def finish(self, rid: int, kept: int, now: float) -> None:
        """End a request in whose text the front found a stop string after ``kept`` tokens."""
        request = self.live.get(rid)
        if request is not None:
            request.ended_reason = "stop_string"
            self._end(request, "stop", now)

    def fail(self, rid: int, code: str, message: str, now: float) -> None:
        """End a live request with an error."""
        request = self.live.get(rid)
        if request is not None:
            self._end(request, "error", now, code=code, message=message)

    # --- a tick

    def plan(self, now: float, draft: Drafter | None = None) -> TickPlan:
        """Decide what the next tick launches; the caller launches it, whatever it is, in the order of these calls.

        Parameters
        ----------
        now : float
            Monotonic seconds.
        draft : callable, optional
            ``draft(request, limit)``: tokens that may come next, to be verified. All launched tokens are known then.
        """
        for request in self.queue.expired(now):
            self._end(request, "error", now, code="request_timeout", message="the deadline passed while waiting")
        self.ticks += 1
        plan = TickPlan(self.ticks)
        plan.poisoned, self.running.poisoned = self.running.poisoned, []
        rows, partial = [], []
        for request in self.running.requests:
            if request.kv < request.goal:
                partial.append(request)
            elif request.end > len(request.tokens) + request.inflight:
                rows.append(request)
        drafts = {r: draft(r, r.left - 1) for r in rows if self._may_draft(r)} if draft is not None else {}
        budget = limit = max(self.config.piece, self.budget.chunk(len(rows), self.queue.count))
        lengths = {r: r.kv + 1 for r in rows}
        for request, ids in drafts.items():
            lengths[request] += len(ids)
        for request in partial[: self.config.max_extend_requests]:
            count = self._chunk(request.kv, request.goal, budget)
            if count > 0:
                lengths[request] = request.kv + count
                budget -= count
        victims, size = self.running.make_room(lengths), self.config.page_size
        for request, length in lengths.items():
            if length > len(request.pages) * size:
                self.running.grow(request, length, plan)
        for request in victims:
            self.queue.push_front(request)
            self.metrics.add("preemptions_total")
        if not victims:
            self._admit(plan, lengths, partial, budget, now)
        self._left_out = self._may_leave_out(rows, drafts, lengths, limit)
        if self._left_out:
            for request in rows:
                lengths.pop(request, None)
        block = self.cache.block
        for request, length in lengths.items():
            if request.kv < request.goal:
                self._plan_chunk(plan, request, length)
            elif drafted := drafts.get(request):
                self._plan_drafts(plan, request, drafted)
            else:
                plan.rows.append(request)
                plan.starts.append(request.kv)
                request.inflight += 1
                request.kv = length
            if request.kv >= (len(request.path) + 1) * block:
                self.running.publish(request, plan)
        plan.complete()
        if not plan.empty:
            self.history.append(
                {
                    "tick": plan.tick, "rows": len(plan.rows), "extend_tokens": plan.extend_tokens,
                    "chunk_limit": limit, "admitted": [r.rid for r in plan.admitted],
                    "preempted": [r.rid for r in victims], "verified": len(plan.verify), "waiting": self.queue.count,
                }
            )  # fmt: skip
        return plan

    def _may_leave_out(
        self, rows: list[Request], drafts: dict[Request, Sequence[int]], lengths: dict[Request, int], limit: int
    ) -> bool:
        """Whether rows wait for the next tick: with a backlog each second whole step is one of prompts alone.

        A decode step costs nearly as much for few rows as for all, and those of a backlog are not there yet.
        """
        if self._left_out or drafts or self.config.piece or not self.budget.backlog(len(rows), self.queue.count):
            return False
        decoding = set(rows)
        new = sum(length - request.kv for request, length in lengths.items() if request not in decoding)
        return 2 * new > limit

    def _chunk(self, start: int, goal: int, budget: int) -> int:
        """Return how many prompt tokens may be computed now: what is left of the budget, or just one whole piece."""
        piece = self.config.piece
        count = min(goal - start, budget, piece or budget)
        return 0 if piece and count < min(goal - start, piece) else count

    @staticmethod
    def _may_draft(request: Request) -> bool:
        enough = request.drawn >= request.submit.min_new_tokens
        return request.left > 1 and not request.inflight and not request.general and enough

    @staticmethod
    def _plan_drafts(plan: TickPlan, request: Request, draft: Sequence[int]) -> None:
        start, ids = request.kv, [request.tokens[-1], *draft]
        parents = [-1, *(parent + 1 for parent in draft.parents)] if isinstance(draft, Tree) else ()
        plan.verify.append(Chunk(request, start, ids, len(ids), parents))
        request.inflight += 1
        request.kv = start + len(ids)  # settled at commit, when it is known how many of the drafts count

    def _plan_chunk(self, plan: TickPlan, request: Request, end: int) -> None:
        start = request.kv
        last = end == request.goal
        plan.chunks.append(Chunk(request, start, request.tokens[start:end], int(last)))
        request.kv = end
        request.inflight += int(last)
        prompt_end = min(end, request.prompt_len)
        fresh = max(0, prompt_end - max(start, request.high))
        self.metrics.add("prompt_tokens_total", "computed", fresh)
        self.metrics.add("prompt_tokens_total", "recomputed", end - start - fresh)
        request.high = max(request.high, prompt_end)

    # --- admission

    def _admit(
        self, plan: TickPlan, lengths: dict[Request, int], partial: list[Request], budget: int, now: float
    ) -> None:
        """Give slots to waiting requests while there is room for their whole prompts and what all may yet need."""
        config, running = self.config, self.running
        extends = sum(request in lengths for request in partial)
        unfinished = sum(lengths.get(request, 0) < request.goal for request in partial)
        promised = -1
        while budget > 0 and not running.full and extends < config.max_extend_requests:
            request = self.queue.head()
            if request is None or request.inflight or self._held(request, now):
                return
            if config.piece:
                request.rewind()
            path = self._hit(request)
            hit, length = len(path) * self.cache.block, len(request.tokens)
            count = self._chunk(hit, length, budget)
            if not count or (count < length - hit and unfinished >= config.max_partial_prefills):
                return
            if promised < 0:
                promised = running.promised_to_all()
            if not running.fits(request, path, promised):
                return
            self.queue.take(request)
            running.enter(plan, request, path)
            self._account(request, now)
            lengths[request] = hit + count
            running.grow(request, lengths[request], plan)
            budget -= count
            extends += 1
            unfinished += lengths[request] < length
            promised += running.promised(request)

    def _account(self, request: Request, now: float) -> None:
        """Count what an admission found in the cache; a resumed request's own blocks are no hit."""
        found = min(request.kv, request.prompt_len)
        self.metrics.add("prompt_tokens_total", "cached", max(0, found - request.high))
        request.high = max(request.high, found)
        if request.cached < 0:
            request.cached, request.admitted_at = request.kv, now
            self.metrics.add("prefix_queries_total", "", request.prompt_len)
            self.metrics.add("prefix_hits_total", "", request.kv)
            self.metrics.observe("queue_seconds", now - request.submit.arrival)

    def _hit(self, request: Request) -> list[Node]:
        if request.submit.prompt_logprobs >= 0 and (self.config.piece or not request.told):
            return []
        path = self.cache.match(request.submit.namespace, request.tokens, len(request.tokens) - 1)
        if piece := self.config.piece:
            del path[len(path) * self.cache.block // piece * piece // self.cache.block :]
        return path[:-1] if self.config.drop_last_block else path

    def _cached_tokens(self, request: Request) -> int:
        return len(self._hit(request)) * self.cache.block

    def _held(self, request: Request, now: float) -> bool:
        """Whether a request waits for another one's prompt to be cached first; a second at most."""
        if not self.config.prefix_cache or (request.held_since and now - request.held_since > HOLD_SECONDS):
            return False
        leader = self.live.get(request.submit.group) if request.submit.group else None
        held = leader is not None and leader is not request and (leader.state == WAITING or leader.kv < leader.goal)
        prefilling = [r for r in self.running.requests if r.kv < r.goal]
        if not held and prefilling:
            need = -(-SHARED_TOKENS // self.cache.block) * self.cache.block
            end = self._cached_tokens(request) + need
            mine, namespace = request.tokens[:end], request.submit.namespace
            held = end < len(request.tokens) and any(
                r.submit.namespace == namespace and r.tokens[:end] == mine for r in prefilling
            )
        if held and not request.held_since:
            request.held_since = now
        return held

    # --- what came of a tick

    def commit_prompts(self, plan: TickPlan, tokens: Sequence[list[int]], now: float) -> None:
        """Take the first tokens of prompts before :meth:`commit` brings the rest of their plan."""
        for request, drawn in zip(plan.sampled[len(plan.rows) :], tokens, strict=False):
            plan.early += 1
            self._commit_one(request, drawn, None, now)

    def commit(self, plan: TickPlan, result: TickResult, now: float) -> None:
        """Take the tokens of a launched plan; plans are committed in the order of their launch."""
        for request, start, logprobs in result.prompt_logprobs:
            have = len(request.prompt_logprobs)
            if start <= have:  # after a preemption the prompt is computed again
                request.prompt_logprobs += logprobs[have - start :]
        verified, told = len(plan.sampled) - len(plan.verify), range(len(plan.rows), len(plan.rows) + plan.early)
        logprobs_of = result.logprobs
        for index, (request, tokens) in enumerate(zip(plan.sampled, result.tokens, strict=True)):
            if index in told:
                continue
            chunk = plan.verify[index - verified] if index >= verified else None
            if chunk is not None:
                self.metrics.add("wasted_tokens_total", "speculation", chunk.samples - len(tokens))
                if request.state == RUNNING:
                    # Drafts that were not accepted: later steps write over their positions.
                    request.kv = chunk.start + len(tokens)
                    self.running.shrink(request)
            self._commit_one(request, tokens, logprobs_of.get(index), now)

    def _commit_one(self, request: Request, tokens: list[int], logprobs: TokenLogprobs | None, now: float) -> None:
        if request.state == ENDED:
            self.metrics.add("wasted_tokens_total", request.ended_reason, len(tokens))
            return
        request.inflight -= 1
        self._take_tokens(request, tokens, logprobs, now)

    def _take_tokens(self, request: Request, tokens: list[int], logprobs: TokenLogprobs | None, now: float) -> None:
        finish, taken = "", 0
        if request.replay and min(tokens) >= 0:
            self._replayed(request, tokens, now)
            return
        for token in tokens:
            if token < 0:  # the logits were not finite
                self.metrics.add("nonfinite_rows_total")
                self.metrics.add("wasted_tokens_total", "error", taken)
                message = f"request {request.rid}: the model's logits are not finite"
                self._end(request, "error", now, code="nonfinite_logits", message=message, forget=True)
                return
            request.tokens.append(token)
            taken += 1
            drawn = len(request.tokens) - request.prompt_len
            if token in request.ends and drawn >= request.submit.min_new_tokens:
                finish = "stop"
                break
            if drawn >= request.submit.max_new_tokens:
                finish = "length"
                break
        self.metrics.add("generation_tokens_total", "", taken)
        self.metrics.add("wasted_tokens_total", "overlap", len(tokens) - taken)
        if not request.told:
            request.first_at = now
            self.metrics.observe("prefill_seconds", now - request.admitted_at)
        told = (logprobs,) if logprobs is not None else ()
        if finish:
            self._end(request, finish, now, tuple(tokens[:taken]), logprobs=told)
            return
        self.outputs.append(self._news(request, tuple(tokens), told))

    def _replayed(self, request: Request, tokens: list[int], now: float) -> None:
        """Take tokens that were told before; that they are the same is what deterministic mode promises."""
        told = request.replay[: len(tokens)]
        del request.replay[: len(tokens)]
        self.metrics.add("wasted_tokens_total", "replay", len(tokens))
        request.tokens += tokens
        if tokens != told:
            message = f"request {request.rid}: computed again, it says other tokens"
            self._end(request, "error", now, code="internal_error", message=message)

    def _news(
        self, request: Request, ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...] = (), finish: str = ""
    ) -> Output:
        if request.told and not finish:
            return Output(request.submit.rid, ids, logprobs=logprobs)
        cached = -1 if request.told or not ids else request.cached
        prompt = () if request.told or not ids else tuple(request.prompt_logprobs)
        request.told |= bool(ids)
        return Output(request.rid, ids, finish, cached_tokens=cached, logprobs=logprobs, prompt_logprobs=prompt)

    def _end(
        self,
        request: Request,
        finish: str,
        now: float,
        ids: tuple[int, ...] = (),
        *,
        logprobs: tuple[TokenLogprobs, ...] = (),
        code: str = "",
        message: str = "",
        forget: bool = False,
    ) -> None:
        """End a request in whatever state it is: its pages and its slot are free at once, its one last word is said."""
        if finish == "error":
            request.ended_reason = "error"
        if request.state == RUNNING:
            self.running.leave(request, forget=forget)
        else:
            self.queue.remove(request)
            request.state = ENDED
        del self.live[request.rid]
        told = self._news(request, ids, logprobs, finish)
        first, admitted = request.first_at or now, request.admitted_at or now
        self.outputs.append(
            Output(
                told.rid, ids, finish, code, message, told.cached_tokens, logprobs, told.prompt_logprobs,
                admitted - request.submit.arrival, first - admitted, now - first,
            )
        )  # fmt: skip
        self._ends.append(now)
        self.metrics.add("requests_total", finish)
        if request.first_at:
            self.metrics.observe("decode_seconds", now - first)

    def end_all(self, code: str, message: str, now: float) -> None:
        """End everything that lives with an error."""
        for request in list(self.live.values()):
            self._end(request, "error", now, code=code, message=message)

    @property
    def idle(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return not self.live
