"""Spans of requests, where an operator asks for them: OpenTelemetry, if it is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from starlette.types import Scope

from fastlayers import __version__

Tracing = Callable[[Scope], AbstractContextManager[Any]]


def tracing(endpoint: str) -> Tracing:
    """Return what opens the span of a request, sent to an OTLP endpoint.

    Raises
    ------
    ValueError
        The packages are not installed.
    """
    try:
        from opentelemetry import propagate, trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        needs = "opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http"
        raise ValueError(f"--otlp-endpoint needs {needs} ({error})") from error
    provider = TracerProvider(resource=Resource.create({"service.name": "fastlayers", "service.version": __version__}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    return spans_of(provider.get_tracer("fastlayers"), propagate.extract, trace.SpanKind.SERVER)


def spans_of(tracer: Any, extract: Callable[[dict[str, str]], Any], kind: Any) -> Tracing:
    """Return what opens a request's span below the one that its headers name."""

    @contextmanager
    def span(scope: Scope) -> Iterator[Any]:
        carrier = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        attributes = {
            "http.request.method": scope["method"], "url.path": scope["path"],
            "fastlayers.request_id": scope["state"]["request_id"],
        }  # fmt: skip
        name = f"{scope['method']} {scope['path']}"
        with tracer.start_as_current_span(name, context=extract(carrier), kind=kind, attributes=attributes) as opened:
            yield opened

    return span
