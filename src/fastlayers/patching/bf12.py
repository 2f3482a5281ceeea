"""bf12 copies of what a patched model's products of one row read: ``patch(cuda_graph=True, bf12=True)``."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fastlayers.errors import ArgumentError
from fastlayers.linear.dense.triton_bf12 import BF12Linear
from fastlayers.quant.bf12 import pack_bf12, run_of, why_not_bf12

log = logging.getLogger(__name__)
# Of each copied weight so many parts of so many numbers are compared with what they were: several linears may be one.
_PARTS, _SAMPLE = 8, 256


def check_bf12(roots: Iterable[nn.Module]) -> None:
    """Raise :class:`ArgumentError` unless each model has bfloat16 linears that can have copies, whatever their size."""
    for root in roots:
        weights = [each.weight for each in root.modules() if type(each) is nn.Linear]
        if not any(weight.dtype == torch.bfloat16 and run_of(weight.shape[1]) is not None for weight in weights):
            accepted = "False: no linear of this model has bfloat16 weights of a multiple of 64 input features"
            raise ArgumentError("patch", "bf12", True, accepted)


class BF12Copies:
    """Copies by the weights' addresses, made by the runs in front of a capture; of weights as they are.

    Parameters
    ----------
    wanted : bool
        Whether there are any.
    """

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted
        self._copies: dict[Any, BF12Linear | None] = {}
        # Parts of the copied weights, which keep their addresses from others, and what was there.
        self._samples: list[torch.Tensor] = []
        self._known: list[torch.Tensor] = []
        # The model's weights when it was asked last, and how often each had been edited.
        self._at: list[tuple[weakref.ref[torch.Tensor], int]] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        return sum(copy.nbytes for copy in self._copies.values() if copy is not None)

    def of(self, weight: torch.Tensor) -> BF12Linear | None:
        """Return what multiplies a row by ``weight``; ``None``: its 16 bits do."""
        if not self.wanted:
            return None
        key = weight.data_ptr(), weight.shape, weight.stride(), weight.dtype
        if key not in self._copies:
            if weight.is_cuda and torch.cuda.is_current_stream_capturing():
                return None
            self._copies[key] = self._made(weight)
        return self._copies[key]

    def _made(self, weight: torch.Tensor) -> BF12Linear | None:
        if why_not_bf12(weight) or weight.is_inference() or not weight.is_contiguous():
            return None
        try:
            packed = pack_bf12(weight.detach())
        except torch.cuda.OutOfMemoryError:
            log.warning("bf12: no memory is left for a copy of a weight %s, whose 16 bits are read", list(weight.shape))
            return None
        if packed is None:
            return None
        whole = weight.detach().view(-1)
        samples = [whole[len(whole) * (2 * i + 1) // (2 * _PARTS) :][:_SAMPLE] for i in range(_PARTS)]
        self._samples += samples
        self._known += [sample.clone() for sample in samples]
        return BF12Linear(packed, weight.dtype)

    def stale(self, root: Any) -> bool:
        """Return whether a weight of ``root`` was edited or replaced since this was asked last, where there are copies.

        What torch counts as no edit (writes through ``.data``, as an adapter's merge; a fused optimizer) is seen
        where it changes a whole weight.
        """
        if not self.wanted:
            return False
        before, weights = self._at, [each for each in root.parameters() if not each.is_inference()]
        self._at = [(weakref.ref(each), each._version) for each in weights]
        same = len(before) == len(weights) and all(
            version == each._version and ref() is each for (ref, version), each in zip(before, weights, strict=True)
        )
        if same and self._samples:
            same = torch.equal(torch.cat(self._samples), torch.cat(self._known))
        return bool(self._copies) and not same

    def clear(self) -> None:
        """Forget all."""
        self._copies.clear()
        self._samples.clear()
        self._known.clear()
