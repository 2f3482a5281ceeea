"""Prepared launches: a Triton kernel that was launched once is launched again without Triton's binder.

    kernel[grid](*arguments, **constants)
        │  key: constants, dtypes and alignment of tensors, classes of numbers   (what Triton specialises on)
        ├─ known: the driver's launch, with addresses instead of tensors
        └─ new:   Triton binds, compiles and launches; what it compiled is kept under the key

Triton's own way to a launch binds arguments by name, compares a printed specialisation and looks at every global: on
the host of an H200 some 50 µs, most of the time of a step that is not captured.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

# The launcher's arguments in CudaDriver.prepare are those of these versions; with others Triton launches by itself.
PREPARED = triton.__version__.split(".")[:2] == ["3", "6"]
# Profilers that want to hear of each launch: then Triton launches by itself.
_LISTENERS: tuple[list[Any], ...] = (
    (triton.knobs.runtime.launch_enter_hook.calls, triton.knobs.runtime.launch_exit_hook.calls)
    if PREPARED
    else ([], [])
)
_ONES: tuple[tuple[int, ...], ...] = ((), (1, 1), (1,), ())
_address: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr
_dtype = attrgetter("dtype")


class CudaDriver:
    """What a prepared launch asks of CUDA; a test puts its own in place of :data:`driver`."""

    def __init__(self) -> None:
        self.device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
        self.stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)

    @staticmethod
    def prepare(compiled: Any) -> Callable[..., None] | None:
        """Return what launches a compiled kernel; ``None`` where only Triton can: it needs memory of Triton's.

        It is called as ``launch(*grid, stream, *arguments, *constants)``, three numbers of programs, addresses for
        tensors, and anything for constants.
        """
        launcher = compiled.run
        if launcher.global_scratch_size or launcher.profile_scratch_size:
            return None
        call, function, metadata = launcher.launch, compiled.function, compiled.packed_metadata
        options = (function, launcher.launch_cooperative_grid, launcher.launch_pdl, None, None, metadata)

        def launch(x: int, y: int, z: int, stream: int, *arguments: Any) -> None:
            call(x, y, z, stream, *options, None, None, None, *arguments)

        return launch


driver: Any = CudaDriver()


class Kernel:
    """A Triton kernel with prepared launches, made by :func:`kernel`.

    ``kernel[grid](*arguments, **constants)``, as of a jitted function: tensors and numbers by position, in this order;
    constants and launch options by name. Returns nothing.

    Attributes
    ----------
    jit : JITFunction
        Triton's own object; under its interpreter the interpreted function.
    """

    def __init__(self, function: Callable[..., None], do_not_specialize: tuple[str, ...] = ()) -> None:
        self.jit: Any = triton.jit(do_not_specialize=list(do_not_specialize))(function)
        self.__name__, self.__doc__, self.__module__ = function.__name__, function.__doc__, function.__module__
        self._known: dict[tuple[Any, ...], Callable[..., None] | None] = {}
        self.prepared = isinstance(self.jit, JITFunction) and PREPARED
        names = self.arg_names
        self._tensors = sum(name.endswith("_ptr") for name in names)
        if not all(name.endswith("_ptr") for name in names[: self._tensors]):
            raise TypeError(f"kernel {self.__name__}: pointers (*_ptr) come first, then numbers, then constants")
        self._constants = (None,) * sum(p.is_constexpr for p in getattr(self.jit, "params", ()))

    @property
    def arg_names(self) -> list[str]:
        """Names of all arguments, constants included."""
        names: list[str] = self.jit.arg_names
        return names

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        if not self.prepared or _LISTENERS[0] or _LISTENERS[1]:
            self.jit[grid](*arguments, **constants)
            return
        tensors, numbers = arguments[: self._tensors], arguments[self._tensors :]
        addresses, device = [*map(_address, tensors)], driver.device()
        key = (
            device, *constants, *constants.values(), *map(_dtype, tensors), *[a % 16 == 0 for a in addresses],
            *map(type, numbers), *[(n == 1) + 2 * (n % 16 == 0) + 4 * (n > 0x7FFFFFFF) for n in numbers],
        )  # fmt: skip
        launch = self._known.get(key)
        if launch is None:
            # Through Triton; what it compiled serves the next launch of this kind. None: a hook forbade the compile.
            compiled = self.jit[grid](*arguments, **constants)
            self._known[key] = driver.prepare(compiled) if compiled is not None else None
        else:
            launch(*grid, *_ONES[len(grid)], driver.stream(device), *addresses, *numbers, *self._constants)


def kernel(function: Callable[..., None] | None = None, *, do_not_specialize: tuple[str, ...] = ()) -> Any:
    """Decorate a kernel that is launched from Python: ``@kernel`` instead of ``@triton.jit``.

    Functions that kernels call keep ``@triton.jit``. The arguments' order is fixed: pointers, whose names end in
    ``_ptr``, then numbers, then constants.

    Parameters
    ----------
    do_not_specialize : tuple[str, ...]
        As for ``triton.jit``.

    Raises
    ------
    TypeError
        The arguments are in another order.
    """
    if function is None:
        return partial(Kernel, do_not_specialize=do_not_specialize)
    return Kernel(function)
