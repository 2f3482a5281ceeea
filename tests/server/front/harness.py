"""A front in this process, on the event loop of a thread, with a client that speaks HTTP to it without a socket."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from fastlayers_server.engine.protocol import EngineInfo
from fastlayers_server.front.app import make_app, make_front
from fastlayers_server.front.generation import Front
from fastlayers_server.front.tokens import TokenText
from fastlayers_server.serve_config import ServeConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from scripted import ScriptedEngine, saying

TINY = Path(__file__).parents[3] / "models" / "fastlayers_models" / "assets" / "tiny_deepseek_v3"
EOS = 1


def tokens_of(folder: Path = TINY, template: str | None = None) -> TokenText:
    return TokenText(folder, template)


def script_of(tokens: TokenText, text: str) -> Callable[[Sequence[int], int, int], int]:
    """A script that answers every prompt with this text."""
    return saying(tokens.encode(text, False), EOS)


class Server:
    """What a test holds: the front, and requests to it."""

    def __init__(self, front: Front, app: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.front, self.app, self.loop = front, app, loop

    def do(self, work: Coroutine[Any, Any, Any], timeout: float = 120.0) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout)

    def client(self, **headers: str) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=True)
        return httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers)

    def request(self, method: str, path: str, headers: dict[str, str] | None = None, **options: Any) -> httpx.Response:
        async def call() -> httpx.Response:
            async with self.client() as client:
                return await client.request(method, path, headers=headers, **options)

        return self.do(call())

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return self.request("POST", path, headers, json=body)

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self.request("GET", path, headers)


@contextmanager
def serving(
    script: Any = None, engine: Any = None, tokens: TokenText | None = None, features: Sequence[str] | None = None,
    grammars: Any = None, wait: bool = True, vocab_size: int = 512, **config: Any,
) -> Iterator[Server]:  # fmt: skip
    """Serve the tiny checkpoint's tokenizer with a scripted engine."""
    tokens = tokens or tokens_of()
    engine = engine or ScriptedEngine(script, tick_seconds=config.pop("tick_seconds", 0.0), vocab_size=vocab_size)
    if features is not None:
        with_features(engine, features)
    settings: dict[str, Any] = {"served_model_name": ("tiny",), "no_freeze_gc": True} | config
    front = make_front(ServeConfig(**settings), engine, tokens, grammars)
    app = make_app(front)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = Server(front, app, loop)
    stop = asyncio.run_coroutine_threadsafe(_open(app), loop).result(120)
    try:
        if wait:
            server.do(asyncio.wait_for(front.link.started.wait(), 60))
            while getattr(engine, "_engine", engine) is None:  # it says that it is there just before
                time.sleep(0.001)
        yield server
    finally:
        server.do(stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(120)
        loop.close()


def with_features(engine: Any, features: Sequence[str]) -> None:
    """Let an engine say that it can do these."""
    start = engine.start

    def begin(deliver: Callable[[Any], None]) -> None:
        def changed(message: Any) -> None:
            known = isinstance(message, EngineInfo)
            deliver(msgspec.structs.replace(message, features=tuple(features)) if known else message)

        start(changed)

    engine.start = begin


async def _open(app: Any) -> Callable[[], Coroutine[Any, Any, None]]:
    """Run the application's lifespan; return what ends it."""
    inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    outbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    task = asyncio.ensure_future(
        app({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, inbox.get, outbox.put)
    )
    await inbox.put({"type": "lifespan.startup"})
    message = await outbox.get()
    assert message["type"] == "lifespan.startup.complete", message

    async def stop() -> None:
        await inbox.put({"type": "lifespan.shutdown"})
        await task

    return stop
