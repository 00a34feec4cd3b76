"""Who may do what: one table of rights over (verb, object, owner). The table of
docs/reference/http.md is made from it.

    AuthMiddleware   refuses by the route, before a byte of the body is read
    the route        refuses by the object: whose it is, or which dataset it is of (`Access`)

What a token makes belongs to it. Whoever has one of a right's `every` scopes may do it to every
object; whoever has one of its `own` scopes to what it made itself; whoever has one of its `fits`
scopes to what is in datasets whose name fits the scope. `admin` may everything. A route without a
right is for admins, so that a forgotten line locks out.

    python -m server.rights --write      writes the table into docs/reference/http.md
"""

from __future__ import annotations

import fnmatch
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from server.problems import ProblemError

READ = ("read", "train")
PATTERNED = ("ingest", "play")
"""Scopes with names of datasets and of runs, in which * stands for any characters."""


@dataclass(frozen=True, slots=True)
class Right:
    """One row: who may send this method to this path."""

    method: str
    path: str
    """Path in FastAPI's form; a {name} in `every` is replaced by the value from the request."""
    every: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    fits: tuple[str, ...] = ()
    note: str = ""
    """For the table in the documentation."""
    advice: str = ""
    """Explanation for refused callers."""

    @property
    def scopes(self) -> tuple[str, ...]:
        """Scopes of which the caller needs one to be admitted."""
        return tuple(dict.fromkeys((*self.every, *self.own, *self.fits, "admin")))


def _right(route: str, every: Sequence[str] = (), **rest: Any) -> Right:
    method, path = route.split()
    return Right(method, path, tuple(every), **rest)


_INGEST = {"own": ("ingest",)}
CREATE_FIRST = (
    "an admin, or a token with the scope ingest for all datasets, creates it first:"
    " stepwell datasets create NAME --spec FILE"
)
EVALUATED = (
    "an evaluation of its own run, of a free name or of a policy that it may play (`play:RUN`)"
)

