"""Kernels that address other ranks, in processes that really run at once over memory they share: each at its own pace.

What the parts of tests/comm/test_symmetric_kernels.py, called in turns, cannot show: who may overwrite what, and when.
The programs are the interpreter's, the memory a file that all ranks map, the clock a real one.
"""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import triton.language as tl

from fastlayers import env
from fastlayers.comm import triton_exchange, triton_push, triton_signals, triton_tokens
from fastlayers.comm.symmetric import Arena, alarm_bytes
from fastlayers.testing.world import Rank, world

sys.path.insert(0, str(Path(__file__).parents[1]))
from quick_interpreter import hasten

if env.triton_interpret():  # in the ranks, too, which load this file alone
    hasten()

pytestmark = pytest.mark.skipif(not env.triton_interpret(), reason="needs TRITON_INTERPRET=1 without a GPU")
HIDDEN, SLOTS, EXPERTS, TOP_K = 16, 3, 4, 2
MODULES = {"push": triton_push, "exchange": triton_exchange, "tokens": triton_tokens}
# Where the slow rank rests: between any two things of which the other rank could see one without the other.
RESTS = {
    "push": ("    turn = tl.load(epoch_ptr + row) & 1", "    bits = tl.load(slot, mask=due, other=0, volatile=True)"),
    "exchange": (
        "    for hop in tl.static_range(1, N):\n        owner = (rank + hop) % N\n        box",
        "    for hop in tl.static_range(1, N):\n        flag = address(",
        "    total = tl.zeros(column.shape, tl.float32)",
        "        for hop in tl.static_range(1, N):\n            flag = address(",
    ),
    "tokens": (
        "            weights = tl.load(weights_ptr + at * K + k,",
        "        _signal_all(flags_ptr, N, rank, last, N)",
        "            total = tl.zeros(column.shape, tl.float32)",
    ),
}  # fmt: skip


class Mapped(Arena):
    """The arena of one rank, in files that every rank maps."""

    def __init__(self, rank: Rank, folder: str, nbytes: int, deadline_s: float) -> None:
        self.all = [
            torch.from_file(f"{folder}/{peer}", shared=True, size=nbytes + alarm_bytes(rank.size), dtype=torch.uint8)
            for peer in range(rank.size)
        ]
        super().__init__(rank.size, rank.rank, self.all[rank.rank], [each.data_ptr() for each in self.all], deadline_s)

    def ready(self) -> None:
        torch.distributed.barrier()


END = 10**9  # looks at the clock


class Pace:
    """The clock of a rank's kernels, and the rests of the last rank: it is as far behind as the others let it be.

    Where ``step`` is set so many nanoseconds pass at each look, and none between them: ``passed`` is what was waited,
    on a machine that does other things as well, too.
    """

    step = passed = 0

    def __init__(self, rank: Rank, folder: str, far: bool) -> None:
        # Calls begun, looks at the clock since; of every rank.
        self.seen = torch.from_file(f"{folder}/pace", shared=True, size=2 * rank.size, dtype=torch.int64).view(-1, 2)
        self.rank, self.slow, self.far = rank.rank, rank.rank == rank.size - 1, far

    def begin(self) -> None:
        """Note that a call begins."""
        self.seen[self.rank, 1] = 0
        self.seen[self.rank, 0] += 1

    def clock(self) -> Any:
        """Return the time, as a kernel has it."""
        time.sleep(0.005 if self.step else 0.0002)  # who waits lets the others run
        self.seen[self.rank, 1] += 1
        self.passed += self.step
        return tl.full([], self.passed or time.monotonic_ns(), tl.int64)

    def rest(self) -> None:
        """Rest: a moment, or until rank 0 waits for somebody or is at its end."""
        if self.slow and not self.far:
            time.sleep(0.001)
        elif self.slow:
            until, (calls, looks) = time.monotonic() + 1.0, self.seen[0].tolist()
            while time.monotonic() < until:
                time.sleep(0.0005)
                calls_now, looks_now = self.seen[0].tolist()
                if calls_now != calls:
                    calls, looks = calls_now, 0
                # The waits of a call that goes on look less often.
                if looks_now >= min(looks + 12, END):
                    return

    def end(self) -> None:
        """Note that this rank makes no more calls."""
        self.seen[self.rank, 1] = END


def rested(text: str, kind: str) -> str:
    """Return a module's text with rests of the slow rank in it."""
    for place in RESTS[kind]:
        # A change may have taken it away.
        blanks = " " * (len(place) - len(place.lstrip()))
        text = text.replace(f"\n{place}", f"\n{blanks}rest()\n{place}")
    return text


