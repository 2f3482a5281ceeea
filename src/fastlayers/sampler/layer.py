"""Sampling of the next token, each row with its own parameters, seed and counter.

    B = rows, V = vocab_size, x[B, V] = logits in fp32 with NaN as -inf, m = max x
    temperature ≤ 0:   id = argmax x, the lowest id on ties; nothing below applies
    w[v]   = exp((x[v] - m) / temperature)                                        fp64
    top-k:  keep v with x[v] ≥ the k-th largest x (ties are kept); off where k ≤ 0 or k ≥ V
    top-p:  keep v where the kept weight of all larger x is < top_p of the kept weight; off where top_p ≥ 1
    min-p:  keep v with w[v] ≥ min_p
    u      = 53 random bits / 2^53, from Philox4x32-10 with key = seed and counter = offset
    id     = the first v whose running sum of kept weights exceeds u times their total
    offset = offset + 1                                                           every row, greedy ones too

The order temperature, top-k, top-p, min-p is Hugging Face's; sglang and FlashInfer apply top-k and top-p
jointly to the unfiltered distribution, vLLM applies min-p before them. A row's token depends on its own
logits, parameters, seed and offset only, not on the batch or the backend: weights and sums are fp64, so that
the order of additions moves no token. A row of -inf gives id 0; +inf shares the whole weight among the tokens
that have it.

A caller who needs the distribution only, not these very numbers, says so with ``seeds="batch"``; then a backend may
draw all rows from the first row's seed and offset with a generator of its own. ``"auto"`` takes none that does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from fastlayers.device import Device
from fastlayers.errors import (
    ArgumentError,
    as_integers,
    check_choice,
    check_device,
    check_fields,
    check_kind,
    check_plain,
    check_positive,
    check_tensor,
    describe,
)
from fastlayers.layer import Layer
from fastlayers.memory import memory_for
from fastlayers.registry import Backend, Registry, reference_backend, torch_backend, triton_backend

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LARGEST_FP32 = torch.finfo(torch.float32).max
# What the rows of a batch need at most; each contains the ones before it.
MODES = ("greedy", "sampled", "filtered")
# What a row's token may depend on: its own seed and offset, or the first row's and its place in the batch.
SEEDS = ("row", "batch")


@dataclass(frozen=True)
class SamplingParams:
    """How one request wants its tokens drawn.

    Parameters
    ----------
    temperature : float
        0: greedy.
    top_k : int
        0 or -1: off.
    top_p, min_p : float
        1.0 and 0.0: off.
    seed : int or None
        Equal seeds give equal tokens; ``None`` draws one from torch's CPU generator.
    logprobs : int
        How many of the most likely tokens are reported beside the chosen one.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    logprobs: int = 0

    def __post_init__(self) -> None:
        check_fields("SamplingParams", self)
        wrong = {
            "temperature": (not 0.0 <= self.temperature <= LARGEST_FP32, "0 (greedy) or a positive number of fp32"),
            "top_k": (not -1 <= self.top_k < 2**31, "a positive 32-bit integer, or 0 or -1 for off"),
            "top_p": (not 0.0 < self.top_p <= 1.0, "more than 0 and up to 1"),
            "min_p": (not 0.0 <= self.min_p <= 1.0, "0 to 1"),
            "seed": (
                self.seed is not None and not -(2**63) <= self.seed < 2**63,
                "a 64-bit integer, or None",
            ),
            "logprobs": (self.logprobs < 0, "0 or more"),
        }
        for name, (is_wrong, accepted) in wrong.items():
            if is_wrong:
                raise ArgumentError("SamplingParams", name, getattr(self, name), accepted)

    @property
    def mode(self) -> str:
        """The cheapest of :data:`MODES` that serves these parameters."""
        if self.temperature == 0.0:
            return "greedy"
        return "filtered" if self.top_k > 0 or self.top_p < 1.0 else "sampled"


