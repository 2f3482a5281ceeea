"""Run the kernel in Gluon without a GPU: its source, with torch in place of Gluon's operations.

Groups of warps take turns: one runs until it waits for a barrier that is not there yet, and whoever comes first in the
given order among those that can go on is next, also at each arrival. So a group that runs ahead of the others does so
as far as barriers let it, whichever it is; products read shared memory as late as they may. What nobody has written in
shared memory is NaN.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from fastlayers.attention.mla import gluon as mla_gluon


class Deadlock(AssertionError):
    """All groups wait."""


class Pointer:
    """Elements of a tensor, one or many."""

    def __init__(self, flat: torch.Tensor, at: Any = 0) -> None:
        self.flat, self.at = flat, torch.as_tensor(at)
        self.dtype = SimpleNamespace(element_ty=flat.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.flat, self.at + offset)

    def __getitem__(self, index: Any) -> Pointer:
        return Pointer(self.flat, self.at[index])

    def view(self, dtype: torch.dtype) -> Pointer:
        assert int(self.at) == 0
        return Pointer(self.flat.view(dtype))


def load(pointer: Pointer, mask: Any = None, other: Any = 0) -> torch.Tensor:
    at, mask = torch.broadcast_tensors(pointer.at, torch.as_tensor(True if mask is None else mask))
    found = torch.full(at.shape, other, dtype=pointer.flat.dtype)
    found[mask] = pointer.flat[at[mask]]
    return found


def store(pointer: Pointer, value: torch.Tensor, mask: Any = None) -> None:
    mask = torch.as_tensor(True if mask is None else mask)
    at, mask, value = torch.broadcast_tensors(pointer.at, mask, torch.as_tensor(value))
    assert bool((at[mask] >= 0).all())
    pointer.flat[at[mask]] = value[mask].to(pointer.flat.dtype)


class Shared:
    """A piece of shared memory."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory

    def index(self, at: Any) -> Shared:
        return Shared(self.memory[int(at)])

    def slice(self, first: int, size: int, dim: int) -> Shared:
        return Shared(self.memory.narrow(dim, first, size))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.memory.permute(order))

    def store(self, value: torch.Tensor) -> None:
        assert value.shape == self.memory.shape and value.dtype == self.memory.dtype
        self.memory.copy_(value)

    def load(self, layout: Any) -> torch.Tensor:
        return self.memory.clone()


