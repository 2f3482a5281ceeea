"""The application: its routes, what guards them, and the start and end of its engine."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib import metadata
from importlib.resources import files
from typing import TYPE_CHECKING

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from fastlayers_server.front import ops
from fastlayers_server.front.answers import document
from fastlayers_server.front.chat import chat
from fastlayers_server.front.completions import completions
from fastlayers_server.front.errors import not_served
from fastlayers_server.front.gate import Gate
from fastlayers_server.front.generation import Front
from fastlayers_server.front.link import Link
from fastlayers_server.front.metrics import Metrics
from fastlayers_server.front.openapi import describe
from fastlayers_server.front.parsers import formats_of
from fastlayers_server.front.responses import responses
from fastlayers_server.front.tokens import TokenText
from fastlayers_server.front.trace import tracing

if TYPE_CHECKING:
    from fastlayers_server.engine.client import EngineClient
    from fastlayers_server.engine.grammar import GrammarWorker
    from fastlayers_server.serve_config import ServeConfig

log = logging.getLogger("fastlayers.front")

Handler = Callable[[Request, Front], Awaitable[Response]]
GET, POST, BOTH = ("GET",), ("POST",), ("GET", "POST")
ROUTES: tuple[tuple[str, tuple[str, ...], Handler], ...] = (
    ("/v1/completions", POST, completions),
    ("/v1/chat/completions", POST, chat),
    ("/v1/responses", POST, responses),
    ("/v1/models", GET, ops.models),
    ("/v1/models/{name:path}", GET, ops.model),
    ("/tokenize", POST, ops.tokenize),
    ("/detokenize", POST, ops.detokenize),
    ("/health", GET, ops.health),
    ("/ready", GET, ops.ready),
    ("/health_generate", GET, ops.health_generate),
    ("/metrics", GET, ops.metrics),
    ("/version", GET, ops.version),
    ("/server_info", GET, ops.server_info),
    ("/backends", GET, ops.backends),
    ("/explain", GET, ops.explain),
    ("/freeze_gc", BOTH, ops.freeze_gc),
    ("/flush_cache", POST, ops.control),
    ("/start_profile", POST, ops.control),
    ("/stop_profile", POST, ops.control),
    ("/drain", POST, ops.control),
    ("/resume", POST, ops.control),
    ("/abort", POST, ops.abort),
    ("/abort_request", POST, ops.abort),
)


def make_front(
    config: ServeConfig,
    engine: EngineClient | Link,
    tokens: TokenText,
    grammars: GrammarWorker | None = None,
) -> Front:
    """Return what the handlers share; an engine that is started already comes as its link."""
    metrics = Metrics(config.name, config.metrics_compat, config.gc_warning_threshold_secs)
    link = engine if isinstance(engine, Link) else Link(engine, config.watchdog_timeout)
    metrics.link = link
    formats = formats_of(tokens, config.reasoning_parser, config.tool_call_parser)
    facts = [metadata.version("fastlayers"), repr(sorted(config.shown().items()))]
    fingerprint = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
    return Front(config, link, tokens, metrics, formats, fingerprint, grammars)


def make_app(front: Front, limit: int = 4096) -> ASGIApp:
    """Return the whole ASGI application; its lifespan starts the engine and ends it."""

    @asynccontextmanager
    async def lifespan(app: ASGIApp) -> AsyncIterator[None]:
        front.metrics.watch_gc()
        front.link.start(asyncio.get_running_loop())
        freezing = asyncio.ensure_future(_freeze(front)) if not front.config.no_freeze_gc else None
        try:
            yield
        finally:
            if freezing is not None:
                freezing.cancel()
            front.metrics.unwatch_gc()
            front.link.draining = True
            await asyncio.to_thread(front.link.client.shutdown, 0.0)

    async def on_page(request: Request) -> Response:
        return HTMLResponse(page, headers={"content-security-policy": "default-src 'self' 'unsafe-inline' data:"})

    async def on_openapi(request: Request) -> Response:
        return document(describe(ROUTES))

    page = files("fastlayers_server.front").joinpath("page.html").read_text("utf-8")
    routes = [Route("/", on_page)]
    routes += [Route(path, _bound(handler, front), methods=methods) for path, methods, handler in ROUTES]
    routes += [Route("/openapi.json", on_openapi)] if front.config.enable_openapi else []
    router = Router(routes, redirect_slashes=False, default=not_served, lifespan=lifespan)
    span = tracing(front.config.otlp_endpoint) if front.config.otlp_endpoint else None
    guarded: ASGIApp = Gate(router, front.config, front.metrics, limit, span)
    if front.config.cors_origin:
        guarded = CORSMiddleware(
            guarded, allow_origins=front.config.cors_origin, allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
        )  # fmt: skip
    return guarded


def _bound(handler: Handler, front: Front) -> Callable[[Request], Awaitable[Response]]:
    async def serve(request: Request) -> Response:
        return await handler(request, front)

    return serve


async def _freeze(front: Front) -> None:
    """Keep what the start made out of the collector's work."""
    await front.link.started.wait()
    gc.collect()
    gc.freeze()
