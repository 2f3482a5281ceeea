"""What collecting a whole suite leaves, kept out of the collector's walks without a test noticing it.

That is a million objects, nearly all of them tests: each full walk through them takes a second, and there are hundreds,
as engines and fronts ask for one when they start, and compilers make enough objects to set them off. They are frozen
between tests. :mod:`gc` counts what is frozen by walking through all of it and knows no levels, so the three functions
are replaced: what is frozen here counts as nothing, as it would without this module, until somebody else freezes.
"""

from __future__ import annotations

import gc
import sys

_freeze, _unfreeze, _count = gc.freeze, gc.unfreeze, gc.get_freeze_count
# Objects that set off a walk through the youngest: Python's 700 are a single call of a compiler.
THRESHOLDS = 10_000, 10, 20
MODULES = 200  # that came since: so many hold tens of thousands of objects


class SuiteHeap:
    """Who froze what lives: the suite, somebody else (``theirs``), or nobody since somebody else thawed.

    Attributes
    ----------
    frozen_by_others : int
        How often others froze something that they have not thawed.
    """

    def __init__(self) -> None:
        self.frozen_by_others, self._ours, self._modules = 0, False, 0

    def begin(self) -> None:
        """Freeze the suite, which is collected, and watch over others from now on."""
        gc.freeze, gc.unfreeze, gc.get_freeze_count = self.freeze, self.unfreeze, self.count
        gc.set_threshold(*THRESHOLDS)
        self.keep()

    def keep(self) -> None:
        """Between two tests: freeze what somebody thawed or imported (a compiler, say), less what is young and dead."""
        grown = len(sys.modules) > self._modules + MODULES
        if not self.frozen_by_others and (grown or not self._ours):
            gc.collect(1)
            _freeze()
            self._ours, self._modules = True, len(sys.modules)

    def freeze(self) -> None:
        self.frozen_by_others += 1
        _freeze()

    def unfreeze(self) -> None:
        self.frozen_by_others, self._ours = 0, False
        _unfreeze()

    def count(self) -> int:
        return 0 if self._ours and not self.frozen_by_others else _count()
