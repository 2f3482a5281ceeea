"""An engine as a front holds it: a process that is started, watched, and started again if it dies; or a thread.

    front ── send ──► EngineClient ══ zmq ══► Child (child.py) ──► Engine (loop.py)
    front ◄─ deliver ─────┘ a thread that listens, watches and starts again

Nothing here imports torch.
"""

from __future__ import annotations

import faulthandler
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
from fastlayers.runtime.held_directory import make as make_folder
from fastlayers.runtime.held_directory import release
from fastlayers_server.engine import protocol as p
from fastlayers_server.engine.child import REFUSED, Child, ChildThread, Make, build
from fastlayers_server.engine.config import EngineConfig
from fastlayers_server.torchrun import ANSWER_SECONDS

log = logging.getLogger(__name__)
RESTARTS, RESTART_SECONDS = 3, 600.0  # more deaths than so many in so long are the end
FOLDER, LOST = "fastlayers-engine-", "RankLostError: "
PAUSE = 5.0  # seconds until a process that could not be started is tried again: who holds all files may let go
SILENCE = 60.0  # a process that sends nothing for so long is hung, whatever it does
LEAST_SILENCE = 5.0  # of one that serves: it sends something once a second, on hosts that stand for a while, too


def command_of(config: EngineConfig) -> list[str]:
    """Return what starts an engine; its folder, its epoch and this process's number are appended."""
    if config.tp * config.attn_dp_size == 1:
        return [sys.executable, "-m", "fastlayers_server.engine.child"]
    from fastlayers_server.parallel import child

    return child.command_of(config)


def engine_client(config: EngineConfig, *, in_process: bool = False) -> EngineClient:
    """Return an engine for ``fastlayers serve``: in its own process, or on a thread of this one."""
    return EngineClient(config, make=partial(build, config) if in_process else None)


