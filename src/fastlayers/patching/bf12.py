"""bf12 copies of what a patched model's products of one row read: ``patch(cuda_graph=True, bf12=True)``."""

from __future__ import annotations

from typing import Any

import torch

from fastlayers.linear.dense.triton_bf12 import BF12Linear
from fastlayers.quant.bf12 import pack_bf12, why_not_bf12


def _edits(root: Any) -> int:
    """Return a number that grows when a weight is edited in place."""
    return sum(weight._version for weight in root.parameters() if not weight.is_inference())


class BF12Copies:
    """Copies by the weights' addresses, made by the runs in front of a capture; of weights as they are.

    Parameters
    ----------
    wanted : bool
        Whether there are any.
    """

    def __init__(self, wanted: bool) -> None:
        self.wanted, self._at = wanted, 0
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
        """Return whether a weight of ``root`` was edited since this was asked last, where there are copies."""
        if not self.wanted:
            return False
        before, self._at = self._at, _edits(root)
        return bool(self._copies) and before != self._at

    def clear(self) -> None:
        """Forget all."""
        self._copies.clear()
