"""The OpenAPI document of the routes, made from the schemas that check the bodies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from fastlayers import __version__

if TYPE_CHECKING:
    from fastlayers_server.front.app import Served


class Error(BaseModel):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str


class Errors(BaseModel):
    """The body of every answer that is an error."""

    error: Error


def describe(routes: Sequence[Served]) -> dict[str, Any]:
    """Return the document."""
    models = [(model, "validation") for model in {*(served.body for served in routes if served.body), Errors}]
    _, found = models_json_schema(models, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]

    def content(model: type[BaseModel]) -> dict[str, Any]:
        return {"content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}}

    error = {"description": "An error"} | content(Errors)
    paths: dict[str, Any] = {}
    for path, methods, handler, body, _ in routes:
        for method in methods:
            operation: dict[str, Any] = {
                "summary": (handler.__doc__ or "").strip().partition("\n")[0],
                "operationId": f"{method.lower()}{path.replace('/', '_').replace('{', '').replace(':path}', '')}",
                "responses": {"200": {"description": "Done"}, "default": error},
            }
            if body is not None:
                operation["requestBody"] = {"required": True} | content(body)
            if "{" in path:
                named = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
                operation["parameters"] = [named]
            paths.setdefault(path.replace(":path", ""), {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "fastlayers", "version": __version__},
        "paths": paths,
        "components": {"schemas": found["$defs"]},
    }
