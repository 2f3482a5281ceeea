"""A rank that is gone, stands still or stays out: every other rank says so, names it, and none waits for ever."""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import subprocess
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastlayers.comm import board as boards
from fastlayers.comm.agreement import share_tables
from fastlayers.comm.board import Board
from fastlayers.comm.collectives import collectives
from fastlayers.comm.fabric import Fabric, Workspace, agree, survey
from fastlayers.comm.parallel import Axis
from fastlayers.comm.processes import AGAIN, birth, ended, lost, own
from fastlayers.comm.trail import KEPT
from fastlayers.errors import RankLostError
from fastlayers.moe.placement.moves import connect
from fastlayers.registry import Backend
from fastlayers.runtime import builds
from fastlayers.runtime.graphs import CudaGraphs, EagerRuntime
from fastlayers.testing.world import Rank, WorldError, world
from fastlayers_models.generate import Generator
from fastlayers_models.groups import IDLE, GroupStep, Intent
from fastlayers_models.llama import LlamaConfig, LlamaForCausalLM

CONFIG = dict(
    model_type="llama", vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=128, rms_norm_eps=1e-6, eos_token_id=1,
)  # fmt: skip
SECONDS = 50.0  # what a busy machine needs, and more; a deadline would be a minute, or minutes


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stand_still(seconds: float) -> None:
    """Stop this process and have it go on after a while."""
    with subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"]):
        os.kill(os.getpid(), signal.SIGSTOP)


def said_by(call: Callable[[], Any]) -> tuple[str, float]:
    """Return what a call raises of a lost rank, and how long that took."""
    begin = time.monotonic()
    try:
        call()
    except RankLostError as error:
        return str(error), time.monotonic() - begin
    return "nothing", time.monotonic() - begin


# ---- the board ---------------------------------------------------------------------------------------------------


def messages(rank: Rank) -> bool:
    board = Board.make(rank.spec().tp, 60.0)
    assert board is not None
    good = True
    for size in (0, 1, 31, 1 << 16, (1 << 16) + 1, 300_000, 5):
        given = [bytes([number + size % 7]) * size for number in range(rank.size)]
        good &= board.exchange(given[rank.rank]) == given
    for turn in range(100):  # one says, the others hear: more than a ring holds
        if rank.rank == 0:
            board.post(str(turn).encode())
        else:
            time.sleep(0.001 * (turn % 7 == rank.rank))
            good &= board.read(0) == str(turn).encode()
    return good and board.exchange(b"end") == [b"end"] * rank.size


@pytest.mark.parametrize("size", [2, 4])
def test_messages_arrive_whole_and_in_order(size: int) -> None:
    assert world(size).run(messages) == [True] * size


def waits(rank: Rank, fault: str, seconds: float = 2.0) -> tuple[str, float]:
    board, begin = Board(rank.spec().tp, 60.0), time.monotonic()
    board.exchange(b"begin")
    if rank.rank == 0:
        if fault == "silent":
            board.deadline_s = 1.0
        said, _ = said_by(lambda: board.exchange(b"more"))
        return said, time.monotonic() - begin  # of both: who hears of the first late waits less for the second
    if fault == "killed":
        time.sleep(0.3)  # the other one waits
        die()
    elif fault == "stopped":
        stand_still(seconds)
        board.exchange(b"more")
    elif fault == "late":
        time.sleep(seconds)
        board.exchange(b"more")
    elif fault == "silent":
        time.sleep(seconds)
    elif fault == "torn":  # a record of which a part has not come
        right = boards._HEAD
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(boards, "_HEAD", Torn(right))
            board.post(b"more")
        time.sleep(0.5)
        board._sent -= 1
        board.exchange(b"more")
    return "nothing", 0.0


class Torn:
    """A record's head with another checksum."""

    def __init__(self, right: struct.Struct) -> None:
        self.right, self.size = right, right.size

    def pack(self, *fields: int) -> bytes:
        return self.right.pack(*fields[:3], fields[3] ^ 1)


def test_a_killed_process_is_named_while_it_is_waited_for() -> None:
    (said, seconds), _ = world(2).run(waits, "killed", dying=[1])
    assert said.startswith("Board: rank 1 is gone, its process") and seconds < SECONDS


def test_a_silent_process_is_named_when_the_deadline_is_over() -> None:
    (said, seconds), _ = world(2).run(waits, "silent")
    assert said.startswith("Board: rank 1 said nothing for 1 s") and 0.9 < seconds < SECONDS