# `GET` covers `HEAD`. Of two paths that match, the first counts.
RIGHTS: tuple[Right, ...] = (
    _right("GET /openapi.json", ("read", "sql", "train", "ingest", "play")),
    _right("GET /metrics", READ),
    # datasets
    _right("POST /v1/datasets", ("ingest:*",), advice=CREATE_FIRST),
    _right("GET /v1/datasets", READ, fits=("ingest",)),
    _right("GET /v1/datasets/{name}", (*READ, "ingest:{name}")),
    _right("PATCH /v1/datasets/{name}"),
    _right("DELETE /v1/datasets/{name}"),
    _right("POST /v1/datasets/{name}/flush", ("ingest:{name}",)),
    _right("POST /v1/datasets/{name}/versions", ("train",)),
    _right("GET /v1/datasets/{name}/versions", READ),
    _right("GET /v1/datasets/{name}/versions/{version}", READ),
    _right("GET /v1/datasets/{name}/versions/{version}/diff", READ),
    _right("DELETE /v1/datasets/{name}/versions/{version}"),
    _right("POST /v1/datasets/{name}/annotations", ("train",)),
    _right("POST /v1/datasets/{name}/annotations/values", ("train",)),
    _right("GET /v1/datasets/{name}/annotations", READ),
    _right("DELETE /v1/datasets/{name}/annotations"),
    _right("GET /v1/datasets/{name}/consumers", (*READ, "ingest:{name}")),
    _right("PUT /v1/datasets/{name}/consumers/{consumer}", ("train",)),
    _right("PATCH /v1/datasets/{name}/consumers/{consumer}", ("train",)),
    _right("DELETE /v1/datasets/{name}/consumers/{consumer}", ("train",)),
    # trajectories, imports, jobs
    _right("POST /v1/datasets/{name}/trajectories", ("ingest:{name}",)),
    _right("GET /v1/datasets/{name}/trajectories", (*READ, "ingest:{name}")),
    _right("POST /v1/trajectories/labels"),
    _right("GET /v1/trajectories/{trajectory_id}", READ, fits=("ingest",)),
    _right("GET /v1/trajectories/{trajectory_id}/steps", READ, fits=("ingest",)),
    _right("PATCH /v1/trajectories/{trajectory_id}"),
    _right("POST /v1/trajectories/{trajectory_id}/demote"),
    _right(
        "POST /v1/datasets/{name}/imports",
        ("ingest:{name}",),
        note="`create=true` makes a dataset only for `ingest` of all datasets",
    ),
    _right("GET /v1/jobs", READ, **_INGEST),
    _right("POST /v1/jobs/check_index"),
    _right("GET /v1/jobs/{job_id}", READ, **_INGEST),
    _right("DELETE /v1/jobs/{job_id}", **_INGEST),
    # SQL
    _right("POST /v1/query", ("sql",), note="it reads all datasets"),
    _right("GET /v1/query/schema", ("sql", "read")),
    _right("GET /v1/queries", ("sql", *READ)),
    _right("GET /v1/queries/{name}", ("sql", *READ)),
    _right("PUT /v1/queries/{name}", own=("sql",), note="whoever saves a new name owns it"),
    _right("DELETE /v1/queries/{name}", own=("sql",)),
    # snapshots and shards
    _right("POST /v1/snapshots", ("train",), note="it may select from all datasets"),
    _right("GET /v1/snapshots", READ),
    _right("GET /v1/snapshots/{snapshot_id}", READ),
    _right("GET /v1/snapshots/{snapshot_id}/manifest", READ),
    _right("PUT /v1/snapshots/{snapshot_id}/lease", ("train",)),
    _right("DELETE /v1/snapshots/{snapshot_id}/lease", ("train",)),
    _right("GET /v1/shards/{shard_id}", READ),
    # runs and policies
    _right(
        "POST /v1/runs",
        ("train",),
        note="with `ingest` alone: of kind `collect` or `eval`, with a parent of its own",
        **_INGEST,
    ),
    _right("GET /v1/runs", READ, **_INGEST),
    _right("GET /v1/runs/{name}", READ, **_INGEST),
    _right("PATCH /v1/runs/{name}", ("train",), **_INGEST),
    _right("DELETE /v1/runs/{name}"),
    _right("POST /v1/runs/{name}/metrics", ("train",), **_INGEST),
    _right("GET /v1/runs/{name}/metrics", READ, **_INGEST),
    _right("GET /v1/runs/{name}/log", READ, **_INGEST),
    _right("PUT /v1/runs/{name}/policies/{version}", ("train",)),
    _right("GET /v1/runs/{name}/policies", (*READ, "play:{name}"), **_INGEST),
    _right("GET /v1/runs/{name}/policies/{which}", (*READ, "play:{name}"), **_INGEST),
    _right("PUT /v1/runs/{name}/aliases/{alias}", ("train",)),
    # evaluations
    _right("POST /v1/evaluations", ("train",), note=f"with `ingest` alone: {EVALUATED}", **_INGEST),
    _right("GET /v1/evaluations", READ, **_INGEST),
    _right("PUT /v1/evaluations/{evaluation_id}/videos/{seed}", ("train",), **_INGEST),
    _right("GET /v1/evaluations/{evaluation_id}/videos", READ, **_INGEST),
    _right("GET /v1/evaluations/{evaluation_id}/videos/{seed}", READ, **_INGEST),
    _right("DELETE /v1/evaluations/{evaluation_id}/videos/{seed}"),
    # workers and launches
    _right(
        "PUT /v1/workers/{worker_id}",
        ("train",),
        note="with `ingest` alone: of role `collect` or `eval`, of a run of its own",
        **_INGEST,
    ),
    _right("GET /v1/workers", READ, **_INGEST),
    _right("POST /v1/workers/{worker_id}/command"),
    _right("PUT /v1/workers/{worker_id}/programs/{role}", ("train",)),
    _right("GET /v1/workers/{worker_id}/programs/{role}", READ),
    _right("POST /v1/launches"),
    _right("GET /v1/launches", READ),
    _right("POST /v1/launches/claim", ("train",)),
    _right("GET /v1/launches/{launch_id}", READ),
    _right("GET /v1/launches/{launch_id}/log", READ),
    _right("PATCH /v1/launches/{launch_id}", own=("train",), note="own: what it claimed"),
    _right("DELETE /v1/launches/{launch_id}"),
    # tokens
    _right("POST /v1/tokens"),
    _right("GET /v1/tokens"),
    _right("PATCH /v1/tokens/{token_id}"),
    _right("DELETE /v1/tokens/{token_id}"),
    _right("GET /v1/audit"),
)


def _pattern(path: str) -> re.Pattern[str]:
    parts = re.split(r"\{(\w+)\}", path)
    texts = [f"(?P<{part}>[^/]+)" if i % 2 else re.escape(part) for i, part in enumerate(parts)]
    return re.compile("".join(texts))


_BY_SHAPE: dict[tuple[str, int], list[tuple[re.Pattern[str], Right]]] = {}
"""Rights by method and number of segments: few are left to compare."""
for _one in RIGHTS:
    _BY_SHAPE.setdefault((_one.method, _one.path.count("/")), []).append(
        (_pattern(_one.path), _one)
    )


def right_of(method: str, path: str) -> Right:
    """The right that a request needs; that of admins for a route without one."""
    path = path.rstrip("/") or "/"
    asked = "GET" if method == "HEAD" else method
    for pattern, right in _BY_SHAPE.get((asked, path.count("/")), ()):
        found = pattern.fullmatch(path)
        if found is not None:
            name = found.groupdict().get("name", "")
            return replace(right, every=tuple(s.replace("{name}", name) for s in right.every))
    return Right(method, path)


