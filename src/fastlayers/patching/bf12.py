"""bf12 copies of what a patched model's products of one row read: ``patch(cuda_graph=True, bf12=True)``."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from fastlayers.linear.dense.triton_bf12 import BF12Linear
from fastlayers.quant.bf12 import pack_bf12, why_not_bf12


class BF12Copies:
    """Copies by the weights' addresses, made by the runs in front of a capture; of weights as they are.

    Parameters
    ----------
    wanted : bool
        Whether there are any.
    """

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted
        # The model's weights when it was asked last, and how often each had been edited.
        self._at: list[tuple[weakref.ref[torch.Tensor], int]] = []
        self._copies: dict[tuple[int, torch.Size], BF12Linear | None] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        return sum(copy.weight.nbytes for copy in self._copies.values() if copy is not None)

    def of(self, weight: torch.Tensor) -> BF12Linear | None:
        """Return what multiplies a row by ``weight``; ``None``: its 16 bits do."""
        if not self.wanted:
            return None
        key = weight.data_ptr(), weight.shape
        if key not in self._copies:
            if weight.is_cuda and torch.cuda.is_current_stream_capturing():
                return None
            found = None if why_not_bf12(weight) or weight.is_inference() else pack_bf12(weight)
            self._copies[key] = None if found is None else BF12Linear(found, weight.dtype)
        return self._copies[key]

    def stale(self, root: Any) -> bool:
        """Return whether a weight of ``root`` was edited or replaced since this was asked last, where there are copies.

        Writes through ``.data`` or raw pointers are seen by nobody.
        """
        if not self.wanted:
            return False
        before, weights = self._at, [each for each in root.parameters() if not each.is_inference()]
        self._at = [(weakref.ref(each), each._version) for each in weights]
        same = len(before) == len(weights) and all(
            version == each._version and ref() is each for (ref, version), each in zip(before, weights, strict=True)
        )
        return bool(self._copies) and not same

    def clear(self) -> None:
        """Forget all."""
        self._copies.clear()
