"""Prepared launches: what makes two launches of one kind, and who launches."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
import triton.language as tl
from triton.runtime.errors import OutOfResources

from fastlayers.runtime import launch
from fastlayers.runtime.launch import Kernel, New, fewer_stages, kernel, side_by_side


@kernel(do_not_specialize=("rows",))
def _copy_kernel(x_ptr, y_ptr, rows, stride, eps, BLOCK: tl.constexpr, FLAG: tl.constexpr):
    column = tl.arange(0, BLOCK)
    tl.store(y_ptr + column, tl.load(x_ptr + column))


class Driver:
    """Records prepared launches instead of making them."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.current = 0

    def device(self) -> int:
        return self.current

    def stream(self, device: int) -> int:
        return 70 + device

    def prepare(self, compiled: Any) -> Any:
        if compiled == "scratch":
            return None
        return lambda *arguments: self.launched.append(arguments), ()

    def maker(self, new: New) -> Any:
        return lambda: torch.zeros(new.shape, dtype=new.dtype)


class Triton:
    """Stands for Triton's own launch."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.result: Any = "compiled"

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, **constants: Any) -> Any:
            self.calls.append((grid, arguments, constants))
            return self.result

        return run


class Raising:
    """A launch that fails."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self, *arguments: Any, **constants: Any) -> None:
        raise self.error


@pytest.fixture
def stubbed(monkeypatch: pytest.MonkeyPatch) -> tuple[Kernel, Triton, Driver]:
    made, driver, own = Kernel.__new__(Kernel), Driver(), Triton()
    made.__dict__.update(_copy_kernel.__dict__)
    made.jit, made.prepared, made._known, made._bound, made._constants = own, True, {}, {}, (None, None)
    monkeypatch.setattr(launch, "driver", driver)
    return made, own, driver


def test_second_launch_of_a_kind_passes_addresses_without_triton(stubbed: Any) -> None:
    made, own, driver = stubbed
    x, y = torch.zeros(64), torch.zeros(64)
    made[(3,)](x, y, 5, 32, 1e-6, BLOCK=16, FLAG=True, num_warps=4)
    assert (len(own.calls), driver.launched) == (1, [])
    made[(4, 2)](x, y, 7, 64, 1e-5, BLOCK=16, FLAG=True, num_warps=4)
    assert len(own.calls) == 1
    assert driver.launched == [(4, 2, 1, 70, x.data_ptr(), y.data_ptr(), 7, 64, 1e-5, None, None)]


@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.zeros(64, dtype=torch.float16)},
        {"x": torch.zeros(65)[1:]},
        {"stride": 33},
        {"stride": 1},
        {"stride": 1 << 32},
        {"rows": 1 << 32},
        {"eps": 0},
        {"FLAG": False},
        {"BLOCK": 32},
        {"num_warps": 8},
        {"num_stages": 2},
    ],
    ids=str,
)
def test_what_triton_specialises_on_makes_another_kind(stubbed: Any, change: dict[str, Any]) -> None:
    made, own, driver = stubbed
    usual = {"x": torch.zeros(64), "rows": 5, "stride": 32, "eps": 1e-6, "BLOCK": 16, "FLAG": True, "num_warps": 4}
    y = torch.zeros(64)

    def go(x: Any, rows: Any, stride: Any, eps: Any, **constants: Any) -> None:
        made[(1,)](x, y, rows, stride, eps, **constants)

    go(**usual)
    go(**usual | change)
    assert (len(own.calls), len(driver.launched)) == (2, 0)
    go(**usual)
    go(**usual | change)
    assert (len(own.calls), len(driver.launched)) == (2, 2)


def test_another_device_is_another_kind(stubbed: Any) -> None:
    made, own, driver = stubbed
    x = torch.zeros(64)
    for device in (0, 1, 1, 0):
        driver.current = device
        made[(1,)](x, x, 5, 32, 1e-6, BLOCK=16, FLAG=True)
    assert len(own.calls) == 2
    assert [each[3] for each in driver.launched] == [71, 70]