@pytest.mark.parametrize(("fault", "stands"), [
    ("torn", 0.5), ("stopped", 1.5), ("late", 1.0), pytest.param("stopped", 5.0, marks=pytest.mark.slow),
    pytest.param("late", 10.0, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_process_that_goes_on_is_waited_for(fault: str, stands: float) -> None:
    (said, seconds), _ = world(2).run(waits, fault, stands)
    assert said == "nothing" and seconds > 0.8 * stands


def elsewhere(rank: Rank) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boards, "host", lambda: f"host {rank.rank}")
        return Board.make(rank.spec().tp) is None


def no_room(*given: Any) -> Any:
    raise OSError("No space left on device")


def full(rank: Rank) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boards, "_reserved", no_room)
        with pytest.raises(OSError, match="Board: ") as caught:
            Board(rank.spec().tp)
    return str(caught.value)


def test_all_ranks_say_that_the_host_is_full() -> None:
    for said in world(2).run(full):
        assert said.startswith("Board: rank 0 has no room for 1,") and said.endswith("No space left on device")


def unseen(rank: Rank) -> str:
    with pytest.MonkeyPatch.context() as patch:
        if rank.rank == 1:  # as in a container of its own
            patch.setattr(boards, "open", no_room, raising=False)
        try:
            Board(rank.spec().tp)
        except OSError as error:
            return str(error)
    return "nothing"


def test_all_ranks_say_which_does_not_see_the_memory() -> None:
    for said in world(2).run(unseen):
        assert said.startswith("Board: rank 1 does not see what rank 0 has made: ")


def test_ranks_of_several_hosts_have_no_board() -> None:
    assert world(2).run(elsewhere) == [True, True]
    assert Board.make(Axis()) is None and Board.make(Axis(2, 0)) is None


def test_a_process_is_known_by_its_beginning() -> None:
    mine = own()
    assert not ended(mine) and ended([*mine[:2], "another"])
    assert not ended(["another host", mine[1], "another"])  # nobody can tell
    with subprocess.Popen(["sleep", "0"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert birth(process.pid) is None  # ended, and nobody has asked how
    assert lost(RuntimeError("Expected 3 rows"), Axis(2, 0), "all_reduce") is None


def test_a_rank_that_took_the_store_with_it_is_named() -> None:
    """Without torchrun the first rank keeps the store by which ranks know each other, until it is gone."""
    gone, reset = [*own()[:2], "another"], RuntimeError("gloo/transport/tcp: Connection reset by peer")
    axis = Axis(2, 1, (0, 1), processes=(gone, own()))
    found = lost(reset, axis, "all_reduce")
    assert str(found).startswith(f"all_reduce over 2 ranks: rank 0 is gone, its process {gone[1]} has ended;")
    nobody = str(lost(reset, Axis(2, 1), "all_reduce"))
    assert nobody.startswith("all_reduce over 2 ranks: a rank did not answer (gloo/transport/tcp: Connection reset")


# ---- collectives -------------------------------------------------------------------------------------------------


def collective(rank: Rank, operation: str, dead: int) -> tuple[str, float]:
    over = collectives(rank.spec().tp)
    over.all_reduce_(torch.ones(2))
    if rank.rank == dead:
        time.sleep(0.2)
        die()
    sizes = [1, 2, 1, 2][: rank.size]
    calls = {
        "all_reduce": lambda: over.all_reduce_(torch.ones(4, 2)),
        "all_gather": lambda: over.all_gather(torch.ones(4, 2)),
        "reduce_scatter": lambda: over.reduce_scatter(torch.ones(4, 2)),
        "all_gather_variable": lambda: over.all_gather_variable(torch.ones(sizes[rank.rank], 2), sizes),
        "reduce_scatter_variable": lambda: over.reduce_scatter_variable(torch.ones(sum(sizes), 2), sizes),
    }

    def until_it_fails() -> None:  # what was on its way when the rank was killed may still have arrived
        for _ in range(1000):
            calls[operation]()

    return said_by(until_it_fails)


def test_a_collective_names_who_was_killed() -> None:
    (said, seconds), _ = world(2).run(collective, "all_gather_variable", 1, dying=[1])
    assert "over 2 ranks: rank 1 is gone, its process" in said and seconds < SECONDS


def calls_of(axis: Axis, folder: str) -> dict[str, Callable[[], Any]]:
    """Return what ranks call together apart from collectives, by the operation that the error names."""
    step: Any = GroupStep.__new__(GroupStep)
    step._axis = axis
    step._groups, step.model = SimpleNamespace(size=2), SimpleNamespace(parallel=SimpleNamespace(attn_dp=axis))
    row = Backend("flashinfer", "nowhere:Nothing", ("torch:tensor",))
    return {
        "asking what connects ranks": lambda: survey(axis, torch.device("cpu")),
        "comparing what ranks have": lambda: agree(axis, {"a": 1}),
        "importing what flashinfer needs": lambda: Workspace(Fabric(2)).agree_on(row, axis),
        "making a board": lambda: Board(axis),
        "asking for the ranks' hosts": lambda: Board.make(axis),
        "telling what is built": lambda: builds.meet(axis),
        "telling what could not be built": lambda: builds.of_all_ranks({}, axis),
        "sharing tuned tables": lambda: share_tables([], Path(folder), axis),
        "connecting ranks between which experts move": lambda: connect(axis, torch.device("cpu")),
        "gathering outputs": lambda: step.of_all_groups([[1]]),
        "telling what ranks called": lambda: step._name_difference(None, "[]"),
    }


def left_alone(rank: Rank, folder: str) -> dict[str, tuple[str, int | None]]:
    axis = rank.spec().tp
    collectives(axis).all_reduce_(torch.ones(2))
    if rank.rank == 1:
        die()
    found: dict[str, tuple[str, int | None]] = {}
    for operation, call in calls_of(axis, folder).items():
        try:
            call()
        except RankLostError as error:
            found[operation] = str(error), error.rank
    return found


def test_whatever_ranks_call_together_names_who_is_gone(tmp_path: Path) -> None:
    found, _ = world(2).run(left_alone, str(tmp_path), dying=[1])
    assert found.keys() == calls_of(Axis(), "").keys()
    for operation, (said, rank) in found.items():
        assert said.startswith(f"{operation} over 2 ranks: rank 1 is gone, its process ") and rank == 1, said


def test_objects_are_gathered_in_one_place() -> None:
    """So that no error of torch.distributed reaches a user."""
    root = Path(__file__).parents[2]
    files = [path for folder in ("src", "models", "server") for path in (root / folder).rglob("*.py")]
    calling = {path.name for path in files if re.search(r"\b(all_)?gather_object\(", path.read_text())}
    assert len(files) > 300 and calling == {"processes.py"}


def tell_and_end(rank: Rank, folder: str) -> None:
    """End as a program does that does not catch the error: then ranks that wait for this one hear of it."""
    said, seconds = collective(rank, "all_reduce", 2)
    Path(folder, str(rank.rank)).write_text(json.dumps([said, seconds]))
    die()


def test_every_survivor_ends_and_the_first_name_who_was_killed(tmp_path: Path) -> None:
    assert world(4).run(tell_and_end, str(tmp_path), dying=range(4)) == [None] * 4
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in (0, 1, 3)]
    for said, seconds in found:
        # The processes are those of earlier tests, too, which may have begun steps.
        begun = r"\((no step had begun here|step \d+ was the last to begin here); last calls between "
        assert "over 4 ranks: rank " in said and re.search(f"; {re.escape(AGAIN)} {begun}", said)
        assert said.endswith("all_reduce with float32[4, 2] between ranks (0, 1, 2, 3))")  # the one that failed
        assert seconds < SECONDS
    assert any("rank 2 is gone" in said for said, _ in found) and not (tmp_path / "2").exists()


# ---- a model -----------------------------------------------------------------------------------------------------


def generate(rank: Rank, attn_dp: int, graphs: bool, at: int, phase: str) -> tuple[Any, float, int]:
    """Return what a stream of which the last rank is killed raises, after how long, and behind how many tokens."""
    torch.manual_seed(0)
    spec = rank.spec(attn_dp=attn_dp)
    model = LlamaForCausalLM(LlamaConfig.from_hf(CONFIG), parallel=spec, dtype=torch.float32, page_size=16)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.1)
    kept = CudaGraphs(runtime=EagerRuntime(), warm_ups=1, freeze=False) if graphs else None
    generator = Generator(model, max_batch=2, max_length=128, graphs=kept)
    prompts, seen, last = [[5, 6, 7], [8, 9]], 0, time.monotonic()
    if rank.rank == rank.size - 1:
        where: Any = generator.step if phase == "exchange" else model
        name = "exchange" if phase == "exchange" else "forward"
        right, calls = getattr(where, name), [0]

        def killed(*given: Any, **named: Any) -> Any:
            calls[0] += 1
            if calls[0] == at:
                time.sleep(0.2)
                die()
            return right(*given, **named)

        setattr(where, name, killed)
    try:
        for _ in generator.stream(prompts, max_new_tokens=60, eos_ids=()):
            seen, last = seen + 1, time.monotonic()
    except RankLostError as error:
        return error, time.monotonic() - last, seen
    return "nothing", 0.0, seen


@pytest.mark.parametrize(("attn_dp", "graphs", "at", "phase", "steps", "record"), [
    (1, False, 1, "prompt", (1, 1), "all_reduce with float32["), (1, True, 9, "replay", (2, 9), "replay of StepKey("),
    (2, True, 6, "exchange", (2, 6), "replay of StepKey("), (2, False, 4, "decode", (4, 4), "all_gather with "),
])  # fmt: skip
def test_a_rank_killed_in_each_phase(
    attn_dp: int, graphs: bool, at: int, phase: str, steps: tuple[int, int], record: str
) -> None:
    (error, seconds, seen), _ = world(2).run(generate, attn_dp, graphs, at, phase, dying=[1])
    said = str(error)  # pickled on its way here
    assert "rank 1 is gone, its process" in said, said
    assert (error.rank, bool(error.operation)) == (1, True) and steps[0] <= error.step <= steps[1], error.step
    assert f"(step {error.step} was the last to begin here; last calls between ranks: " in said
    assert said.endswith(f"{'; '.join(error.records[-3:])})") and 0 < len(error.records) <= 4 * KEPT
    assert any(each.startswith(record) for each in error.records), error.records
    assert seconds < SECONDS
    assert seen == 0 if phase == "prompt" else seen > 0


def held_up(rank: Rank, attn_dp: int, seconds: float, stops: bool) -> tuple[list[list[int]], float]:
    """Return what ranks generate of which the last one's host stands for a while before a step, and the longest gap."""
    torch.manual_seed(0)
    spec = rank.spec(attn_dp=attn_dp)
    model = LlamaForCausalLM(LlamaConfig.from_hf(CONFIG), parallel=spec, dtype=torch.float32, page_size=16)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.1)
    generator = Generator(model, max_batch=2, max_length=128)
    prompts: list[list[int]] = [[5, 6, 7], [8, 9]]
    options: dict[str, Any] = {"max_new_tokens": 8, "eos_ids": ()}
    wanted = generator.generate(prompts, **options)
    right, calls, times = model.forward, [0], [time.monotonic()]

    def late(*given: Any, **named: Any) -> Any:
        calls[0] += 1
        times.append(time.monotonic())
        if calls[0] == 4 and rank.rank == rank.size - 1:
            stand_still(seconds) if stops else time.sleep(seconds)
        return right(*given, **named)

    model.forward = late  # type: ignore[method-assign]
    found = generator.generate(prompts, **options)
    times.append(time.monotonic())
    assert found == wanted
    return found, max(after - before for before, after in pairwise(times))