@contextmanager
def kernels(
    rank: Rank, folder: str, name: str, changes: tuple[tuple[str, str, str], ...], pace: Pace
) -> Iterator[dict[str, Any]]:
    """Give the modules with rests, changes and a real clock."""
    made: dict[str, ModuleType] = {}
    label = "".join(each if each.isalnum() else "_" for each in name)
    for kind, module in MODULES.items():
        text = Path(str(module.__file__)).read_text()
        for which, before, after in changes:
            if which == kind:
                assert before in text, f"{kind} no longer has {before!r}"
                text = text.replace(before, after)
        text = rested(text, kind).replace('@operator("', f'@operator("{label}_')
        path = Path(folder) / f"{label}_{kind}_{rank.rank}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        made[kind] = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        vars(made[kind])["rest"] = pace.rest
        spec.loader.exec_module(made[kind])
        if hasattr(made[kind], "now"):
            vars(made[kind])["now"] = pace.clock
    stood, triton_signals.now = triton_signals.now, pace.clock
    try:
        yield dict(made)
    finally:
        pace.end()
        triton_signals.now = stood
        for module in made.values():
            del sys.modules[module.__name__]


class Ranks:
    """All operators of one rank, and what each call must give."""

    def __init__(
        self, rank: Rank, folder: str, made: dict[str, Any], pace: Pace, deadline_s: float, programs: int
    ) -> None:
        n = self.n = rank.size
        push, moves, tokens = made["push"].PushSum, made["exchange"].Exchange, made["tokens"].TokenExchange
        nbytes = (
            push.nbytes_for(n, HIDDEN, torch.float32, SLOTS)
            + moves.nbytes_for(n, HIDDEN, torch.float32, SLOTS, programs)
            + tokens.nbytes_for(n, HIDDEN, TOP_K, torch.float32, SLOTS, programs)
        )
        self.rank, self.arena = rank.rank, Mapped(rank, folder, nbytes, deadline_s)
        self.push = push(self.arena, HIDDEN, torch.float32, SLOTS)
        self.moves = moves(self.arena, HIDDEN, torch.float32, SLOTS, programs, 1)
        self.tokens = tokens(self.arena, HIDDEN, EXPERTS, TOP_K, torch.float32, SLOTS, programs)
        self.push.programs = programs
        self.pace = pace
        for counter in (self.push.epoch, self.moves.state, self.tokens.states):
            counter.fill_(2**31 - 4)  # which wraps on the way
        for flags in (self.moves.flags, self.tokens.there, self.tokens.back):
            flags.tensor.fill_(2**31 - 4)
        self.arena.ready()

    def call(self, what: str, rows: int, seed: int) -> bool:
        """Make one call, and return whether what came is right."""
        self.pace.begin()
        generator = torch.Generator().manual_seed(seed)
        # Of few values, so that a stale row is another one; zeros of both signs.
        whole = torch.randint(-2, 3, (self.n, self.n * rows, HIDDEN), generator=generator).float() * (seed % 7 - 3.0)
        own = slice(self.rank * rows, (self.rank + 1) * rows)
        if what == "push":
            found, wanted = self.push(whole[self.rank, :rows].contiguous())[1], whole[:, :rows].sum(0)
        elif what == "scatter":
            found, wanted = self.moves.scatter(whole[self.rank])[1], whole.sum(0)[own]
        elif what == "gather":
            found, wanted = self.moves.gather(whole[self.rank, :rows].contiguous())[0], whole[:, :rows].flatten(0, 1)
        elif what == "both":
            found, wanted = self.moves.scatter_gather(whole[self.rank])[0], whole.sum(0)
        else:
            ids = torch.rand(self.n, rows, EXPERTS, generator=generator).topk(TOP_K).indices.int()
            weights = torch.rand(self.n, rows, TOP_K, generator=generator)
            x = whole[:, :rows].contiguous()
            got, local, gates = self.tokens.dispatch(x[self.rank], ids[self.rank], weights[self.rank])
            self.pace.rest()
            there = (local >= 0)[..., None]
            partial = (torch.where(there, gates[..., None], 0.0) * got[:, None]).sum(1)
            found = self.tokens.combine(partial, local, ids[self.rank])
            wanted = x[self.rank] * weights[self.rank].sum(-1, keepdim=True)
            return torch.allclose(found, wanted, rtol=1e-5, atol=1e-5)
        self.pace.rest()  # who reads what was gathered may be late, too
        return torch.equal(found, wanted)


