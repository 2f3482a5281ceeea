"""The application: its routes, what guards them, and the start and end of its engine."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING, NamedTuple

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from fastlayers import __version__
from fastlayers_server.front import ops, schemas
from fastlayers_server.front.chat import chat
from fastlayers_server.front.completions import completions
from fastlayers_server.front.errors import document, not_served
from fastlayers_server.front.gate import Gate, body_of
from fastlayers_server.front.generation import Front
from fastlayers_server.front.link import Link
from fastlayers_server.front.metrics import Metrics
from fastlayers_server.front.openapi import describe
from fastlayers_server.front.parsers import formats_of
from fastlayers_server.front.responses import ResponsesRequest, responses
from fastlayers_server.front.tokens import TokenText
from fastlayers_server.front.trace import tracing
from fastlayers_server.stalls import Collections, freeze, thaw, watch_loop

if TYPE_CHECKING:
    from fastlayers_server.engine.client import EngineClient
    from fastlayers_server.engine.grammar import GrammarWorker
    from fastlayers_server.serve_config import ServeConfig

log = logging.getLogger("fastlayers.front")

GET, POST, BOTH = ("GET",), ("POST",), ("GET", "POST")
CONTROLS = ("flush_cache", "start_profile", "stop_profile", "drain", "resume")  # passed on to the engine as they are


class Served(NamedTuple):
    """A path: who answers, ``handler(request, front)``, with a third argument where there is a ``body`` to check."""

    path: str
    methods: tuple[str, ...]
    handler: Callable[..., Awaitable[Response]]
    body: type[schemas.Model] | None = None
    admin: bool = False


ROUTES = (
    Served("/v1/completions", POST, completions, schemas.CompletionRequest),
    Served("/v1/chat/completions", POST, chat, schemas.ChatRequest),
    Served("/v1/responses", POST, responses, ResponsesRequest),
    Served("/v1/models", GET, ops.models),
    Served("/v1/models/{name:path}", GET, ops.model),
    Served("/tokenize", POST, ops.tokenize, schemas.TokenizeRequest),
    Served("/detokenize", POST, ops.detokenize, schemas.DetokenizeRequest),
    Served("/health", GET, ops.health),
    Served("/ready", GET, ops.ready),
    Served("/health_generate", GET, ops.health_generate),
    Served("/metrics", GET, ops.metrics),
    Served("/version", GET, ops.version),
    Served("/server_info", GET, ops.server_info),
    Served("/backends", GET, ops.explain),
    Served("/explain", GET, ops.explain),
    Served("/freeze_gc", BOTH, ops.freeze_gc, admin=True),
    *(Served(f"/{what}", POST, ops.control, admin=True) for what in CONTROLS),
    Served("/abort", POST, ops.abort, schemas.AbortRequest, admin=True),
    Served("/abort_request", POST, ops.abort, schemas.AbortRequest, admin=True),
)
ADMIN = frozenset(route.path for route in ROUTES if route.admin)


def make_front(
    config: ServeConfig, engine: EngineClient | Link, tokens: TokenText, grammars: GrammarWorker | None = None
) -> Front:
    """Return what the handlers share; an engine that is started already comes as its link."""
    metrics = Metrics(config.name, config.metrics_compat, config.gc_warning_threshold_secs)
    link = engine if isinstance(engine, Link) else Link(engine, config.watchdog_timeout)
    metrics.link, link.stalls = link, metrics.stalls
    formats = formats_of(tokens, config.reasoning_parser, config.tool_call_parser)
    facts = [__version__, repr(sorted(config.shown().items()))]
    fingerprint = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
    return Front(config, link, tokens, metrics, formats, fingerprint, grammars)


def make_app(front: Front) -> ASGIApp:
    """Return the whole ASGI application; its lifespan starts the engine and ends it."""

    @asynccontextmanager
    async def lifespan(app: ASGIApp) -> AsyncIterator[None]:
        metrics = front.metrics
        front.link.start(asyncio.get_running_loop())
        if not front.config.no_freeze_gc:  # while the engine starts: it takes tenths of a second of this loop
            freeze()
        watching = asyncio.ensure_future(watch_loop(partial(metrics.stalls.late, "loop")))
        try:
            with Collections(metrics.collected):
                yield
        finally:
            watching.cancel()
            front.link.draining = True
            await asyncio.to_thread(front.link.client.shutdown)
            thaw()

    async def on_page(request: Request) -> Response:
        return HTMLResponse(page, headers={"content-security-policy": "default-src 'self' 'unsafe-inline' data:"})

    async def on_openapi(request: Request) -> Response:
        return document(describe(ROUTES))

    page = files("fastlayers_server.front").joinpath("page.html").read_text("utf-8")
    routes = [Route("/", on_page)]
    routes += [Route(served.path, _bound(served, front), methods=served.methods) for served in ROUTES]
    routes += [Route("/openapi.json", on_openapi)] if front.config.enable_openapi else []
    router = Router(routes, redirect_slashes=False, default=not_served, lifespan=lifespan)
    span = tracing(front.config.otlp_endpoint) if front.config.otlp_endpoint else None
    guarded: ASGIApp = Gate(router, front.config, front.metrics, ADMIN, span)
    if front.config.cors_origin:
        guarded = CORSMiddleware(
            guarded, allow_origins=front.config.cors_origin, allow_methods=["GET", "POST"], allow_headers=["*"],
            expose_headers=["retry-after", "x-request-id", "x-fastlayers-seed"],
        )  # fmt: skip
    return guarded


def _bound(served: Served, front: Front) -> Callable[[Request], Awaitable[Response]]:
    async def serve(request: Request) -> Response:
        if served.body is None:
            return await served.handler(request, front)
        body = await body_of(request, served.body, front.ignore if front.config.lenient_fields else None)
        request.state.arrival = time.monotonic()
        front.check_model(getattr(body, "model", None))
        return await served.handler(request, front, body)

    return serve
