"""The captured steps of one model, of whatever kind: their graphs, and why other steps ran without one.

a step of a bucket that is    runs
captured                      as a replay
new                           uncaptured, and is wanted from then on: captured when its caller has time for that
broken                        uncaptured: it could not be captured, and nobody tries again
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

from fastlayers.errors import ArgumentError, CaptureError
from fastlayers.runtime.graphs import CudaGraphs, GraphRecord

log = logging.getLogger(__name__)


class CapturedSteps:
    """Base of what captures a model's steps; a subclass says which steps there are and how one runs.

    Parameters
    ----------
    graphs : CudaGraphs, optional
        ``None``: nothing is captured, or not yet.
    strict : bool
        Whether a step that cannot be captured raises.

    Attributes
    ----------
    wanted : dict[key, None]
        Kinds of steps that ran uncaptured because they were new.
    broken : dict[key, str]
        Kinds that could not be captured, and why.
    uncaptured : Counter[str]
        Steps that ran uncaptured, by the reason in words.
    notes : list[str]
        What the report begins with.
    off : str
        Why there are no graphs, in words.
    """

    # What :meth:`report` calls the steps whose reasons are counted.
    counted = "steps"

    def __init__(self, graphs: CudaGraphs | None = None, strict: bool = False) -> None:
        self.graphs, self.strict = graphs, strict
        self.wanted: dict[Any, None] = {}
        self.broken: dict[Any, str] = {}
        self.uncaptured: Counter[str] = Counter()
        self.notes: list[str] = []
        self.off = ""

    def check_graphs(self, called: str) -> CudaGraphs:
        """Return the graphs; raise :class:`ArgumentError` if nothing can be captured, naming what was called."""
        if self.graphs is None:
            accepted = "'auto' or True for a model on CUDA whose ranks communicate by NCCL; or graphs of your own"
            raise ArgumentError(called, "cuda_graph", self.off, accepted)
        return self.graphs

    def kind_of(self, key: Any) -> Hashable:
        """Return what of a graph's key decides whether it can be captured."""
        return key

    def describe(self, key: Any) -> str:
        """Return a graph's key in words."""
        raise TypeError(f"{type(self).__name__} describes no steps")

    def agreed(self, failed: CaptureError | None) -> CaptureError | None:
        """Return why a capture counts as failed; over several ranks that is for all of them to say."""
        return failed

    def missing(self, kind: Any, new: str) -> str:
        """Note that a step of this kind came and has no graph; return why it runs uncaptured, ``new`` if it is new."""
        why = self.broken.get(kind)
        if why is None:
            self.wanted[kind] = None
        return why or new

    def capture_step(
        self, key: Any, run: Callable[[], Any], words: str, restore: Callable[[], None] | None = None
    ) -> bool:
        """Capture one step, and return whether there is a graph of it now.

        Parameters
        ----------
        key : hashable
        run, restore : callable
            As for :meth:`fastlayers.runtime.graphs.CudaGraphs.capture`.
        words : str
            What a warning says if it cannot be captured, before the reason.

        Raises
        ------
        CaptureError
            It cannot be captured, and :attr:`strict` is set.
        """
        assert self.graphs is not None
        failed: CaptureError | None = None
        try:
            self.graphs.capture(key, run, restore=restore)
        except CaptureError as error:
            failed = error
        failed = self.agreed(failed)
        if failed is None:
            return True
        self.graphs.drop(key)
        if self.strict:
            raise failed
        log.warning("%s: %s", words, failed)
        self.broken[self.kind_of(key)] = str(failed)
        return False

    @property
    def ledger(self) -> list[GraphRecord]:
        """What every graph cost and how often it ran."""
        return [] if self.graphs is None else self.graphs.ledger

    def report(self) -> list[str]:
        """Return what was captured, what each graph cost and how often it ran, and why steps ran uncaptured."""
        lines = [
            f"{self.describe(each.key)}: captured in {each.warm_up_seconds + each.capture_seconds:.2f} s, "
            f"{each.bytes:,} bytes, {each.replays} replays"
            for each in self.ledger
        ]
        reasons = self.uncaptured.most_common()
        return self.notes + lines + [f"{count} {self.counted} uncaptured: {reason}" for reason, count in reasons]
