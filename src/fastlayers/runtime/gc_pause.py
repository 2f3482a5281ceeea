"""Python's garbage collector, kept away while graphs are captured: :func:`gc_pause`."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# Some Pythons begin with hundreds of frozen objects; whoever freezes after importing torch freezes a hundred thousand.
_FROZEN_BY_SOMEONE = 20_000
# Counting what is frozen walks through all of it, tens of milliseconds, at each capture of a pause that holds many.
_paused: ContextVar[bool] = ContextVar("paused", default=False)


@contextmanager
def gc_pause(enabled: bool = True) -> Iterator[None]:
    """Keep Python's garbage collector away from what exists now; put it back as it was afterwards.

    A capture calls the collector, or sets it off, again and again; millions of objects are looked through each
    time. Here they are frozen, and the collector is off. Nothing is collected for that, neither now nor at the end: a
    look through everything costs more than most captures. ``gc.unfreeze`` knows no levels: where objects were frozen
    before (by a server), they stay so, and nothing else is frozen. A pause within a pause does nothing.

    Parameters
    ----------
    enabled : bool
        False: do nothing (to measure what it is worth).
    """
    if not enabled or _paused.get():
        yield
        return
    was_enabled, was_frozen = gc.isenabled(), gc.get_freeze_count() > _FROZEN_BY_SOMEONE
    if not was_frozen:
        gc.freeze()
    # freeze() alone leaves the collector on, which could free a dead cycle's CUDA memory in the middle of a capture.
    gc.disable()
    within = _paused.set(True)
    try:
        yield
    finally:
        _paused.reset(within)
        if not was_frozen:
            gc.unfreeze()
        if was_enabled:
            gc.enable()