@pytest.mark.parametrize("result", ["scratch", None])
def test_what_cannot_be_prepared_stays_with_triton(stubbed: Any, result: Any) -> None:
    made, own, driver = stubbed
    own.result, x = result, torch.zeros(64)
    for _ in range(3):
        made[(1,)](x, x, 5, 32, 1e-6, BLOCK=16, FLAG=True)
    assert (len(own.calls), driver.launched) == (3, [])


def test_threads_that_need_the_same_kernel_compile_it_once(stubbed: Any) -> None:
    made, own, driver = stubbed
    x, bound, compiling = torch.zeros(64), made.bind(BLOCK=16, FLAG=True), Barrier(2)

    class Slow:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def run(*arguments: Any, **constants: Any) -> Any:
                compiling.wait(60)  # until the other thread is there, or a kernel of another kind is compiled beside
                return own[grid](*arguments, **constants)

            return run

    made.jit = Slow()
    with ThreadPoolExecutor(5) as pool:
        # Four of one kind, and one of another: both kinds are compiled at the same time, each of them once.
        done = [pool.submit(bound, (1,), x, x, rows, 32, 1e-6) for rows in (5, 7, 9, 5)]
        done.append(pool.submit(bound, (1,), x, x, 5, 48 + 1, 1e-6))
        for each in done:
            each.result()
    assert len(own.calls) == 2 and len(driver.launched) == 3 and not launch._COMPILING