def drive(rank: Rank, folder: str, name: str, changes: tuple[tuple[str, str, str], ...], deadline_s: float) -> str:
    """Return what went wrong first on this rank in a row of calls, or nothing."""
    pace = Pace(rank, folder, far=bool(changes))
    with kernels(rank, folder, name, changes, pace) as made:
        ranks, order = Ranks(rank, folder, made, pace, deadline_s, 1 if changes else 2), random.Random(3)
        kinds = sorted({kind for kind, *_ in changes}) or list(MODULES)
        calls = {"push": ["push"], "exchange": ["scatter", "gather", "both"], "tokens": ["experts"]}
        for step in range(120 // rank.size**2):
            what = order.choice([call for kind in kinds for call in calls[kind]])
            right = ranks.call(what, order.choice((1, SLOTS, 2)), step + 1)
            late = ranks.arena.failed()
            if not right or late is not None:
                return f"{what}: rank {late} was late" if late is not None else f"{what}: other rows"
    return ""


DEADLINE, LOOKS = 10**9, 200  # nanoseconds, and looks at the clock that they are: a second, and longer if it is busy


def hold_up(rank: Rank, folder: str, fault: str, stands: float = 0.0) -> tuple[list[bool], int | None, float]:
    """Return what four calls gave on this rank, who was late, and the seconds of the last two, or deadlines waited."""
    pace = Pace(rank, folder, far=False)
    with kernels(rank, folder, fault, (), pace) as made:
        ranks = Ranks(rank, folder, made, pace, 60.0, 1)
        found = [ranks.call("push", 2, 1), ranks.call("both", 2, 2)]
        begin = time.monotonic()
        if fault == "gone":
            ranks.arena.deadline_ns, pace.step = DEADLINE, DEADLINE // LOOKS
        if rank.rank == 1 and fault.startswith("stopped"):
            with subprocess.Popen(["sh", "-c", f"sleep {stands}; kill -CONT {os.getpid()}"]):
                os.kill(os.getpid(), signal.SIGSTOP)
        elif rank.rank == 1:
            return found, None, 0.0
        found += [ranks.call("push", 2, 3), ranks.call("both", 2, 4)]
        return found, ranks.arena.failed(), pace.passed / DEADLINE or time.monotonic() - begin


@pytest.mark.parametrize("stands", [2.0, pytest.param(5.0, marks=pytest.mark.slow)])
def test_a_rank_that_stands_still_is_waited_for(stands: float, tmp_path: Path) -> None:
    answers = world(2).run(hold_up, str(tmp_path), f"stopped {stands:g}", stands)
    assert all(found == [True] * 4 and late is None for found, late, _ in answers)
    assert max(seconds for *_, seconds in answers) > 0.75 * stands


def test_a_rank_that_is_gone_is_named_once_the_deadline_is_over(tmp_path: Path) -> None:
    found, late, waited = world(2).run(hold_up, str(tmp_path), "gone")[0]
    assert found == [True, True, False, False] and late == 1
    assert 1.0 <= waited < 2.0  # once: afterwards nothing waits


class Dying(Pace):
    """A rank that is killed where it would rest for the so-manieth time since it was armed."""

    left = 0

    def rest(self) -> None:
        """Count, and end."""
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def upset(rank: Rank, folder: str, fault: str) -> tuple[list[bool], int | None, float]:
    """Return what five calls gave on this rank, who was late, and the deadlines that the last three waited.

    See :data:`FAULTS`.
    """
    pace = Dying(rank, folder, far=False)
    with kernels(rank, folder, fault, (), pace) as made:
        ranks = Ranks(rank, folder, made, pace, 60.0, 1)
        found, rows = [ranks.call("push", 2, 1), ranks.call("both", 2, 2)], 2
        ranks.arena.deadline_ns, pace.step = DEADLINE, DEADLINE // LOOKS
        if fault == "one row more on the first rank" and rank.rank == 0:
            rows = 3
        elif fault == "a counter has skipped a call" and rank.rank == 1:
            ranks.push.epoch[0] += 1
        elif fault == "the status is set" and rank.rank == 0:
            ranks.arena.status.fill_(2)
        elif rank.rank == 1:
            pace.left = FAULTS[fault]
        found += [ranks.call("push", rows, 3), ranks.call("both", 2, 4), ranks.call("experts", 2, 5)]
        return found, ranks.arena.failed(), pace.passed / DEADLINE


# Rests of the killed rank in its third call, whose two rows it pushes one by one, and in its fourth; 0: it lives.
FAULTS = {
    "killed before it pushed": 1, "killed between its rows": 2, "killed between push and wait": 3,
    "killed before its flag": 6, "one row more on the first rank": 0,
    "a counter has skipped a call": 0, "the status is set": 0,
}  # fmt: skip


# Between two pushes nothing is otherwise than before both, and before a flag nothing than before the rows.
ALIKE = ("killed between its rows", "killed before its flag")


@pytest.mark.parametrize("fault", [pytest.param(f, marks=[pytest.mark.slow] * (f in ALIKE)) for f in FAULTS])
def test_faults_are_named_after_one_deadline(fault: str, tmp_path: Path) -> None:
    dead = [1] if FAULTS[fault] else []
    found, late, waited = world(2).run(upset, str(tmp_path), fault, dying=dead)[0]
    assert found[:2] == [True, True] and late in ((1,) if dead else (0, 1))  # of two that live either gives up first
    assert not found[4], "a rank is lost, and its tokens came"
    assert found[2] == (FAULTS[fault] > 2)  # all that it had pushed has come, though its memory has no owner
    # One deadline is waited for, not one a call, and nothing once the status says so.
    assert waited < 0.5 if fault == "the status is set" else 1.0 <= waited < 2.0


@pytest.mark.parametrize("n", [2, 4])
def test_ranks_at_their_own_pace(n: int, tmp_path: Path) -> None:
    assert world(n).run(drive, str(tmp_path), f"right {n}", (), 60.0) == [""] * n


WAIT = "late = await_signal(flag_ptr + (N + giver) * programs + program, last,"
ASK = "late = _await_all(flag_ptr, 0, rank, last, late"
COME = ASK.replace(" 0,", " N,")
TURN = "turn = tl.load(epoch_ptr + row) & 1"
STORE = "    tl.store(slot, tl.full(column.shape, EMPTY, WORD), mask=due)\n"
LOAD = "    bits = tl.load(slot, mask=due, other=0, volatile=True)\n    missing"
FLAG = """    for hop in tl.static_range(1, N):
        flag = address(flags_ptr, (rank + hop) % N, tl.int32)
        signal(flag + rank * programs + program, epoch)
"""
BOX = (
    "    program, programs = tl.program_id(0), tl.num_programs(0)\n    for hop in tl.static_range(1, N):\n        owner"
)
SENT = "        _signal_all(flags_ptr, N, rank, last, N)\n"
TOKEN = """        for token in range(program, tokens, tl.num_programs(0)):
            at = tl.cast(token, tl.int64)
            ids = tl.load(ids_ptr + at * K + k, mask=chosen, other=-1)
            weights"""
BUGS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "one phase of words": (("push", TURN, TURN[:-1] + "0"), ("push", "epoch & 1", "epoch & 0")),
    "phases are swapped on one side": (("push", "epoch & 1, 1 - rank, row", "(epoch + 1) & 1, 1 - rank, row"),),
    "words are left": (("push", STORE, ""),),
    "words go before they are read": (("push", LOAD, STORE + LOAD),),
    "minus zero is sent": (("push", "tl.where(bits == EMPTY, 0, bits).to(WORD)", "bits"),),
    "rows go where another rank's belong": (("push", "(turn * N + rank).to", "(turn * N + 1 - rank).to"),),
    "the own row is waited for": (("push", "epoch & 1, 1 - rank, row", "epoch & 1, rank, row"),),
    "calls are not counted": (("push", "tl.store(epoch_ptr + row, epoch + 1)", "tl.store(epoch_ptr + row, epoch)"),),
    "flag before rows": (
        ("exchange", FLAG, ""), ("exchange", BOX, BOX.replace("    for hop", FLAG + "    for hop", 1)),
    ),
    "one phase of rows": (("exchange", "tl.load(state_ptr + 2 * program + 1) & 1", "0 * base"),),
    "readers are not asked": (("exchange", "due = base + chunk if SCATTER else last", "due = base + chunk * SCATTER"),),
    "what is gathered is not waited for": (("exchange", WAIT, WAIT.replace("last,", "base,")),),
    "flag before tokens": (("tokens", SENT, ""), ("tokens", TOKEN, SENT + TOKEN)),
    "tokens' readers are not asked": (("tokens", ASK, ASK.replace("last", "last - 1")),),
    "tokens are not waited for": (("tokens", COME, COME.replace("last", "last - 1")),),
}  # fmt: skip


@pytest.mark.parametrize("name", BUGS)
def test_planted_bugs_in_protocols_are_caught(name: str, tmp_path: Path) -> None:
    assert any(world(2).run(drive, str(tmp_path), name, BUGS[name], 1.5))
