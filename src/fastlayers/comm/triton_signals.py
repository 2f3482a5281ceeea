"""How kernels of several GPUs wait for each other: flags with release and acquire, and a deadline in every wait."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from fastlayers.triton_lang import INTERPRET, dependent_launch

# Whether kernels between ranks start before those in front have ended; benchmarks/two_gpus.py compares both.
EARLY = True


def order(device: torch.device) -> dict[str, bool]:
    """Return the launch arguments that say when a kernel between ranks starts."""
    return dependent_launch(device) if EARLY else {"PDL": False}


@triton.jit
def now():
    """Return nanoseconds; in the interpreter nothing is waited for, and this is 0."""
    if INTERPRET:
        return tl.full([], 0, tl.int64)
    else:
        return globaltimer()


@triton.jit
def address(table_ptr, index, dtype: tl.constexpr):
    """Return the part of rank ``index`` as a pointer; parts are aligned to 256 bytes."""
    return tl.multiple_of(tl.load(table_ptr + index).to(tl.pointer_type(dtype)), 16)


@triton.jit
def given_up(status_ptr):
    """Return the own status word, and set those of all ranks if it is set: before anything of this call is sent.

    Behind it lie their number and addresses, see :class:`fastlayers.comm.symmetric.Arena`.
    """
    late = tl.load(status_ptr)
    if late != 0:
        words = (status_ptr + 2).to(tl.pointer_type(tl.int64))
        for rank in range(0, tl.load(status_ptr + 1)):
            tl.store(tl.load(words + rank).to(tl.pointer_type(tl.int32)), late)
    return late


@triton.jit
def signal(flag_ptr, value):
    """Set a flag after everything that this program has stored."""
    # An atomic whose result is unused waits for no other warp: all warps' stores first.
    tl.debug_barrier()
    tl.atomic_xchg(flag_ptr, value, sem="release", scope="sys")


@triton.jit
def await_signal(flag_ptr, value, late, deadline_ns, status_ptr, code):
    """Wait until a flag has reached ``value`` (counters may wrap); return 1 if ``late`` or after the deadline."""
    limit = now() + deadline_ns
    # The result of the atomic is used: Triton drops an unused one.
    while (tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys") - value < 0) & (late == 0):
        if now() >= limit:
            late = 1
            tl.store(status_ptr, code)
    tl.debug_barrier()
    return late
