"""What Triton would compile, recorded in place of launches."""

from __future__ import annotations

from typing import Any

import pytest

from fastlayers.runtime import launch
from fastlayers.runtime.launch import Kernel


class Kinds:
    """What Triton would compile for the launches so far: constants, dtypes, and of addresses and numbers what it
    specialises on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: set[Any] = set()
        # Where each launch passes, whenever it was prepared: backends keep what they prepared for other tests, which
        # would compute here, for minutes, and what they prepared here would compute nothing there.
        note = self.note
        monkeypatch.setattr(Kernel, "_through_triton", lambda kernel, *given: note(kernel, *given))
        monkeypatch.setattr(launch, "_LISTENERS", (["this"], []))

    def note(self, kernel: Kernel, grid: Any, given: tuple[Any, ...], constants: dict[str, Any]) -> None:
        count = kernel._tensors
        names, tensors, numbers = kernel.arg_names[count:], given[:count], given[count:]
        classes = tuple(
            (n == 1, n % 16 == 0, n > 0x7FFFFFFF) if isinstance(n, int) else type(n)
            for name, n in zip(names, numbers, strict=False)
            if name not in kernel.unspecialized
        )
        aligned = tuple((x.dtype, x.data_ptr() % 16 == 0) for x in tensors)
        self.seen.add((kernel.__module__, kernel.__name__, aligned, classes, *sorted(constants.items())))
