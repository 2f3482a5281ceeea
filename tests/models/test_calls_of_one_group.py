"""Ranks of one group that call differently are named on each, before the host waits for that step's tokens."""

from __future__ import annotations

import gc
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from fastlayers.comm.board import Board
from fastlayers.comm.parallel import ParallelSpec
from fastlayers.comm.trail import TRAIL
from fastlayers.errors import CaptureError, CollectiveOrderError
from fastlayers.testing.world import Rank, world
from fastlayers_models.auto import AutoModel
from fastlayers_models.between_ranks import SplitStep
from fastlayers_models.generate import Generator
from fastlayers_models.groups import step_class
from fastlayers_models.step import ModelStep

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
from family_tools import save_random, tiny_config
from silent_ranks import WIDE, X, eager_graphs, silent

PROMPTS, NEW = [[5, 6, 7, 8, 9, 10, 11], [12, 13], [14]], 5


# What each rank calls behind a step, and what every rank reads then.
FAULTS: dict[str, tuple[Any, Any, str]] = {
    "swapped": (
        lambda over, graphs: (over.all_reduce_(X), over.all_gather(WIDE)),
        lambda over, graphs: (over.all_gather(WIDE), over.all_reduce_(X)),
        "rank 0 made all_reduce with float32[4, 8]; rank 1 made all_gather with float32[2, 8]",
    ),
    "missing": (
        lambda over, graphs: over.all_gather(X),
        lambda over, graphs: None,
        "rank 0 made all_gather with float32[4, 8]; rank 1 made none",
    ),
    "one more": (
        lambda over, graphs: None,
        lambda over, graphs: over.all_gather(X),
        "rank 0 made none; rank 1 made all_gather with float32[4, 8]",
    ),
    "another shape": (
        lambda over, graphs: over.all_reduce_(X),
        lambda over, graphs: over.all_reduce_(WIDE),
        "rank 0 made all_reduce with float32[4, 8]; rank 1 made all_reduce with float32[2, 8]",
    ),
    "another replay": (
        lambda over, graphs: graphs.replay(1),
        lambda over, graphs: graphs.replay(2),
        "rank 0 made replay of 1; rank 1 made replay of 2",
    ),
}  # fmt: skip
# Behind which of a batch's launches: that of the prompts, one of decode, the last one; or all of them.
PLACES = (0, 2, NEW - 1, "end")


class Planted:
    """A generator whose ranks call differently behind one of a batch's launches."""

    def __init__(self, rank: Rank, folder: str, board: bool, captured: bool) -> None:
        model = AutoModel.from_pretrained(folder, dtype=torch.float32, page_size=16, parallel=rank.spec())
        kept = eager_graphs() if captured else None
        self.generator = Generator(model, max_batch=2, max_length=64, prefill_tokens=4, graphs=kept)
        self.step: Any = self.generator.step
        assert isinstance(self.step, SplitStep)
        self.step._board = self.step._board if board else None
        self.rank = rank.rank
        self.over, self.graphs = silent(model.parallel.tp)
        self.fault, self.place, self.behind = "", None, 0  # type: ignore[var-annotated]
        self._collect, self._wanted = self.step.collect, self.step.capture_wanted
        self.step.collect, self.step.capture_wanted = self.collect, self.wanted

    def collect(self) -> Any:
        if self.fault and self.place == self.behind:
            FAULTS[self.fault][self.rank](self.over, self.graphs)
        self.behind += 1
        return self._collect()

    def wanted(self) -> None:
        self._wanted()
        if self.fault and self.place == "end" and self.behind:
            FAULTS[self.fault][self.rank](self.over, self.graphs)

    def generate(self, fault: str = "", place: Any = None) -> tuple[str, float, int]:
        """Return the tokens or the error, the seconds until then, and the launches."""
        self.fault, self.place, self.behind = fault, place, 0
        begin = time.monotonic()
        try:
            said = str(self.generator.generate(PROMPTS[:2], max_new_tokens=NEW, eos_ids=()))
        except CollectiveOrderError as error:
            said = str(error)
        return said, time.monotonic() - begin, self.behind


def differ(rank: Rank, folder: str, board: bool, captured: bool) -> tuple[str, dict[Any, tuple[str, float, int]], str]:
    made = Planted(rank, folder, board, captured)
    alike = made.generate()[0]
    found = {(fault, place): made.generate(fault, place) for fault in FAULTS for place in PLACES}
    stream = made.generator.stream(PROMPTS, max_new_tokens=NEW, eos_ids=())
    made.fault = ""
    for _ in range(3):
        next(stream)
    stream.close()  # a step is launched, and its tokens are not read
    return alike, found, made.generate()[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_random(tiny_config("qwen3"), tmp_path_factory.mktemp("qwen3")))


