"""How far a way to run a checkpoint is from fp32, and how far its number format alone may bring it.

Measured after every context of some texts, teacher forced, over the whole vocabulary; a context that several texts
begin with counts once:

    KL = Σ_v p(v) · (log p(v) - log q(v))        p: stock transformers in fp32, q: what is judged

The bound of a variant is derived in the same run from what its format rounds, on the same text and weights: stock
transformers computes in fp32 with one rounding of the format and no other, and the error finds its way through the
layers as it does in a model of ours, whose code takes no part in it. For small errors KL is half the variance of the
logits' errors, and variances of independent errors add:

    bound = MARGIN · ( Σ over the format's roundings  KL(stock with this one)  +  FLOOR · KL(stock in bf16) )

with ``+ Z · sqrt(Σ 2 s² / n)`` for the mean: s² is the variance of a rounding's KL over its n contexts, and the means
of two draws are further apart about once in a hundred. The 99th percentile is the k-th largest number of n, and two
sound ways of rounding draw it anew: where few are that large, one draw's is far from the other's. Between two draws of
one distribution the larger numbers come from either with a chance of one half, so fewer than r of the first lie above
the second's k-th largest with

    P(r) = Σ over j < r of  C(k + j - 1, j) / 2^(k + j)

and the bound of the 99th percentile takes stock's r-th largest for its KL, r the greatest with P(r) ≤ 1 %
(``extreme_rank``): 6 for k = 17. Of some 600 contexts and less the largest counts, and the chance is greater.

=============  ========================================================================================
rounding       what stock transformers is told
=============  ========================================================================================
``bf16``       weights and activations in bf16
``fp8-block``  weights: the e4m3 codes times their scales, in fp32; the inputs of those linears in e4m3, one scale for
               each 128 values of a row
``fp8-weights``  the same weights, inputs as they are
``fp8-kv``     keys and values (of MLA: latents) in e4m3 where they enter its cache
``fp8-inputs``  of a checkpoint in FP8: the inputs of its coded linears in e4m3, one scale for as many values of a row
               as its blocks are wide, for a row, or for all rows of a call, as its format says
``int8-inputs``  of a checkpoint in int8: the inputs of its coded linears in int8, one scale for each row
=============  ========================================================================================

What a checkpoint's own format rounds counts with each variant of ours (:func:`own_roundings`), by :class:`QuantSpec`:

=======================  ==============================================================================
``none``                 nothing
``mxfp4``                nothing: its weights are exact in bf16, so the model is the checkpoint
``w4a16``, ``w8a16``,    nothing: inputs are as they are, and the weights are the checkpoint
``fp8_w8a16``
``fp8_block``            ``fp8-inputs``; that scales are powers of two shifts codes, and makes none coarser
``int8``                 ``int8-inputs``
``fp8_tensor``,          ``fp8-inputs`` where a call finds the scales; with those of the checkpoint there is no bound:
``fp8_channel``          linears that are fused here take the largest of their parts', and stock transformers fuses none
=======================  ==============================================================================

fp32 has the floor: KL grows with the square of the unit round-off, (2⁻²⁴ / 2⁻⁹)² = 2⁻³⁰ of bf16's, and 16 times that
lets sums of another order be four times as far off. The margin covers what the sum leaves out: errors of two roundings
are not quite independent, and sums in bf16 have an order. ``tests/server/test_accuracy_bounds.py`` holds both sides of
it: every sound variant of the shipped checkpoints stays within, and at the places that are planted there a doubled
scale of one block, a halved expert and, in fp32, where no noise of bf16 covers it, a cache scale that is 2 % off or a
single wrong exponent of MXFP4 go beyond. It is no proof for other places: a block or an expert that weighs less on
these texts than what the format rounds may be wrong and stay within, and what no logits come from (NextN layers) is not
judged.

Both sides read the same files, so what is wrong in a checkpoint is wrong in both: a bound finds faults of the library.
The planted ones are in the files that the judged side reads, and the reference reads sound ones.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import cache
from math import ceil, comb, sqrt
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fastlayers.quant.spec import QuantSpec
from fastlayers.quant.weight_only_config import WEIGHT_ONLY
from fastlayers_models.checkpoint import Checkpoint
from fastlayers_models.convert import convert_to_fp8_block, dequantize_checkpoint
from fastlayers_server.hugging_face import load_hugging_face
from fastlayers_server.variants import Rounding

MARGIN = 1.25
FLOOR = 16 * 2.0**-30
# A chance, and how many standard deviations it is.
CHANCE, Z = 0.01, 2.33
PERCENTILE = 0.99
E4M3, GROUP = torch.float8_e4m3fn, 128
E4M3_MAX, SMALLEST = 448.0, 1e-10
LARGEST = {E4M3: E4M3_MAX, torch.int8: 127.0}

Logits = Callable[[Sequence[int]], torch.Tensor]


@dataclass(frozen=True)
class Divergence:
    """KL from fp32 in nats, over the contexts: its mean, its 99th percentile, how often the best token agrees.

    ``extreme``: what the 99th percentile of another draw stays below, but for one in a hundred where some hundred
    contexts are there. ``apart``: the standard deviation of the difference between the means of two draws.
    """

    mean: float
    p99: float
    top1: float
    extreme: float
    apart: float


@cache
def extreme_rank(k: int) -> int:
    """Return which of a draw's largest numbers another's k-th largest exceeds once in a hundred; k < 7: the first."""
    rank, chance = 0, 0.0
    while (chance := chance + comb(k + rank - 1, rank) / 2 ** (k + rank)) <= CHANCE:
        rank += 1
    return max(rank, 1)


def shared_starts(texts: Sequence[Sequence[int]]) -> list[int]:
    """Return with how many tokens each text begins as one before it does: its contexts that have been counted."""
    after: dict[tuple[int, int], int] = {}  # (context, token) -> the context that is one longer
    found = []
    for ids in texts:
        context = shared = 0
        for token in ids:
            shared += (context, token) in after
            context = after.setdefault((context, token), len(after) + 1)
        found.append(shared)
    return found


def divergence(
    reference: Sequence[torch.Tensor], logits: Logits, texts: Sequence[Sequence[int]], shared: Sequence[int]
) -> Divergence:
    """Compare with the reference's logits, ``[len(text), vocab]`` for each text, on any device.

    ``shared``: of :func:`shared_starts`.
    """
    found, agree = [], 0
    for wanted, ids, start in zip(reference, texts, shared, strict=True):
        p, q = (x[start:].double().log_softmax(-1) for x in (wanted, logits(ids).to(wanted.device)))
        found.append((p.exp() * (p - q)).sum(-1))
        agree += int((p.argmax(-1) == q.argmax(-1)).sum())
    kl = torch.cat(found)
    k = len(kl) - ceil(PERCENTILE * (len(kl) - 1))  # the percentile lies between this one and the next smaller
    extreme = kl.topk(min(extreme_rank(k), len(kl))).values[-1]
    apart = float(kl.var(correction=0).mul(2 / len(kl)).sqrt())
    return Divergence(float(kl.mean()), float(kl.quantile(PERCENTILE)), agree / len(kl), float(extreme), apart)


class Yardstick:
    """Stock transformers in fp32 on some texts, and with each rounding when it is first asked for.

    Parameters
    ----------
    path : Path
        A checkpoint that stock transformers reads; one of another format than MXFP4 is multiplied out for it.
    texts : sequence of token ids
    device : torch.device

    Notes
    -----
    Holds the fp32 logits on the host: four bytes for each token of the texts and each of the vocabulary.

    Raises
    ------
    CheckpointError
        transformers cannot load it.
    """

    def __init__(self, path: Path, texts: Sequence[Sequence[int]], device: torch.device) -> None:
        self._folders = tempfile.TemporaryDirectory(prefix="fastlayers-yardstick-")
        self._spec = QuantSpec.from_config(Checkpoint(path).config.get("quantization_config"))
        self.path, self.texts, self.device, self._coded = path, [list(ids) for ids in texts], device, path
        if self._spec.format not in ("none", "mxfp4"):
            self.path = Path(self._folders.name) / "fp32"
            dequantize_checkpoint(path, self.path, torch.float32)
        self._shared = shared_starts(self.texts)
        stock = _Stock(self.path, torch.float32, device)
        self.reference = [stock.logits(ids).cpu() for ids in self.texts]
        self._found: dict[Rounding, Divergence] = {}

    def of(self, logits: Logits) -> Divergence:
        """Return how far these logits are from fp32."""
        return divergence(self.reference, logits, self.texts, self._shared)

    def with_rounding(self, rounding: Rounding) -> Divergence:
        """Return how far stock transformers is with this rounding and no other."""
        if rounding not in self._found:
            self._found[rounding] = self.of(self._rounded(rounding).logits)
        return self._found[rounding]

    def bound(self, roundings: Sequence[Rounding]) -> tuple[float, float]:
        """Return what a variant with these roundings may reach: of the mean, and of the 99th percentile."""
        bf16, parts = self.with_rounding("bf16"), [self.with_rounding(each) for each in roundings]
        mean = sum(part.mean for part in parts) + FLOOR * bf16.mean
        apart = sqrt(sum(part.apart**2 for part in parts) + (FLOOR * bf16.apart) ** 2)
        p99 = sum(part.extreme for part in parts) + FLOOR * bf16.extreme
        return MARGIN * mean + Z * apart, MARGIN * p99

    def _rounded(self, rounding: Rounding) -> _Stock:
        if rounding == "bf16":
            return _Stock(self.path, torch.bfloat16, self.device)
        if rounding == "fp8-kv":
            return _Stock(self.path, torch.float32, self.device, cache=True)
        if rounding in ("fp8-inputs", "int8-inputs"):
            inputs = _Inputs.of(self._spec, _coded_linears(self._coded))
            return _Stock(self.path, torch.float32, self.device, inputs=inputs)
        packed, plain = Path(self._folders.name) / "fp8", Path(self._folders.name) / "fp8-fp32"
        if not plain.exists():
            convert_to_fp8_block(self.path, packed, include_ragged=True)
            dequantize_checkpoint(packed, plain, torch.float32)
        names = _coded_linears(packed) if rounding == "fp8-block" else frozenset()
        return _Stock(plain, torch.float32, self.device, inputs=_Inputs(names))


def own_roundings(path: Path) -> tuple[Rounding, ...] | None:
    """Return what our models round of a checkpoint's own format, beside its weights; ``None``: no bound counts that."""
    spec = QuantSpec.from_config(Checkpoint(path).config.get("quantization_config"))
    if spec.format in ("none", "mxfp4", *WEIGHT_ONLY):
        return ()
    if spec.format == "int8":
        return ("int8-inputs",)
    return None if spec.activation_scale == "static" else ("fp8-inputs",)


