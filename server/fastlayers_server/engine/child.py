"""The engine's own process: ``python -m fastlayers_server.engine.child FOLDER EPOCH PARENT``, settings on stdin.

    main thread   builds the engine, then ticks
    I/O thread    receives, beats once a second, notices that the front is gone

Only :mod:`fastlayers_server.engine.client` starts it; or the same two threads beside its own, for a server that is one
process. The exit code is :data:`REFUSED` where another try is in vain.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import msgspec
import zmq

from fastlayers.errors import FastlayersError
from fastlayers_server import log as logs
from fastlayers_server.engine.config import EngineConfig
from fastlayers_server.engine.loop import Engine
from fastlayers_server.engine.protocol import Beat, Died, FromEngine, encode, to_engine
from fastlayers_server.stalls import Collections

log = logging.getLogger("fastlayers_server.engine.child")  # it runs as __main__
REFUSED = 3
BEAT_SECONDS = 1.0
OUTBOX = 10_000  # messages
POLL_MS = 200
FRONT_SECONDS = 30.0  # a front that takes nothing for so long is gone
Phase = Callable[[str], None]
Make = Callable[[Phase, int], Engine]  # given the epoch; tells each phase of the start


class Child:
    """An engine and its sockets.

    Parameters
    ----------
    address : str
        Of the sockets, which the front has bound.
    epoch : int
    parent : int
        The front, which may be gone before this process could ask; 0: it is this process, or somebody else looks.
    context : zmq.Context, optional
        The front's, where it is in this process.
    """

    def __init__(self, address: str, epoch: int, parent: int = 0, context: zmq.Context[Any] | None = None) -> None:
        self.epoch, self.phase, self._parent, self._folder = epoch, "starting", parent, address.removeprefix("ipc://")
        self.engine: Engine | None = None
        self._context = context = context or zmq.Context()
        self._in, self._out = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        self._out.set_hwm(OUTBOX)
        self._out.setsockopt(zmq.SNDTIMEO, int(FRONT_SECONDS * 1000))
        self._in.connect(f"{address}/to-{epoch}")
        self._out.connect(f"{address}/from-{epoch}")
        self._sending = threading.Lock()
        self._talking = threading.Thread(target=self._io, name="engine-io", daemon=True)
        self._talking.start()

    def deliver(self, message: FromEngine) -> None:
        """Send a message; a front that does not take it ends this process."""
        with self._sending:
            try:
                if self.phase != "dead":
                    self._out.send(encode(message))
            except zmq.Again:
                log.error("the front took nothing for %g s; the engine ends", FRONT_SECONDS)
                os._exit(1)

    def run(self, make: Make) -> int:
        """Build the engine and tick until the front ends it, and let what was sent go out; returns the exit code."""
        try:
            self.engine = make(self._tell, self.epoch)
            self.engine.begin(self.deliver)
            self.phase = "serving"
            note = self.engine.stalls.note
            with Collections(lambda generation, seconds: note("collector", seconds, generation=generation)):
                self.engine.run()
            code = 0
        except Exception as error:
            told, code = died(error, self.epoch, begun=self.engine is not None)
            self.deliver(told)
        with self._sending:
            self.phase = "dead"
            self._out.close(linger=2000)
        return code

    def leave(self) -> None:
        """Wait until what was sent has gone out, or nobody takes it; behind :meth:`run`, in a process of its own."""
        self._talking.join(5.0)
        if not self._talking.is_alive():  # its socket is closed
            self._context.term()

    def _tell(self, phase: str) -> None:
        self.phase = phase
        self._beat()

    def _beat(self) -> None:
        engine, phase, age = self.engine, self.phase, 0.0
        if engine is not None:
            phase = "draining" if phase == "serving" and engine.scheduler.draining else phase
            started = engine.tick_started
            age = time.monotonic() - started if started else 0.0
        self.deliver(Beat(self.epoch, phase, engine.scheduler.ticks if engine is not None else 0, age))

    def _io(self) -> None:
        beat_at = 0.0
        while self.phase != "dead":
            begin, found = time.monotonic(), self._in.poll(POLL_MS)
            if self.engine is not None:
                self.engine.stalls.late("i/o thread", time.monotonic() - begin - POLL_MS / 1e3)
            if found:
                message = to_engine.decode(self._in.recv())
                # The front sends nothing before it was told that the engine is there.
                if self.engine is not None:
                    self.engine.post(message)
            if self._parent and os.getppid() != self._parent:
                log.warning("the front is gone; the engine ends")
                shutil.rmtree(self._folder, ignore_errors=True)  # it was the front's, which had no time for that
                os._exit(1)
            now = time.monotonic()
            if now >= beat_at:
                beat_at = now + BEAT_SECONDS
                self._beat()
        self._in.close()


def died(error: Exception, epoch: int, *, begun: bool, who: str = "the engine") -> tuple[Died, int]:
    """Log why an engine ends, which had begun to serve or not; return what the front is told and the exit code."""
    # Of some errors the next start would end alike.
    refused = not begun and isinstance(error, ValueError | LookupError | RuntimeError | OSError)
    # A traceback helps nobody with our own errors, which are sentences for whoever started the engine.
    unforeseen = begun or not isinstance(error, FastlayersError)
    log.error("%s %s: %s", who, "died" if begun else "does not start", error, exc_info=unforeseen)
    return Died(epoch, f"{type(error).__name__}: {error}", restarting=not refused), REFUSED if refused else 1


class ChildThread(threading.Thread):
    """Runs an engine, and ends as a process does."""

    def __init__(self, child: Child, make: Make) -> None:
        super().__init__(name="engine", daemon=True)
        self.child, self.returncode, self._make = child, 1, make
        self.start()

    def run(self) -> None:
        """Tick until the end."""
        self.returncode = self.child.run(self._make)

    def poll(self) -> int | None:
        """Return the exit code, if it has ended."""
        return None if self.is_alive() else self.returncode


def main(make: Callable[[EngineConfig, Phase, int], Engine], config: EngineConfig | None = None) -> int:
    """Run the process; its configuration comes on stdin, or is given to one that ends with the front by other means."""
    folder, epoch, parent = sys.argv[-3:]
    # The front decides when to end: an interrupt from the terminal reaches both, and systemd sends SIGTERM to all
    # processes of a service. The ranks' launcher ends them by SIGTERM, and gives them their configuration.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if config is not None:
        parent = "0"
    else:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        given = sys.stdin.buffer.read()
        if not given:  # the front is gone already
            shutil.rmtree(folder, ignore_errors=True)
            return 1
        config = msgspec.json.decode(given, type=EngineConfig)
    logs.configure(config.log_level)
    child = Child(f"ipc://{folder}", int(epoch), int(parent))
    code = child.run(partial(make, config))
    child.leave()
    return code


def end(code: int) -> NoReturn:
    """End this process as it stands: a thread inside a library (a grammar's tokenizer, say) would abort it."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def build(config: EngineConfig, phase: Phase, epoch: int) -> Engine:
    """Build a model's engine; imports take seconds, in which the front may die, and wants to hear from us."""
    from fastlayers_server.engine import startup

    return startup.build(config, phase, epoch)


if __name__ == "__main__":
    end(main(build))
