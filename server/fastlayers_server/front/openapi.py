"""The OpenAPI document of the routes, made from the schemas that check the bodies."""

from __future__ import annotations

from collections.abc import Iterable
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
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}


def describe(title: str, version: str, routes: Iterable[tuple[str, tuple[str, ...], Any]]) -> dict[str, Any]:
    """Return the document."""
    template = "#/components/schemas/{model}"
    models = [(model, "validation") for model in set(BODIES.values())]
    _, found = models_json_schema(models, ref_template=template)  # type: ignore[arg-type]
    error = {"description": "An error", "content": {"application/json": {"schema": {"$ref": template.format(model="Error")}}}}  # fmt: skip  # noqa: E501
    paths: dict[str, Any] = {}
    for path, methods, handler in routes:
        for method in methods:
            operation: dict[str, Any] = {
                "summary": (handler.__doc__ or "").strip().partition("\n")[0],
                "operationId": f"{method.lower()}{path.replace('/', '_').replace('{', '').replace(':path}', '')}",
                "responses": {"200": {"description": "Done"}, "default": error},
            }
            if path in BODIES:
                reference = {"$ref": template.format(model=BODIES[path].__name__)}
                operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference}}}
            if "{" in path:
                operation["parameters"] = [
                    {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
                ]
            paths.setdefault(path.replace(":path", ""), {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": paths,
        "components": {"schemas": {**found["$defs"], "Error": _ERROR}},
    }
