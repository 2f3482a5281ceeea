"""One step of a model over a paged cache: static inputs, sampling inside, captured per bucket where there is a GPU.

    kind      brings                                                    called by
    decode    one token a request, of the rows 0, 1, …                  load(rows), then launch(batch) again and again
    extend    any number of tokens a request, each with a cached prefix extend(parts)

    decode:  row's token ─► model ─► logits ─► sampler ─► row's token
    extend:  ids, or a row's token ─► model ─► last hidden row of each request ─► logits ─► sampler ─► row's token

A *row* holds on the device how one request samples, and its last token. The next step reads what this one wrote there,
so the host may launch a step before it has seen the tokens of the one before; it only plans lengths and pages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fastlayers.attention.buckets import TOKENS, ExtendBucket, ExtendBuckets
from fastlayers.attention.core import AttentionCore
from fastlayers.attention.kv_cache.spec import LayerCache
from fastlayers.attention.meta import AttentionBatch, AttentionMeta, AttentionState
from fastlayers.comm.collectives import by_nccl, collectives
from fastlayers.comm.parallel import AXES, SINGLE
from fastlayers.comm.trail import TRAIL
from fastlayers.errors import ArgumentError, CaptureError
from fastlayers.runtime.captured_steps import CapturedSteps
from fastlayers.runtime.gc_pause import gc_pause
from fastlayers.runtime.graphs import CudaGraphs, bucket_of, decode_buckets
from fastlayers.sampler.layer import MODES, Sampler
from fastlayers.torch_compile import CompiledBlocks, TorchCompile
from fastlayers.weights_epoch import WeightsWatch
from fastlayers_models.images import step_images
from fastlayers_models.overlap import Halves, OneGroup, Shares
from fastlayers_models.parts import Part, StepKey
from fastlayers_models.rows import ExtendInputs, Outbox, Pending, Row, RowTable, waits_of

log = logging.getLogger(__name__)

__all__ = ["ModelStep", "Part", "Pending", "Row", "StepKey"]
# Besides the sampler's modes: nobody draws, so there is no head.
NO_DRAW = "none"
EXPANDED = "a long prefix is expanded, as in no captured step"


class ModelStep(CapturedSteps):
    """The steps of a model over one cache.

    Parameters
    ----------
    model : CausalLM
    caches : sequence of LayerCache
    state : AttentionState
    sampler : Sampler
    num_pages : int
        Of the cache, for checks under ``FASTLAYERS_DEBUG``.
    cuda_graph : "auto" or bool
        ``"auto"``: capture on CUDA, over several ranks if they communicate by NCCL; a step that cannot be captured
        runs uncaptured, with a warning. ``True``: what cannot be captured raises.
    graphs : CudaGraphs, optional
        Where this generator alone keeps its graphs; default: an own one without limit. Given, it is used wherever
        the model is.
    torch_compile : TorchCompile, optional
        Compile the decoder layers' small operators for captured decode buckets up to its ``max_batch``. Where that
        fails, the capture raises, whatever ``cuda_graph`` is.
    extend_buckets : ExtendBuckets, optional
        Which extends are captured; default: up to the model's ``captured_tokens``, see :class:`ExtendBuckets`.
    overlap : str
        Which steps are computed in two halves that take turns, see :mod:`fastlayers_models.overlap`: ``"off"``,
        ``"two_batch"`` (decode), ``"two_chunk"`` (extends, which are not captured then), or ``"both"``.

    Attributes
    ----------
    buckets : tuple[int, ...]
        Batch sizes of decode that are captured; () if nothing is.
    extend_buckets : ExtendBuckets
        Those of extends that this state holds.
    wanted : dict[StepKey, None]
        Buckets of extends that ran uncaptured because they were new: see :meth:`capture_wanted`.
    broken, uncaptured
        See :class:`fastlayers.runtime.captured_steps.CapturedSteps`.
    """

    counted = "extends"
    real_rows: Any = OneGroup  # what knows which rows of a half are real

    def __init__(
        self,
        model: Any,
        caches: Sequence[LayerCache],
        state: AttentionState,
        sampler: Sampler,
        num_pages: int,
        *,
        cuda_graph: bool | str = "auto",
        graphs: CudaGraphs | None = None,
        torch_compile: TorchCompile | None = None,
        extend_buckets: ExtendBuckets | None = None,
        overlap: str = "off",
    ) -> None:
        if not isinstance(cuda_graph, (bool, str)) or cuda_graph not in ("auto", True, False):  # 1 equals True
            raise ArgumentError("Generator", "cuda_graph", repr(cuda_graph), "one of 'auto', True, False")
        if not (graphs is None or isinstance(graphs, CudaGraphs)):
            raise ArgumentError("Generator", "graphs", repr(graphs), "a CudaGraphs")
        if not (torch_compile is None or isinstance(torch_compile, TorchCompile)):
            raise ArgumentError("Generator", "torch_compile", repr(torch_compile), "a TorchCompile")
        if not (extend_buckets is None or isinstance(extend_buckets, ExtendBuckets)):
            raise ArgumentError("Generator", "extend_buckets", repr(extend_buckets), "an ExtendBuckets")
        cuda = model.device.type == "cuda"
        if cuda_graph is True and not cuda and graphs is None:
            raise ArgumentError("Generator", "cuda_graph", True, f"False or 'auto': the model is on {model.device}")
        self.model, self.caches, self.state, self.sampler, self.num_pages = model, caches, state, sampler, num_pages
        self.max_batch = state.max_batch
        self.halves = Halves.make(model, state, overlap, torch_compile, self.real_rows)
        ranks = model.parallel.attn_tp.size if hasattr(model, "parallel") else 1
        ranks = getattr(model, "row_multiple", ranks)
        wanted = graphs is not None or cuda_graph is True or (cuda_graph == "auto" and cuda and _capturable(model))
        own = (graphs if graphs is not None else CudaGraphs(model.device)) if wanted and cuda_graph else None
        super().__init__(own, cuda_graph is True)
        why = f"the model is on {model.device}" if not cuda else "its ranks do not communicate by NCCL"
        self.off = f"'auto', and {why}" if cuda_graph else "False"
        self.notes += [] if self.halves is None else [f"{' and '.join(self.halves.kinds)} steps: two halves in turns"]
        if torch_compile is not None and self.graphs is None:
            accepted = "None where decode is not captured: it is for captured steps only"
            raise ArgumentError("Generator", "torch_compile", torch_compile, accepted)
        self.torch_compile = torch_compile
        self._compiled: CompiledBlocks | None = None
        # Where a group's rows are scattered, they are cut into equal parts for its ranks.
        self.buckets = decode_buckets(self.max_batch, ranks) if self.graphs is not None else ()
        given = extend_buckets if extend_buckets is not None else _default_buckets(model)
        self.extend_buckets = given.within(state.max_tokens, self.max_batch, ranks)
        if self.graphs is None or (self.halves is not None and "extend" in self.halves.kinds):
            self.extend_buckets = ExtendBuckets((), ())
        self.table = RowTable(self.max_batch, model.device)
        self.inputs = ExtendInputs(state.max_tokens, self.max_batch, model.device)
        self.count = torch.zeros(1, dtype=torch.int32, device=model.device)
        self._outbox = Outbox(self.max_batch, model.device, *waits_of(model, model.device))
        self.weights = WeightsWatch(model)
        self._images = getattr(model, "tower", None) is not None
        self._balancer = getattr(model, "balancer", None)  # where experts move between steps
        # Layers of one model take the same way.
        self._attention = next((each for each in model.modules() if isinstance(each, AttentionCore)), None)
        self._ranks = collectives(model.parallel.tp if hasattr(model, "parallel") else SINGLE)
        self._size, self._mode = 0, "greedy"
        self._bucket: int | None = None

    # ---- decode -------------------------------------------------------------------------------------------------

    def load(self, requests: Sequence[Row], capture: bool = True) -> bool:
        """Put requests into the rows, in order; the following launches are for exactly these.

        Parameters
        ----------
        requests : sequence of Row
        capture : bool
            Capture their bucket if that is new. False: the caller loads again before it launches.

        Returns
        -------
        bool
            Whether launches may follow.
        """
        mode = max((r.params.mode for r in requests), key=MODES.index)
        if capture and self.graphs is not None:
            self.capture([found] if (found := bucket_of(self.buckets, len(requests))) is not None else (), [mode])
        self.table.load(requests)
        return self.resize(len(requests), mode)

    def resize(self, size: int, mode: str | None = None) -> bool:
        """Let the following launches be for the first ``size`` rows, as they are in the table.

        ``mode``: of sampling; default: as before. Returns as :meth:`load` does.
        """
        self._size, self._mode = size, mode if mode is not None else self._mode
        self._bucket = bucket_of(self.buckets, size)
        self.count.fill_(size)
        return self._bucket is None or (self.graphs is not None and self._key(self._bucket, self._mode) in self.graphs)

    def collect(self) -> Pending:
        """Start the copy of the loaded rows' last tokens to the host."""
        return self._outbox.send(self.table.tokens[: self._size])

    def begin(self) -> None:
        """Count another step, before which experts may move."""
        TRAIL.steps += 1
        if self._balancer is not None:
            self._balancer.tick()

    def launch(self, batch: AttentionBatch) -> Pending:
        """Run one decode step for the loaded requests, without waiting for it.

        A captured step whose weights were replaced since is captured again first.
        """
        self.begin()
        if self._bucket is not None and not self._is_captured(self._key(self._bucket, self._mode)):
            self._capture_keeping_rows(self._bucket, self._mode)
        if self._bucket is None:
            self._run(self._plan("decode", batch), self._mode)
        else:
            assert self.graphs is not None
            self._plan("decode", batch, self._bucket)
            self.graphs.replay(self._key(self._bucket, self._mode))
        return self.collect()

    def _plan(
        self, kind: str, batch: AttentionBatch, bucket: int | ExtendBucket | None = None, shares: Shares | None = None
    ) -> AttentionMeta:
        """Plan a step, and its halves where it has some."""
        meta = self.state.plan(batch, bucket=bucket, num_pages=self.num_pages)
        if self.halves is not None:
            self.halves.plan(meta, kind, shares)
        return meta

    def _compute(
        self, ids: torch.Tensor, meta: AttentionMeta, valid: torch.Tensor | None, images: Any = None
    ) -> torch.Tensor:
        """Return the model's hidden states of a step."""
        more = {} if images is None else {"images": images}
        more |= {} if self.halves is None else {"halves": self.halves.of(meta)}
        hidden: torch.Tensor = self.model(ids, meta, self.caches, valid=valid, **more)
        return hidden

    @staticmethod
    def _key(bucket: int, mode: str) -> StepKey:
        return StepKey("decode", bucket, bucket, mode)

    def _is_captured(self, key: StepKey) -> bool:
        """Return whether there is a graph of the weights as they are."""
        return self.graphs is not None and key in self.graphs and not self.weights.stale

    def _drop_stale(self, graphs: CudaGraphs) -> None:
        if self.weights.stale:
            graphs.clear()

    def _capture_keeping_rows(self, bucket: int, mode: str) -> None:
        """Capture a bucket between two steps of the loaded rows."""
        rows = (*self.table.tensors, self.count)
        kept = [tensor.clone() for tensor in rows]
        self.capture([bucket], [mode])
        for tensor, values in zip(rows, kept, strict=True):
            tensor.copy_(values)

    def capture(
        self,
        buckets: Iterable[int] | None = None,
        modes: Iterable[str] = ("greedy",),
        progress: Callable[[StepKey], None] | None = None,
        seen: bool = False,
    ) -> None:
        """Capture what is not captured yet of decode, largest first, and the extends that are :attr:`wanted`.

        Overwrites ``count`` and rows' ``rope_delta``, so before :meth:`load`. ``seen``: what these steps run has run in
        these sizes before, see :meth:`fastlayers.runtime.graphs.CudaGraphs.capture_all`.

        Raises
        ------
        ArgumentError
            There are no graphs: ``cuda_graph`` is False, the model is elsewhere than on CUDA, or a capture failed.
        CaptureError
            With ``cuda_graph=True`` or ``torch_compile``. Otherwise a warning is logged and steps run uncaptured from
            now on.
        """
        graphs = self.check_graphs("ModelStep.capture")
        self._drop_stale(graphs)
        keys = [self._key(n, mode) for n in (self.buckets if buckets is None else buckets) for mode in modes]
        keys = [key for key in dict.fromkeys(keys) if key not in graphs]
        if not keys and not self.wanted:
            return
        with gc_pause(graphs.freeze):
            self.capture_wanted()
            failed: CaptureError | None = None
            try:
                functions = {key: self._captured(key.tokens, key.mode) for key in keys}
                graphs.capture_all(functions, progress=progress, seen=seen)
            except CaptureError as error:
                failed = error
            failed = self.agreed(failed)
            if failed is not None:
                if self.strict or self.torch_compile is not None:
                    raise failed
                log.warning("decode runs without CUDA graphs: %s", failed)
                self.off = f"'auto', and a capture failed: {failed}"
                self.graphs, self.buckets, self._bucket = None, (), None
                self.extend_buckets = ExtendBuckets((), ())
        self.weights.mark()  # only now: the runs before a capture may pack

    def _captured(self, bucket: int, mode: str) -> Callable[[], torch.Tensor]:
        # Nobody's rows: they read and write page 0 only. Alike for all buckets, so they may be planned beforehand.
        meta = self._plan("decode", AttentionBatch((), (), []), bucket)
        self.count.zero_()
        self.table.rope_deltas.zero_()  # of rows before, which begin at 0 here
        how = self.torch_compile
        if how is None or bucket > how.max_batch:
            return lambda: self._run(meta, mode)
        traceable = False

        def run() -> torch.Tensor:
            """Run the step compiled; only warm-ups and the capture come here."""
            nonlocal traceable
            if not traceable:
                self._run(meta, mode)  # builds what cannot be traced
                traceable = True
            with self._compiled_blocks(how).applied():
                return self._run(meta, mode)

        return run

    def _compiled_blocks(self, how: TorchCompile) -> CompiledBlocks:
        if self._compiled is None:
            self._compiled = CompiledBlocks(self.model.decoder.layers[: self.model.config.num_hidden_layers], how)
        return self._compiled

    def _run(self, meta: AttentionMeta, mode: str) -> torch.Tensor:
        size = meta.num_tokens
        # A bucket of one has no padding: its only row is always real.
        valid = self.count if meta.bucket is not None and size > 1 else None
        ids = self.table.tokens[:size]
        if self._images:  # they move what follows them; one sum for all layers, which take it as it is
            deltas = self.table.rope_deltas[:size].expand(3, -1)
            meta = replace(meta, rope_positions=meta.positions + deltas)
        hidden = self._compute(ids, meta, valid)
        ids.copy_(self.sampler(self.model.compute_logits(hidden), self.table.params(size), mode))
        return ids

    # ---- extend -------------------------------------------------------------------------------------------------

    def extend(self, parts: Sequence[Part], capture: bool = False, shares: Shares | None = None) -> Pending:
        """Run one step of several requests, without waiting for it.

        Parameters
        ----------
        parts : sequence of Part
            At most as many as the state's ``max_batch``; prefill chunks and decode rows in any order. The rows that
            draw must be in the table (:meth:`load`, or :meth:`RowTable.put` for some of them).
        capture : bool
            Capture a new bucket first; there must be graphs. False: it runs uncaptured and is noted in :attr:`wanted`.
        shares : sequence, optional
            What groups agree on, see :meth:`Halves.plan`.

        Returns
        -------
        Pending
            One token for each part that draws, in their order.
        """
        if capture:
            self.check_graphs("ModelStep.extend")
        self.begin()
        draws = [part.mode for part in parts if part.row is not None]
        mode = max(draws, key=MODES.index) if draws else NO_DRAW
        batch = AttentionBatch(
            tuple(max(1, len(part.ids)) for part in parts),
            tuple(part.prefix for part in parts),
            [part.pages for part in parts],
        )
        images = any(part.images is not None for part in parts)
        key = None if images else self._extend_key(batch, mode, capture)
        bucket = None if key is None else self._extend_bucket(key)
        meta = self._plan("extend", batch, bucket, shares)
        self.inputs.write([(part.ids, part.row) for part in parts], batch.query_lens, bucket)
        if images:
            self.uncaptured["prompts with images"] += 1
            positions, self.inputs.images = step_images(parts, self.model.device)
            meta = replace(meta, rope_positions=positions)
        if key is None:
            drawn = self._run_extend(meta, mode)
        else:
            assert self.graphs is not None
            drawn = self.graphs.replay(key)
        return self._outbox.send(drawn, [i for i, part in enumerate(parts) if part.row is not None])

    def _extend_bucket(self, key: StepKey) -> ExtendBucket:
        return ExtendBucket(key.tokens, key.requests)

    def _extend_key(self, batch: AttentionBatch, mode: str, capture: bool) -> StepKey | None:
        """Return the graph to replay; ``None`` after counting why there is none."""
        found: ExtendBucket | str = "CUDA graphs are off"
        if self.graphs is not None:
            found = self.extend_buckets.bucket_of(batch.num_tokens, len(batch.query_lens))
            if isinstance(found, ExtendBucket) and self._outweighs_capture(batch, mode):
                found = EXPANDED
        if isinstance(found, ExtendBucket):
            key = StepKey("extend", found.tokens, found.requests, mode)
            if capture:
                self.capture_extends([key])
            if self._is_captured(key):
                return key
            found = self.missing(key, f"the first step of {found.tokens} tokens and {found.requests} requests")
        self.uncaptured[found] += 1
        return None

    def _outweighs_capture(self, batch: AttentionBatch, mode: str) -> bool:
        """Return whether layers take a way through an extend that is worth an uncaptured step."""
        return self._attention is not None and self._attention.outweighs_capture(batch)

    def capture_wanted(self) -> None:
        """Capture the buckets of extends that were met and are new: when nobody waits for a token."""
        keys, self.wanted = list(self.wanted), {}
        if self.graphs is not None:
            self.capture_extends(keys)

    def capture_extends(self, keys: Iterable[StepKey], progress: Callable[[StepKey], None] | None = None) -> None:
        """Capture extends, largest first. Rows keep what they hold.

        Raises
        ------
        ArgumentError
            There are no graphs, see :meth:`capture`.
        CaptureError
            With ``cuda_graph=True``. Otherwise a warning is logged, and that bucket runs uncaptured from now on.
        """
        graphs = self.check_graphs("ModelStep.capture_extends")
        self._drop_stale(graphs)
        fresh = [key for key in dict.fromkeys(keys) if key not in graphs and key not in self.broken]
        if fresh:
            with gc_pause(graphs.freeze):
                self._capture_extends(sorted(fresh, reverse=True), progress)
            self.weights.mark()

    def _capture_extends(self, keys: list[StepKey], progress: Callable[[StepKey], None] | None) -> None:
        for key in keys:
            bucket = self._extend_bucket(key)
            # Nobody's tokens: they write page 0, and draw for nobody.
            meta = self._plan("extend", AttentionBatch((), (), []), bucket)
            self.inputs.write([], (), bucket)
            words = f"extends of {key.tokens} tokens run without CUDA graphs"
            if self.capture_step(key, partial(self._run_extend, meta, key.mode), words) and progress is not None:
                progress(key)

    def agreed(self, failed: CaptureError | None) -> CaptureError | None:
        """Return why a capture counts as failed: here, or on another rank, whose steps would not fit a replay's."""
        if self._ranks.size == 1:
            return failed
        captured = torch.full((1,), int(failed is None), dtype=torch.int32, device=self.model.device)
        if int(self._ranks.all_reduce_(captured)) == self._ranks.size:
            return None
        TRAIL.take(self.model.parallel.tp)  # who failed has called less
        return failed if failed is not None else CaptureError("another rank could not capture it")

    def _run_extend(self, meta: AttentionMeta, mode: str) -> torch.Tensor:
        """Return the tokens drawn, one a request; of requests that do not draw, anything."""
        inputs, table, captured = self.inputs, self.table, meta.bucket is not None
        ids = inputs.ids(meta.num_tokens, table.tokens)
        hidden = self._compute(ids, meta, inputs.count if captured else None, inputs.images)
        last, rows = inputs.last[: meta.num_requests], inputs.rows[: meta.num_requests]
        if mode == NO_DRAW:
            return last
        params = table.gather(rows)
        drawn = self.sampler(self.model.compute_logits(hidden.index_select(0, last)), params, mode)
        table.scatter(rows, params.offset, drawn)
        return drawn

    def describe(self, key: StepKey) -> str:
        """Return a graph's key in words."""
        short = f"contexts up to {key.longest}, " if key.longest else ""
        return f"{key.kind} of {key.tokens} tokens, {key.requests} requests, {short}{key.mode}"


def _default_buckets(model: Any) -> ExtendBuckets:
    """Return the default buckets, up to the largest that pays for this model."""
    most = getattr(model, "captured_tokens", None)
    return ExtendBuckets(tuple(size for size in TOKENS if most is None or size <= most))


def _capturable(model: Any) -> bool:
    """Return whether the model's collectives can be captured: there are none, or they are NCCL's."""
    parallel = getattr(model, "parallel", None)
    if parallel is None or parallel.world_size == 1:
        return True
    axes = (getattr(parallel, name) for name in AXES)
    return all(axis.size == 1 or by_nccl(axis.group) for axis in axes)
