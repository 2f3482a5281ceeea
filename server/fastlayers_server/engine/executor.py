"""Plans on a model: :class:`TorchExecutor`, one decode step and one extend a tick or both in one, captured on a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import count, repeat
from pathlib import Path
from typing import Any

import torch

import fastlayers as fl
from fastlayers.attention.buckets import TOKENS, ExtendBuckets
from fastlayers.attention.meta import AttentionState
from fastlayers.runtime.compile_log import CompileWatch
from fastlayers.runtime.graphs import CudaGraphs
from fastlayers.sampler.layer import Sampler, SamplingParams
from fastlayers_models.rows import Outbox, Pending, Row, waits_of
from fastlayers_models.step import StepKey
from fastlayers_server.engine.config import SchedulerConfig
from fastlayers_server.engine.mtp import ModelDrafts, MTPDrafts
from fastlayers_server.engine.protocol import TokenLogprobs
from fastlayers_server.engine.request import Chunk, Request, TickPlan, TickResult
from fastlayers_server.engine.special import Special, SpecialDraws, Telling
from fastlayers_server.engine.step import ALL, DECODES, GREEDY, LOGITS, PASSED, TREE, VERIFY, SlotStep, on_device

# Requests of a captured extend, besides as many as may run where these are part of it: few, for the graphs' number.
REQUESTS = (1, 8, 32)
# Larger ones have sizes between two powers, so that a third of padding at most leaves no extend up to the largest
# uncaptured: launching one takes the host longer than the decode step does that hides it. Most are of one and of two
# usual prompts beside up to 192 or 256 rows: each token of padding is time that all of them wait.
BETWEEN, PADDING = (704, 768, 1216, 1280, 1536), 1 / 3
# Of steps that verify: a token and three drafts of one request are not padded to what prompts begin with.
DRAFTED = (4, 8)


class Held:
    """Logits to draw from: whose, and where they stand among ``plan.sampled``.

    Rows of the table are noted now: by the time of the draw a request may have ended, and given its slot back.
    """

    def __init__(
        self, first: int, logits: torch.Tensor, requests: Sequence[Request], special: Special, of_chunks: bool
    ) -> None:
        self.first, self.logits, self.special, self.of_chunks = first, logits, special, of_chunks
        self.rows = [request.slot - 1 for request in requests]
        self.mode = GREEDY if _greedy(requests) else "filtered"


class TorchStep:
    """A launched plan: tokens and log-probabilities on their way to the host."""

    def __init__(self, executor: TorchExecutor, plan: TickPlan) -> None:
        self._executor, self._plan = executor, plan
        self.rows: Pending | None = None
        self.chunks: Pending | None = None
        self.verified: Pending | None = None
        self.held: list[Held] = []
        self.telling: list[tuple[list[int], Telling]] = []  # by places among ``plan.sampled``
        self.prompts: list[tuple[Chunk, list[Telling]]] = []
        self.told: torch.cuda.Event | None = None  # when log-probabilities have arrived

    def sample(self, masks: Any = None) -> None:
        """Draw from the logits that were held back."""
        self._executor.draw_held(self, masks)

    def first(self) -> list[list[int]]:
        """Wait for the first tokens of prompts; see :class:`fastlayers_server.engine.loop.Step`."""
        if self.chunks is None or self.telling or self.prompts:
            return []
        return [[token] for token in self.chunks.tokens()]

    def done(self) -> bool:
        """Whether all tokens are there."""
        return all(each.arrived() for each in (self.rows, self.chunks, self.verified) if each is not None)

    def result(self) -> TickResult:
        """Wait for the tokens."""
        plan = self._plan
        tokens = [[token] for drawn in (self.rows, self.chunks) if drawn is not None for token in drawn.tokens()]
        if self.verified is not None:
            drawn = self.verified.tokens()
            for chunk in plan.verify:
                mine, drawn = drawn[: len(chunk.ids)], drawn[len(chunk.ids) :]
                tokens.append([token for token in mine if token != PASSED])
        if self.told is not None:
            self.told.synchronize()
        logprobs: dict[int, TokenLogprobs] = {}
        for places, telling in self.telling:
            logprobs |= zip(places, telling.rows(), strict=True)
        prompts = [
            (chunk.request, chunk.start, [entry for part in parts for entry in part.rows()])
            for chunk, parts in self.prompts
        ]
        return TickResult(tokens, logprobs, prompts)


class TorchExecutor:
    """Computes plans with a model of ``fastlayers_models``.

    Parameters
    ----------
    model : CausalLM
    config : SchedulerConfig
    cuda_graph : "auto" or bool
    graphs : CudaGraphs, optional
        See :class:`fastlayers_models.step.ModelStep`.
    extend_buckets : ExtendBuckets, optional
    verify_each : int
        Most tokens of one request in a step that verifies drafts; 0: there are none.
    mtp : int
        The model's own layer, or another model, drafts so many tokens of each depth; 0: neither does.
    draft_model : CausalLM, optional
    rejection : bool
        Draw its drafts, and verify them by rejection.
    profile_folder : Path, optional
        Where profiles are written; without it there are none.
    """

    step_class: type[SlotStep] = SlotStep

    def __init__(
        self,
        model: Any,
        config: SchedulerConfig,
        *,
        cuda_graph: bool | str = "auto",
        graphs: CudaGraphs | None = None,
        extend_buckets: ExtendBuckets | None = None,
        verify_each: int = 0,
        mtp: int = 0,
        draft_model: Any = None,
        rejection: bool = False,
        profile_folder: Path | None = None,
    ) -> None:
        self.model, self.config, self.profile_folder = model, config, profile_folder
        device, running = model.device, config.max_running
        spec = fl.kv_cache_spec(model, page_size=config.page_size, dtype=model.kv_dtype)
        self.caches = spec.allocate(config.num_pages, device)
        pages = -(-config.max_model_len // config.page_size)
        sampler = Sampler(model.config.vocab_size, device=device)
        self.verify_tokens = running * verify_each
        tokens = max(config.most_tokens, self.verify_tokens)
        if extend_buckets is None:
            most = getattr(model, "captured_tokens", None) or TOKENS[-1]
            all_sizes = (*DRAFTED, *TOKENS, *BETWEEN) if verify_each else (*TOKENS, *BETWEEN)
            sizes = sorted(size for size in all_sizes if size <= most)
            requests = tuple(sorted({*REQUESTS, *[running] * config.mixed}))
            extend_buckets = ExtendBuckets(tuple(sizes), requests, PADDING, many=REQUESTS[-1])
        if graphs is None and cuda_graph and device.type == "cuda":
            # One run before a capture, not two: every layer ran in these sizes before.
            graphs = CudaGraphs(device, warm_ups=1)

        def step(most: int, graphs: CudaGraphs | None) -> SlotStep:
            state = AttentionState(running, most, pages, config.page_size, device)
            return self.step_class(
                model, self.caches, state, sampler, config.num_pages, cuda_graph=cuda_graph,
                graphs=graphs, extend_buckets=extend_buckets, verify_each=verify_each,
                keep_hidden=mtp > 0 and draft_model is None,
            )  # fmt: skip

        self.decoding = step(running, graphs)
        self.extending = step(tokens, self.decoding.graphs if graphs is None else graphs)
        self.extending.table, self.extending.weights = self.decoding.table, self.decoding.weights
        self.extending.pages = self.decoding.pages
        self.special = SpecialDraws(sampler, self.decoding.table, config.max_model_len)
        # Two ticks are in flight at most, and each of these has room for four.
        late, watch = waits_of(model, device)
        self._rows_out, self._chunks_out = (Outbox(running, device, late, watch) for _ in range(2))
        self._verify_out = Outbox(max(1, self.verify_tokens), device, late, watch)
        self._profiler: Any = None
        self.watch: CompileWatch | None = None
        self.start: list[tuple[str, float]] = []  # what the start spent its seconds on, for :meth:`explain`
        self._chosen, self.rule = [], ALL if rejection else VERIFY  # type: list[dict[str, Any]], str
        draws = (sampler, self.decoding.table) if rejection else None
        self.mtp: MTPDrafts | None = None
        if mtp and draft_model is None:
            self.mtp = MTPDrafts(model, self.caches[model.config.num_hidden_layers], config, draws, mtp)
        elif mtp:
            spec = fl.kv_cache_spec(draft_model, page_size=config.page_size, dtype=draft_model.kv_dtype)
            self.mtp = ModelDrafts(draft_model, spec.allocate(config.num_pages, device), config, draws, mtp)

    # --- a tick

    @torch.inference_mode()
    def launch(self, plan: TickPlan) -> TorchStep:
        """Begin a plan's work, see :class:`fastlayers_server.engine.loop.Executor`."""
        self.decoding.begin()
        if plan.poisoned:
            pages = on_device(plan.poisoned, self.model.device)
            for part in (part for cache in self.caches for part in (cache.keys, cache.values) if part is not None):
                part.index_fill_(0, pages, 0)
        self.decoding.turn_pages(plan)
        self._admit(plan.admitted, plan.chunks)
        step = TorchStep(self, plan)
        alone = self.config.piece > 0
        place = len(plan.rows)
        for chunks in [[chunk] for chunk in plan.chunks] if alone else [plan.chunks] * self.extends(plan):
            place = self._launch_chunks(plan, step, chunks, place)
            self._note(self.extending, ((c.request, c.start, len(c.ids)) for c in chunks))
        if not plan.masked:
            self.draw_held(step, None)  # before the rows: a prompt's first token does not wait for them
        if plan.verify:
            total = sum(len(chunk.ids) for chunk in plan.verify)
            drawn, _ = self.extending.extend_chunks(plan.verify, self.rule)
            if self.rule == ALL and self.mtp is not None:
                drawn = self.extending.reject(drawn[:total], self.mtp.proposed(plan.verify))
            step.verified = self._verify_out.send(drawn[:total])
            self._note(self.extending, ((c.request, c.start, len(c.ids)) for c in plan.verify))
        if self.decodes(plan):  # last: held logits stay in the graph's own memory until the next one is replayed
            size = 1 if alone else max(1, len(plan.rows))
            for place in range(0, max(1, len(plan.rows)), size):
                rows, starts = plan.rows[place : place + size], plan.starts[place : place + size]
                special = _within(plan, place, size)
                if alone or special or not _greedy(rows):
                    logits = self.decoding.decode(rows, starts, LOGITS)
                    step.held.append(Held(place, logits.clone() if alone else logits, rows, special, False))
                else:
                    step.rows = self._rows_out.send(self.decoding.decode(rows, starts, GREEDY))
            self._note(self.decoding, zip(plan.rows, plan.starts, repeat(1)))
        if not plan.masked:
            self.draw_held(step, None)
        return step

    def extends(self, plan: TickPlan) -> bool:
        """Whether a plan's tick extends."""
        return bool(plan.chunks)

    def decodes(self, plan: TickPlan) -> bool:
        """Whether a plan's tick decodes in a step of its own."""
        return bool(plan.rows) and not plan.mixed

    def _note(self, step: SlotStep, spans: Iterable[tuple[Request, int, int]]) -> None:
        """Let the draft layer have the hidden rows of what was just launched: whose, from where on, how many."""
        if self.mtp is not None and self.mtp.active and step.keep_hidden:
            launched = list(spans)
            lengths = [count for _, _, count in launched]
            for (request, start, _), rows in zip(launched, step.take_hidden(sum(lengths)).split(lengths), strict=True):
                self.mtp.note(request, start, rows)

    def _admit(self, admitted: Sequence[Request], chunks: Sequence[Chunk]) -> None:
        if not admitted:
            return
        rows = {}
        for request in admitted:
            s = request.submit.sampling
            params = SamplingParams(s.temperature, s.top_k, s.top_p, s.min_p)
            rows[request.slot - 1] = Row(0, params, s.seed, len(request.tokens) - request.prompt_len)
            self.special.admit(request)
        self.decoding.table.put(rows)
        if self.mtp is not None and self.mtp.active:
            for chunk in chunks:
                if chunk.request in admitted:
                    self.mtp.begin(chunk.request, chunk.start)

    def _launch_chunks(self, plan: TickPlan, step: TorchStep, chunks: Sequence[Chunk], place: int) -> int:
        """Launch an extend whose draws are from ``place`` on among the sampled ones; returns the place behind."""
        rows, starts = (plan.rows, plan.starts) if plan.mixed else ((), ())
        logits, hidden = self.extending.extend_chunks(chunks, LOGITS, rows, starts)
        if rows:
            step.held.append(Held(0, logits[-len(rows) :], rows, _within(plan, 0, len(rows)), False))
        first = 0
        for chunk in chunks:
            if hidden is not None and chunk.tells_prompt:
                end = min(chunk.start + len(chunk.ids), chunk.request.prompt_len - 1)
                follow = chunk.request.tokens[chunk.start + 1 : end + 1]
                top = chunk.request.submit.prompt_logprobs
                step.prompts.append((chunk, self.special.prompt_logprobs(self.model, hidden[first:], follow, top)))
            first += len(chunk.ids)
        kept = [index for index, chunk in enumerate(chunks) if chunk.samples]
        if kept:
            logits = logits.index_select(0, on_device(kept, logits.device))
            requests = [chunks[index].request for index in kept]
            step.held.append(Held(place, logits, requests, _within(plan, place, len(kept)), True))
        return place + len(kept)

    @torch.inference_mode()
    def draw_held(self, step: TorchStep, masks: Any) -> None:
        """Draw what was held back at its logits; ``masks``: one row for each of ``plan.sampled``."""
        drawn: dict[bool, list[torch.Tensor]] = {True: [], False: []}
        for held in step.held:
            mask = None if masks is None else masks[held.first : held.first + len(held.rows)]
            tokens = self.special.draw(held.logits, held.rows, held.special, mask, held.mode)
            telling = self.special.logprobs(held.logits, tokens, held.special)
            if telling is not None:
                places = [held.first + i for i, r, _ in held.special if r.submit.logprobs >= 0]
                step.telling.append((places, telling))
            drawn[held.of_chunks].append(tokens)
        step.held.clear()
        if drawn[True]:
            step.chunks = self._chunks_out.send(torch.cat(drawn[True]))
        if drawn[False]:
            step.rows = self._rows_out.send(torch.cat(drawn[False]))
        if (step.telling or step.prompts) and self.model.device.type == "cuda":
            step.told = torch.cuda.Event()
            step.told.record()

    # --- before and beside the ticks

    @torch.inference_mode()
    def capture(self, progress: Callable[[StepKey], None] | None = None) -> None:
        """Capture every bucket of decode and of extends, where there are graphs; nothing is captured later."""
        # A step that ends at its logits runs what the one that draws the likeliest token ran before.
        for place, mode in enumerate(DECODES):
            if self.decoding.graphs is not None:  # as after a capture that failed
                self.decoding.capture(modes=[mode], progress=progress, seen=place > 0)
        if self.extending.graphs is None:
            return
        buckets = self.extending.extend_buckets
        rule = self.rule if self.mtp is None or self.mtp.topk == 1 else TREE
        keys = [StepKey("extend", one.tokens, one.requests, LOGITS) for one in buckets.every()]
        # One that verifies brings two tokens.
        verified = [one for one in buckets.every(2) if one.tokens < 2 * self.verify_tokens]
        verifying = [StepKey("extend", one.tokens, one.requests, rule) for one in verified]
        keys += [*verifying, *self.extending.for_short_contexts(verifying)]
        self.extending.capture_extends(keys, progress)

    def explain(self) -> Any:
        """Return what was captured and what ran uncaptured, in sentences."""
        compiled = [] if self.watch is None else self.watch.check()  # of packages too, whose caches lie in folders
        return {
            "graphs": self.decoding.report(), "uncaptured": dict(self.extending.uncaptured),
            "compiled": list(compiled), "start": [[part, round(seconds, 3)] for part, seconds in self.start],
        }  # fmt: skip

    def backends(self) -> list[dict[str, Any]]:
        """Return what was chosen for every layer of the model, on which evidence, and why not the others.

        It is found once, before requests come: looking into all packages takes longer than a step may.
        """
        if not self._chosen:
            found = fl.explain(self.model)
            self._chosen = [
                {"module": row.module, "layer": row.place, "chosen": row.chosen, "evidence": row.evidence, "not": lost}
                for row, lost in zip(found, found.losers(), strict=True)
            ]
        return self._chosen

    def graph_counts(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the replays by graph, and the steps that ran without one by reason."""
        ledger: Any = self.decoding.ledger
        replays: dict[str, float] = {}
        for record in ledger:
            key = record.key
            short = f" up to {key.longest}" if key.longest else ""
            replays[f"{key.kind} {key.tokens}x{key.requests}{short} {key.mode}"] = float(record.replays)
        eager = self.decoding.uncaptured + self.extending.uncaptured
        return replays, {why: float(count) for why, count in eager.items()}

    def counters(self) -> dict[str, dict[str, float]]:
        """Return :meth:`graph_counts`, and how often each kernel was compiled since :attr:`watch` looks on."""
        replays, eager = self.graph_counts()
        compiled = {name: float(n) for name, n in Counter(self.watch.compiled if self.watch else ()).items()}
        return {"graph_replays_total": replays, "eager_steps_total": eager, "jit_compiles_total": compiled}

    def profile(self, start: bool) -> str:
        """Start or stop torch's profiler."""
        if self.profile_folder is None:
            raise RuntimeError("no folder for profiles was given at the start (--profile-folder)")
        if start == (self._profiler is not None):
            raise RuntimeError("a profile is running" if start else "no profile is running")
        if start:
            self._profiler = torch.profiler.profile(with_stack=False)
            self._profiler.start()
            return str(self.profile_folder)
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        path = next(path for n in count() if not (path := self.profile_folder / f"engine-{n}.json").exists())
        profiler.export_chrome_trace(str(path))
        if not path.is_file():  # torch says so in a log of its own only
            raise RuntimeError(f"the profile cannot be written to {str(path)!r}")
        return str(path)


def _within(plan: TickPlan, first: int, count: int) -> Special:
    """Return the special ones among so many sampled requests from ``first`` on, by their place in them."""
    return [(i - first, request, drawn) for i, request, drawn in plan.special if first <= i < first + count]


def _greedy(requests: Sequence[Request]) -> bool:
    return not any(r.submit.sampling.temperature > 0 for r in requests)
