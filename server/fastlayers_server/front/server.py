"""Running an application with uvicorn: slow headers are cut, signals drain, a dead engine or a hung loop ends it."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fastlayers_server.front.generation import Front

log = logging.getLogger("fastlayers.serve")
KEEP_ALIVE_SECONDS = 65
ENGINE_GONE, FRONT_HUNG = 70, 71
HUNG_SECONDS, LOOKS = 30.0, 30  # an event loop that does not turn for so long, at so many looks, is hung
# What a request may have beside its body. Bodies in chunks of one byte have five times as much again.
HEAD_BYTES, FRAMING = 65_536, 8
TOO_LONG = f"Headers of more than {HEAD_BYTES} bytes."


class Protocol(HttpToolsProtocol):
    """Uvicorn's, with what it lacks: a time-out for a request's headers, a limit of their bytes, and no offers taken.

    Java's client offers HTTP/2 with whatever it sends first, and the parser takes no body behind an offer. Such a
    request is read as if it did not, as a server may.
    """

    parser: Any
    header_timeout = 0.0  # seconds; 0: any
    _data = b""  # what is parsed
    _waiting: asyncio.TimerHandle | None = None
    _body = _beside = _head = 0  # bytes of the request that comes

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for headers."""
        super().connection_made(transport)
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes of the connection."""
        self._data = data
        self._beside += len(data)
        super().data_received(data)
        if self._beside > HEAD_BYTES + FRAMING * self._body and not self.transport.is_closing():
            self.send_400_response(TOO_LONG)

    def on_message_begin(self) -> None:
        """Count and wait anew."""
        self._body = self._beside = self._head = 0
        self._await_headers()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Count the path."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header."""
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin with the request, unless its body would be left out."""
        self._disarm()
        if not self._offers_another():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body, of which there may be more bytes."""
        self._beside -= len(body)
        self._body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Be told that the request is complete."""
        if not self._offers_another():
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, and end the connection."""
        super().send_400_response(TOO_LONG if self._head > HEAD_BYTES else msg)

    def _count(self, size: int) -> None:
        """Count what came whole in one read, which may hold more than the limit, and other requests before it."""
        self._head += size
        if self._head > HEAD_BYTES:
            raise ValueError(TOO_LONG)  # the parser ends, and its caller answers

    def _await_headers(self) -> None:
        self._disarm()
        if self.header_timeout:
            self._waiting = self.loop.call_later(self.header_timeout, self.transport.close)

    def _disarm(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _offers_another(self) -> bool:
        """Whether the request that comes offers another protocol; CONNECT is none that is served."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _unsupported_upgrade_warning(self) -> None:
        """Read the request once more, without the offer: called while the parser's exception says where it ends."""
        ended = sys.exc_info()[1]
        if ended is None or not self._offers_another():
            return
        head = [self.parser.get_method() + b" " + self.url + b" HTTP/" + self.parser.get_http_version().encode()]
        head += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        rest = self._data[ended.args[0] :]
        self.parser = type(self.parser)(self)
        with contextlib.suppress(AttributeError):  # as uvicorn makes its own; httptools before 0.6.3 has none
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.data_received(b"\r\n".join([*head, b"", rest]))


@contextlib.contextmanager
def watched(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """End the process, and with it the engine's, if the loop hangs: its clients would wait for ever.

    What counts are looks, of which a process that was stopped makes none.
    """
    turned, ended = threading.Event(), threading.Event()

    def look() -> None:
        missed = 0
        while not ended.wait(HUNG_SECONDS / LOOKS):
            missed = 0 if turned.is_set() else missed + 1
            if missed > LOOKS:
                # Not by a logger, whose lock may be what hangs.
                os.write(2, f"error: the front is hung: its loop did not turn for {HUNG_SECONDS:g} s\n".encode())
                faulthandler.dump_traceback(2, all_threads=True)
                os._exit(FRONT_HUNG)
            turned.clear()
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(turned.set)

    threading.Thread(target=look, name="front-watch", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


class Runner(uvicorn.Server):
    """One server and its front.

    Parameters
    ----------
    app, front
    """

    def __init__(self, app: ASGIApp, front: Front) -> None:
        protocol = type("Protocol", (Protocol,), {"header_timeout": front.config.header_timeout})
        super().__init__(
            uvicorn.Config(
                app, http=protocol, ws="none", loop="uvloop", lifespan="on", log_config=None,
                access_log=False, server_header=False, timeout_keep_alive=KEEP_ALIVE_SECONDS, backlog=2048,
                timeout_graceful_shutdown=5,
            )
        )  # fmt: skip
        self.front = front
        self.exit_code = 0
        self.listening = asyncio.Event()
        self._draining: asyncio.Task[None] | None = None
        self._leaving: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        self.listening.set()

    def engine_died(self, reason: str) -> None:
        """End the process: the engine does not come back."""
        self.exit_code = ENGINE_GONE if self.front.link.was_ready else 1
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Drain on the first signal, leave on the second."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.on_signal)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def on_signal(self) -> None:
        """Begin to drain; a second time: leave at once."""
        if self._draining is None:
            self._draining = asyncio.ensure_future(self._drain())
        elif self._leaving is None:
            log.warning("second signal: leaving now")
            self._draining.cancel()
            self._leaving = asyncio.ensure_future(self._leave())

    async def _leave(self) -> None:
        """Tell who waits that nothing comes any more, and end the process."""
        self.front.link.draining = True
        self.front.link.end("draining", "the server ended before the request did")
        await self._last_events()
        self.front.link.client.abandon()
        os._exit(1)

    async def _last_events(self) -> None:
        """Let the last events leave before the sockets close; who takes none holds nobody up for more than a second."""
        for _ in range(50):
            if not self.front.jobs:
                break
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.02)  # written in this turn of the loop, they leave at its end

    async def _drain(self) -> None:
        config, link = self.front.config, self.front.link
        begin = time.monotonic()
        link.leaving = True
        await asyncio.sleep(config.drain_delay)
        link.draining = True
        log.info("draining: %d requests run", link.live)
        end = time.monotonic() + config.shutdown_timeout
        while (link.live or self.front.jobs) and time.monotonic() < end:
            await asyncio.sleep(0.02)
        if link.live:
            log.warning("%d requests did not end within %g s", link.live, config.shutdown_timeout)
        await asyncio.to_thread(link.client.shutdown)
        await self._last_events()
        log.info("drained in %.1f s", time.monotonic() - begin)
        self.should_exit = True