class RowParams(NamedTuple):
    """The parameters of a batch as tensors ``[B]``; ``offset`` is written by each call."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    offset: torch.Tensor


# What the backends' operators take and return.
def fake_ids(logits: torch.Tensor, *rest: object) -> torch.Tensor:
    """Return ids ``[B]`` without values: what an operator of a sampler gives while it is traced."""
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


# Of temperature, top_k, top_p, min_p, seed, offset.
ROW_DTYPES = (torch.float32, torch.int32, torch.float32, torch.float32, torch.int64, torch.int64)


class SamplingState:
    """Static tensors with the parameters of up to ``max_batch`` requests, one a row.

    Parameters
    ----------
    max_batch : int
    device

    Notes
    -----
    The tensors keep their addresses, so a captured graph sees what :meth:`set` writes between replays, and
    its replays advance ``offset``. Which *mode* was captured is fixed: capture ``"filtered"`` to
    serve every request.
    """

    def __init__(self, max_batch: int, device: torch.device | str | None = None) -> None:
        check_positive("SamplingState", max_batch=max_batch)
        (max_batch,) = as_integers(max_batch)
        where = check_device("SamplingState", device)
        with memory_for("SamplingState", max_batch=max_batch):
            self.rows = RowParams(*(torch.zeros(max_batch, dtype=dtype, device=where) for dtype in ROW_DTYPES))
            self.params = [SamplingParams(temperature=0.0)] * max_batch
        self.rows.top_p.fill_(1.0)

    def set(self, row: int, params: SamplingParams, offset: int = 0) -> None:
        """Give ``row`` to a request; ``offset`` is the number of tokens already drawn with its seed."""
        check_plain("SamplingState.set", "int >= 0", offset=offset)
        check_kind("SamplingState.set", SamplingParams, params=params)
        check_plain("SamplingState", "int", row=row)
        if not 0 <= row < len(self.params):
            raise ArgumentError("SamplingState", "row", row, f"0 to {len(self.params) - 1}")
        seed = int(torch.randint(2**62, (), device="cpu")) if params.seed is None else params.seed
        values = (params.temperature, max(params.top_k, 0), params.top_p, params.min_p, seed, offset)
        for tensor, value in zip(self.rows, values, strict=True):
            # A tensor takes no number of NumPy's.
            tensor[row] = float(value) if tensor.is_floating_point() else int(value)
        self.params[row] = params

    def mode(self, batch: int) -> str:
        """Return the cheapest mode that serves the first ``batch`` rows; asks the host only."""
        check_plain("SamplingState", "int >= 0", batch=batch)
        return max((params.mode for params in self.params[:batch]), key=MODES.index, default="greedy")

    def view(self, batch: int) -> RowParams:
        """Return views of the first ``batch`` rows."""
        check_plain("SamplingState", "int >= 0", batch=batch)
        return RowParams(*(tensor[:batch] for tensor in self.rows))


@dataclass(frozen=True)
class SamplerConfig:
    """What a backend must know: ``vocab_size``, and whose seeds it must use (one of :data:`SEEDS`)."""

    vocab_size: int
    seeds: str = "row"

    def __post_init__(self) -> None:
        check_positive("Sampler", vocab_size=self.vocab_size)
        check_choice("Sampler", "seeds", self.seeds, SEEDS)


def _flashinfer_refuses(cfg: SamplerConfig, device: Device) -> str | None:
    if cfg.seeds == "row":
        return (
            "draws a batch from its first row's seed and offset, with other numbers; Sampler(seeds='batch') allows it"
        )
    if device.type != "cuda" or (device.capability is not None and device.capability < (8, 0)):
        return f"needs a CUDA device of sm_80 or newer, this is {device}"
    return None


_FLASHINFER_NEEDS = tuple(
    f"flashinfer.sampling:{name}"
    for name in ("softmax", "top_k_renorm_probs", "top_p_renorm_probs", "min_p_sampling_from_probs")
)
_HERE = "fastlayers.sampler"
SAMPLER = Registry(
    "sampler",
    [
        triton_backend(f"{_HERE}.triton:TritonSampler"),
        Backend(
            "flashinfer",
            f"{_HERE}.flashinfer:FlashInferSampler",
            _FLASHINFER_NEEDS,
            _flashinfer_refuses,
            auto_on=(),
            note="other numbers: by name only",
        ),
        torch_backend(f"{_HERE}.torch:TorchSampler"),
        reference_backend(f"{_HERE}.reference:ReferenceSampler"),
    ],
    cases=f"{_HERE}.cases",
)


def _first_rows(state: SamplingState | RowParams, batch: int, device: torch.device) -> RowParams:
    """Return views of the first ``batch`` rows, or raise :class:`ArgumentError` naming what does not fit."""
    rows = state.rows if isinstance(state, SamplingState) else state
    if not isinstance(rows, RowParams):
        raise ArgumentError("Sampler", "state", describe(state), "a SamplingState or RowParams")
    for name, tensor, dtype in zip(RowParams._fields, rows, ROW_DTYPES, strict=True):
        check_tensor(
            "Sampler", f"state.{name}", tensor, shape=(None,), dtype=dtype, device=device, last_dim_contiguous=True
        )
        if tensor.shape[0] < batch:
            raise ArgumentError("Sampler", "state", f"{tensor.shape[0]} rows of {name}", f"at least {batch} rows")
    return RowParams(*(tensor[:batch] for tensor in rows))


class Logprobs(NamedTuple):
    """Log-probabilities of the model's own distribution: before temperature and filters."""

    chosen: torch.Tensor
    top: torch.Tensor
    top_ids: torch.Tensor


