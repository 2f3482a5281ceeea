"""Waiting for a job without losing sight of its client, and streams of events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from fastlayers_server.front.errors import ApiError
from fastlayers_server.front.generation import Front
from fastlayers_server.front.rows import Job

log = logging.getLogger("fastlayers.front")
T = TypeVar("T")
# So long a stream waits for its first news, so that what fails at once fails with its own status.
FIRST_NEWS_SECONDS = 1.0
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE_SECONDS, KEEP_ALIVE = 15.0, b": keep-alive\n\n"


def event(document: Any) -> bytes:
    """Return one server-sent event."""
    return b"data: " + msgspec.json.encode(document) + b"\n\n"


def document(value: Any, headers: dict[str, str] | None = None, status: int = 200) -> Response:
    """Return a JSON answer."""
    return Response(msgspec.json.encode(value), status, headers=headers, media_type="application/json")


async def attended(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """Return what ``work`` returns, or None as soon as the client is gone; then the work is cancelled."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(StreamingResponse):
    """A stream that closes its job however it ends: served whole, failed, or the client gone."""

    def __init__(self, content: AsyncIterator[bytes], close: Callable[[], None], headers: dict[str, str]) -> None:
        headers = headers | {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(content, headers=headers, media_type="text/event-stream")
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


async def answer(
    request: Request,
    front: Front,
    job: Job,
    stream: bool,
    whole: Callable[[Job], Any],
    events: Callable[[Job], AsyncIterator[bytes]],
) -> Response:
    """Return the response of a job, streamed or whole; its requests end with it.

    Parameters
    ----------
    whole : callable
        Makes the document of a job that has ended.
    events : callable
        Makes the events of a job that runs, the last one excepted.
    """
    headers = {"x-fastlayers-seed": str(job.seed)}

    def close() -> None:
        job.close()
        if front.config.log_prompts:
            texts = [front.tokens.decode(row.ids) for row in job.rows]
            log.info("answered", extra={"facts": {"response": job.id, "answers": texts}})
        front.jobs.pop(job.key, None)

    if not stream:
        try:
            await attended(request, job.finished())
            return document(whole(job), headers) if job.done else Response(status_code=499)
        finally:
            close()
    try:
        await attended(request, job.news(FIRST_NEWS_SECONDS))
        if job.error is not None:
            raise job.error
    except BaseException:
        close()
        raise
    # What woke us may be all there is.
    job.event.set()
    return EventStream(_guarded(job, events(job)), close, headers)


async def _guarded(job: Job, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Pass events on; an error becomes the last one but [DONE]."""
    try:
        async for each in events:
            yield each
    except ApiError as error:
        job.metrics.errors.labels(error.code).inc()
        yield event(error.body)
    yield DONE
