"""What every request passes: its id, keys, the size and pace of its body, the pace of its answer, one line of log."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import math
import secrets
import time
from collections.abc import Iterable, Set
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import pydantic_core
from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastlayers_server.front.errors import ApiError, of_exception, of_validation
from fastlayers_server.front.metrics import Metrics
from fastlayers_server.front.schemas import Model
from fastlayers_server.front.trace import Tracing

if TYPE_CHECKING:
    from fastlayers_server.serve_config import ServeConfig

access = logging.getLogger("fastlayers.access")

OPEN = frozenset({"/health", "/ready"})
# Asked every few seconds by machines, which is no news.
PROBES = OPEN | {"/metrics"}
# The page is one static file without a word about this server; what it shows it asks with the reader's key.
PAGE = "/"
MAX_DEPTH = 64
# So long the rest of a body that is refused is taken, and thrown away.
DRAIN_SECONDS = 5.0
# Larger bodies are parsed on a thread.
INLINE_BYTES = 65_536

M = TypeVar("M", bound=Model)


def digests(keys: Iterable[str]) -> tuple[bytes, ...]:
    """Return what is kept of keys."""
    return tuple(hashlib.sha256(key.encode()).digest() for key in keys)


def matches(given: bytes, stored: tuple[bytes, ...]) -> bool:
    """Return whether a digest is among the stored ones, in the same time whichever it is."""
    return any([hmac.compare_digest(given, each) for each in stored])


class Gate:
    """Pure ASGI, around the application.

    Parameters
    ----------
    app
    config : ServeConfig
    metrics : Metrics
    admin : set of str
        Paths that need the admin key.
    span : callable, optional
        Opens a request's span.
    """

    def __init__(
        self, app: ASGIApp, config: ServeConfig, metrics: Metrics, admin: Set[str], span: Tracing | None = None
    ) -> None:
        self.app, self.config, self.metrics, self.admin, self._span = app, config, metrics, admin, span
        self.active = 0
        self._keys, self._admin = digests(config.api_key), digests(config.admin_api_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["request_id"], state["key"] = secrets.token_hex(8), b""
        scope["app"] = self  # so the router raises what it refuses, and we answer
        passage = _Passage(scope, receive, send, self.config)
        with self._span(scope) if self._span is not None else nullcontext() as span:
            await self._serve(scope, passage)
            if span is not None:
                span.set_attribute("http.response.status_code", passage.status or 499)

    async def _serve(self, scope: Scope, passage: _Passage) -> None:
        state = scope["state"]
        begin = time.monotonic()
        self.active += 1
        try:
            # A server that does all it can is well, and its figures are wanted just then.
            limit = self.config.limit_concurrency
            if self.active > limit and scope["path"] not in PROBES:
                message = f"{limit} requests are being served, which is the limit (--limit-concurrency)"
                raise ApiError(429, message, "queue_full", retry_after=1)
            self._authorize(scope, state)
            await self.app(scope, passage.receive, passage.send)
        except (TimeoutError, ClientDisconnect) as error:
            passage.outcome = "write_timeout" if isinstance(error, TimeoutError) else "disconnect"
        except Exception as error:
            wrong = of_exception(error, scope)
            self.metrics.errors.labels(wrong.code).inc()
            if wrong is not error:
                passage.outcome = type(error).__name__
            if not passage.status:
                await passage.refuse(wrong)
        finally:
            self.active -= 1
            facts = {
                "request": state["request_id"], "method": scope["method"], "path": scope["path"],
                "status": passage.status or 499, "seconds": round(time.monotonic() - begin, 6),
            }  # fmt: skip
            facts |= {"outcome": passage.outcome} if passage.outcome else {}
            level = logging.DEBUG if scope["path"] in PROBES else logging.INFO
            access.log(level, "served", extra={"facts": facts})

    def _authorize(self, scope: Scope, state: dict[str, Any]) -> None:
        path = scope["path"]
        if path in OPEN or path == PAGE or (path == "/metrics" and self.config.metrics_public):
            return
        given = next((v for k, v in scope["headers"] if k == b"authorization"), b"")
        kind, _, token = given.partition(b" ")
        digest = hashlib.sha256(token.strip()).digest()
        bearer = kind.lower() == b"bearer"
        is_admin = matches(digest, self._admin) and bearer
        if path in self.admin:
            if not self._admin and not self.config.open_admin:
                raise ApiError(403, f"{path} is off: the server has no admin key, nor --open-admin", "admin_disabled")
            if self._admin and not is_admin:
                raise ApiError(403, f"{path} needs the admin key", "admin_key_required")
            return
        if self._keys and not (matches(digest, self._keys) and bearer) and not is_admin:
            message = "the API key is wrong" if bearer else "an API key is needed: Authorization: Bearer KEY"
            raise ApiError(401, message, "invalid_api_key", headers={"www-authenticate": "Bearer"})
        if len(self._keys) > 1:
            state["key"] = digest


class _Passage:
    """The way in and out of one request."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, config: ServeConfig) -> None:
        self._receive, self._send, self._config = receive, send, config
        self.status, self.outcome, self._bytes, self._complete = 0, "", 0, False
        headers = dict(scope["headers"])
        declared = headers.get(b"content-length", b"0")
        self._declared = int(declared) if declared.isdigit() else 0
        self._request_id = scope["state"]["request_id"]

    async def receive(self) -> Message:
        if self._complete:
            return await self._receive()
        if self._declared > self._config.max_body_bytes:
            raise self._too_large()
        try:
            async with asyncio.timeout(self._config.body_timeout or None):
                message = await self._receive()
        except TimeoutError as error:
            late = f"the body took more than {self._config.body_timeout:g} s"
            raise ApiError(408, late, "request_timeout") from error
        if message["type"] == "http.request":
            self._bytes += len(message.get("body", b""))
            self._complete = not message.get("more_body", False)
            if self._bytes > self._config.max_body_bytes:
                raise self._too_large()
        return message

    def _too_large(self) -> ApiError:
        limit = self._config.max_body_bytes
        return ApiError(413, f"the body is larger than {limit} bytes", "request_too_large")

    async def refuse(self, error: ApiError) -> None:
        """Answer, and take what still comes of the body: who closed before would break the sender's pipe."""
        response = error.response()
        await self.send({"type": "http.response.start", "status": error.status, "headers": response.raw_headers})
        await self.send({"type": "http.response.body", "body": response.body, "more_body": not self._complete})
        if self._complete:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                while (await self._receive()).get("more_body"):
                    pass
        await self.send({"type": "http.response.body"})

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = list(message.get("headers", ()))
            headers.append((b"x-request-id", self._request_id.encode()))
            message = {**message, "headers": headers}
        async with asyncio.timeout(self._config.write_timeout or None):
            await self._send(message)