def shared(dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Shared:
    """Return memory that holds no numbers; barriers, of int64, have seen no arrival."""
    return Shared(torch.zeros(shape, dtype=dtype) if dtype == torch.int64 else torch.full(shape, torch.nan).to(dtype))


class Product:
    """A product that runs: it reads its operands when somebody waits for it."""

    def __init__(self, a: Shared, b: Shared, acc: Any, use_acc: bool = True, is_async: bool = False) -> None:
        self.a, self.b, self.acc, self.use_acc = a, b, acc, use_acc

    def done(self) -> torch.Tensor:
        product = self.a.memory.float() @ self.b.memory.float()
        if not self.use_acc:
            return product
        return product + (self.acc.done() if isinstance(self.acc, Product) else self.acc)


class Groups:
    """Groups of warps that take turns."""

    def __init__(self, order: Sequence[int]) -> None:
        self.order, self.change = order, threading.Condition()
        self.waits: dict[int, Callable[[], bool]] = {group: lambda: True for group in order}
        self.turn: int | None = order[0]
        self.failed: BaseException | None = None
        self.mine, self.inference = threading.local(), torch.is_inference_mode_enabled()

    def run(self, tasks: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], *numbers: Any) -> None:
        threads = [threading.Thread(target=self._group, args=(i, *task), daemon=True) for i, task in enumerate(tasks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        if self.failed is not None:
            raise self.failed

    def _group(self, group: int, task: Callable[..., None], given: tuple[Any, ...]) -> None:
        self.mine.group = group
        try:
            self._until_turn()
            with torch.inference_mode(self.inference):
                task(*given)
        except BaseException as error:
            self.failed = self.failed or error
        with self.change:
            del self.waits[group]
        self._next()

    def _next(self) -> None:
        with self.change:
            able = [group for group in self.order if group in self.waits and self.waits[group]()]
            if not able and self.waits and self.failed is None:
                self.failed = Deadlock(f"groups {sorted(self.waits)} wait for each other")
            self.turn = able[0] if able else None
            self.change.notify_all()

    def _until_turn(self) -> None:
        with self.change:
            assert self.change.wait_for(lambda: self.turn == self.mine.group or self.failed is not None, 60)
        if self.failed is not None:
            raise Deadlock("another group failed")

    def wait(self, barrier: Shared, parity: Any) -> None:
        parity = int(parity)
        self.waits[self.mine.group] = lambda: int(barrier.memory.sum()) & 1 != parity
        self._next()
        self._until_turn()
        self.waits[self.mine.group] = lambda: True

    def arrive(self, barrier: Shared, count: int) -> None:
        assert count == 1
        barrier.memory.add_(1)
        self._next()
        self._until_turn()


def halves(text: str, registers: str, given: Sequence[torch.Tensor], **options: Any) -> tuple[torch.Tensor, ...]:
    """Return the four codes of each word as fp16, as the instructions do: low byte first."""
    assert text == mla_gluon.CONVERT.value and registers == "=h,=h,=h,=h,r"
    codes = given[0].contiguous().view(torch.float8_e4m3fn).view(*given[0].shape, 4)
    return tuple(codes.to(torch.float16).unbind(-1))


def _both(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda a, b: function(torch.as_tensor(a), torch.as_tensor(b))


def _layout(*given: Any) -> None:
    return None


def language(groups: Groups, program: tuple[int, int]) -> dict[str, Any]:
    """Return what the kernel's source imports."""
    gl = SimpleNamespace(
        constexpr=lambda value: value, static_range=range, num_warps=lambda: 8, program_id=lambda axis: program[axis],
        BlockedLayout=_layout, SliceLayout=_layout, NVMMADistributedLayout=_layout, NVMMASharedLayout=_layout,
        SwizzledSharedLayout=_layout, convert_layout=lambda value, layout: value, thread_barrier=lambda: None,
        pointer_type=lambda dtype: dtype, float16=torch.float16, float32=torch.float32, int32=torch.int32,
        int64=torch.int64, load=load, store=store, allocate_shared_memory=shared, inline_asm_elementwise=halves,
        warp_specialize=groups.run,
        arange=lambda first, end, layout: torch.arange(first, end),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
        cdiv=lambda a, b: (a + b - 1) // b, maximum=_both(torch.maximum), minimum=_both(torch.minimum), abs=torch.abs,
        where=lambda mask, a, b: torch.where(mask, torch.as_tensor(a), torch.as_tensor(b)), exp2=torch.exp2,
        log2=torch.log2, sum=lambda x, axis: x.sum(axis), max=lambda x, axis: x.amax(axis),
        associative_scan=lambda x, axis, combine: x.cumsum(axis),
        join=lambda a, b: torch.stack((a, b), -1), reshape=lambda x, shape: x.reshape(shape),
    )  # fmt: skip
    hopper = SimpleNamespace(
        fence_async_shared=lambda: None, warpgroup_mma=Product,
        warpgroup_mma_wait=lambda pending, deps: deps[0].done(),
    )  # fmt: skip
    mbarrier = SimpleNamespace(
        MBarrierLayout=_layout, init=lambda barrier, count: barrier.memory.zero_(), wait=groups.wait,
        arrive=groups.arrive,
    )  # fmt: skip
    gluon = SimpleNamespace(jit=lambda function: function, constexpr_function=lambda function: function)
    return {
        "gl": gl, "gluon": gluon, "hopper": hopper, "mbarrier": mbarrier, "await_inputs": lambda early: None,
        "kernel": lambda **options: lambda function: function, "release_dependents": lambda early: None,
        "__name__": "by_hand",
    }  # fmt: skip


def source() -> str:
    """Return the kernel's text."""
    return Path(mla_gluon.__file__).read_text()


def run(
    grid: tuple[int, int], tensors: Sequence[torch.Tensor], numbers: Sequence[float], constants: dict[str, Any],
    order: Sequence[int] = (0, 1, 2), text: str = "",
) -> None:  # fmt: skip
    """Run all programs of a launch one after another; ``order``: of groups, values, scores and conversion."""
    text = re.sub(r"(?m)^from (?!__future__).*$", "", text or source())
    text = re.sub(r"\.to\((gl\.[\w.]+(?:\([\w.]+\))?), bitcast=True\)", r".view(\1)", text)
    code = compile(text, "kernel by hand", "exec")
    for y in range(grid[1]):
        for x in range(grid[0]):
            found = language(Groups(order), (torch.tensor(x), torch.tensor(y)))
            exec(code, found)
            found["heads_kernel"](*map(Pointer, tensors), *numbers, **constants)