@dataclass(frozen=True, slots=True)
class Principal:
    """The caller. `who` is written to the audit log, and to what the caller makes: a token's id,
    "operator", "local", or "oidc:" and an address."""

    who: str
    scopes: tuple[str, ...]

    def may(self, needed: str) -> bool:
        """Whether one of the scopes covers `needed`.

        "ingest" requires any ingest scope, "ingest:hopper" one whose pattern matches that dataset,
        "ingest:*" one for all datasets; the same for "play" and runs.
        """
        return any(_covers(scope, needed) for scope in self.scopes)

    def may_any(self, needed: Sequence[str]) -> bool:
        return any(self.may(one) for one in needed)


LOCAL = Principal("local", ("admin",))
OPERATOR = Principal("operator", ("admin",))


def _covers(scope: str, needed: str) -> bool:
    if scope in ("admin", needed):
        return True
    kind, _, name = needed.partition(":")
    granted, _, pattern = scope.partition(":")
    if kind not in PATTERNED or granted != kind:
        return False
    # No name contains "*", so the name "*" (all of them) is matched by "*" alone.
    return not pattern or not name or fnmatch.fnmatchcase(name, pattern)


@dataclass(frozen=True, slots=True)
class Access:
    """What the caller of a request may do to the objects of its route."""

    principal: Principal
    right: Right

    @property
    def who(self) -> str:
        return self.principal.who

    @property
    def every(self) -> bool:
        """Whether it may do this to every object."""
        return self.principal.may_any(("admin", *self.right.every))

    @property
    def reads(self) -> bool:
        """Whether it may read the names of everything, and so be told similar ones."""
        return self.principal.may_any(("admin", *READ))

    @property
    def creates(self) -> bool:
        """Whether it may create datasets."""
        return self.principal.may("ingest:*")

    def owns(self, owner: str) -> bool:
        """Whether it may do this to what `owner` made."""
        mine = owner == self.who and self.principal.may_any(self.right.own)
        return mine or self.every

    def require(self, owner: str, what: str) -> None:
        """Raise 403 `not_owner` unless it may do this to what `owner` made."""
        if self.owns(owner):
            return
        whose = "with another token" if owner else "before owners were kept"
        needed = ", ".join(dict.fromkeys((*self.right.every, "admin")))
        raise ProblemError(
            403,
            "not_owner",
            f"{what} was made {whose}; this takes the token of its owner, or one of the scopes"
            f" {needed}",
            expected=owner or needed,
            got=self.who,
        )

    def require_fit(self, dataset: str) -> None:
        """Raise 403 unless it may do this to what is in a dataset."""
        if self.every or self.principal.may(f"ingest:{dataset}"):
            return
        raise ProblemError(
            403,
            "forbidden",
            f"the token may not {self.right.method} what is in dataset {dataset!r}",
            expected=f"one of {', '.join((*self.right.every, f'ingest:{dataset}', 'admin'))}",
            got=", ".join(self.principal.scopes),
        )

    def mine(self, owner: sa.ColumnElement[str]) -> list[sa.ColumnElement[bool]]:
        """Conditions of a list: rows of this owner, unless it may read every one."""
        return [] if self.every else [owner == self.who]

    @property
    def patterns(self) -> list[str] | None:
        """Of names of datasets to which it may do this, with * for any characters; None: all."""
        if self.every or self.creates:
            return None
        granted = (scope.partition(":") for scope in self.principal.scopes)
        return [pattern for kind, _, pattern in granted if kind == "ingest"]


EVERYTHING = Access(LOCAL, Right("", ""))
"""Access of the service itself."""

# --- the documentation ----------------------------------------------------------------------------

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "reference" / "http.md"
BEGIN = "<!-- rights: made by `python -m server.rights --write` -->"
END = "<!-- end of rights -->"


def table() -> str:
    """The rights as a table in Markdown; `admin`, which may everything, stands only where alone."""
    lines = ["| request | to everything | to some | |", "|---|---|---|---|"]
    for right in RIGHTS:
        every = ", ".join(f"`{scope}`" for scope in right.every)
        some = [f"own: `{scope}`" for scope in right.own]
        some += [f"of datasets that fit: `{scope}:NAME`" for scope in right.fits]
        if not every and not some:
            every = "`admin` alone"
        lines.append(
            f"| `{right.method} {right.path}` | {every} | {', '.join(some)} | {right.note} |"
        )
    return "\n".join(lines)


def with_table(text: str) -> str:
    """A document with the table between its two marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        DOCUMENT.write_text(with_table(DOCUMENT.read_text()))
    else:
        print(table())
