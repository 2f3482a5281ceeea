"""What goes wrong between two ranks while kernels wait for rows: it is named, and neither a hang nor a wrong sum.

The same cases run on two GPUs, over NVLink, and on a CPU in two processes, whose programs are the interpreter's, memory
a file that both map, and clock a real one.
"""

from __future__ import annotations

import json
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl

from fastlayers import env
from fastlayers.comm import fabric, triton_push
from fastlayers.comm.board import Board
from fastlayers.comm.fabric import Fabric, Workspace
from fastlayers.comm.seam import Late
from fastlayers.comm.sum_norm.layer import SumNorm
from fastlayers.comm.symmetric import SymmArena
from fastlayers.comm.trail import TRAIL, name_difference
from fastlayers.errors import CollectiveOrderError
from fastlayers.testing.world import Rank, world
from fastlayers_models.rows import Outbox

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
from quick_interpreter import hasten
from test_lost_ranks import die, said_by, stand_still

if env.triton_interpret():  # in the ranks, too, which load this file alone
    hasten()

GPUS = pytest.param(
    "nccl",
    marks=[pytest.mark.multigpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")],
)  # fmt: skip
CPU = pytest.param(
    "gloo", marks=pytest.mark.skipif(not env.triton_interpret(), reason="needs TRITON_INTERPRET=1 without a GPU")
)
everywhere = pytest.mark.parametrize("backend", [GPUS, CPU])
HIDDEN, EPS, SLOTS, ROWS = 64, 1e-6, 4, 2
# Seconds; on a GPU both longer than 32 bits of nanoseconds, so that one compiled kernel has either.
DEADLINE, PATIENCE = 2.0 if env.triton_interpret() else 3.0, 60.0


class Mapped(SymmArena):
    """An arena of files that all ranks map; of a rank that is ``denied`` that of the first rank is its own copy."""

    folder, denied = "", False

    def _map(self, rank: int, nbytes: int, shared: bool = True) -> torch.Tensor:
        return torch.from_file(f"{self.folder}/{rank}", shared=shared, size=nbytes, dtype=torch.uint8)

    def _allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        return self._map(torch.distributed.get_rank(), nbytes)

    def _meet(self, buffer: torch.Tensor, size: int) -> list[torch.Tensor]:
        return [self._map(peer, buffer.numel(), not (self.denied and peer == 0)) for peer in range(size)]

    def ready(self) -> None:
        torch.distributed.barrier()


class Denied(SymmArena):
    """An arena of a GPU which takes memory of its own for that of the first rank: its stores go nowhere."""

    def _meet(self, buffer: torch.Tensor, size: int) -> list[torch.Tensor]:
        found = super()._meet(buffer, size)
        return [torch.zeros_like(buffer) if peer == 0 else each for peer, each in enumerate(found)]


def clock() -> Any:
    """Return the time, as a kernel of the interpreter has it; who waits lets the others run."""
    time.sleep(0.001)
    return tl.full([], time.monotonic_ns(), tl.int64)


@contextmanager
def workspace(rank: Rank, folder: str, name: str = "first", denied: bool = False) -> Iterator[Workspace]:
    """Give the workspace of two ranks; ``name``: of its files; ``denied``: the second does not reach the first."""
    axis, denied = rank.spec().tp, denied and rank.rank == 1
    with pytest.MonkeyPatch.context() as patch:
        if rank.device.type == "cpu":
            Path(folder, name).mkdir(exist_ok=True)
            own = type("Own", (Mapped,), {"folder": f"{folder}/{name}", "denied": denied})
            patch.setattr(fabric, "survey", lambda axis, device: Fabric(axis.size))
            patch.setattr(fabric, "SymmArena", own)
            patch.setattr(triton_push, "now", clock)
        elif denied:
            patch.setattr(fabric, "SymmArena", Denied)
        yield Workspace.make(axis, HIDDEN, torch.bfloat16, rank.device, rows=SLOTS, deadline_s=PATIENCE)


def sync(rank: Rank) -> None:
    if rank.device.type == "cuda":
        torch.cuda.synchronize()


class Sums:
    """Sums of a workspace, each of other rows, and whether they were right; of both ranks the same number by number."""

    def __init__(self, rank: Rank, made: Workspace) -> None:
        assert made.push is not None and made.arena is not None, made.fabric.refusal
        self.rank, self.push, self.arena, self.number = rank, made.push, made.arena, 0
        self.weight = torch.ones(HIDDEN, dtype=torch.bfloat16, device=rank.device)
        self.outbox = Outbox(1, rank.device, [Late(made.arena.status, rank.spec().tp.ranks)])
        self.tokens = torch.zeros(1, dtype=torch.int64, device=rank.device)
        # Whole numbers, whose sums are exact; there before anything waits, so that calls follow one another at once.
        parts = torch.randint(-60, 60, (40, 2, SLOTS, HIDDEN), generator=torch.Generator().manual_seed(7))
        self.parts = parts.to(rank.device, torch.bfloat16)
        found = [self.call() for _ in range(3)]
        assert self.judged(found) == ["right"] * 3  # also compiled, on both
        torch.distributed.barrier()

    def call(self, rows: int = ROWS, part: int = 0, by: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch the next sum; return what it gives, and what it must."""
        parts = self.parts[self.number, :, :rows]
        x = parts[self.rank.rank].contiguous()
        self.number += part != 1
        if by is not None:
            return by(x, None, self.weight)[1], parts
        return self.push(x, None, self.weight, EPS, part=part)[1], parts

    def skip(self) -> None:
        """Leave the next sum out."""
        self.number += 1

    def judged(self, found: list[tuple[torch.Tensor, torch.Tensor]]) -> list[str]:
        """Return of each sum whether it is right, NaN in all rows that are not, or wrong."""
        verdicts = []
        for h, parts in found:
            good, lost = (h == parts.sum(0)).all(-1), h.isnan().all(-1)
            verdicts.append("right" if bool(good.all()) else "NaN" if bool((good | lost).all()) else "wrong")
        return verdicts

    def said(self) -> str:
        """Return what the tokens of a step behind all these sums raise."""
        return said_by(self.outbox.send(self.tokens).tokens)[0]

    def timed(self, times: int) -> tuple[list[str], str, float]:
        """Return what so many sums gave, what their step's tokens raised, and the seconds until then."""
        begin = time.monotonic()
        found = [self.call() for _ in range(times)]
        said = self.said()
        return self.judged(found), said, time.monotonic() - begin


LOST = "Pending.tokens: rank 1 did not answer within the deadline of a sum over ranks; nothing of this step is right"


# ---- a rank that is gone -----------------------------------------------------------------------------------------


@torch.inference_mode()
def killed(rank: Rank, folder: str, at: str) -> None:
    with workspace(rank, folder) as made:
        sums = Sums(rank, made)
        sums.call(part=1)
        assert sums.judged([sums.call(part=2)]) == ["right"]
        torch.distributed.barrier()
        sums.arena.deadline_ns = int(DEADLINE * 1e9)
        if rank.rank == 1:
            if at == "push":
                sums.call(part=1)  # which waits for nobody
                sync(rank)
            die()
        Path(folder, "seen").write_text(json.dumps([*sums.timed(3), *sums.timed(20)]))
        die()  # NCCL would wait for the other one


@everywhere
@pytest.mark.parametrize("at", ["begin", "push"])
def test_a_rank_killed_before_it_pushes_or_before_it_waits(backend: str, at: str, tmp_path: Path) -> None:
    """What it has pushed is used, and is right; what it has not is named, behind one deadline."""
    world(2, backend).run(killed, str(tmp_path), at, dying=[0, 1], timeout=120.0)
    first, said, seconds, later, again, more = json.loads((tmp_path / "seen").read_text())
    assert first == (["NaN"] * 3 if at == "begin" else ["right", "NaN", "NaN"])
    assert said.startswith(LOST) and again == said and later == ["NaN"] * 20
    assert 0.9 * DEADLINE < seconds < DEADLINE + 20.0 and more < 10 * DEADLINE


# ---- a rank that is late -----------------------------------------------------------------------------------------


@torch.inference_mode()
def late(rank: Rank, folder: str, how: str, seconds: float) -> tuple[list[str], str, float]:
    with workspace(rank, folder) as made:
        sums = Sums(rank, made)
        begin = time.monotonic()
        if rank.rank == 1:
            (stand_still if how == "stopped" else time.sleep)(seconds)
        verdicts, said, _ = sums.timed(6)
        torch.distributed.barrier()
        return verdicts, said, time.monotonic() - begin


@everywhere
@pytest.mark.parametrize(("how", "seconds"), [("stopped", 5.0), ("late", 10.0)])
def test_a_rank_that_comes_within_the_deadline(backend: str, how: str, seconds: float, tmp_path: Path) -> None:
    seconds = seconds if backend == "nccl" else 1.0
    for verdicts, said, took in world(2, backend).run(late, str(tmp_path), how, seconds, timeout=120.0):
        assert verdicts == ["right"] * 6 and said == "nothing" and took > 0.9 * seconds


@torch.inference_mode()
def too_late(rank: Rank, folder: str, how: str) -> dict[str, Any]:
    """Return what the first rank sees while the other is away for too long, what that one sees when it is back."""
    with workspace(rank, folder) as made:
        sums = Sums(rank, made)
        sums.arena.deadline_ns = int(DEADLINE * 1e9)
        if rank.rank == 0:
            found = {"first": sums.timed(3), "later": sums.timed(20)}
            status = int(sums.arena.status)
            torch.distributed.barrier()
        else:
            (stand_still if how == "stopped" else time.sleep)(DEADLINE + (1.0 if rank.device.type == "cpu" else 3.0))
            torch.distributed.barrier()  # by now the first rank has overrun what this one did not take
            found = {"first": sums.timed(3), "later": sums.timed(20)}
            status = int(sums.arena.status)
        torch.distributed.barrier()
    with workspace(rank, folder, "again") as made:  # on all ranks: then everything is as before
        fresh = Sums(rank, made)
        found["again"] = fresh.timed(6)
        torch.distributed.barrier()
    return {**found, "status": status}


@everywhere
@pytest.mark.parametrize("how", ["stopped", pytest.param("late", marks=pytest.mark.slow)])
def test_a_rank_that_comes_too_late(backend: str, how: str, tmp_path: Path) -> None:
    """Both end in an error, though both live: what the first rank sent has been overrun when the other comes."""
    one, other = world(2, backend).run(too_late, str(tmp_path), how, timeout=120.0)
    assert 0.9 * DEADLINE < one["first"][2] < DEADLINE + 20.0
    for each in (one, other):  # the workspace gives nothing any more, and nobody waits for it
        verdicts, said, _ = each["first"]
        assert verdicts == ["NaN"] * 3 and said.startswith(LOST) and each["status"] == 2
        verdicts, again, seconds = each["later"]
        assert verdicts == ["NaN"] * 20 and again == said and seconds < 10 * DEADLINE
        assert each["again"][:2] == (["right"] * 6, "nothing")


# ---- calls that differ -------------------------------------------------------------------------------------------


def plan(fault: str, rank: int) -> list[int | None]:
    """Return of how many rows each call of a rank is; ``None``: it leaves it out."""
    if rank == 0 or not fault:
        return [ROWS] * 3
    return [ROWS, ROWS + 1, ROWS] if fault == "rows" else [ROWS, None, ROWS]


@torch.inference_mode()
def differ(rank: Rank, folder: str, fault: str) -> tuple[list[str], str, str, float]:
    """Return what the sums gave, what comparing the calls raised, what the tokens would, and how long both took."""
    axis = rank.spec().tp
    with workspace(rank, folder) as made:
        layer = SumNorm(
            axis, HIDDEN, EPS, workspace=made, device=rank.device, dtype=torch.bfloat16, backend="triton_symm_mem"
        )
        sums, board = Sums(rank, made), Board.make(axis, PATIENCE)
        assert board is not None
        sums.arena.deadline_ns = int(DEADLINE * 1e9)
        TRAIL.take(axis)  # as a step does, see fastlayers_models.between_ranks
        begin, found = time.monotonic(), []
        for rows in plan(fault, rank.rank):
            if rows is None:
                sums.skip()
            else:
                found.append(sums.call(rows, by=layer))
        value, told = TRAIL.take(axis)
        named = "nothing"
        if len(set(board.exchange(struct.pack("<q", value)))) > 1:
            try:
                name_difference(axis, [each.decode() for each in board.exchange(told().encode())])
            except CollectiveOrderError as error:
                named = str(error)
        said = sums.said()
        seconds = time.monotonic() - begin
        torch.distributed.barrier()
        return sums.judged(found), named, said, seconds


@everywhere
def test_ranks_that_bring_other_rows_are_named(backend: str, tmp_path: Path) -> None:
    one, other = world(2, backend).run(differ, str(tmp_path), "rows", timeout=120.0)
    named = (
        "calls between ranks (0, 1), number 2 since ranks last agreed: rank 0 made SumNorm with "
        f"bfloat16[2, {HIDDEN}]; rank 1 made SumNorm with bfloat16[3, {HIDDEN}]"
    )
    for verdicts, said, _, seconds in (one, other):
        assert said.startswith(named) and "wrong" not in verdicts and seconds < DEADLINE + 20.0
    # Who waits for a row that nobody sends gives nothing, and both ranks say so by themselves.
    assert other[0] == ["right", "NaN", "NaN"]
    for said in (one[2], other[2]):
        assert said.startswith("Pending.tokens: rank ") and "did not answer within the deadline" in said


@everywhere
def test_a_rank_that_leaves_a_call_out_is_named(backend: str, tmp_path: Path) -> None:
    """Rows of two calls meet then, which no kernel can tell: the step ends before its tokens are read."""
    found = world(2, backend).run(differ, str(tmp_path), "skip", timeout=120.0)
    for verdicts, named, _, seconds in found:
        assert named.startswith(
            "calls between ranks (0, 1), number 3 since ranks last agreed: rank 0 made SumNorm with "
            f"bfloat16[2, {HIDDEN}]; rank 1 made none"
        )
        assert verdicts[:2] == ["right", "wrong"] and seconds < DEADLINE + 20.0
    # Who waits for the third call gives it up; whoever left one out has ended its own, maybe before it is told.
    assert found[0][0][2] == "NaN" and found[0][2].startswith(LOST)
    assert found[1][2] == "nothing" or found[1][2].startswith(LOST)


@everywhere
def test_calls_alike_raise_nothing(backend: str, tmp_path: Path) -> None:
    for verdicts, named, said, _ in world(2, backend).run(differ, str(tmp_path), "", timeout=120.0):
        assert verdicts == ["right"] * 3 and named == said == "nothing"


# ---- no peer access ----------------------------------------------------------------------------------------------


@torch.inference_mode()
def denied(rank: Rank, folder: str) -> tuple[str | None, str, bool]:
    """Return why there is no workspace, which row of the layer serves, and whether its sums are right."""
    with workspace(rank, folder, denied=True) as made:
        axis = rank.spec().tp
        layer = SumNorm(axis, HIDDEN, EPS, workspace=made, device=rank.device, dtype=torch.bfloat16)
        parts = [torch.full((ROWS, HIDDEN), 3.0 + 4 * each, dtype=torch.bfloat16) for each in range(2)]
        x, weight = (each.to(rank.device) for each in (parts[rank.rank], torch.ones(HIDDEN, dtype=torch.bfloat16)))
        h = layer(x.clone(), None, weight)[1]
        return made.fabric.refusal, layer.choice.name, torch.equal(h.cpu(), parts[0] + parts[1])


@everywhere
def test_without_peer_access_the_next_row_serves(backend: str, tmp_path: Path) -> None:
    found = world(2, backend).run(denied, str(tmp_path), timeout=120.0)
    assert found == [("no peer access between ranks 1 and 0", backend, True)] * 2
