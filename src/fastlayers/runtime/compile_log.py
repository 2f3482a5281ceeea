"""Watching run-time compilation: after a warm-up nothing may compile, least of all inside a CUDA graph capture.

Triton announces every kernel that is not loaded yet, so it is stopped before it compiles. deep_gemm and flashinfer
announce nothing: that they compiled is seen afterwards, from new entries in their cache directories, see
:mod:`fastlayers.runtime.kernel_cache`; a kernel that they load from such a directory is not seen.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fastlayers import device, env
from fastlayers.errors import CaptureError
from fastlayers.runtime.kernel_cache import cached_kernels

log = logging.getLogger(__name__)


def _triton_runtime() -> Any:
    """Return Triton's run-time settings; ``None`` where Triton compiles nothing: no GPU, or its interpreter."""
    import torch

    if env.triton_interpret() or not torch.cuda.is_available() or device.package("triton", load=True).reason:
        return None
    import triton

    return triton.knobs.runtime


class TritonHook:
    """Calls ``found(name)`` before Triton compiles, or loads from its cache, a kernel that this process lacks.

    Parameters
    ----------
    found : callable
        Told the kernel's qualified name. If it raises, Triton does not compile.

    Notes
    -----
    Triton has one such hook a process. The one that was there before is called first, and is put back by
    :meth:`remove`. Triton's interpreter compiles nothing and calls no hook.
    """

    def __init__(self, found: Callable[[str], None]) -> None:
        self._found = found
        self._before: Any = None
        self._knobs: Any = None

    def install(self) -> None:
        """Start; does nothing where Triton does not compile."""
        if self._knobs is None:
            self._knobs = _triton_runtime()
            if self._knobs is not None:
                self._before = self._knobs.jit_cache_hook
                self._knobs.jit_cache_hook = self._called

    def remove(self) -> None:
        """Stop. A hook that someone installed on top stays, and goes on calling this one, which is silent."""
        if self._knobs is not None and self._knobs.jit_cache_hook == self._called:
            self._knobs.jit_cache_hook = self._before
        self._knobs = None

    def _called(self, **details: Any) -> Any:
        skip = self._before(**details) if self._before is not None else None
        if not skip and self._knobs is not None:
            self._found(f"{details['fn'].module}.{details['fn'].name}")
        return skip


class QuietCompileError(CaptureError):
    """deep_gemm or flashinfer compiled during a capture, in this process or in another that shares their caches."""


@contextmanager
def forbidden(label: str) -> Iterator[None]:
    """Inside, a compile is a :class:`CaptureError`: at once if Triton's, at the end if deep_gemm's or flashinfer's.

    The latter is a :class:`QuietCompileError`: their directories tell that there is a new kernel, not who made it.

    Parameters
    ----------
    label : str
        What is being captured, for the message.
    """

    def found(kernel: str) -> None:
        raise CaptureError(f"{label}: Triton kernel {kernel} would be compiled inside the capture; run it once before")

    hook, before = TritonHook(found), cached_kernels()
    hook.install()
    try:
        yield
    finally:
        hook.remove()
    new = sorted(cached_kernels() - before)
    if new:
        raise QuietCompileError(f"{label}: compiled inside the capture: {', '.join(new)}; run it once before")


@contextmanager
def counted() -> Iterator[Callable[[], list[str]]]:
    """Yield a function that returns the kernels compiled, or loaded, since the beginning."""
    before, loaded = cached_kernels(), []  # type: ignore[var-annotated]
    hook = TritonHook(loaded.append)
    hook.install()
    try:
        yield lambda: loaded + sorted(cached_kernels() - before)
    finally:
        hook.remove()


def stop_watching() -> None:
    """Close the :class:`CompileWatch` that is on, if one is: what compiles next is meant to."""
    runtime = _triton_runtime()
    hook = getattr(getattr(runtime, "jit_cache_hook", None), "__self__", None)
    watch = getattr(getattr(hook, "_found", None), "__self__", None)
    if isinstance(watch, CompileWatch):
        watch.close()


class CompileWatch:
    """Warns of every compile from now on: what :func:`fastlayers.warmup` leaves behind.

    Attributes
    ----------
    compiled : list[str]
        What was seen so far: Triton kernels as they happen, entries of the other caches by :meth:`check`.
    """

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self._known = cached_kernels()
        self._hook = TritonHook(self._warn)
        self._hook.install()

    def _warn(self, kernel: str) -> None:
        self.compiled.append(kernel)
        log.warning("%s is compiled after the warm-up: a token count that was not warmed up?", kernel)

    def check(self) -> list[str]:
        """Look for kernels that deep_gemm or flashinfer compiled since the last look, and warn of each."""
        found = cached_kernels()
        for name in sorted(found - self._known):
            self._warn(name)
        self._known = found
        return self.compiled

    def close(self) -> None:
        """Stop watching."""
        self._hook.remove()
