"""An engine in a process of its own, as a front holds it: started, watched, started again if it dies. Without torch."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import msgspec
import zmq

from fastlayers.errors import ArgumentError
from fastlayers.runtime.held_directory import make, release
from fastlayers_server.engine.child import REFUSED, build
from fastlayers_server.engine.client import EngineClient, InProcessEngine
from fastlayers_server.engine.config import EngineConfig
from fastlayers_server.engine.protocol import (
    Beat,
    Died,
    EngineInfo,
    FromEngine,
    Shutdown,
    ToEngine,
    encode,
    from_engine,
)

log = logging.getLogger(__name__)
RESTARTS, RESTART_SECONDS = 3, 600.0  # more deaths than so many in so long are the end
FOLDER = "fastlayers-engine-"
PAUSE = 5.0  # seconds until a process that could not be started is tried again: who holds all files may let go
SILENCE = 60.0  # a process that sends nothing for so long is hung, whatever it does


def command_of(config: EngineConfig) -> list[str]:
    """Return what starts an engine; its folder, its epoch and this process's number are appended."""
    if config.tp * config.attn_dp_size == 1:
        return [sys.executable, "-m", "fastlayers_server.engine.child"]
    from fastlayers_server.parallel import child

    return child.command_of(config)


def engine_client(config: EngineConfig, *, in_process: bool = False) -> EngineClient:
    """Return an engine for ``fastlayers serve``: in its own process, or on a thread of this one."""
    return InProcessEngine(partial(build, config)) if in_process else EngineProcess(config)


class EngineProcess(EngineClient):
    """An engine that is another process.

    Parameters
    ----------
    config : EngineConfig
    command : sequence of str, optional
        What to start, instead of :mod:`fastlayers_server.engine.child` (tests).
    """

    def __init__(self, config: EngineConfig, command: Sequence[str] | None = None) -> None:
        super().__init__()
        self.config, self.phase, self.epoch = config, "starting", 0
        self._command = list(command or command_of(config))
        self._refused = False
        self._context = zmq.Context()
        self._out: zmq.Socket[bytes] | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._stop_by: float | None = None
        self._thread: threading.Thread | None = None

    def start(self, deliver: Callable[[FromEngine], None]) -> None:
        """Begin to start, see :class:`EngineClient`."""
        self._deliver_to = deliver
        place = tempfile.gettempdir()
        room = zmq.IPC_PATH_MAX_LEN - len(f"/{FOLDER}12345678/from-1000")
        if len(os.fsencode(place)) > room:
            raise ArgumentError("serve", "TMPDIR", repr(place), f"a folder of at most {room} bytes: sockets lie there")
        self._folder = make(FOLDER)  # mode 0700
        self._thread = threading.Thread(target=self._supervise, name="engine-supervisor", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Of the engine's process, or 0."""
        return self._child.pid if self._child is not None else 0

    def _pass(self, message: ToEngine) -> bool:
        if self._out is None:
            return False
        try:
            self._out.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            log.error("the engine takes no messages; its process is killed")
            self._kill()
        return True

    def shutdown(self, timeout: float = 0.0) -> None:
        """End, see :class:`EngineClient`."""
        if self._stop_by is None:
            self._stop_by = time.monotonic() + timeout + 10.0
            self.send(Shutdown(timeout))
        if self._thread is not None:
            self._thread.join()

    def abandon(self) -> None:
        """End at once, see :class:`EngineClient`."""
        self._stop_by = time.monotonic() + 10.0
        while self._thread is not None and self._thread.is_alive():
            if self._child is not None:
                self._child.kill()
            self._thread.join(0.05)

    def _supervise(self) -> None:
        deaths: deque[float] = deque(maxlen=RESTARTS + 1)
        again = True
        while again:
            try:
                code: int | None = self._one_life()
            except Exception as error:  # no files or memory left for a process, or one that nobody understands
                self._lost(error)
                code = None
            with self._lock:
                if self._out is not None:
                    self._out.close(linger=0)
                    self._out = None
                self._early.clear()
            deaths.append(time.monotonic())
            often = len(deaths) > RESTARTS and deaths[-1] - deaths[0] < RESTART_SECONDS
            again = self._stop_by is None and code != REFUSED and not self._refused and not often
            self._reason = self._reason or f"the engine's process ended with {code}"
            self.phase = "starting" if again else "dead"
            self._tell_orphans()
            self._deliver(Died(self.epoch, self._reason, again))
        release(self._folder)

    def _lost(self, error: Exception) -> None:
        """Say why a process was not started, or is not listened to; let some time pass before the next one."""
        log.error("the engine's process is lost", exc_info=error)
        self._reason = f"the engine's process is lost: {error}"
        if self._child is not None and self._child.poll() is None:
            self._child.kill()
            self._child.wait()
        end = time.monotonic() + PAUSE
        while self._stop_by is None and time.monotonic() < end:
            time.sleep(0.05)

    def _one_life(self) -> int:
        """Start a process, pass on what it says until it is gone, and return its exit code."""
        self.epoch += 1
        self._reason = ""
        out, news = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        try:
            out.bind(f"ipc://{self._folder}/to-{self.epoch}")
            news.bind(f"ipc://{self._folder}/from-{self.epoch}")
            return self._watched(out, news)
        finally:
            news.close(linger=0)
            if self._out is not out:
                out.close(linger=0)

    def _watched(self, out: zmq.Socket[bytes], news: zmq.Socket[bytes]) -> int:
        command = [*self._command, str(self._folder), str(self.epoch), str(os.getpid())]
        config = replace(self.config, begun=time.monotonic())
        self._child = child = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        assert child.stdin is not None
        try:
            child.stdin.write(msgspec.json.encode(config))
            child.stdin.close()
        except BrokenPipeError:
            log.error("the engine's process ended before it read its configuration")
        heard = time.monotonic()
        while child.poll() is None:
            if news.poll(100):
                heard = time.monotonic()
                self._hear(from_engine.decode(news.recv()), out)
            elif time.monotonic() - heard > SILENCE:
                self._reason = f"the engine said nothing for {SILENCE:g} s"
                self._kill()
            if self._stop_by is not None and time.monotonic() > self._stop_by:
                self._reason = "the engine did not end in time"
                self._kill()
        while news.poll(50):
            self._hear(from_engine.decode(news.recv()), out)
        return child.returncode

    def _hear(self, message: FromEngine, out: zmq.Socket[bytes]) -> None:
        if isinstance(message, Died):
            # Told when it is gone. Of several ranks the exit code is torchrun's, so what was said counts.
            self._reason, self._refused = message.reason, not message.restarting
            return
        if isinstance(message, Beat):
            self.phase = message.phase
            if message.tick_age > self.config.watchdog_timeout:
                self._reason = f"a step took longer than {self.config.watchdog_timeout:g} s"
                self._kill()
        self._deliver(message)
        if isinstance(message, EngineInfo):
            self.phase = "serving"
            with self._lock:
                self._out = out
                self._pass_early()

    def _kill(self) -> None:
        """Let the process say where it hangs, and end it."""
        child = self._child
        if child is not None and child.poll() is None:
            child.send_signal(signal.SIGUSR1)
            time.sleep(0.3)
            child.kill()
