"""A wait for work that needs a lost rank ends, in words, and the work with it; any other wait is what it was."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any

import pytest
import torch

from fastlayers.comm import watch as watches
from fastlayers.comm.parallel import Axis, ParallelSpec
from fastlayers.comm.processes import own
from fastlayers.comm.seam import Late
from fastlayers.comm.watch import Watch
from fastlayers.errors import RankLostError
from fastlayers_models.rows import Outbox

GONE = [*own()[:2], "another"]
ALIVE = Axis(2, 0, (0, 1), processes=(own(), own()))
DEAD = Axis(2, 0, (0, 1), processes=(own(), GONE))
LONG = 30.0  # nothing here takes so long


class Work:
    """A device's work, which ends when it is told to: as an event, and as the communicator whose abort ends it."""

    def __init__(self) -> None:
        self.ended, self.aborted = threading.Event(), 0

    def synchronize(self) -> None:
        assert self.ended.wait(LONG), "nobody ended it"

    def abort(self) -> None:
        self.aborted += 1
        self.ended.set()


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watches, "_LOOK", 0.01)


def said_of(watch: Watch, work: Any) -> str:
    with pytest.raises(RankLostError) as caught:
        watch.wait(work)
    return str(caught.value)


def test_work_that_ends_raises_nothing() -> None:
    for axis in (ALIVE, DEAD):  # a process may have brought all that it had to before it ended
        work = Work()
        threading.Timer(0.1, work.ended.set).start()
        watch = Watch(axis, [work], grace_s=LONG)
        for _ in range(2):
            watch.wait(work)
        assert work.aborted == 0 and watch.lost is None


def test_a_process_that_has_ended_is_named_and_the_work_aborted() -> None:
    work, begin = Work(), time.monotonic()
    watch = Watch(DEAD, [work], grace_s=0.2)
    said = said_of(watch, work)
    assert said.startswith(f"Watch: rank 1 is gone, its process {GONE[1]} has ended; the model must be made again")
    assert work.aborted == 1 and 0.2 <= time.monotonic() - begin < LONG
    assert said_of(watch, Work()) == said  # and nobody waits any more
    assert work.aborted == 1


def test_grace_begins_anew_with_each_wait() -> None:
    watch, works = Watch(DEAD, [], grace_s=0.3), [Work() for _ in range(4)]
    for work in works:
        threading.Timer(0.15, work.ended.set).start()
        watch.wait(work)
    assert watch.lost is None


def test_a_rank_that_a_sum_has_given_up_is_named() -> None:
    work, codes = Work(), [None, 0, 0, 2]
    watch = Watch(ALIVE, [work], lambda: codes.pop(0) if len(codes) > 1 else codes[0], grace_s=0.1)
    assert said_of(watch, work).startswith("Watch: rank 1 did not answer within the deadline of a sum over ranks")
    assert len(codes) == 1 and work.aborted == 1


def test_a_rank_that_lives_is_waited_for_until_the_deadline() -> None:
    work, begin = Work(), time.monotonic()
    said = said_of(Watch(ALIVE, [work], deadline_s=0.3), work)
    assert said.startswith("Watch: a rank of (0, 1) did not answer for 0.3 s") and time.monotonic() - begin >= 0.3


def test_an_abort_that_does_not_return_holds_up_nobody() -> None:
    """One of NCCL's waits for graphs, which are freed behind it."""
    work, never = Work(), threading.Event()
    held = Work()
    held.abort = lambda: never.wait(LONG)  # type: ignore[method-assign, assignment, return-value]
    assert "rank 1 is gone" in said_of(Watch(DEAD, [held, work], grace_s=0.0), work)
    assert work.aborted == 1
    never.set()


def test_what_one_watch_gave_up_all_of_its_group_give_up() -> None:
    """Its work ends, too, and has not done what it was for."""
    group, mine, other = Work(), Watch(ALIVE, []), Watch(ALIVE, [])
    mine.groups = other.groups = (group,)
    work = Work()
    threading.Timer(0.1, mine.give_up, ("rank 1 is gone", 1)).start()
    threading.Timer(0.3, work.ended.set).start()
    with pytest.raises(RankLostError, match="rank 1 is gone") as caught:
        other.wait(work)
    assert caught.value.rank == 1 and group.aborted == 1
    with pytest.raises(RankLostError, match="rank 1 is gone"):  # made behind it
        Watch(ALIVE, [group]).wait(work)