@pytest.mark.parametrize(
    ("board", "captured"), [pytest.param(True, False, marks=pytest.mark.slow), (True, True), (False, False)]
)
def test_what_ranks_call_differently_is_named_on_each(folder: str, board: bool, captured: bool) -> None:
    (alike, one, again), (same, two, same_again) = world(2).run(differ, folder, board, captured)
    assert alike == again == same == same_again and alike.startswith("[[")
    for (fault, place), (said, seconds, launches) in one.items():
        assert two[fault, place][0] == said and max(seconds, two[fault, place][1]) < 5
        # Without memory that ranks share, all launches are compared at the end: others follow what one rank lacks.
        words = FAULTS[fault][-1] if board else f"rank {int(fault == 'one more')} made "
        assert words in said and "since ranks last agreed: " in said, (fault, place, said)
        last = NEW if place == "end" or not board else min(NEW, int(place) + 1 + captured)
        assert launches == two[fault, place][2] == last, (fault, place, launches)


def fails(rank: Rank, folder: str) -> tuple[str, str]:
    """Return the tokens without graphs, and those where one rank cannot capture."""
    found = []
    for broken in (False, True):
        model = AutoModel.from_pretrained(folder, dtype=torch.float32, page_size=16, parallel=rank.spec())
        kept = eager_graphs()
        generator = Generator(model, max_batch=2, max_length=64, cuda_graph="auto", graphs=kept if broken else None)
        if broken and rank.rank:

            def capture_all(functions: Any, **options: Any) -> None:
                for function in functions.values():  # as far as the other ranks need it
                    function(), function()
                raise CaptureError("no memory")

            kept.capture_all = capture_all  # type: ignore[method-assign]
        found.append(str(generator.generate(PROMPTS, max_new_tokens=NEW, eos_ids=())))
        assert not broken or generator.step.graphs is None
    return found[0], found[1]


def test_a_capture_that_one_rank_cannot_make_is_no_difference(folder: str) -> None:
    (plain, one), (same, two) = world(2).run(fails, folder)
    assert plain == one == same == two


def freed(rank: Rank, folder: str) -> list[bool]:
    """Return whether a generator's step goes with the last reference, all tokens read and a stream left early."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, page_size=16, parallel=rank.spec())
    found = []
    gc.disable()  # as while steps are captured and served
    for early in (False, True):
        generator = Generator(model, max_batch=2, max_length=64, cuda_graph=False)
        step = weakref.ref(generator.step)
        if early:
            stream = generator.stream(PROMPTS[:1], max_new_tokens=NEW, eos_ids=())
            next(stream)
            stream.close()
            del stream
        else:
            generator.generate(PROMPTS[:1], max_new_tokens=NEW, eos_ids=())
        del generator
        found.append(step() is None)
    gc.enable()
    return found


def test_a_generator_goes_with_the_last_reference(folder: str) -> None:
    assert world(2).run(freed, folder) == [[True, True], [True, True]]


def without_memory(rank: Rank, folder: str) -> str:
    """Return what a call says where ranks share no memory, and one of them called something before."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, page_size=16, parallel=rank.spec())

    def full(*args: Any) -> Any:
        raise OSError("no space is left")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Board, "make", full)
        if rank.rank == 0:
            TRAIL.step("replay", 1)
        generator = Generator(model, max_batch=2, max_length=64, cuda_graph=False)
    assert isinstance(generator.step, SplitStep) and generator.step._board is None
    return str(generator.generate(PROMPTS[:1], max_new_tokens=NEW, eos_ids=()))


def test_what_was_called_before_is_nobodys_order(folder: str) -> None:
    first, second = world(2).run(without_memory, folder)
    assert first == second and first.startswith("[[")


def test_who_compares() -> None:
    assert step_class(None) is step_class(ParallelSpec()) is ModelStep
    assert step_class(ParallelSpec.grid(2, 0)) is ModelStep  # no processes


def cost(rank: Rank, folder: str) -> float:
    """Return the quickest of many steps' microseconds: a number is written, read and compared."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, page_size=16, parallel=rank.spec())
    step: Any = Generator(model, max_batch=2, max_length=64, cuda_graph=False).step
    times = []
    for _ in range(2000):
        begin = time.perf_counter()
        step._write(step._board)
        written = time.perf_counter()
        time.sleep(0.0002)  # the device computes, and the other rank writes
        compared = time.perf_counter()
        step._compare(step._board, step._count)
        times.append((written - begin + time.perf_counter() - compared) * 1e6)
    return min(times)


def test_what_a_step_costs_the_host(folder: str) -> None:
    found = world(2).run(cost, folder)
    print(" / ".join(f"{each:.1f}" for each in found), "us a step")
    assert max(found) < 500
