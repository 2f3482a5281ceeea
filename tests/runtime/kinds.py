"""What Triton would compile, recorded in place of launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from fastlayers.runtime.launch import Kernel


class Kinds:
    """What Triton would compile for the launches so far: constants, dtypes, and of addresses and numbers what it
    specialises on."""

    # Of whoever made a launch, as backends keep what was prepared.
    all_seen: ClassVar[set[Any]] = set()

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen = Kinds.all_seen
        self.seen.clear()

        def bind(kernel: Kernel, **constants: Any) -> Callable[..., None]:
            count = kernel._tensors
            return lambda grid, *given: self.note(kernel, given[:count], given[count:], constants)

        def at(
            kernel: Kernel, grid: Any, *numbers: Any, parts: Any = None, **constants: Any
        ) -> Callable[..., None]:  # fmt: skip
            return lambda *given: self.note(kernel, given, numbers, constants)

        monkeypatch.setattr(Kernel, "bind", bind)
        monkeypatch.setattr(Kernel, "at", at)

    def note(self, kernel: Kernel, tensors: Any, numbers: Any, constants: dict[str, Any]) -> None:
        names = kernel.arg_names[kernel._tensors :]
        classes = tuple(
            (n == 1, n % 16 == 0, n > 0x7FFFFFFF) if isinstance(n, int) else type(n)
            for name, n in zip(names, numbers, strict=False)
            if name not in kernel.unspecialized
        )
        aligned = tuple((x.dtype, x.data_ptr() % 16 == 0) for x in tensors)
        self.seen.add((kernel.__module__, kernel.__name__, aligned, classes, *sorted(constants.items())))
