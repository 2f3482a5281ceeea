"""Prepared launches: a Triton kernel that was launched once is launched again without Triton's binder.

    bound = kernel.bind(**constants)        once for each configuration; kernel[grid](*a, **constants) does both
    bound(grid, *arguments)
        │  key: dtypes of tensors, the numbers; whether all are aligned
        ├─ seen:  the driver's launch, with addresses instead of tensors; grid and stream are bound as last time
        ├─ alike: the same alignment of each and classes of numbers   (what Triton specialises on)
        └─ new:   Triton binds, compiles and launches; what it compiled is kept under both keys

    launch = kernel.at(grid, *numbers, **constants)         once for each shape: grid and numbers are bound, too
    launch(*tensors)                        asks for the stream, dtypes and addresses, else as above
    y = launch(*tensors)                    with makes={place: New(shape, dtype)}: what it writes is new, and returned

Triton's own way to a launch binds arguments by name, compares a printed specialisation and looks at every global: on
the host of an H200 some 50 µs, most of the time of a step that is not captured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from math import gcd, prod
from operator import attrgetter
from threading import Lock
from typing import Any, NamedTuple

import torch
import triton
from torch._C._dynamo import guards
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

log = logging.getLogger(__name__)

# The launcher's arguments in CudaDriver.prepare are those of these versions; with others Triton launches by itself.
PREPARED = triton.__version__.split(".")[:2] == ["3", "6"]
# Profilers that want to hear of each launch: then Triton launches by itself.
_LISTENERS: tuple[list[Any], ...] = (
    (triton.knobs.runtime.launch_enter_hook.calls, triton.knobs.runtime.launch_exit_hook.calls)
    if PREPARED
    else ([], [])
)
_ONES: tuple[tuple[int, ...], ...] = ((), (1, 1), (1,), ())
# Kinds and sizes of launches that a kernel remembers; sizes of prompts come without end.
MOST_KNOWN = 4096
# Of each layer, which finds the rest by way of what is shared.
MOST_KINDS = 128
# Of each kind that somebody compiles: who needs it as well waits, then finds it.
_COMPILING: dict[tuple[Any, ...], Lock] = {}
_address: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr
_dtype = attrgetter("dtype")
# What torch's own compiled code allocates by: neither parses arguments by name nor asks the dispatcher.
_empty_strided: Callable[..., torch.Tensor] | None = getattr(guards, "_empty_strided_cuda", None)


class New(NamedTuple):
    """A contiguous tensor that a launch makes, writes and returns."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class CudaDriver:
    """What a prepared launch asks of CUDA; a test puts its own in place of :data:`driver`."""

    def __init__(self) -> None:
        self.device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
        self.stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)

    @staticmethod
    def prepare(compiled: Any) -> tuple[Callable[..., None], tuple[Any, ...]] | None:
        """Return what launches a compiled kernel, and its options; ``None`` where that needs memory of Triton's.

        It is called as ``launch(*grid, stream, *options, *arguments, *constants)``, three numbers of programs,
        addresses for tensors, and anything for constants.
        """
        launcher = compiled.run
        if launcher.global_scratch_size or launcher.profile_scratch_size:
            return None
        how = (launcher.launch_cooperative_grid, launcher.launch_pdl, None, None, compiled.packed_metadata)
        return launcher.launch, (compiled.function, *how, None, None, None)

    @staticmethod
    def maker(new: New) -> Callable[[], torch.Tensor]:
        """Return what makes such a tensor on the current device, without values."""
        if _empty_strided is None:
            return partial(torch.empty, new.shape, dtype=new.dtype, device="cuda")
        shape = tuple(new.shape)  # no torch.Size
        return partial(_empty_strided, shape, tuple(prod(shape[i + 1 :]) for i in range(len(shape))), new.dtype)


driver: Any = CudaDriver()