async def body_of(request: Request, model: type[M], lenient: Any = None) -> M:
    """Return the checked body of a request.

    Parameters
    ----------
    request
    model : type
    lenient : callable, optional
        Told the name of each unknown field, which is then dropped.

    Raises
    ------
    ApiError
        400, 408 or 413.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(400, f"content-type is {kind!r}; accepted: application/json", "invalid_content_type")
    if (encoding := request.headers.get("content-encoding", "identity").strip().lower()) != "identity":
        raise ApiError(400, f"content-encoding is {encoding!r}; accepted: identity", "invalid_content_encoding")
    raw = await request.body()
    if len(raw) > INLINE_BYTES:
        return await asyncio.to_thread(_parsed, raw, model, lenient)
    return _parsed(raw, model, lenient)


def _parsed(raw: bytes, model: type[M], lenient: Any) -> M:
    try:
        data = pydantic_core.from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", "invalid_json") from error
    check_shape(data)
    if lenient is not None and isinstance(data, dict):
        known = {*model.refused, *(f.alias or name for name, f in model.model_fields.items())}
        for name in [n for n in data if n not in known and not n.startswith("guided_")]:
            del data[name]
            lenient(name)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise of_validation(error, data) from error


def check_shape(data: Any, levels: int = MAX_DEPTH) -> None:
    """Raise 400 for JSON nested too deep, or with numbers that are infinite."""
    if type(data) is float and not math.isfinite(data):
        raise ApiError(400, "a number of the body is too large", "invalid_json")
    if isinstance(data, dict | list):
        if not levels:
            raise ApiError(400, f"the body is nested deeper than {MAX_DEPTH} levels", "invalid_json")
        for value in data.values() if isinstance(data, dict) else data:
            if type(value) in (dict, list, float):
                check_shape(value, levels - 1)