class EngineClient:
    """An engine that is another process, or a thread of this one.

    Methods may be called from any thread and do not block (:meth:`start` and :meth:`shutdown` excepted).

    Parameters
    ----------
    config : EngineConfig
    command : sequence of str, optional
        What to start, instead of :mod:`fastlayers_server.engine.child` (tests).
    make : callable, optional
        ``make(phase, epoch)``: makes the engine on a thread of this process, which nobody can kill, and which is not
        started again.

    Attributes
    ----------
    phase : str
        One of :data:`~fastlayers_server.engine.protocol.PHASES`, now.
    epoch : int
        Number of the engine's start, from 1; messages of older epochs are not delivered.
    """

    def __init__(self, config: EngineConfig, command: Sequence[str] | None = None, make: Make | None = None) -> None:
        self.config, self.phase, self.epoch = config, "starting", 0
        self._make, self._command = make, list(command or command_of(config))
        self._lock = threading.Lock()
        self._reason, self._refused, self._told = "", False, -1
        self._deliver_to: Callable[[p.FromEngine], None] = lambda message: None
        self._context = zmq.Context()
        self._out: zmq.Socket[bytes] | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._beside: ChildThread | None = None
        self._stop_by: float | None = None
        self._thread: threading.Thread | None = None

    def start(self, deliver: Callable[[p.FromEngine], None]) -> None:
        """Begin to start the engine, and return.

        Parameters
        ----------
        deliver : callable
            Given every message of the engine, on a thread of the client's, one at a time. It must not block: an
            asyncio front passes ``lambda m: loop.call_soon_threadsafe(handle, m)``. The first message of a start that
            succeeds is an :class:`~fastlayers_server.engine.protocol.EngineInfo`; of one that fails, a
            :class:`~fastlayers_server.engine.protocol.Died`; beats aside.
        """
        self._deliver_to = deliver
        self._address = f"inproc://{id(self)}"
        if self._make is None:
            place = tempfile.gettempdir()
            room = zmq.IPC_PATH_MAX_LEN - len(f"/{FOLDER}12345678/from-1000")
            if len(os.fsencode(place)) > room:
                accepted = f"a folder of at most {room} bytes: sockets lie there"
                raise ArgumentError("serve", "TMPDIR", repr(place), accepted)
            self._folder = make_folder(FOLDER)  # mode 0700
            self._address = f"ipc://{self._folder}"
        self._thread = threading.Thread(target=self._supervise, name="engine-supervisor", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Of the engine's process, or 0."""
        return self._child.pid if self._child is not None else 0

    def submit(self, request: p.Submit) -> None:
        """Hand over a request."""
        self.send(request)

    def send(self, message: p.ToEngine) -> None:
        """Hand over a message. Where there is no engine, or none any more, its front hears, or heard, of a death."""
        with self._lock:
            if self._out is None:
                return
            try:
                self._out.send(p.encode(message), zmq.NOBLOCK)
            except zmq.Again:
                if self._child is None or self._child.poll() is None:  # of one that is gone others will tell
                    log.error("the engine takes no messages; its process is killed")
                    self._kill()

    def shutdown(self) -> None:
        """End the engine, and what runs and waits with "draining". Returns when it is gone; may be called twice."""
        if self._stop_by is None:
            self._stop_by = time.monotonic() + 10.0
            self.send(p.Shutdown())
        if self._thread is not None:
            self._thread.join()

    def abandon(self) -> None:
        """End at once, with nothing left behind, because the front does not go on; it may not have begun to start.

        Threads end with the process.
        """
        if self._make is not None:
            return
        self._stop_by = time.monotonic() + 10.0
        while self._thread is not None and self._thread.is_alive() and time.monotonic() < self._stop_by:
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
            deaths.append(time.monotonic())
            often = len(deaths) > RESTARTS and deaths[-1] - deaths[0] < RESTART_SECONDS
            in_vain = code == REFUSED or self._refused or often or self._make is not None
            again = self._stop_by is None and not in_vain
            self._reason = self._reason or f"the engine's process ended with {code}"
            self.phase = "starting" if again else "dead"
            self._deliver_to(p.Died(self.epoch, self._reason, again))
        if self._make is None:
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

    def _one_life(self) -> int | None:
        """Start a process or thread, pass on what it says until it is gone, and return its exit code."""
        self.epoch += 1
        self._reason = ""
        out, news = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        try:
            out.bind(f"{self._address}/to-{self.epoch}")
            news.bind(f"{self._address}/from-{self.epoch}")
            child = self._started()
            heard = time.monotonic()
            while child.poll() is None:
                if news.poll(100):
                    heard = time.monotonic()
                    self._hear(p.from_engine.decode(news.recv()), out)
                elif time.monotonic() - heard > (silence := self._silence()):
                    self._kill(f"the engine said nothing for {silence:g} s")
                if self._stop_by is not None and time.monotonic() > self._stop_by:
                    self._kill("the engine did not end in time")
                elif self._stop_by is not None and self._child is not None and self._out is None:
                    self._reason = "the server ended before the engine was there"
                    self._child.kill()  # a start that nobody waits for has nothing to finish
            while news.poll(50):
                self._hear(p.from_engine.decode(news.recv()), out)
            return child.returncode
        finally:
            news.close(linger=0)
            if self._out is not out:
                out.close(linger=0)

    def _silence(self) -> float:
        """Return the seconds after which silence means that it is hung: what stands cannot say so itself."""
        if self.phase in ("serving", "draining"):
            return min(SILENCE, max(LEAST_SILENCE, self.config.watchdog_timeout))
        return SILENCE

    def _started(self) -> subprocess.Popen[bytes] | ChildThread:
        if self._make is not None:
            self._beside = ChildThread(Child(self._address, self.epoch, context=self._context), self._make)
            return self._beside
        command = [*self._command, str(self._folder), str(self.epoch), str(os.getpid())]
        config = replace(self.config, begun=time.monotonic())
        self._child = child = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        assert child.stdin is not None
        try:
            child.stdin.write(msgspec.json.encode(config))
            child.stdin.close()
        except BrokenPipeError:
            log.error("the engine's process ended before it read its configuration")
        return child

    def _hear(self, message: p.FromEngine, out: zmq.Socket[bytes]) -> None:
        if isinstance(message, p.Died):
            # Told when it is gone. Of several ranks the exit code is torchrun's, so what was said counts, and
            # of that the first; of ranks that say that they lost another one, whoever knows why.
            if not self._reason or (LOST in self._reason and LOST not in message.reason):
                self._reason = message.reason
            self._refused = self._refused or not message.restarting
            return
        if isinstance(message, p.Beat):
            self.phase = message.phase
            if message.tick_age > self.config.watchdog_timeout:
                self._hung(message.tick, f"a step took longer than {self.config.watchdog_timeout:g} s")
        elif isinstance(message, p.EngineInfo):
            with self._lock:
                self.phase, self._out = "serving", out
            if self._stop_by is not None:  # said before there was anybody to hear it
                self.send(p.Shutdown())
        self._deliver_to(message)

    def _hung(self, tick: int, reason: str) -> None:
        if self._make is None:
            self._kill(reason)
        elif tick != self._told:  # once a step, of a thread
            self._told = tick
            log.error("the engine is hung: %s; what each thread does follows", reason)
            faulthandler.dump_traceback(2, all_threads=True)  # sys.stderr may be no file

    def _kill(self, reason: str = "") -> None:
        """Let a process say where it hangs, and end it; nobody can end a thread."""
        child = self._child
        if child is not None and child.poll() is None:
            self._reason = reason or self._reason
            child.send_signal(signal.SIGUSR1)
            time.sleep(0.3 + ANSWER_SECONDS * self.config.tp * self.config.attn_dp_size)
            child.kill()
