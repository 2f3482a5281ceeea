"""What a client is told when something is wrong: one shape of body for every status."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import msgspec
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fastlayers_server.engine.protocol import ERROR_CODES, Output

log = logging.getLogger("fastlayers.front")

TYPES = {401: "authentication_error", 403: "permission_error", 408: "timeout", 429: "rate_limit_error"}
# Seconds after which another try may find a server: this one, or whoever takes its place.
RETRY_AFTER = {"not_ready": 5, "draining": 5, "engine_restarting": 10}
SERVED = "/v1/completions, /v1/chat/completions, /v1/responses, /v1/models, /tokenize, /detokenize"


class ApiError(Exception):
    """An answer that is an error.

    Parameters
    ----------
    status : int
    message : str
    code : str
        What programs look at.
    param : str, optional
        The field of the request that is wrong.
    retry_after : float
        Seconds; told in the header where it is not 0. With 503 always, by default as :data:`RETRY_AFTER` says.
    headers : dict, optional
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        param: str | None = None,
        retry_after: float = 0.0,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = dict(headers or {})
        if retry_after or status == 503:
            self.headers["retry-after"] = str(max(1, round(retry_after or RETRY_AFTER.get(code, 1))))

    @property
    def body(self) -> dict[str, Any]:
        """The JSON document."""
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The whole answer."""
        return document(self.body, self.headers, self.status)


def document(value: Any, headers: dict[str, str] | None = None, status: int = 200) -> Response:
    """Return a JSON answer."""
    return Response(msgspec.json.encode(value), status, headers=headers, media_type="application/json")


def bad(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """Return a 400 that names a field."""
    return ApiError(400, f"{param}: {message}", code, param)


def of_output(output: Output) -> ApiError:
    """Return the error with which an engine ended a request."""
    if output.finish == "abort":
        return ApiError(503, "the request was aborted by the server's operator", "aborted")
    message = output.message or f"the engine ended the request: {output.code}"
    return ApiError(ERROR_CODES.get(output.code, 500), message, output.code, retry_after=output.retry_after)


def of_validation(error: ValidationError, body: Any) -> ApiError:
    """Return the answer to a body that is not what its schema says; the first finding counts."""
    found = error.errors(include_url=False)
    # The members of a union each say why they do not fit; the one whose type fits is what the client meant.
    first = max(found, key=lambda f: (not f["type"].endswith("_type"), len(f["loc"])))
    if found[0]["type"] == "extra_forbidden":
        first = found[0]
    param = ".".join(_place(first["loc"], body, first["type"] == "missing"))[:200] or None  # names are the client's
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"unknown parameter {param!r}: it is not served, and nothing is ignored", "unknown_parameter", param)  # fmt: skip  # noqa: E501
    given = "" if first["type"] == "missing" else f"; given: {_short(first['input'])}"
    code = "missing_parameter" if first["type"] == "missing" else "invalid_value"
    return ApiError(400, f"{param or 'the body'}: {first['msg']}{given}", code, param)


def _place(found: tuple[int | str, ...], body: Any, missing: bool) -> Iterator[str]:
    """Yield the names of a finding's place: between them stand the members of unions, which no body has."""
    for at, name in enumerate(found):
        if name in body if isinstance(body, dict) else isinstance(body, list) and isinstance(name, int):
            body = body[name]
        elif at and not (missing and at == len(found) - 1):
            continue
        else:  # what is missing, or a field that the body has under another name
            body = None
        yield str(name)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def of_exception(error: Exception, scope: Scope) -> ApiError:
    """Return what a client is told of anything that was raised; the trace of a fault of ours goes to the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):  # the router's: it knows the path, but not for this method
        message = f"{scope['method']} is not accepted at {scope['path']!r}"
        return ApiError(error.status_code, message, "method_not_allowed", headers=dict(error.headers or {}))
    rid = scope["state"]["request_id"]
    log.error("request %s failed: %s", rid, type(error).__name__, exc_info=error)
    return ApiError(500, f"an internal error; the server's log has it under request id {rid}", "internal_error")


async def not_served(scope: Scope, receive: Receive, send: Send) -> None:
    """Refuse every path that has no route."""
    raise ApiError(404, f"{scope['path']!r} is not served; served are {SERVED}", "not_found")