def test_a_wait_that_ends_leaves_another_thread_s_watched() -> None:
    watch, never, short = Watch(DEAD, [], grace_s=0.5), Work(), Work()
    watch.groups = (never,)
    said: list[str] = []
    other = threading.Thread(target=lambda: said.append(said_of(watch, never)))
    other.start()
    threading.Timer(0.1, short.ended.set).start()
    watch.wait(short)
    other.join(LONG)
    assert said and said[0].startswith("Watch: rank 1 is gone") and never.aborted == 1


def test_a_thread_that_ended_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, done = Watch(ALIVE, [], deadline_s=0.2), Work()
    done.ended.set()
    watch.wait(done)
    assert watch._thread is not None
    watch._thread = threading.Thread(target=int)  # as one that an error has ended
    watch._thread.start()
    watch._thread.join()
    never = Work()
    watch.groups = (never,)
    assert "did not answer for 0.2 s" in said_of(watch, never)


def test_who_finds_a_rank_lost_ends_the_work_of_all() -> None:
    work, other = Work(), Work()
    watch = Watch(ALIVE, [work, other])
    watch.give_up("rank 1 is gone")
    watch.give_up("another reason")
    assert work.ended.wait(LONG) and other.ended.wait(LONG)
    assert said_of(watch, work).startswith("Watch: rank 1 is gone;") and work.aborted == other.aborted == 1


def test_other_errors_stay_what_they_are() -> None:
    class Broken(Work):
        def synchronize(self) -> None:
            raise RuntimeError("CUDA error: an illegal memory access")

    with pytest.raises(RuntimeError, match="illegal memory") as caught:
        Watch(DEAD, [], grace_s=LONG).wait(Broken())
    assert not isinstance(caught.value, RankLostError)


def test_a_watch_that_nobody_has_is_freed_and_its_thread_ends() -> None:
    work = Work()
    work.ended.set()
    watch = Watch(ALIVE, [])
    watch.wait(work)
    thread, gone = watch._thread, weakref.ref(watch)
    assert thread is not None and thread.daemon
    del watch
    thread.join(LONG)  # it holds the watch for a moment at each look
    gc.collect()
    assert not thread.is_alive() and gone() is None


def test_tokens_wait_by_the_watch() -> None:
    work = Work()
    watch = Watch(DEAD, [work], grace_s=0.0)
    outbox = Outbox(2, torch.device("cpu"), (), watch)
    pending = outbox.send(torch.tensor([3, 4]))
    pending._slot.arrived = work
    for _ in range(2):
        with pytest.raises(RankLostError, match="rank 1 is gone"):
            pending.tokens()
    assert work.aborted == 1


@pytest.mark.parametrize("lost", ["status", "before"])
def test_a_loss_that_tokens_tell_ends_what_was_launched_behind(lost: str) -> None:
    work, status = Work(), torch.tensor([2 * (lost == "status")], dtype=torch.int32)
    watch = Watch(ALIVE, [work])
    pending = Outbox(2, torch.device("cpu"), [Late(status, ALIVE.ranks)], watch).send(torch.tensor([3, 4]))
    pending._slot.arrived = done = Work()
    done.ended.set()
    if lost == "before":

        def gone() -> None:
            raise RankLostError("Board: rank 1 is gone", rank=1)

        pending.before = gone
    with pytest.raises(RankLostError, match="rank 1"):
        pending.tokens()
    assert work.ended.wait(LONG) and watch.lost is not None and "rank 1" in watch.lost


def test_a_model_of_one_rank_or_on_a_cpu_has_none() -> None:
    assert Watch.of(ParallelSpec(), torch.device("cpu")) is None
    assert Watch.of(ParallelSpec.grid(2, 0), torch.device("cuda")) is None  # sizes only
