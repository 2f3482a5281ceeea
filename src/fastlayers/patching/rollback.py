"""A log of undo steps: whatever goes wrong while a model is patched, it ends as it began."""

from __future__ import annotations

from collections.abc import Callable


class RollbackLog:
    """Undo steps, run in reverse order by :meth:`undo`."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []

    def add(self, step: Callable[[], object]) -> None:
        """Remember how to undo what is about to be done."""
        self._steps.append(step)

    def undo(self) -> None:
        """Undo everything, last step first."""
        while self._steps:
            self._steps.pop()()
