"""The engine's own process: ``python -m fastlayers_server.engine.child FOLDER EPOCH PARENT``, settings on stdin.

    main thread   builds the engine, then ticks
    I/O thread    receives, beats once a second, notices that the front is gone

Only :mod:`fastlayers_server.engine.process` starts it. The exit code is :data:`REFUSED` where another try is in vain.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence

import msgspec
import zmq

from fastlayers_server import log as logs
from fastlayers_server.engine.client import BEAT_SECONDS, Phase, beat, unforeseen
from fastlayers_server.engine.config import EngineConfig
from fastlayers_server.engine.loop import Engine
from fastlayers_server.engine.protocol import Died, FromEngine, encode, to_engine

log = logging.getLogger("fastlayers_server.engine.child")  # it runs as __main__
REFUSED = 3
OUTBOX = 10_000  # messages
FRONT_SECONDS = 30.0  # a front that takes nothing for so long is gone
Make = Callable[[EngineConfig, Phase, int], Engine]


class Child:
    """The sockets and the engine of this process."""

    def __init__(self, folder: str, epoch: int, parent: int) -> None:
        self.epoch, self.phase = epoch, "starting"
        self.engine: Engine | None = None
        self._parent = parent  # who may be gone before this process could ask
        context = zmq.Context()
        self._in, self._out = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        self._out.set_hwm(OUTBOX)
        self._out.setsockopt(zmq.SNDTIMEO, int(FRONT_SECONDS * 1000))
        self._in.connect(f"ipc://{folder}/to-{epoch}")
        self._out.connect(f"ipc://{folder}/from-{epoch}")
        self._sending = threading.Lock()
        threading.Thread(target=self._io, name="engine-io", daemon=True).start()

    def deliver(self, message: FromEngine) -> None:
        """Send a message; a front that does not take it ends this process."""
        with self._sending:
            try:
                self._out.send(encode(message))
            except zmq.Again:
                log.error("the front took nothing for %g s; the engine ends", FRONT_SECONDS)
                os._exit(1)

    def run(self, make: Make, config: EngineConfig) -> int:
        """Build the engine and tick until the front ends it; returns the exit code."""

        def tell(phase: str) -> None:
            self.phase = phase

        try:
            self.engine = make(config, tell, self.epoch)
        except (ValueError, LookupError, RuntimeError, OSError) as error:
            # Either way the next start would end alike.
            log.error("the engine does not start: %s", error, exc_info=unforeseen(error))
            self.deliver(Died(self.epoch, f"{type(error).__name__}: {error}", restarting=False))
            return REFUSED
        self.engine.begin(self.deliver)
        self.phase = "serving"
        try:
            self.engine.run()
        except Exception as error:
            log.exception("the engine died")
            self.deliver(Died(self.epoch, f"{type(error).__name__}: {error}", restarting=True))
            return 1
        return 0

    def close(self) -> None:
        """Let what was sent go out."""
        self.phase = "dead"
        with self._sending:
            self._out.close(linger=2000)

    def _io(self) -> None:
        beat_at = 0.0
        while self.phase != "dead":
            if self._in.poll(200):
                message = to_engine.decode(self._in.recv())
                # The front sends nothing before it was told that the engine is there.
                if self.engine is not None:
                    self.engine.post(message)
            if os.getppid() != self._parent:
                log.warning("the front is gone; the engine ends")
                os._exit(1)
            now = time.monotonic()
            if now >= beat_at and self.phase != "dead":
                beat_at = now + BEAT_SECONDS
                self.deliver(beat(self.engine, self.epoch, self.phase))


def main(make: Make, arguments: Sequence[str] = (), config: EngineConfig | None = None) -> int:
    """Run the process; by default its arguments come on the command line, the configuration on stdin."""
    # The front decides when to end: an interrupt from the terminal reaches both.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if config is None:
        given = sys.stdin.buffer.read()
        if not given:
            return 1  # the front is gone already
        config = msgspec.json.decode(given, type=EngineConfig)
    logs.configure(config.log_level)
    folder, epoch, parent = arguments or sys.argv[1:4]
    child = Child(folder, int(epoch), int(parent))
    code = child.run(make, config)
    child.close()
    return code


def build(config: EngineConfig, phase: Phase, epoch: int) -> Engine:
    """Build a model's engine; imports take seconds, in which the front may die, and wants to hear from us."""
    from fastlayers_server.engine import startup

    return startup.build(config, phase, epoch)


if __name__ == "__main__":
    raise SystemExit(main(build))
