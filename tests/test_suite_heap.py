"""The collector in this suite: what collecting the tests left is frozen, and no test can tell."""

from __future__ import annotations

import gc

import suite_heap  # type: ignore[import-not-found]  # conftest.py has imported it


def test_the_suite_is_frozen_again_after_somebody_thaws() -> None:
    heap = gc.freeze.__self__
    assert isinstance(heap, suite_heap.SuiteHeap)
    frozen = suite_heap._count()
    assert frozen > 20_000 and gc.get_freeze_count() == 0
    gc.freeze()
    assert gc.get_freeze_count() >= frozen and heap.frozen_by_others == 1
    heap.keep()
    assert heap.frozen_by_others == 1, "what others froze is theirs"
    gc.unfreeze()
    assert gc.get_freeze_count() == suite_heap._count() < 20_000
    heap.keep()
    assert suite_heap._count() >= frozen - 1000 and gc.get_freeze_count() == 0
