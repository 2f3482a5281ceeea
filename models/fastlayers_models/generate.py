"""Prefill and decode over a paged cache: :class:`Generator`, a loop that streams tokens.

    prompts ─► prefill in chunks of at most prefill_tokens ─► sample ─► decode, one token a request and step ─► …

A batch is of requests whose tokens all find pages, or of one request. Who ends leaves it, and its pages go back to the
pool. Steps are captured in CUDA graphs where there is a GPU, and the next one is launched before the last one's tokens
are read: a request that turns out to have ended takes part in one step more, whose token is dropped. A bucket of
prefill that is new is captured after the first token went out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any, Protocol, runtime_checkable

import torch

import fastlayers as fl
from fastlayers.attention.buckets import ExtendBuckets
from fastlayers.attention.kv_cache.spec import LayerCache
from fastlayers.attention.meta import AttentionBatch, AttentionMeta, AttentionState
from fastlayers.comm.collectives import collectives
from fastlayers.comm.parallel import SINGLE
from fastlayers.errors import (
    AllocatorOverflowError,
    ArgumentError,
    as_integers,
    check_choice,
    check_kind,
    check_plain,
    check_positive,
    describe,
)
from fastlayers.runtime.graphs import CudaGraphs
from fastlayers.sampler.layer import MODES, Sampler, SamplingParams
from fastlayers.torch_compile import TorchCompile
from fastlayers_models.agreement import same_requests, same_settings
from fastlayers_models.between_ranks import RankStep
from fastlayers_models.groups import run_groups, step_class
from fastlayers_models.images import prompt_images
from fastlayers_models.requests import Request, Token, prompts_of, stop_ids, wrong_ids
from fastlayers_models.step import Part, Pending
from fastlayers_models.warm_up import warm_up_calls

_GREEDY = SamplingParams(temperature=0.0)


@runtime_checkable
class CausalLM(Protocol):
    """What a generator needs of a model."""

    config: Any
    device: torch.device
    page_size: int
    kv_dtype: torch.dtype

    def __call__(
        self, input_ids: torch.Tensor, meta: AttentionMeta, caches: Sequence[LayerCache], *, valid: Any = None
    ) -> torch.Tensor:
        """Return hidden states ``[T, D]``."""

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return logits ``[R, vocab]``."""


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
        Pages of the cache, 2 or more: page 0 is nobody's; default: enough for ``max_batch`` requests of
        ``max_length``.
    prefill_tokens : int
        Most new tokens a step; longer prompts are prefilled in chunks over their cached prefix. A step's buffers are
        sized by it, up to ``max_batch`` prompts of ``max_length``.
    cuda_graph : "auto" or bool
        Whether steps are captured, per bucket at its first use: see :class:`ModelStep`. ``"auto"``: on CUDA; with
        several ranks, if they communicate by NCCL.
    graphs : CudaGraphs, optional
        Where this generator keeps its graphs (with a byte limit, say); its ledger tells what they cost.
    torch_compile : TorchCompile, optional
        Compile small operators in captured decode: see :class:`fastlayers.torch_compile.TorchCompile`, which says
        what it is worth. Default: not.
    extend_buckets : ExtendBuckets, optional
        Which prefill steps are captured; default: those that pay for this model.
    overlap : str
        Of several ranks: which steps are computed in two halves, one while the other's rows are exchanged, see
        :class:`ModelStep`; ``"off"``, ``"two_batch"``, ``"two_chunk"`` or ``"both"``.

    Notes
    -----
    Of several ranks all make theirs, and copy or unpickle it, at the same place: what it is made of is compared.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        max_batch: int = 8,
        max_length: int | None = None,
        num_pages: int | None = None,
        prefill_tokens: int = 8192,
        cuda_graph: bool | str = "auto",
        graphs: CudaGraphs | None = None,
        torch_compile: TorchCompile | None = None,
        extend_buckets: ExtendBuckets | None = None,
        overlap: str = "off",
    ) -> None:
        check_kind("Generator", CausalLM, model=model)
        check_positive("Generator", max_batch=max_batch, prefill_tokens=prefill_tokens)
        check_plain("Generator", "int | None", max_length=max_length, num_pages=num_pages)
        sizes = as_integers(max_batch, max_length, num_pages, prefill_tokens)
        max_batch, max_length, num_pages, prefill_tokens = sizes
        if num_pages is not None and num_pages < 2:
            raise ArgumentError("Generator", "num_pages", num_pages, "2 or more, or None: page 0 is nobody's")
        self._made_of = {
            "model": model, "max_batch": max_batch, "max_length": max_length, "num_pages": num_pages,
            "prefill_tokens": prefill_tokens, "cuda_graph": cuda_graph, "graphs": graphs,
            "torch_compile": torch_compile, "extend_buckets": extend_buckets, "overlap": overlap,
        }  # fmt: skip
        self._running = Lock()  # the decode step has one set of rows: one stream at a time has it
        self.model, self.max_batch, self.prefill_tokens = model, max_batch, prefill_tokens
        limit = model.config.max_position_embeddings
        self.max_length = limit if max_length is None else max_length
        parallel = getattr(model, "parallel", None)
        compared = "max_batch", "num_pages", "prefill_tokens", "cuda_graph", "torch_compile", "extend_buckets"
        settings = {name: self._made_of[name] for name in compared} | {"max_length": self.max_length}
        same_settings(parallel, settings | {"graphs": "given" if graphs is not None else None})
        if not 0 < self.max_length <= limit:
            raise ArgumentError("Generator", "max_length", self.max_length, f"1 to {limit} (max_position_embeddings)")
        pages = -(-self.max_length // model.page_size)
        self.pool = fl.PagePool(num_pages if num_pages is not None else max_batch * pages + 1, model.page_size)
        spec = fl.kv_cache_spec(model, page_size=model.page_size, dtype=model.kv_dtype)
        self.caches = spec.allocate(self.pool.num_pages, model.device)
        # No step brings more: whoever asks for more prefills whole prompts.
        tokens = max(min(prefill_tokens, max_batch * self.max_length), max_batch)
        self.state = AttentionState(max_batch, tokens, pages, model.page_size, model.device)
        sampler = Sampler(model.config.vocab_size, device=model.device)
        self.groups = parallel.attn_dp if parallel is not None else SINGLE
        self.ranks = collectives(parallel.tp if parallel is not None else SINGLE)
        self.step = step_class(parallel)(
            model,
            self.caches,
            self.state,
            sampler,
            self.pool.num_pages,
            cuda_graph=cuda_graph,
            graphs=graphs,
            torch_compile=torch_compile,
            extend_buckets=extend_buckets,
            overlap=overlap,
        )
        # Without a GPU a step is done when its launch returns: launching one ahead would only waste it.
        self.ahead = model.device.type == "cuda" or self.step.graphs is not None

    def __getstate__(self) -> dict[str, Any]:
        """Return what it was made of: a copy, or one that was pickled, has cached and captured nothing yet.

        Raises
        ------
        ArgumentError
            It was given ``graphs``, which stay where they were captured.
        """
        if self._made_of["graphs"] is not None:
            raise ArgumentError("Generator", "graphs", "given", "None for a generator that is copied or pickled")
        return self._made_of

    def __setstate__(self, made_of: dict[str, Any]) -> None:
        Generator.__init__(self, **made_of)

    @contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        """Have the decode step to oneself, or raise: another stream's rows would be overwritten."""
        if not self._running.acquire(blocking=False):
            accepted = "one at a time: read the other stream to its end, or close() it, or make a second Generator"
            raise ArgumentError("Generator", what, "called while a stream of this generator is running", accepted)
        try:
            yield
        finally:
            self._running.release()

    def generate(
        self,
        prompts: Sequence[Sequence[int]] | torch.Tensor,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        max_new_tokens: int = 64,
        eos_ids: Sequence[int] | None = None,
        pixel_values: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | Sequence[Sequence[int]] | None = None,
    ) -> list[list[int]]:
        """Return the generated ids of every prompt (the end token included); arguments as for :meth:`stream`."""
        rows = prompts_of(prompts)
        outputs: list[list[int]] = [[] for _ in rows]
        for token in self.stream(
            rows, params, max_new_tokens=max_new_tokens, eos_ids=eos_ids, pixel_values=pixel_values,
            image_grid_thw=image_grid_thw,
        ):  # fmt: skip
            outputs[token.request].append(token.id)
        return self.step.of_all_groups(outputs) if isinstance(self.step, RankStep) else outputs

    def stream(
        self,
        prompts: Sequence[Sequence[int]] | torch.Tensor,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        max_new_tokens: int = 64,
        eos_ids: Sequence[int] | None = None,
        pixel_values: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | Sequence[Sequence[int]] | None = None,
    ) -> Iterator[Token]:
        """Yield tokens as they are made.

        With several attention groups every rank calls this with the same prompts and yields the tokens of its own
        group's: of ``prompts[group :: groups]``. All make the same steps until the last group has ended.

        Parameters
        ----------
        prompts : sequence of sequences of int, or Tensor or array ``[prompts, tokens]``
            Token ids; at least one each.
        params : SamplingParams or one per prompt
            Default: greedy.
        max_new_tokens : int
        eos_ids : sequence of int, optional
            Default: the configuration's; ``()`` never stops early.
        pixel_values : Tensor ``[patches, width]``, optional
            All prompts' images in order, as transformers' processor gives them, for a model with a tower; finite.
        image_grid_thw : integer Tensor or sequence ``[images, 3]``, optional
            Of these: frames, and patches down and across. Each has its image tokens in the prompts.

        Raises
        ------
        ArgumentError
            An empty prompt, an id outside the vocabulary, a prompt that does not fit ``max_length``, images that are
            not those of the prompts' tokens, videos, or another stream of this generator that has begun and not ended,
            in whatever thread; found before anything runs.
        CollectiveMismatch
            Ranks were given other prompts, parameters or limits, or one of them refuses its own; before anything runs.
        AllocatorOverflowError
            The cache is too small for a single request, when that needs one page more than there are; with several
            attention groups before anything runs.
        """
        try:
            requests = self._requests(prompts_of(prompts), params, max_new_tokens)
            self._take_images(requests, pixel_values, image_grid_thw)
            (max_new_tokens,) = as_integers(max_new_tokens)
            stop = stop_ids(self.model.config.eos_token_ids if eos_ids is None else eos_ids)
        except ArgumentError as error:  # ranks that refuse nothing would wait for this one
            with self._alone("stream"):
                same_requests(self.ranks, self.model, (), {}, str(error))
            raise
        asked = {"max_new_tokens": max_new_tokens, "eos_ids": sorted(stop)}
        asked["images"] = None if pixel_values is None else tuple(pixel_values.shape)
        with self._alone("stream"):
            same_requests(self.ranks, self.model, requests, asked)
            for request, seed in zip(requests, self._seeds([each.params for each in requests]), strict=True):
                request.seed = seed
            requests = requests[self.groups.rank :: self.groups.size]
            waiting = list(reversed(requests))
            try:
                if self.groups.size > 1:
                    yield from run_groups(self, waiting, max_new_tokens, stop)
                while waiting:
                    yield from self._run(self._next_batch(waiting), max_new_tokens, stop)
            finally:
                for request in requests:
                    self.pool.release(request.pages)

    def _take_images(self, requests: Sequence[Request], pixel_values: Any, image_grid_thw: Any) -> None:
        """Give each request its images."""
        if pixel_values is not None and self.groups.size > 1:
            raise ArgumentError("Generator", "pixel_values", "given", "None with several attention groups")
        tower, ids = getattr(self.model, "tower", None), [request.prompt for request in requests]
        image_token = getattr(self.model.config, "image_token_id", None)
        found = prompt_images(tower, ids, pixel_values, image_grid_thw, image_token)
        for request, images in zip(requests, found, strict=True):
            request.images = images

    def _requests(self, prompts: Sequence[Sequence[int]], params: Any, max_new_tokens: int) -> list[Request]:
        check_positive("Generator", max_new_tokens=max_new_tokens)
        (max_new_tokens,) = as_integers(max_new_tokens)
        vocab = self.model.config.vocab_size
        several = isinstance(params, Sequence) and not isinstance(params, str | bytes)
        each = list(params) if several else [_GREEDY if params is None else params] * len(prompts)
        for place, one in enumerate(each):
            if not isinstance(one, SamplingParams):
                name = f"params[{place}]" if several else "params"
                raise ArgumentError("Generator", name, describe(one), "SamplingParams, one or one per prompt, or None")
        if len(each) != len(prompts):
            raise ArgumentError(
                "Generator", "params", f"{len(each)} entries", f"one, or one per prompt ({len(prompts)})"
            )
        for index, prompt in enumerate(prompts):
            wrong = wrong_ids(prompt, vocab)
            if not prompt or wrong:
                given = f"token id {wrong[0]!r}" if wrong else "empty"
                raise ArgumentError("Generator", f"prompts[{index}]", given, f"token ids in [0, {vocab}), at least one")
            if len(prompt) + max_new_tokens > self.max_length:
                given = f"{len(prompt)} tokens and {max_new_tokens} new ones"
                raise ArgumentError("Generator", f"prompts[{index}]", given, f"at most max_length {self.max_length}")
        # The last token is not cached.
        needs = [-(-(len(prompt) + max_new_tokens - 1) // self.pool.page_size) for prompt in prompts]
        most = self.pool.num_pages - 1
        for index, pages in enumerate(needs):
            if pages > most and self.groups.size > 1:  # the others would wait for a group that gave up
                given = f"request {index} needs {pages} pages for all of its tokens"
                raise AllocatorOverflowError(f"Generator: {given}; the cache of its attention group has {most}")
        made = enumerate(zip(prompts, each, needs, strict=True))
        return [Request(i, list(p), s, 0, pages) for i, (p, s, pages) in made]

    def _seeds(self, params: Sequence[SamplingParams]) -> list[int]:
        """Return each prompt's seed. What nobody gave is drawn: of several ranks by the first, or they would differ."""
        seeds = [int(torch.randint(2**62, ())) if one.seed is None else one.seed for one in params]
        if self.ranks.size > 1 and any(one.seed is None and one.mode != "greedy" for one in params):
            mine = torch.tensor(seeds, dtype=torch.int64, device=self.model.device)
            seeds = self.ranks.all_gather(mine)[: len(seeds)].tolist()
        return seeds

    def _next_batch(self, waiting: list[Request]) -> list[Request]:
        """Take from the end of ``waiting`` as many requests as find rows and pages whenever they end, or one."""
        batch = [waiting.pop()]
        free = self.pool.free_pages - batch[0].needs
        while waiting and len(batch) < self.max_batch and waiting[-1].needs <= free:
            free -= waiting[-1].needs
            batch.append(waiting.pop())
        return batch

    def close(self) -> None:
        """Give back what was captured; of a split model before its process group is ended, behind the last stream."""
        with self._alone("close"):
            if self.step.graphs is not None:
                self.step.graphs.clear()

    def report(self) -> list[str]:
        """Return which steps were captured, what each graph cost, and why others ran uncaptured; for ``explain``."""
        return self.step.report()

    @torch.inference_mode()
    def capture(
        self,
        buckets: Sequence[int] | None = None,
        modes: Sequence[str] = ("greedy",),
        progress: Callable[[Any], None] | None = None,
    ) -> None:
        """Capture decode now instead of at first use: all batch buckets, or these; no stream may be running.

        Parameters
        ----------
        buckets : sequence of int, optional
            Of ``self.step.buckets``.
        modes : sequence of str
            Of sampling: ``"greedy"``, ``"sampled"``, ``"filtered"``.
        progress : callable, optional
            Told each :class:`~fastlayers_models.step.StepKey` when it is captured.

        Raises
        ------
        ArgumentError
            Nothing can be captured here, see ``cuda_graph``, or no bucket or mode is like that.
        """
        for place, bucket in enumerate(() if buckets is None else buckets):
            check_positive("Generator.capture", **{f"buckets[{place}]": bucket})
        for mode in modes:
            check_choice("Generator.capture", "modes", mode, MODES)
        with self._alone("capture"):
            self.step.check_graphs("Generator.capture")
            self.step.capture(buckets, modes, progress)

    def warm_up_calls(self, tokens: Sequence[int]) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Yield what :func:`fastlayers.warmup` runs: decode of so many requests, and a prefill of so many tokens.

        Decode with CUDA graphs captures the bucket, for greedy and for filtered sampling. Where only one of the two
        can run, its label says so. With a vision tower, images of so many tokens, too.

        Raises
        ------
        ArgumentError
            A count that is too large for both.
        """
        return warm_up_calls(self, tokens)

    def _prefill(self, group: list[Request]) -> None:
        """Cache the prompts chunk by chunk; each request's first token is drawn into its row, in the group's order."""
        while parts := self._chunks(group)[0]:
            self.step.extend(parts)

    def _launch(self, active: list[Request]) -> tuple[Pending, list[Request]]:
        for request in active:
            self.pool.extend(request.pages, request.cached + 1, f"request {request.index}")
        ones, lengths = (1,) * len(active), tuple(request.cached for request in active)
        batch = AttentionBatch(ones, lengths, [request.pages for request in active])
        for request in active:
            request.cached += 1
        return self.step.launch(batch), active

    def _room(self, active: list[Request]) -> bool:
        """Whether the pages for one more step of all requests are free."""
        size = self.pool.page_size
        return sum(request.cached >= len(request.pages) * size for request in active) <= self.pool.free_pages

    def _taken(self, request: Request, token: int, max_new_tokens: int, stop: set[int]) -> Iterator[Token]:
        """Yield a request's next token, none if it has ended; behind its last one its pages are given back."""
        if request.done:
            return
        request.output.append(token)
        ended = "stop" if token in stop else "length" if len(request.output) == max_new_tokens else None
        yield Token(request.index, token, ended)
        if ended:
            request.done = True
            self.pool.release(request.pages)

    @torch.inference_mode()
    def _run(self, group: list[Request], max_new_tokens: int, stop: set[int]) -> Iterator[Token]:
        active = group
        # A new bucket is captured after the first token went out.
        ready = self.step.load([request.row for request in active], capture=False)
        self._prefill(group)
        pending, rows = self.step.collect(), active
        while True:
            # All requests are equally long: either none or all end by length with the tokens that are on their way.
            more = max(len(request.output) for request in active) + 1 < max_new_tokens
            ready = ready and len(rows) == len(active)
            following = self._launch(active) if self.ahead and more and ready and self._room(active) else None
            for request, token in zip(rows, pending.tokens(), strict=True):
                yield from self._taken(request, token, max_new_tokens, stop)
            active = [request for request in active if not request.done]
            if not active:
                self.step.capture_wanted()
                return
            if following is None:
                if not ready or len(active) < len(rows):
                    ready = self.step.load([request.row for request in active])
                following = self._launch(active)
            pending, rows = following

    def _chunks(self, active: list[Request]) -> tuple[list[Part], list[Request]]:
        """Return the next chunks of prompts, none where all are cached, and whose first token they draw."""
        parts, drawing, budget = [], [], self.prefill_tokens
        for row, request in enumerate(active):
            done = min(len(request.prompt), request.cached + budget)
            if done > request.cached:
                self.pool.extend(request.pages, done, f"request {request.index}")
                last = done == len(request.prompt)
                ids = request.prompt[request.cached : done]
                draws = row if last else None
                parts.append(Part(ids, request.cached, request.pages, draws, request.params.mode, request.images))
                drawing += [request] * last
                budget -= len(ids)
                request.cached = done
        return parts, drawing
