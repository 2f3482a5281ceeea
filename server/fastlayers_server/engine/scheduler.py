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
from fastlayers_server.engine.request import ENDED, RUNNING, WAITING, Chunk, Request, TickPlan, TickResult, verifying
from fastlayers_server.engine.running import Running

HOLD_SECONDS = 1.0  # how long a request waits for one with the same beginning
SHARED_TOKENS = 32  # ... of at least so many tokens
Drafter = Callable[[Request, int], Sequence[int]]
Logprobs = tuple[TokenLogprobs, ...]
Ending = tuple[str, str, str]  # how a request ended, and of an error its code and message


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
        News for the front since the caller took them, and cleared the list.
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
        self.draining = self._left_out = self._behind = self._deep = False
        self._seq = 0
        self.history: deque[dict[str, object]] = deque(maxlen=256)

    # --- what the front says

    def submit(self, submit: Submit, now: float) -> None:
        """Queue a request, or refuse it."""
        refused = refusal(submit, self.config, self.live, self.draining, self.queue, self.running.free)
        if refused:
            self.metrics.add("rejections_total", refused[0])
            wait = self.queue.retry_after(now) if refused[0] == "queue_full" else 0.0
            self.outputs.append(Output(submit.rid, (), "error", refused[0], refused[1], retry_after=wait))
            return
        ends = frozenset(submit.stop_ids if submit.ignore_eos else (*submit.stop_ids, *self.config.eos_ids))
        self._seq += 1
        priority = submit.priority if self.config.enable_priority else 0
        request = Request(submit, self._seq, unpack_ids(submit.prompt), ends, priority)
        self.live[submit.rid] = request
        self.queue.push(request)

    def end(self, rids: Iterable[int], now: float, finish: str = "abort", code: str = "", message: str = "") -> None:
        """End live requests of these exact rids; with "stop": the front found a stop string; "error": why is said."""
        for request in (self.live[rid] for rid in rids if rid in self.live):
            request.ended_reason = "stop_string"  # where it is nothing worse
            self._end(request, now, (finish, code, message))

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
            self._end(request, now, ("error", "request_timeout", "the deadline passed while waiting"))
        self.ticks += 1
        plan = TickPlan(self.ticks)
        partial = [request for request in self.running.requests if request.kv < request.goal]
        rows = [request for request in self.running.requests if request.decodes]
        drafts = {r: draft(r, r.left - 1) for r in rows if r.may_draft} if draft is not None else {}
        decoding, waiting = len(rows), self.queue.count
        behind = self._backlog(decoding)
        self._deep = behind and (self._deep or waiting > decoding)
        if not behind:
            fits = self.budget.chunk(decoding, waiting, self.config.mixed)
        else:
            fits = self.budget.max_tokens if self._deep else self.budget.whole(decoding)
        budget = limit = max(self.config.piece, fits)
        lengths = {r: r.kv + 1 + len(drafts.get(r, ())) for r in rows}
        for request in partial[: self.config.max_extend_requests]:
            count = self._chunk(request.kv, request.goal, budget)
            if count > 0:
                lengths[request] = request.kv + count
                budget -= count
        victims = self.running.make_room(lengths, plan)
        for request in victims:
            self.queue.push(request)
            self.metrics.add("preemptions_total")
        if not victims:
            self._admit(plan, lengths, partial, budget, now)
        new = sum(length - request.kv for request, length in lengths.items() if request.kv < request.goal)
        whole = behind and 2 * new > limit
        self._behind = whole and self.queue.count > 0
        self._left_out = whole and self._deep and bool(rows) and not (self._left_out or drafts or self.config.piece)
        if self._left_out:
            lengths = {request: length for request, length in lengths.items() if request.kv < request.goal}
        block = self.cache.block
        for request, length in lengths.items():
            if request.kv < request.goal:
                self._plan_chunk(plan, request, length)
            else:
                if drafted := drafts.get(request):
                    plan.verify.append(verifying(request, drafted))
                else:
                    plan.rows.append(request)
                    plan.starts.append(request.kv)
                request.inflight += 1
                request.kv = length  # behind drafts settled at commit, when it is known how many of them count
            if request.kv >= (len(request.path) + 1) * block:
                self.running.publish(request, plan)
        plan.complete(self.config.mixed and not whole and new + len(plan.rows) <= self.config.most_tokens)
        if not plan.empty:  # another one is not launched
            plan.poisoned, self.running.poisoned = self.running.poisoned, []
            plan.pages[:0], self.running.dropped = self.running.dropped, []
            self.history.append(
                {
                    "tick": plan.tick, "rows": len(plan.rows), "extend_tokens": plan.extend_tokens,
                    "chunk_limit": limit, "admitted": [r.rid for r in plan.admitted],
                    "preempted": [r.rid for r in victims], "verified": len(plan.verify), "waiting": self.queue.count,
                }
            )  # fmt: skip
        return plan

    @property
    def backlog(self) -> bool:
        """Whether so many wait that whole steps serve all best; from then on, until one leaves nobody behind.

        If more waited than ran, each second one is of prompts alone: a decode step costs nearly as much for few rows as
        for all, and those of a backlog are not there yet. Prompts that fill no such step, as slots are taken, have the
        rows beside them. Else rows wait for no more than :meth:`Budget.whole` tokens, of a burst or behind a stall.
        """
        return self._backlog(sum(request.decodes for request in self.running.requests))

    def _backlog(self, decoding: int) -> bool:
        return self._behind or self.budget.backlog(decoding, self.queue.count)

    def _chunk(self, start: int, goal: int, budget: int) -> int:
        """Return how many prompt tokens may be computed now: what is left of the budget, or just one whole piece."""
        piece = self.config.piece
        count = min(goal - start, budget, piece or budget)
        return 0 if piece and count < min(goal - start, piece) else count

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
        while budget > 0 and running.free and extends < config.max_extend_requests:
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
                promised = running.promised(running.requests)
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
            promised += running.promised((request,))

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
        submit, tokens = request.submit, request.tokens
        path = self.cache.match(submit.namespace, tokens, len(tokens) - 1, submit.prompt)
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
        for chunk, tokens in zip(plan.verify, result.tokens[len(plan.sampled) - len(plan.verify) :], strict=True):
            self.metrics.add("wasted_tokens_total", "speculation", chunk.samples - len(tokens))
            if chunk.request.state == RUNNING and min(tokens) >= 0:
                # Drafts that were not accepted: later steps write over their positions. Where logits were not finite
                # the request ends, and all its pages are in doubt.
                chunk.request.kv = chunk.start + len(tokens)
                self.running.shrink(chunk.request)
        told, logprobs_of = range(len(plan.rows), len(plan.rows) + plan.early), result.logprobs
        for index, (request, tokens) in enumerate(zip(plan.sampled, result.tokens, strict=True)):
            if index not in told:
                self._commit_one(request, tokens, logprobs_of.get(index), now)

    def _commit_one(self, request: Request, tokens: list[int], logprobs: TokenLogprobs | None, now: float) -> None:
        if request.state == ENDED:
            self.metrics.add("wasted_tokens_total", request.ended_reason, len(tokens))
            if min(tokens) < 0:  # it told all that it had to, but the row in flight may be among what is cached
                self.running.doubt(request)
            return
        request.inflight -= 1
        finish, taken = "", 0
        if request.replay and min(tokens) >= 0:
            self._replayed(request, tokens, now)
            return
        for token in tokens:
            if token < 0:  # the logits were not finite
                self.metrics.add("nonfinite_rows_total")
                self.metrics.add("wasted_tokens_total", "error", taken)
                message = f"request {request.rid}: the model's logits are not finite"
                self._end(request, now, ("error", "nonfinite_logits", message), forget=True)
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
            self._end(request, now, (finish, "", ""), tuple(tokens[:taken]), told)
        else:
            self._tell(request, tuple(tokens), told)

    def _replayed(self, request: Request, tokens: list[int], now: float) -> None:
        """Take tokens that were told before; that they are the same is what deterministic mode promises."""
        told = request.replay[: len(tokens)]
        del request.replay[: len(tokens)]
        self.metrics.add("wasted_tokens_total", "replay", len(tokens))
        request.tokens += tokens
        if tokens != told:
            message = f"request {request.rid}: computed again, it says other tokens"
            self._end(request, now, ("error", "internal_error", message))

    def _tell(self, request: Request, ids: tuple[int, ...], logprobs: Logprobs, end: Ending = ("", "", "")) -> None:
        """Tell new tokens, and the end of a request that has ended."""
        prompt: Logprobs = ()
        cached = -1
        if ids and not request.told:  # once, with the first tokens
            cached, prompt, request.told = request.cached, tuple(request.prompt_logprobs), True
        self.outputs.append(Output(request.submit.rid, ids, *end, cached, logprobs, prompt))

    def _end(
        self, request: Request, now: float, end: Ending, ids: tuple[int, ...] = (), told: Logprobs = (),
        forget: bool = False,
    ) -> None:  # fmt: skip
        """End a request in whatever state it is: its pages and its slot are free at once, its one last word is said."""
        finish = end[0]
        if finish in ("abort", "error"):
            request.ended_reason = finish
        if request.state == RUNNING:
            self.running.leave(request, forget=forget)
        else:
            self.queue.remove(request)
            request.state = ENDED
            if forget:  # it was preempted while the row was in flight
                self.running.doubt(request)
        del self.live[request.rid]
        self._tell(request, ids, told, end)
        self.queue.ends.append(now)
        self.metrics.add("requests_total", finish)
        if request.first_at:
            self.metrics.observe("decode_seconds", now - request.first_at)

    @property
    def idle(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return not self.live