@pytest.mark.parametrize(("attn_dp", "seconds", "stops"), [
    (1, 1.5, False), (2, 1.5, True), pytest.param(1, 5.0, True, marks=pytest.mark.slow),
    pytest.param(1, 10.0, False, marks=pytest.mark.slow), pytest.param(2, 10.0, False, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_host_that_is_late_is_not_lost(attn_dp: int, seconds: float, stops: bool) -> None:
    found = world(2).run(held_up, attn_dp, seconds, stops)
    assert found[0][0] == found[1][0] and all(gap > 0.8 * seconds for _, gap in found)


def between(rank: Rank) -> tuple[str, float]:
    """Return what a generator raises of which the last rank's process ended behind the model."""
    model = LlamaForCausalLM(LlamaConfig.from_hf(CONFIG), parallel=rank.spec(), dtype=torch.float32, page_size=16)
    if rank.rank == rank.size - 1:
        die()
    return said_by(lambda: Generator(model, max_batch=2, max_length=64))


def test_a_rank_that_ends_before_its_generator() -> None:
    (said, seconds), _ = world(2).run(between, dying=[1])
    assert "comparing what ranks have over 2 ranks: rank 1 is gone, its process" in said, said
    assert seconds < SECONDS


def idle(rank: Rank) -> list[list[int]]:
    spec = rank.spec(attn_dp=2)
    model = LlamaForCausalLM(LlamaConfig.from_hf(CONFIG), parallel=spec, dtype=torch.float32, page_size=16)
    step = Generator(model, max_batch=2, max_length=64).step
    assert isinstance(step, GroupStep)
    found = [step.exchange(Intent(rank.rank, 3 * rank.rank, 1, 0))]
    step._board = None  # as on several hosts
    found.append(step.exchange(Intent(IDLE, 7, rank.rank, 5)))
    return [list(each) for intents in found for each in intents]


def test_what_groups_would_do_with_a_board_and_without() -> None:
    assert world(2).run(idle) == [[[0, 0, 1, 0], [1, 3, 1, 0], [0, 7, 0, 5], [0, 7, 1, 5]]] * 2


def test_a_rank_that_was_not_to_die_is_an_error() -> None:
    with pytest.raises(WorldError, match="its process died"):
        world(2).run(waits, "killed")