class _Launch:
    """What launches one kind of arguments; grid and stream, which seldom change, are bound as they were last time."""

    __slots__ = ("call", "options", "ready", "tail")

    def __init__(self, call: Callable[..., None], options: tuple[Any, ...], tail: tuple[Any, ...] = ()) -> None:
        # The tail: numbers and constants, after all addresses.
        self.call, self.options, self.tail = call, options, tail
        self.ready: tuple[tuple[int, ...], int, Callable[..., None]] = ((), -1, call)

    def at(self, grid: tuple[int, ...], stream: int) -> tuple[tuple[int, ...], int, Callable[..., None]]:
        """Return this for a grid and a stream; what a thread was given here stays as it is."""
        self.ready = grid, stream, partial(self.call, *grid, *_ONES[len(grid)], stream, *self.options)
        return self.ready


class Part(NamedTuple):
    """Values inside a piece of memory that several launches share: one allocation where each had its own."""

    offset: int
    numel: int
    dtype: torch.dtype

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the part of ``memory`` (uint8) as a tensor of one dimension."""
        return memory[self.offset : self.offset + self.numel * self.dtype.itemsize].view(self.dtype)


class Heads(NamedTuple):
    """Some heads of values ``[T, H, D]``, which begin so many bytes behind those of all."""

    offset: int
    first: int
    heads: int

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """Return these heads of ``memory``."""
        return memory.narrow(1, self.first, self.heads)


def side_by_side(*sizes: tuple[int, torch.dtype]) -> tuple[int, list[Part]]:
    """Return the bytes that so many values of these dtypes take, and where each begins: at whole cache lines."""
    end, found = 0, []
    for count, dtype in sizes:
        found.append(Part(end, count, dtype))
        end += -(-count * dtype.itemsize // 256) * 256
    return end, found


def fewer_stages(constants: Mapping[str, Any]) -> dict[str, int] | None:
    """Return the launch options with one buffer less of what is fetched ahead, or ``None`` where there is one.

    Most configurations were measured with 227 KiB of shared memory; sm_86, sm_89 and sm_120 have 99. How many tiles are
    in flight changes no sum.
    """
    stages = constants.get("num_stages", 3)
    if stages <= 1:
        return None
    # A loop may name the same number for itself.
    more = ("STAGES",) if constants.get("STAGES") == stages else ()
    return dict.fromkeys(("num_stages", *more), stages - 1)


class Kinds(dict[tuple[Any, ...], Any]):
    """What was prepared for kinds of inputs (shapes, strides, dtypes) that came before; a copy begins without."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Kinds, ()

    def keep(self, kind: tuple[Any, ...], prepared: Any) -> Any:
        """Return what was prepared, which is found again by its kind."""
        if len(self) >= MOST_KINDS:
            self.clear()
        self[kind] = prepared
        return prepared


@lru_cache
def _straight(places: tuple[int, ...], numbers: int, makes: int) -> Callable[..., Callable[..., Any]]:
    """Return what makes the launch of :meth:`Kernel.at`, a function of straight lines.

    ``places``: for each tensor of the kernel its number among the given ones, which those follow that the launch
    ``makes``, or ``-1 - part``: so many bytes behind the first. Written out: collecting dtypes and addresses in loops
    takes half as long again as all the rest.
    """
    count = max(1 + max(places) - makes, 1)
    given, where = [f"t{i}" for i in range(count)], [f"a{i}" for i in range(count)]
    made, makers = [f"y{i}" for i in range(makes)], [f"m{i}" for i in range(makes)]
    offsets, tail = [f"o{i}" for i in range(-min(0, *places))], [f"n{i}" for i in range(numbers)]
    of_all = [*where, *(f"_address({y})" for y in made)]
    addresses = [of_all[place] if place >= 0 else f"a0 + o{-1 - place}" for place in places]
    known = ", ".join(["call", *makers])
    source = f"""
def make(kernel, first, {", ".join([*offsets, *tail])}):
    def launch({", ".join(given)}):
        if not kernel.prepared or _LISTENERS[0] or _LISTENERS[1]:
            return first({", ".join(given)})
        device = driver.device()
        call = kernel._known.get((launch, driver.stream(device), device, {", ".join(f"{t}.dtype" for t in given)}))
        {", ".join(where)}, = map(_address, ({", ".join(given)},))
        if call is None or ({" | ".join(where)}) & 15{" or t0.get_device() != device" if makes else ""}:
            return first({", ".join(given)})
        {f"{known} = call" if makes else ""}
        {"; ".join(f"{y} = {m}()" for y, m in zip(made, makers, strict=True))}
        call({", ".join([*addresses, *tail])})
        {f"return {', '.join(made)}" if makes else ""}
    return launch
"""
    found: dict[str, Any] = {}
    exec(compile(source, f"<{__name__}>", "exec"), globals(), found)
    made_of: Callable[..., Callable[..., Any]] = found["make"]
    return made_of


