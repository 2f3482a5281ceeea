"""The OpenAPI document of the routes, made from the schemas that check the bodies."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from fastlayers_server.front import responses, schemas

BODIES: dict[str, type[BaseModel]] = {
    "/v1/completions": schemas.CompletionRequest,
    "/v1/chat/completions": schemas.ChatRequest,
    "/v1/responses": responses.ResponsesRequest,
    "/tokenize": schemas.TokenizeRequest,
    "/detokenize": schemas.DetokenizeRequest,
    "/abort": schemas.AbortRequest,
    "/abort_request": schemas.AbortRequest,
}


class Error(BaseModel):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str


class Errors(BaseModel):
    """The body of every answer that is an error."""

    error: Error


def describe(routes: Iterable[tuple[str, tuple[str, ...], Any]]) -> dict[str, Any]:
    """Return the document."""
    models = [(model, "validation") for model in {*BODIES.values(), Errors}]
    _, found = models_json_schema(models, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]

    def content(model: type[BaseModel]) -> dict[str, Any]:
        return {"content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}}

    error = {"description": "An error"} | content(Errors)
    paths: dict[str, Any] = {}
    for path, methods, handler in routes:
        for method in methods:
            operation: dict[str, Any] = {
                "summary": (handler.__doc__ or "").strip().partition("\n")[0],
                "operationId": f"{method.lower()}{path.replace('/', '_').replace('{', '').replace(':path}', '')}",
                "responses": {"200": {"description": "Done"}, "default": error},
            }
            if path in BODIES:
                operation["requestBody"] = {"required": True} | content(BODIES[path])
            if "{" in path:
                operation["parameters"] = [
                    {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
                ]
            paths.setdefault(path.replace(":path", ""), {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "fastlayers", "version": metadata.version("fastlayers")},
        "paths": paths,
        "components": {"schemas": found["$defs"]},
    }
