"""Calls that differ between ranks are named once a step, on every rank, by what the ranks exchange anyway."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fastlayers.comm.parallel import Axis
from fastlayers.comm.trail import KEPT, TRAIL, Trail, name_difference
from fastlayers.errors import CollectiveOrderError
from fastlayers.testing.world import Rank, world
from fastlayers_models.auto import AutoModel
from fastlayers_models.generate import Generator
from fastlayers_models.groups import Intent

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
sys.path.insert(0, str(Path(__file__).parents[1]))
from family_tools import save_random, tiny_config
from silent_ranks import WIDE, X, silent


def digest(operation: str, x: torch.Tensor) -> str:
    """Return the number of a captured step that makes one call."""
    calls = Trail()
    calls.note(operation, Axis(2, 0, (0, 1)), x.shape, x.dtype)
    return f"{calls.digest():x}"


# What each rank calls behind the first step, and what every rank reads then.
SAME = "accepted: the same on all ranks. FASTLAYERS_DEBUG=1 names where a call is made, before it is launched."
FAULTS: dict[str, tuple[Any, Any, str]] = {
    "another order": (
        lambda over, graphs: (over.all_reduce_(X), over.all_gather(WIDE)),
        lambda over, graphs: (over.all_gather(WIDE), over.all_reduce_(X)),
        "number 1 since ranks last agreed: rank 0 made all_reduce with float32[4, 8]; rank 1 made all_gather with "
        "float32[2, 8]",
    ),
    "another shape": (
        lambda over, graphs: (over.all_reduce_(X), over.all_reduce_(X)),
        lambda over, graphs: (over.all_reduce_(X), over.all_reduce_(WIDE)),
        "number 2 since ranks last agreed: rank 0 made all_reduce with float32[4, 8]; rank 1 made all_reduce with "
        "float32[2, 8]",
    ),
    "another dtype": (
        lambda over, graphs: over.all_reduce_(X),
        lambda over, graphs: over.all_reduce_(X.half()),
        "rank 0 made all_reduce with float32[4, 8]; rank 1 made all_reduce with float16[4, 8]",
    ),
    "other sizes": (
        lambda over, graphs: over.all_gather_variable(WIDE, (2, 1)),
        lambda over, graphs: over.all_gather_variable(WIDE, (3, 2)),
        "rank 0 made all_gather_variable with float32[8] of [2, 1] rows; rank 1 made all_gather_variable with "
        "float32[8] of [3, 2] rows",
    ),
    "a missing call": (
        lambda over, graphs: (over.all_reduce_(X), over.all_gather(X)),
        lambda over, graphs: over.all_reduce_(X),
        "number 2 since ranks last agreed: rank 0 made all_gather with float32[4, 8]; rank 1 made none",
    ),
    "another replay": (
        lambda over, graphs: graphs.replay(1),
        lambda over, graphs: graphs.replay(2),
        "captured steps, number 1 since ranks last agreed: rank 0 made replay of 1; rank 1 made replay of 2",
    ),
    "another capture": (
        lambda over, graphs: graphs.capture(3, lambda: over.all_reduce_(X)),
        lambda over, graphs: graphs.capture(3, lambda: over.all_gather(X)),
        f"captured steps, number 1 since ranks last agreed: rank 0 made capture {digest('all_reduce', X)} of 3; rank 1 "
        f"made capture {digest('all_gather', X)} of 3",
    ),
    "a capture of another key": (
        lambda over, graphs: graphs.capture(4, lambda: over.all_reduce_(X)),
        lambda over, graphs: graphs.capture(5, lambda: over.all_reduce_(X)),
        f"rank 0 made capture {digest('all_reduce', X)} of 4; rank 1 made capture {digest('all_reduce', X)} of 5",
    ),
}  # fmt: skip


def differ(rank: Rank, folder: str, boards: bool) -> dict[str, tuple[str, float]]:
    spec = rank.spec(attn_dp=2)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, page_size=16, parallel=spec)
    generator = Generator(model, max_batch=2, max_length=64, cuda_graph=False)
    step: Any = generator.step
    step._board = step._board if boards else None
    over, graphs = silent(spec.tp)
    found = {}
    step.exchange(Intent())
    for fault, (*calls, _) in FAULTS.items():
        step.exchange(Intent())  # in agreement, as behind each fault that was named
        begin, said = time.monotonic(), "nothing"
        calls[rank.rank](over, graphs)
        try:
            step.exchange(Intent(tokens=rank.rank))
        except CollectiveOrderError as error:
            said = str(error)
        found[fault] = said, time.monotonic() - begin
    assert not TRAIL.lines[spec.tp.ranks].count  # exchanges are no calls of a step
    found["goes on"] = str(generator.generate([[5, 6], [7]], max_new_tokens=3, eos_ids=())), 0.0
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_random(tiny_config("qwen3"), tmp_path_factory.mktemp("qwen3")))


@pytest.mark.parametrize("boards", [True, False])
def test_what_ranks_call_differently_is_named_on_each(folder: str, boards: bool) -> None:
    one, two = world(2).run(differ, folder, boards)
    assert one.pop("goes on") == two.pop("goes on")
    for fault, (*_, words) in FAULTS.items():
        assert one[fault][0] == two[fault][0] and words in one[fault][0], (fault, one[fault], two[fault])
        assert one[fault][0].endswith(SAME) and max(one[fault][1], two[fault][1]) < 5


def test_a_difference_long_ago_has_no_name_but_is_one() -> None:
    axis, told, values = Axis(2, 0, (0, 1)), [], set()
    for rank in range(2):
        trail = Trail()
        trail.note("all_gather" if rank else "all_reduce", axis, (2, 8), torch.float32)
        for _ in range(KEPT):
            trail.note("all_reduce", axis, (2, 8), torch.float32)
        value, words = trail.take(axis)
        values.add(value)
        told.append(words())
    assert len(values) == 2
    with pytest.raises(CollectiveOrderError, match=f"other calls, and more than {KEPT} ago"):
        name_difference(axis, told)


def test_calls_of_other_ranks_and_inside_a_capture_do_not_count() -> None:
    trail, whole, part = Trail(), Axis(4, 0, (0, 1, 2, 3)), Axis(2, 0, (0, 1))
    trail.step("replay", 1)  # of a process that calls nobody
    assert not trail.lines
    trail.note("all_reduce", whole, (2, 8), torch.float32)
    value, _ = trail.take(whole)
    trail.note("all_reduce", whole, (2, 8), torch.float32)
    trail.note("all_gather", part, (2, 8), torch.float32)  # of this rank's group
    with trail.aside() as calls:
        trail.note("all_reduce", whole, (2, 8), torch.float32)
    assert trail.lines[whole.ranks].count == 1 and calls.lines[whole.ranks].count == 1 and calls.digest()
    assert trail.take(whole)[0] == value != trail.take(whole)[0]


def test_the_last_calls_in_words_are_those_that_were_compared_and_those_since() -> None:
    trail, whole, part = Trail(), Axis(2, 0, (0, 1)), Axis(2, 0, (4, 5))
    assert trail.recent() == ()
    trail.note("all_reduce", whole, (2, 8), torch.float32)
    trail.step("replay", 1)
    trail.take(whole)
    trail.take(whole)  # nothing was called between
    trail.note("all_gather", whole, (1, 8), torch.float32)
    trail.note("all_gather", part, (1, 8), torch.float32)
    assert trail.recent() == (
        "replay of 1", "all_reduce with float32[2, 8] between ranks (0, 1)",
        "all_gather with float32[1, 8] between ranks (0, 1)", "all_gather with float32[1, 8] between ranks (4, 5)",
    )  # fmt: skip
    for number in range(2 * KEPT):
        trail.note("all_reduce", whole, (number, 8), torch.float32)
    last = [each for each in trail.recent() if each.endswith("(0, 1)")]
    assert len(last) == KEPT and last[-1] == f"all_reduce with float32[{2 * KEPT - 1}, 8] between ranks (0, 1)"


def test_what_a_call_and_a_step_cost_the_host() -> None:
    trail, axis, x = Trail(), Axis(2, 0, (0, 1)), torch.zeros(4, 8)

    def quickest(function: Any, calls: int) -> float:
        times = []
        for _ in range(7):
            begin = time.perf_counter()
            for _ in range(calls):
                function()
            times.append((time.perf_counter() - begin) / calls * 1e6)
        return min(times)

    call = quickest(lambda: trail.note("all_reduce", axis, x.shape, x.dtype), 1000)
    step = quickest(lambda: trail.take(axis), 1000)
    print(f"{call:.2f} us a call, {step:.2f} us a step")
    assert call < 20 and step < 60  # microseconds, on a machine that is busy with other things