class Kernel:
    """A Triton kernel with prepared launches, made by :func:`kernel`.

    ``kernel[grid](*arguments, **constants)``, as of a jitted function: tensors and numbers by position, in this order;
    constants and launch options by name. Returns nothing.

    Attributes
    ----------
    jit : JITFunction
        Triton's own object; under its interpreter the interpreted function.
    unspecialized : tuple[str, ...]
        Numbers of which no value is compiled in.
    """

    def __init__(
        self,
        function: Callable[..., None],
        do_not_specialize: tuple[str, ...] = (),
        jit: Callable[..., Any] = triton.jit,
    ) -> None:
        self.unspecialized = do_not_specialize
        self.jit: Any = jit(do_not_specialize=list(do_not_specialize))(function)
        self.__name__, self.__doc__, self.__module__ = function.__name__, function.__doc__, function.__module__
        self._known: dict[tuple[Any, ...], Any] = {}
        self._bound: dict[tuple[Any, ...], Callable[..., None]] = {}
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
        bound = self._bound.get((*constants, *constants.values()))
        (bound or self.bind(**constants))(grid, *arguments)

    def bind(self, **constants: Any) -> Callable[..., None]:
        """Return the kernel with its constants and launch options, called as ``bound(grid, *arguments)``.

        The same function for the same constants; what launches a configuration often keeps it.
        """
        name = (*constants, *constants.values())
        if name in self._bound:
            return self._bound[name]
        tensors = self._tensors

        def bound(grid: tuple[int, ...], *arguments: Any) -> None:
            if not self.prepared or _LISTENERS[0] or _LISTENERS[1]:
                self._through_triton(grid, arguments, constants)
                return
            given, numbers, device = arguments[:tensors], arguments[tensors:], driver.device()
            addresses = [*map(_address, given)]
            # Equal numbers are of one class whatever their type, so they may stand for themselves.
            key = (bound, device, numbers, *map(_dtype, given))
            launch = self._known.get(key)
            if launch is None or gcd(16, *addresses) != 16:
                launch = self._alike(key, addresses) or self._first(key, addresses, grid, arguments, constants)
                if launch is None:
                    return
            stream, ready = driver.stream(device), launch.ready
            if ready[0] != grid or ready[1] != stream:
                ready = launch.at(grid, stream)
            ready[2](*addresses, *launch.tail)

        self._bound[name] = bound
        return bound

    def at(
        self,
        grid: tuple[int, ...],
        *numbers: float,
        parts: Sequence[tuple[int, Part | Heads]] | None = None,
        makes: Mapping[int, New] | None = None,
        **constants: Any,
    ) -> Callable[..., Any]:
        """Return the kernel with its constants, grid and numbers, called with the tensors alone.

        With ``parts``, each with its place among the arguments, the first tensor is what they are parts of. What it
        ``makes``, by places in rising order, is not given but returned: a tensor, or a tuple of several.
        """
        bound, new, taken = self.bind(**constants), makes or {}, {}
        offsets: tuple[int, ...] = ()
        if parts is not None:
            taken = {place: -1 - number for number, (place, _) in enumerate(parts)}
            offsets = tuple(part.offset for _, part in parts)
        rest = [place for place in range(self._tensors) if place not in taken and place not in new]
        order = [*([None] if parts is not None else []), *rest, *new]
        places = tuple(taken[place] if place in taken else order.index(place) for place in range(self._tensors))

        def first(*given: torch.Tensor) -> Any:
            """Launch what was not launched with such tensors yet, or is not prepared."""
            placed = {place: given[0].new_empty(each.shape, dtype=each.dtype) for place, each in new.items()}
            made = [*placed.values()]
            placed |= {place: part.view(given[0]) for place, part in parts or ()}
            placed |= zip(rest, given if parts is None else given[1:], strict=True)
            tensors = [placed[place] for place in range(self._tensors)]
            bound(grid, *tensors, *numbers)
            if self.prepared and not (_LISTENERS[0] or _LISTENERS[1]):
                device = driver.device()
                held = self._known.get((bound, device, numbers, *map(_dtype, tensors)))
                if held is not None:
                    stream = driver.stream(device)
                    call = partial(held.call, *grid, *_ONES[len(grid)], stream, *held.options)
                    ready = (call, *map(driver.maker, new.values())) if new else call
                    self._known[launch, stream, device, *map(_dtype, given)] = ready
            return None if not made else made[0] if len(made) == 1 else tuple(made)

        launch = _straight(places, len(numbers) + len(self._constants), len(new))(
            self, first, *offsets, *numbers, *self._constants
        )
        return launch

    def _first(
        self, key: tuple[Any, ...], addresses: list[int], grid: tuple[int, ...], arguments: tuple[Any, ...],
        constants: dict[str, Any],
    ) -> _Launch | None:  # fmt: skip
        """Launch through Triton, whose compile serves the next of this kind; return what another thread made meanwhile.

        A warm-up runs calls side by side, of which many need the same kernel first: half of the compiles would be
        of what another thread is compiling.
        """
        kind = self._kind(key, addresses)
        if kind in self._known:  # Triton alone launches this one
            self._through_triton(grid, arguments, constants)
            return None
        try:
            with _COMPILING.setdefault(kind, Lock()):
                if (launch := self._alike(key, addresses)) is not None:
                    return launch
                compiled = self._through_triton(grid, arguments, constants)
                if compiled is not None:  # no hook forbade the compile
                    made = driver.prepare(compiled)
                    self._known[kind] = _Launch(*made) if made is not None else None
        finally:
            _COMPILING.pop(kind, None)
        return None

    def _through_triton(self, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> Any:
        while True:
            try:
                return self.jit[grid](*arguments, **constants)
            except OutOfResources as error:
                fewer = fewer_stages(constants) if error.name == "shared memory" else None
                if fewer is None:
                    raise
                log.info(
                    "%s: %d stages need %d bytes of shared memory, this GPU has %d: launched with one less",
                    self.__name__, fewer["num_stages"] + 1, error.required, error.limit,
                )  # fmt: skip
                # In place: the next launch of this configuration begins here.
                constants.update(fewer)

    def _alike(self, key: tuple[Any, ...], addresses: list[int]) -> _Launch | None:
        """Return what launches arguments of this kind, and remember it for these sizes."""
        launch = self._known.get(self._kind(key, addresses))
        if launch is not None:
            launch = _Launch(launch.call, launch.options, (*key[2], *self._constants))
            if gcd(16, *addresses) == 16:
                if len(self._known) > MOST_KNOWN:
                    self._known.clear()
                self._known[key] = launch
        return launch

    @staticmethod
    def _kind(key: tuple[Any, ...], addresses: list[int]) -> tuple[Any, ...]:
        """Return what Triton specialises on."""
        bound, device, numbers, *dtypes = key
        classes = [(n == 1) + 2 * (n % 16 == 0) + 4 * (n > 0x7FFFFFFF) for n in numbers]
        # The first two tell it from a key of sizes seen before.
        return True, bound, device, *dtypes, *[a % 16 == 0 for a in addresses], *map(type, numbers), *classes


def kernel(
    function: Callable[..., None] | None = None, *, do_not_specialize: tuple[str, ...] = (),
    jit: Callable[..., Any] = triton.jit,
) -> Any:  # fmt: skip
    """Decorate a kernel that is launched from Python: ``@kernel`` instead of ``@triton.jit``.

    Functions that kernels call keep ``@triton.jit``. The arguments' order is fixed: pointers, whose names end in
    ``_ptr``, then numbers, then constants.

    Parameters
    ----------
    do_not_specialize : tuple[str, ...]
        As for ``triton.jit``.
    jit : callable
        What compiles it: ``gluon.jit`` for a kernel in Gluon, which no interpreter runs.

    Raises
    ------
    TypeError
        The arguments are in another order.
    """
    if function is None:
        return partial(Kernel, do_not_specialize=do_not_specialize, jit=jit)
    return Kernel(function, do_not_specialize, jit)
