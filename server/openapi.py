"""GET /openapi.json, corrected where FastAPI's own guess is not what this service answers.

Every error is application/problem+json, validation errors too; FastAPI would promise its own shape.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from stepwell.messages import PROBLEM

_PROBLEM = {
    "description": "What was expected, what came, what to do (RFC 9457)",
    "content": {PROBLEM: {"schema": {"$ref": "#/components/schemas/Problem"}}},
}
_FOREIGN = ("HTTPValidationError", "ValidationError")


def customize_openapi(app: FastAPI) -> None:
    """Make `app` describe itself so; worked out once, at the first request."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _corrected(
                get_openapi(title=app.title, version=app.version, routes=app.routes)
            )
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _corrected(document: dict[str, Any]) -> dict[str, Any]:
    components = document["components"]
    for name in _FOREIGN:
        components["schemas"].pop(name, None)
    components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"token": []}, {}]  # open on loopback while no token exists
    for operations in document["paths"].values():
        for operation in operations.values():
            responses = operation["responses"]
            responses.pop("422", None)
            responses["default"] = _PROBLEM
    return document
