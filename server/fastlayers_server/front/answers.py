"""Waiting for a job without losing sight of its client, and streams of events."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from fastlayers_server.front.errors import ApiError, document
from fastlayers_server.front.generation import Front
from fastlayers_server.front.rows import Job, Row

log = logging.getLogger("fastlayers.front")
T = TypeVar("T")
# So long a stream waits for its first news, so that what fails at once fails with its own status.
FIRST_NEWS_SECONDS = 1.0
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE_SECONDS, KEEP_ALIVE = 15.0, b": keep-alive\n\n"


def event(document: Any) -> bytes:
    """Return one server-sent event."""
    return b"data: " + msgspec.json.encode(document) + b"\n\n"


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


class Writer(ABC):
    """Writes the answer of one request: a document, or the events of a stream, of which ``[DONE]`` is not its own."""

    kind = ""  # of the stream's documents

    def __init__(self, front: Front, body: Any) -> None:
        self._front, self._body = front, body

    @abstractmethod
    def whole(self, job: Job) -> Any:
        """Return the document of a job that has ended."""

    def begin(self, job: Job) -> Iterable[bytes]:
        """Yield what stands before the first news."""
        return ()

    def news(self, job: Job) -> Iterable[bytes]:
        """Yield what is new; raises the error of a choice."""
        for row in job.rows:
            if row.error is not None:
                raise row.error
            if row.readable:
                yield from self._news(job, row)

    @abstractmethod
    def _news(self, job: Job, row: Row) -> Iterable[bytes]:
        """Yield what is new of a choice."""

    def end(self, job: Job) -> Iterable[bytes]:
        """Yield what stands behind the last news: the usage, if it was asked for."""
        return [event(self._document(job, [], True))] if self._options("include_usage") else []

    def failed(self, error: ApiError) -> bytes:
        """Return what stands there instead."""
        return event(error.body)

    def _document(self, job: Job, choices: Sequence[Any], usage: bool, **extra: Any) -> dict[str, Any]:
        told = {
            "id": job.id, "object": self.kind, "created": job.created, "model": self._body.model,
            "system_fingerprint": self._front.fingerprint, "choices": choices,
        }  # fmt: skip
        return told | ({"usage": job.usage()} if usage else {}) | extra

    def _chunk(self, job: Job, choice: Any, **extra: Any) -> bytes:
        return event(self._document(job, [choice], self._options("continuous_usage_stats"), **extra))

    def _options(self, name: str) -> bool:
        return bool(self._body.stream_options and getattr(self._body.stream_options, name))


async def answer(request: Request, front: Front, job: Job, stream: bool, writer: Writer) -> Response:
    """Return the response of a job, streamed or whole; its requests end with it."""
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
            return document(writer.whole(job), headers) if job.done else Response(status_code=499)
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
    return EventStream(_events(job, writer), close, headers)


async def _events(job: Job, writer: Writer) -> AsyncIterator[bytes]:
    """Yield all of a stream; an error becomes the last event but [DONE]."""
    try:
        for each in writer.begin(job):
            yield each
        while not job.done or job.unread:
            if not await job.news(KEEP_ALIVE_SECONDS):
                yield KEEP_ALIVE
                continue
            for each in writer.news(job):
                yield each
        for each in writer.end(job):
            yield each
    except ApiError as error:
        job.metrics.errors.labels(error.code).inc()
        yield writer.failed(error)
    yield DONE
