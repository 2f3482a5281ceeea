"""Logs: a JSON line a record, or for people at a terminal; requests' ids, never their texts."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import QueueHandler, QueueListener
from queue import Full, Queue
from typing import Any

import msgspec

UNWRITTEN = 10_000  # lines that wait for a disk or a pipe; more are lost, and counted
STUCK = 5.0  # seconds in which not one of them is written: whoever ends waits no longer


class JsonLines(logging.Formatter):
    """One JSON object a line; ``extra={"facts": {…}}`` becomes its fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage(),
        }  # fmt: skip
        line |= getattr(record, "facts", {})
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=repr).decode()


class ForPeople(logging.Formatter):
    """A short line, the facts behind it."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        facts = " ".join(f"{k}={v}" for k, v in getattr(record, "facts", {}).items())
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{clock} {record.levelname.lower():7} {record.getMessage()} {facts}".rstrip()
        return line + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


def configure(level: str) -> None:
    """Send logs to stderr, all in one form: ours from this level on, and the warnings of libraries."""
    handler = logging.StreamHandler()
    handler.setFormatter(ForPeople() if sys.stderr.isatty() else JsonLines())
    logging.basicConfig(level="WARNING", handlers=[handler])
    for ours in ("fastlayers", "fastlayers_server"):
        logging.getLogger(ours).setLevel(level.upper())


class _Aside(QueueHandler):
    """Queues records, and counts those for which there is no room."""

    lost = 0

    def enqueue(self, record: logging.LogRecord) -> None:
        if self.lost:
            record.facts = getattr(record, "facts", {}) | {"lost_before": self.lost}
        try:
            self.queue.put_nowait(record)
            self.lost = 0
        except Full:
            self.lost += 1


@contextmanager
def aside(name: str, size: int = UNWRITTEN, patience: float = STUCK) -> Iterator[None]:
    """Let a thread write what this logger is told: its callers, as an event loop, never wait for a disk or a pipe.

    At the end all is written, unless nothing is for ``patience`` seconds. Where more than ``size`` lines wait they are
    lost, and the next one that is not says how many.
    """
    waiting: Queue[Any] = Queue(size)
    logger, handler = logging.getLogger(name), _Aside(waiting)
    before, logger.propagate = logger.propagate, False
    listener = QueueListener(waiting, *logging.getLogger().handlers)
    logger.addHandler(handler)
    listener.start()
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = before
        if _done(waiting, patience):  # else the thread ends with the process
            listener.stop()
            if handler.lost:
                logger.warning("there was no room for the last lines", extra={"facts": {"lost_before": handler.lost}})


def _done(waiting: Queue[Any], patience: float) -> bool:
    """Wait until all of a queue is done, as long as something of it is now and then; return whether it is."""
    with waiting.all_tasks_done:
        left = 0
        while waiting.unfinished_tasks not in (0, left):
            left = waiting.unfinished_tasks
            waiting.all_tasks_done.wait(patience)
        return not waiting.unfinished_tasks
