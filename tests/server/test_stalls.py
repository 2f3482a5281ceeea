"""What a process says of where it stood, and that a slow log is no such place."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time

import pytest

from fastlayers_server import log as logs
from fastlayers_server.stalls import KEPT, LONG, Collections, Stalls, watch_loop


def test_what_takes_longer_than_expected_is_kept_and_counted() -> None:
    stalls = Stalls(lambda: 12.5)
    stalls.note("device", LONG)
    stalls.note("device", 3.0, expected=3.0 - LONG / 2)
    assert not stalls.counts and not stalls.last
    for tick in range(KEPT + 3):
        stalls.note("device", 0.35, expected=0.2, tick=tick)
    assert stalls.counts == {"device": KEPT + 3}
    assert [each["tick"] for each in stalls.last] == list(range(3, KEPT + 3))
    assert stalls.last[-1] == {"where": "device", "at": 12.5, "ms": 350.0, "tick": KEPT + 2}


def test_a_process_that_computed_is_told_from_one_that_waited() -> None:
    stalls = Stalls()
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    stalls.late("loop", 0.2)
    time.sleep(0.05)
    stalls.late("loop", 0.2)
    computed, waited = (each["user_ms"] + each["system_ms"] for each in stalls.last)
    assert computed >= 45 and waited < 25


def test_collections_are_told_while_they_are_watched() -> None:
    told: list[tuple[int, float]] = []
    with Collections(lambda generation, seconds: told.append((generation, seconds))):
        gc.collect()
        seen = len(told)
    gc.collect()
    assert seen == len(told) >= 1 and 2 in {generation for generation, _ in told}
    assert all(seconds >= 0 for _, seconds in told)


def test_a_loop_that_is_held_up_is_late() -> None:
    late: list[float] = []

    async def run() -> None:
        watching = asyncio.ensure_future(watch_loop(late.append, 0.01))
        await asyncio.sleep(0.03)
        time.sleep(0.15)
        await asyncio.sleep(0.03)
        watching.cancel()

    asyncio.run(run())
    assert max(late) >= 0.13 and min(late) < 0.1  # a busy machine makes them late, never early


class Slow(logging.Handler):
    """A disk that takes nothing until it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.free, self.written = threading.Event(), []  # type: threading.Event, list[dict[str, Any]]

    def emit(self, record: logging.LogRecord) -> None:
        self.free.wait(60)
        self.written.append({"message": record.getMessage(), **getattr(record, "facts", {})})


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Slow:
    logging.getLogger("fastlayers.access").info("as a server said before, which loggers remember by level")
    caplog.set_level(logging.INFO, "fastlayers.access")
    found = Slow()
    monkeypatch.setattr(logging.getLogger(), "handlers", [found])
    return found


def test_who_logs_aside_does_not_wait_for_the_disk(slow: Slow) -> None:
    logger = logging.getLogger("fastlayers.access")
    with logs.aside("fastlayers.access", size=3):
        logger.info("served %d", -1)
        while logger.handlers[0].queue.qsize():  # type: ignore[attr-defined]
            time.sleep(0.001)  # the thread has taken it, and hangs
        for place in range(5):
            logger.info("served %d", place, extra={"facts": {"path": "/"}})
        assert not slow.written, "the disk took none of them, and nobody waited until it did"
        slow.free.set()
        while logger.handlers[0].queue.qsize():  # type: ignore[attr-defined]
            time.sleep(0.001)
        logger.info("served %d", 9)
    assert [each["message"] for each in slow.written] == [f"served {n}" for n in (-1, 0, 1, 2, 9)]
    assert slow.written[1] == {"message": "served 0", "path": "/"} and slow.written[-1]["lost_before"] == 2
    assert logger.propagate and not logger.handlers


def hung(size: int, slow: Slow) -> list[str]:
    """Log as many lines as fit, and one more: that one hangs in the disk."""
    logger = logging.getLogger("fastlayers.access")
    logger.info("served %d", 0)
    while logger.handlers[0].queue.qsize():  # type: ignore[attr-defined]
        time.sleep(0.001)
    for place in range(1, size + 1):
        logger.info("served %d", place)
    assert logger.handlers[0].queue.full() and not slow.written  # type: ignore[attr-defined]
    return [f"served {place}" for place in range(size + 1)]


def test_what_waits_for_the_disk_at_the_end_is_written(slow: Slow) -> None:
    logger = logging.getLogger("fastlayers.access")
    with logs.aside("fastlayers.access", size=3):
        said = hung(3, slow)
        logger.info("no room")
        threading.Timer(0.1, slow.free.set).start()
    assert [each["message"] for each in slow.written[:4]] == said
    assert slow.written[4]["lost_before"] == 1, "of lines behind which there is none"


def test_a_disk_that_takes_nothing_is_not_waited_for(slow: Slow) -> None:
    begin = time.monotonic()
    with logs.aside("fastlayers.access", size=3, patience=0.1):
        hung(3, slow)
    assert time.monotonic() - begin >= 0.1 and not slow.written, "nobody waited until the disk took them"
    slow.free.set()