def test_a_compile_that_fails_leaves_no_lock_behind(stubbed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _, _ = stubbed
    x, bound = torch.zeros(64), made.bind(BLOCK=16, FLAG=True)
    with monkeypatch.context() as patch:
        patch.setattr(made, "_through_triton", Raising(RuntimeError("no such card")))
        with pytest.raises(RuntimeError, match="no such card"):
            bound((1,), x, x, 5, 32, 1e-6)
    assert not launch._COMPILING
    bound((1,), x, x, 5, 32, 1e-6)


def test_a_profiler_sees_every_launch(stubbed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, own, driver = stubbed
    x = torch.zeros(64)
    made[(1,)](x, x, 5, 32, 1e-6, BLOCK=16, FLAG=True)
    monkeypatch.setattr(launch, "_LISTENERS", ([print], []))
    made[(1,)](x, x, 5, 32, 1e-6, BLOCK=16, FLAG=True)
    assert (len(own.calls), driver.launched) == (2, [])


def test_sizes_without_end_are_not_remembered(stubbed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, own, driver = stubbed
    monkeypatch.setattr(launch, "MOST_KNOWN", 8)
    x, bound = torch.zeros(64), made.bind(BLOCK=16, FLAG=True)
    assert bound is made.bind(BLOCK=16, FLAG=True) is not made.bind(BLOCK=16, FLAG=False)
    for rows in range(2, 200):
        bound((1,), x, x, rows, 32, 1e-6)
        assert len(made._known) <= 10
    assert len(own.calls) + len(driver.launched) == 198


def test_arguments_in_another_order_are_refused() -> None:
    def wrong_kernel(x_ptr, rows, y_ptr, BLOCK: tl.constexpr):
        pass

    with pytest.raises(TypeError, match="kernel wrong_kernel: pointers"):
        kernel(wrong_kernel)


def test_grid_and_stream_are_those_of_each_launch(stubbed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, own, driver = stubbed
    x, bound, wanted = torch.zeros(64), made.bind(BLOCK=16, FLAG=True), []
    bound((1,), x, x, 5, 32, 1e-6)
    for grid, stream in [((1,), 3), ((1,), 3), ((1,), 4), ((2, 6), 4), ((1,), 4), ((1, 1), 3), ((1, 2, 3), 3)]:
        monkeypatch.setattr(driver, "stream", lambda device, stream=stream: stream)
        bound(grid, x, x, 5, 32, 1e-6)
        wanted.append((*(*grid, 1, 1)[:3], stream, x.data_ptr(), x.data_ptr(), 5, 32, 1e-6, None, None))
    assert driver.launched == wanted and len(own.calls) == 1


def test_what_a_thread_is_about_to_launch_stays_as_it_is(stubbed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _, driver = stubbed
    x, bound = torch.zeros(64), made.bind(BLOCK=16, FLAG=True)
    for _ in range(2):
        bound((1,), x, x, 5, 32, 1e-6)
    held = next(each for each in made._known.values() if each is not None and each.tail)
    mine = held.at((7,), 70)
    bound((9,), x, x, 5, 32, 1e-6)  # another thread's, in between
    mine[2](x.data_ptr(), x.data_ptr(), *held.tail)
    assert [each[0] for each in driver.launched] == [1, 9, 7]


def test_grid_and_numbers_may_be_bound_too(stubbed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, own, driver = stubbed
    x, y, wanted = torch.zeros(64), torch.zeros(64), []
    launched = made.at((3, 2), 5, 32, 1e-6, BLOCK=16, FLAG=True, num_warps=4)
    launched(x, y)
    for stream in (3, 3, 3, 4, 3):
        monkeypatch.setattr(driver, "stream", lambda device, stream=stream: stream)
        launched(x, y)
        wanted.append((3, 2, 1, stream, x.data_ptr(), y.data_ptr(), 5, 32, 1e-6, None, None))
    assert driver.launched == wanted
    assert own.calls == [((3, 2), (x, y, 5, 32, 1e-6), {"BLOCK": 16, "FLAG": True, "num_warps": 4})]


@pytest.mark.parametrize("change", [{"x": torch.zeros(64, dtype=torch.float16)}, {"x": torch.zeros(65)[1:]}], ids=str)
def test_other_tensors_are_another_kind_of_a_bound_launch(stubbed: Any, change: dict[str, Any]) -> None:
    made, own, driver = stubbed
    usual, y = {"x": torch.zeros(64)}, torch.zeros(64)
    launched = made.at((1,), 5, 32, 1e-6, BLOCK=16, FLAG=True)
    for _ in range(3):
        launched(*usual.values(), y)
    launched(*change.values(), y)
    assert (len(own.calls), len(driver.launched)) == (2, 2)
    for given in (usual, change, usual, change):
        launched(*given.values(), y)
    assert len(own.calls) == 2
    assert [each[4] for each in driver.launched[2:]] == [
        given["x"].data_ptr() for given in (usual, change, usual, change)
    ]


def test_a_bound_launch_is_another_one_of_each_device_and_heard_by_profilers(
    stubbed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, own, driver = stubbed
    x = torch.zeros(64)
    launched = made.at((1,), 5, 32, 1e-6, BLOCK=16, FLAG=True)
    for device in (0, 1, 0, 1, 0, 1):
        driver.current = device
        launched(x, x)
    assert len(own.calls) == 2 and [each[3] for each in driver.launched] == [70, 71, 70, 71]
    monkeypatch.setattr(launch, "_LISTENERS", ([], [print]))
    launched(x, x)
    assert (len(own.calls), len(driver.launched)) == (3, 4)


@pytest.mark.parametrize("places", [(0,), (1,), (0, 1), ()], ids=str)
def test_arguments_may_lie_in_one_memory(stubbed: Any, places: tuple[int, ...]) -> None:
    made, own, driver = stubbed
    size, found = side_by_side((3, torch.float32), (5, torch.bfloat16))
    assert (size, [part.offset for part in found]) == (512, [0, 256])
    memory, own_tensors = torch.zeros(size, dtype=torch.uint8), [torch.zeros(64), torch.zeros(64)]
    given = [tensor for place, tensor in enumerate(own_tensors) if place not in places]
    launched = made.at((1,), 5, 32, 1e-6, parts=[(place, found[place]) for place in places], BLOCK=16, FLAG=True)
    for _ in range(4):
        launched(memory, *given)
    views = [part.view(memory) if place in places else own_tensors[place] for place, part in enumerate(found)]
    through = own.calls[0][1]
    assert len(own.calls) == 1 and [t.data_ptr() for t in through[:2]] == [view.data_ptr() for view in views]
    assert [(t.dtype, t.numel()) for t in through[:2]] == [(view.dtype, view.numel()) for view in views]
    assert driver.launched == 3 * [(1, 1, 1, 70, *(view.data_ptr() for view in views), 5, 32, 1e-6, None, None)]


@pytest.mark.parametrize(
    ("makes", "parts"), [((1,), ()), ((0,), ()), ((0, 1), ()), ((0,), (1,)), ((1,), (0,))], ids=str
)
def test_a_launch_returns_what_it_makes(
    stubbed: Any, monkeypatch: pytest.MonkeyPatch, makes: tuple[int, ...], parts: tuple[int, ...]
) -> None:
    made, own, driver = stubbed
    driver.current = -1  # as a tensor says of a CPU
    known = {place: New((3, 5 + place), (torch.float16, torch.int32)[place]) for place in makes}
    _, [part] = side_by_side((8, torch.float32))
    memory, given = torch.zeros(64), [torch.zeros(64) for _ in {0, 1} - {*makes, *parts}]
    inside = None if given else [(place, part) for place in parts]
    launched = made.at((1,), 5, 32, 1e-6, parts=inside, makes=known, BLOCK=16, FLAG=True)
    for number in range(4):
        found = launched(*given or [memory])
        found = found if len(makes) > 1 else [found]
        assert [(t.shape, t.dtype, t.is_contiguous()) for t in found] == [(*new, True) for new in known.values()]
        addresses = [*(own.calls[0][1][:2] if not number else driver.launched[-1][4:6])]
        addresses = [a if isinstance(a, int) else a.data_ptr() for a in addresses]
        assert [addresses[place] for place in makes] == [t.data_ptr() for t in found]
        assert all(addresses[place] == memory.data_ptr() for place in parts)
    assert (len(own.calls), len(driver.launched)) == (1, 3)
    driver.current = 1  # tensors of another device than the current one are no business of a prepared launch
    for _ in range(2):
        launched(*given or [memory])
    assert (len(own.calls), len(driver.launched)) == (2, 4)


def test_a_launch_that_does_not_fit_begins_again_with_a_buffer_less(
    stubbed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Four buffers of 60 KiB on a card of 99: one is left, said once, and later launches begin there."""
    made, _, _ = stubbed
    asked: list[dict[str, Any]] = []

    def run(*arguments: Any, **constants: Any) -> Any:
        asked.append(constants)
        needed = constants["num_stages"] * 60 * 1024
        if needed > 99 * 1024:
            raise OutOfResources(needed, 99 * 1024, "shared memory")
        return "compiled"

    made.jit = type("Card", (), {"__getitem__": lambda self, grid: run})()
    x, y = torch.zeros(8), torch.zeros(8)
    with caplog.at_level(logging.INFO, logger="fastlayers.runtime.launch"):
        for rows in (1, 2):
            made[(1,)](x, y, rows, 8, 1e-6, BLOCK=8, FLAG=True, num_stages=4, num_warps=4)
    assert [each["num_stages"] for each in asked] == [4, 3, 2, 1, 1] and all(each["num_warps"] == 4 for each in asked)
    assert [record.message.split(":")[1] for record in caplog.records] == [
        f" {stages} stages need {stages * 61440} bytes of shared memory, this GPU has 101376" for stages in (4, 3, 2)
    ]
    # With one buffer there is none to give up; and other resources are not bought with buffers.
    for resource, stages in (("shared memory", 1), ("threads", 4)):
        given = OutOfResources(2, 1, resource)
        made.jit = type("Card", (), {"__getitem__": lambda self, grid, given=given: Raising(given)})()
        with pytest.raises(OutOfResources):
            made[(1,)](x, y, 1, 8, 1e-6, BLOCK=16, FLAG=True, num_stages=stages)


def test_stages_that_a_loop_names_go_with_the_launchs() -> None:
    assert fewer_stages({"num_stages": 4, "STAGES": 4}) == {"num_stages": 3, "STAGES": 3}
    assert fewer_stages({"num_stages": 4, "STAGES": 2}) == {"num_stages": 3}
    assert fewer_stages({}) == {"num_stages": 2}  # Triton's own default is three
    assert fewer_stages({"num_stages": 1}) is None
