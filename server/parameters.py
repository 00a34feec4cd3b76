"""A query parameter that no route knows is an error, as an unknown field of a body is.

`?action_lo=-3` would otherwise import under guessed bounds, and `?purpos=eval` would list it all.
"""

from __future__ import annotations

import difflib

from fastapi import Request
from fastapi.dependencies.models import Dependant

from server.problems import ProblemError


def known_parameters(request: Request) -> None:
    """A dependency of the whole application. Raises `ProblemError` 422 `validation_error`."""
    route = request.scope.get("route")
    dependant = getattr(route, "dependant", None)
    if not request.query_params or dependant is None:
        return
    known = _names(dependant)
    for name in request.query_params:
        if name in known:
            continue
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        raise ProblemError(
            422,
            "validation_error",
            f"query.{name[:64]}: there is no such parameter"
            + (f"; did you mean {near[0]}?" if near else ""),
            expected=sorted(known),
            got=name[:64],
        )


def _names(dependant: Dependant) -> set[str]:
    names = {field.alias for field in dependant.query_params}
    for inner in dependant.dependencies:
        names |= _names(inner)
    return names
