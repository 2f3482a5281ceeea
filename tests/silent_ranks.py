"""Ranks whose calls return at once, whether the others make them or not: for tests of calls that differ."""

from __future__ import annotations

from typing import Any

import torch

from fastlayers.comm.collectives import TorchCollectives
from fastlayers.comm.parallel import Axis
from fastlayers.runtime.graphs import CudaGraphs, EagerRuntime

X, WIDE = torch.zeros(4, 8), torch.zeros(2, 8)  # what they bring


class Silent(TorchCollectives):
    """As NCCL's: a call returns at once, whether the other ranks make it or not."""

    def _call(self, operation: Any, *given: Any) -> None:
        pass


def eager_graphs() -> CudaGraphs:
    """Return graphs whose replays run again what was captured."""
    return CudaGraphs(runtime=EagerRuntime(), warm_ups=1, freeze=False)


def silent(axis: Axis) -> tuple[Silent, CudaGraphs]:
    """Return what a rank calls differently by: its collectives, and two captured steps."""
    graphs = eager_graphs()
    for key in (1, 2):
        graphs.capture(key, lambda: None)
    return Silent(axis), graphs
