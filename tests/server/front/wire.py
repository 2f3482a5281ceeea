"""The same front behind uvicorn at a loopback port."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from fastlayers_server.front.app import make_app, make_front
from fastlayers_server.front.server import Runner
from fastlayers_server.serve_command import bound
from fastlayers_server.serve_config import ServeConfig

from .harness import ScriptedEngine, tokens_of


class OnThread(Runner):
    """Signals belong to the main thread, which is the test's."""

    def capture_signals(self) -> Any:
        return contextlib.nullcontext()


class Wire:
    """A running server: its URL, its front, its engine."""

    def __init__(self, runner: Runner, engine: Any, port: int, loop: asyncio.AbstractEventLoop) -> None:
        self.runner, self.front, self.engine, self.port, self.loop = runner, runner.front, engine, port, loop
        self.url = f"http://127.0.0.1:{port}"

    @property
    def live(self) -> int:
        """Requests that the engine has."""
        engine = self.engine._engine
        return len(engine.scheduler.live) if engine is not None else 0

    def connect(self, receive_buffer: int = 0) -> socket.socket:
        made = socket.socket()
        if receive_buffer:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        made.settimeout(60)
        made.connect(("127.0.0.1", self.port))
        return made

    def send(self, path: str, body: bytes, *headers: str, **options: Any) -> socket.socket:
        """Send a POST, and do not wait."""
        made = self.connect(**options)
        lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", *headers]
        if not any(h.lower().startswith(("content-length", "transfer-encoding")) for h in headers):
            lines.append(f"Content-Length: {len(body)}")
        made.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        return made


def wait_for(what: Any, seconds: float = 60.0) -> bool:
    """Wait until something holds, and return whether it does; who waits in vain hangs, however slow the machine is."""
    end = time.monotonic() + seconds
    while not what() and time.monotonic() < end:
        time.sleep(0.005)
    return bool(what())


@contextlib.contextmanager
def on_the_wire(
    script: Any = None, engine: Any = None, tick_seconds: float = 0.002, grammars: Any = None, tokens: Any = None,
    vocab_size: int = 512, **config: Any,
) -> Iterator[Wire]:  # fmt: skip
    engine = engine or ScriptedEngine(script, tick_seconds=tick_seconds, vocab_size=vocab_size)
    settings: dict[str, Any] = {"served_model_name": ("tiny",), "no_freeze_gc": True} | config
    front = make_front(ServeConfig(**settings), engine, tokens or tokens_of(), grammars)
    runner = OnThread(make_app(front), front)
    front.link.on_death = runner.engine_died
    listening = bound("127.0.0.1", 0)
    loop = asyncio.new_event_loop()

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(runner.serve([listening]))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert wait_for(lambda: runner.started and front.link.info is not None)
    try:
        yield Wire(runner, engine, listening.getsockname()[1], loop)
    finally:
        runner.should_exit = True
        thread.join(120)
        assert not thread.is_alive()
