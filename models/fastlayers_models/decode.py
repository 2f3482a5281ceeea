"""One decode step of a model: static inputs, sampling inside, captured per batch bucket where there is a GPU.

    load(requests)       last tokens and sampling parameters into the static rows; captures their bucket if it is new
    launch(batch)        plan the step's metadata, replay (or run) it, start the copy of its tokens to the host
    Pending.tokens()     wait for that copy

    step:  ids[n] ─► model ─► logits ─► sampler ─► ids[n]        the next step reads what this one wrote

So the host may launch a step before it has seen the tokens of the one before; it only plans lengths and pages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fastlayers.attention.kv_cache.spec import LayerCache
from fastlayers.attention.meta import AttentionBatch, AttentionMeta, AttentionState
from fastlayers.errors import ArgumentError, CaptureError
from fastlayers.runtime.graphs import CudaGraphs, bucket_of, decode_buckets
from fastlayers.sampler.layer import MODES, ROW_DTYPES, RowParams, Sampler, SamplingParams, SamplingState
from fastlayers.torch_compile import CompiledBlocks, TorchCompile
from fastlayers.weights_epoch import WeightsWatch

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Row:
    """One request as the step sees it: its last token, how it samples, and how many tokens it drew so far."""

    token: int
    params: SamplingParams
    seed: int
    drawn: int


class Pending:
    """Tokens on their way to the host."""

    def __init__(self, tokens: torch.Tensor, arrived: Any) -> None:
        self._tokens, self._arrived = tokens, arrived

    def tokens(self) -> list[int]:
        """Wait, and return one token a row."""
        if self._arrived is not None:
            self._arrived.synchronize()
        found: list[int] = self._tokens.tolist()
        return found


class DecodeStep:
    """The decode step of a model over one cache.

    Parameters
    ----------
    model : CausalLM
    caches : sequence of LayerCache
    state : AttentionState
    sampler : Sampler
    num_pages : int
        Of the cache, for checks under ``FASTLAYERS_DEBUG``.
    cuda_graph : "auto" or bool
        ``"auto"``: capture on CUDA with one rank; a step that cannot be captured runs uncaptured, with a warning.
        ``True``: what cannot be captured raises.
    graphs : CudaGraphs, optional
        Where this generator alone keeps its graphs; default: an own one without limit. Given, it is used wherever
        the model is.
    torch_compile : TorchCompile, optional
        Compile the decoder layers' small operators for captured buckets up to its ``max_batch``. Where that fails,
        the capture raises, whatever ``cuda_graph`` is.

    Attributes
    ----------
    buckets : tuple[int, ...]
        Batch sizes that are captured; () if nothing is.
    """

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
    ) -> None:
        if not isinstance(cuda_graph, (bool, str)) or cuda_graph not in ("auto", True, False):  # 1 equals True
            raise ArgumentError("Generator", "cuda_graph", repr(cuda_graph), "one of 'auto', True, False")
        if not (graphs is None or isinstance(graphs, CudaGraphs)):
            raise ArgumentError("Generator", "graphs", repr(graphs), "a CudaGraphs")
        if not (torch_compile is None or isinstance(torch_compile, TorchCompile)):
            raise ArgumentError("Generator", "torch_compile", repr(torch_compile), "a TorchCompile")
        cuda = model.device.type == "cuda"
        if cuda_graph is True and not cuda and graphs is None:
            raise ArgumentError("Generator", "cuda_graph", True, f"False or 'auto': the model is on {model.device}")
        self.model, self.caches, self.state, self.sampler, self.num_pages = model, caches, state, sampler, num_pages
        self.strict, self.max_batch = cuda_graph is True, state.max_batch
        ranks = model.parallel.attn_tp.size if hasattr(model, "parallel") else 1
        wanted = graphs is not None or cuda_graph is True or (cuda_graph == "auto" and cuda and ranks == 1)
        self.graphs = (graphs if graphs is not None else CudaGraphs(model.device)) if wanted and cuda_graph else None
        if torch_compile is not None and self.graphs is None:
            accepted = "None where decode is not captured: it is for captured steps only"
            raise ArgumentError("Generator", "torch_compile", torch_compile, accepted)
        self.torch_compile = torch_compile
        self._compiled: CompiledBlocks | None = None
        # A group's rows are cut into equal parts for its ranks.
        self.buckets = decode_buckets(self.max_batch, ranks) if self.graphs is not None else ()
        self.ids = torch.zeros(self.max_batch, dtype=torch.int64, device=model.device)
        self.rows = SamplingState(self.max_batch, model.device).rows
        self.count = torch.zeros(1, dtype=torch.int32, device=model.device)
        self._host = torch.zeros(2, self.max_batch, dtype=torch.int64, device="cpu", pin_memory=cuda)
        self._events = [torch.cuda.Event() for _ in range(2)] if cuda else [None, None]
        self._turn = 0
        self.weights = WeightsWatch(model)
        self._size, self._mode = 0, "greedy"
        self._bucket: int | None = None

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
        self._size, self._mode = len(requests), max((r.params.mode for r in requests), key=MODES.index)
        self._bucket = bucket_of(self.buckets, self._size)
        if self._bucket is not None and capture:
            self.capture([self._bucket], [self._mode])
        idle = [Row(0, SamplingParams(temperature=0.0), 0, 0)] * (self.max_batch - self._size)
        rows = [*requests, *idle]
        columns: tuple[list[Any], ...] = (
            [r.params.temperature for r in rows], [max(r.params.top_k, 0) for r in rows],
            [r.params.top_p for r in rows], [r.params.min_p for r in rows], [r.seed for r in rows],
            [r.drawn for r in rows],
        )  # fmt: skip
        for tensor, column, dtype in zip(self.rows, columns, ROW_DTYPES, strict=True):
            tensor.copy_(torch.tensor(column, dtype=dtype))
        self.ids.copy_(torch.tensor([r.token for r in rows]))
        self.count.fill_(self._size)
        return self._bucket is None or (self.graphs is not None and (self._bucket, self._mode) in self.graphs)

    def first(self, hidden: torch.Tensor) -> Pending:
        """Sample from the last hidden rows of the prefill, one a request in the order of :meth:`load`."""
        self._sample(hidden, self._mode)
        return self._send()

    def launch(self, batch: AttentionBatch) -> Pending:
        """Run one step for the loaded requests, without waiting for it.

        A captured step whose weights were replaced since is captured again first.
        """
        if self._bucket is not None and self.weights.stale:
            self._capture_again(self._bucket)
        if self._bucket is None:
            self._run(self.state.plan(batch, num_pages=self.num_pages), self._mode)
        else:
            assert self.graphs is not None
            self.state.plan(batch, bucket=self._bucket, num_pages=self.num_pages)
            self.graphs.replay((self._bucket, self._mode))
        return self._send()

    def capture(
        self,
        buckets: Iterable[int] | None = None,
        modes: Iterable[str] = ("greedy",),
        progress: Callable[[Any], None] | None = None,
    ) -> None:
        """Capture what is not captured yet, largest first; overwrites the rows, so before :meth:`load`.

        Raises
        ------
        CaptureError
            With ``cuda_graph=True`` or ``torch_compile``. Otherwise a warning is logged and steps run uncaptured from
            now on.
        """
        graphs = self.graphs
        if graphs is None:
            return
        if self.weights.stale:
            graphs.clear()
        keys = [(n, mode) for n in (self.buckets if buckets is None else buckets) for mode in modes]
        keys = [key for key in dict.fromkeys(keys) if key not in graphs]
        if not keys:
            return
        try:
            graphs.capture_all({key: self._captured(*key) for key in keys}, progress=progress)
        except CaptureError as error:
            if self.strict or self.torch_compile is not None:
                raise
            log.warning("decode runs without CUDA graphs: %s", error)
            self.graphs, self.buckets, self._bucket = None, (), None
        self.weights.mark()  # only now: the runs before a capture may pack

    def _capture_again(self, bucket: int) -> None:
        """Capture the loaded rows' bucket anew between two of their steps."""
        rows = (self.ids, *self.rows, self.count)
        kept = [tensor.clone() for tensor in rows]
        self.capture([bucket], [self._mode])
        for tensor, values in zip(rows, kept, strict=True):
            tensor.copy_(values)

    def _captured(self, bucket: int, mode: str) -> Callable[[], torch.Tensor]:
        # Nobody's rows: they read and write page 0 only. Alike for all buckets, so they may be planned beforehand.
        meta = self.state.plan(AttentionBatch((), (), []), bucket=bucket)
        self.count.zero_()
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
        hidden = self.model(self.ids[:size], meta, self.caches, valid=valid)
        return self._sample(hidden, mode)

    def _sample(self, hidden: torch.Tensor, mode: str) -> torch.Tensor:
        size = hidden.shape[0]
        params = RowParams(*(tensor[:size] for tensor in self.rows))
        ids = self.ids[:size]
        ids.copy_(self.sampler(self.model.compute_logits(hidden), params, mode))
        return ids

    def _send(self) -> Pending:
        self._turn = 1 - self._turn
        tokens, arrived = self._host[self._turn, : self._size], self._events[self._turn]
        tokens.copy_(self.ids[: self._size], non_blocking=True)
        if arrived is not None:
            arrived.record()
        return Pending(tokens, arrived)