def _coded_linears(path: Path) -> frozenset[str]:
    checkpoint, suffix = Checkpoint(path), ".weight"
    names = (name for name in checkpoint.names() if name.endswith(suffix))
    return frozenset(name.removesuffix(suffix) for name in names if checkpoint.dtype(name) in ("F8_E4M3", "I8"))


@dataclass(frozen=True)
class _Inputs:
    """Linears, given by their checkpoint names, and what their inputs are rounded to: codes times scales.

    ``group``: how many values of a row have one scale, or all of a ``"row"``, or all of a ``"call"``.
    """

    names: frozenset[str] = frozenset()
    dtype: torch.dtype = E4M3
    group: int | str = GROUP

    @staticmethod
    def of(spec: QuantSpec, names: frozenset[str]) -> _Inputs:
        """Return what a format rounds of these linears."""
        if spec.format == "int8":
            return _Inputs(names, torch.int8, "row")
        if spec.format == "fp8_block":
            return _Inputs(names, E4M3, spec.block_size[1])
        return _Inputs(names, E4M3, "row" if spec.activation_scale == "token" else "call")

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """Return a new tensor like ``x`` ``[..., K]``."""
        rows = x.reshape(1, -1) if self.group == "call" else x
        width = rows.shape[-1]
        group = self.group if isinstance(self.group, int) else width
        groups = F.pad(rows, (0, -width % group)).unflatten(-1, (-1, group))
        scale = groups.abs().amax(-1, keepdim=True).clamp_min(SMALLEST) / LARGEST[self.dtype]
        ratio = groups / scale
        codes = (ratio.round() if self.dtype == torch.int8 else ratio).to(self.dtype)
        return (codes.to(x.dtype) * scale).flatten(-2)[..., :width].reshape(x.shape)