class Sampler(Layer):
    """Logits to token ids.

    Parameters
    ----------
    vocab_size : int
    device
        Where it will run.
    backend : str
        ``"auto"``, a name, or a ladder.
    seeds : str
        ``"row"``: a row's token depends on its own logits, parameters, seed and offset only. ``"batch"``: a backend may
        use the first row's seed and offset for all, and a generator of its own.

    Notes
    -----
    Source: inverse transform sampling; Philox: Salmon et al. 2011. Capture-safe: seeds and offsets are
    tensors.

    Examples
    --------
    >>> import torch, fastlayers as fl
    >>> from fastlayers.sampler.layer import SamplingState
    >>> state = SamplingState(2)
    >>> state.set(1, fl.SamplingParams(temperature=0.8, top_k=2, seed=7))
    >>> fl.Sampler(4)(torch.tensor([[0.0, 3.0, 1.0, 3.0], [0.0, 9.0, 9.0, 0.0]]), state).tolist()
    [1, 2]
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        device: torch.device | str | None = None,
        backend: str = "auto",
        seeds: str = "row",
    ) -> None:
        super().__init__()
        self.choose(SAMPLER, SamplerConfig(vocab_size, seeds), device, backend)

    def forward(self, logits: torch.Tensor, state: SamplingState | RowParams, mode: str | None = None) -> torch.Tensor:
        """Draw one token a row.

        Parameters
        ----------
        logits : Tensor ``[B, V]``
            fp32, fp16 or bf16; rows may be strided.
        state : SamplingState or RowParams
            Parameters of at least ``B`` rows; the first ``B`` offsets are incremented in place.
        mode : str, optional
            ``"greedy"``, ``"sampled"`` (temperature and min-p) or ``"filtered"`` (everything). Default: what
            the rows of a :class:`SamplingState` need; ``"filtered"`` for bare tensors.

        Returns
        -------
        Tensor ``[B]``
            int64 ids.
        """
        self._check_logits(logits)
        batch = logits.shape[0]
        if mode is None:
            mode = state.mode(batch) if isinstance(state, SamplingState) else "filtered"
        check_choice("Sampler", "mode", mode, MODES)
        rows = _first_rows(state, batch, logits.device)
        ids: torch.Tensor = self.ladder.pick(batch)(logits, rows, mode)
        return ids

    def _check_logits(self, logits: torch.Tensor) -> None:
        wanted = (None, self.cfg.vocab_size)
        check_tensor(
            "Sampler", "logits", logits, shape=wanted, dtype=DTYPES, device=self.device_type, last_dim_contiguous=True
        )

    def logprobs(self, logits: torch.Tensor, ids: torch.Tensor, top: int = 0) -> Logprobs:
        """Return fp32 log-probabilities of ``ids`` ``[B]`` and of the ``top`` likeliest tokens ``[B, top]``.

        NaN logits count as -inf, as in :meth:`forward`; a row of -inf gives -inf, and +inf shares the whole weight
        among the tokens that have it. Most likely first. On a CPU, ids outside the vocabulary raise an error.
        """
        self._check_logits(logits)
        indices = (torch.int64,)
        check_tensor("Sampler", "ids", ids, shape=tuple(logits.shape[:1]), dtype=indices, device=logits.device)
        check_plain("Sampler", "int >= 0", top=top)
        if ids.numel() and not ids.is_cuda and not 0 <= int(ids.min()) <= int(ids.max()) < self.cfg.vocab_size:
            given = f"{int(ids.min())} to {int(ids.max())}"
            raise ArgumentError("Sampler", "ids", given, f"0 to {self.cfg.vocab_size - 1}")
        if top > self.cfg.vocab_size:
            raise ArgumentError("Sampler", "top", top, f"0 to vocab_size {self.cfg.vocab_size}")
        x = logits.float()
        x = x.masked_fill(x.isnan(), float("-inf"))
        certain = x == float("inf")
        x = torch.where(certain.any(-1, keepdim=True), torch.where(certain, 0.0, float("-inf")), x)
        logprobs = torch.log_softmax(x, -1)
        logprobs = logprobs.masked_fill(logprobs.isnan(), float("-inf"))
        best = logprobs.topk(top, -1)
        return Logprobs(logprobs.gather(-1, ids.unsqueeze(-1)).squeeze(-1), best.values, best.indices)