class _Stock:
    """A stock model, with a rounding of the cache or of the inputs of some linears."""

    def __init__(
        self, path: Path, dtype: torch.dtype, device: torch.device, *, cache: bool = False, inputs: _Inputs = _Inputs()
    ) -> None:
        self.model, self.device, self.cache = load_hugging_face(path, dtype, device), device, cache
        if inputs.names and hasattr(self.model, "set_experts_implementation"):
            self.model.set_experts_implementation("eager")  # one linear an expert: what the mode below sees
        self.mode = _RoundInputs(inputs, _weights(self.model, inputs.names))

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Return fp32 logits ``[len(ids), vocab]``."""
        options = {"past_key_values": _rounding_cache(self.model.config)} if self.cache else {}
        with self.mode:
            out = self.model(torch.tensor([list(ids)], device=self.device), use_cache=self.cache, **options)
        logits: torch.Tensor = out.logits[0]
        return logits.float()


class _RoundInputs(TorchFunctionMode):
    """Rounds the first argument of ``linear`` where the weight is one of these."""

    def __init__(self, inputs: _Inputs, storages: set[int]) -> None:
        super().__init__()
        self.inputs, self.storages = inputs, storages

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and args[1].untyped_storage().data_ptr() in self.storages:
            args = (self.inputs.rounded(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


def _weights(model: nn.Module, names: Set[str]) -> set[int]:
    """Return where the weights of these linears are stored; stacked experts hold those of all of theirs."""
    found: set[int] = set()
    for name, parameter in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        stacked = parameter.ndim == 3 and any(other.startswith(f"{owner}.0.") for other in names)
        if stacked or (leaf == "weight" and owner in names):
            found.add(parameter.untyped_storage().data_ptr())
    return found


def _rounding_cache(config: Any) -> Any:
    """Return a cache of transformers that rounds what enters it to e4m3."""
    from transformers import DynamicCache

    class RoundingCache(DynamicCache):
        def update(self, key_states: Any, value_states: Any, *rest: Any, **options: Any) -> Any:
            rounded = [x.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).to(x.dtype) for x in (key_states, value_states)]
            return super().update(*rounded, *rest, **options)

    return RoundingCache(config=config)
