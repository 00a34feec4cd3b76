"""Everything the pages read or change, through `stepwell.Client`, which only this file and
launching.py import. Leaderboards are in ranking.py.

Reads are cached for a few seconds, by address, token and arguments, for all browsers together. A
page acts with the token that was given in its browser session, else with the one that the dashboard
was started with. Writes go through `client()` inside `components.attempt`, which clears the cache.
"""

from __future__ import annotations

import functools
import io
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import pandas as pd
import pyarrow.ipc
import pyarrow.parquet
import streamlit as st
from streamlit.runtime.scriptrunner import add_script_run_ctx, get_script_run_ctx

from dashboard.frames import gif
from stepwell import Client
from stepwell._settings import flatten
from stepwell.errors import ServiceError, ServiceUnreachable, StepwellError, Unauthorized
from stepwell.messages import (
    AuditEntry,
    Evaluation,
    Excluded,
    Job,
    Launch,
    Page,
    Run,
    RunPage,
    Version,
)
from stepwell.spaces import Box, Discrete, EnvSpec
from stepwell.sql_result import SqlResult
from stepwell.trajectory import Trajectory
from stepwell.version_card import card as version_card
from workbench.analysis import doctor
from workbench.analysis.comparison import (
    NAMES_SQL,
    TABLE_SQL,
    CurvePoint,
    Row,
    curves,
    read_comparison,
    read_data_row,
    recipe_of,
    recipe_rows,
)
from workbench.analysis.confidence_intervals import bootstrap_mean_curve
from workbench.analysis.doctor import Repair, Report
from workbench.analysis.leaderboard import NAMES, run_of
from workbench.analysis.lineage import Lineage, read_lineage
from workbench.analysis.published_scores import published_scores

__all__ = [
    "ServiceError", "ServiceUnreachable", "StepwellError", "Unauthorized",
    "bootstrap_mean_curve", "flatten", "version_card",
]  # fmt: skip

P = ParamSpec("P")
R = TypeVar("R")

TOKEN = "_token"
DEFAULT_URL = "http://127.0.0.1:8000"
ANSWER_SECONDS = 15.0
"""Request timeout, longer than the slowest request of a page."""
AWAY_SECONDS = 1.0
"""After an unanswered read, all other reads fail at once for this long: sessions read one after
another, and each would wait for a failure of its own."""
SQL_SECONDS = 5.0
"""Timeout of a page's query."""
CONSOLE_SECONDS = 10.0
"""Default timeout of a query that somebody wrote: a long one to the service, for which pages do not
wait (docs/reference/sql.md)."""
MOST_ROWS = 1_000_000
"""Maximum number of rows in a file with the whole answer."""
QUERIES_AT_ONCE = 3
"""Queries at once of all browsers with one token, and as many long ones, which people write. The
service counts these as two callers, and refuses the fifth query of each."""
PAGE = 100
"""Number of rows per page of a long list."""
VALUES_SQL = """
SELECT name, step, q, v, advantage, weight FROM annotations
WHERE trajectory = $trajectory ORDER BY name, step
"""
ESTIMATES = 500
"""Versions of a run whose estimates are shown, at most."""


def address() -> str:
    return os.environ.get("STEPWELL_URL", DEFAULT_URL)


def token() -> str | None:
    """Return the token of this browser session, if it has one, else that of the dashboard."""
    own: str | None = st.session_state.get(TOKEN)
    return own or os.environ.get("STEPWELL_TOKEN")


def log_in(given: str) -> None:
    """Use a token in this browser session. Raises `Unauthorized` if it is not valid."""
    _client(address(), given).datasets()
    st.session_state[TOKEN] = given


def log_out() -> None:
    st.session_state.pop(TOKEN, None)


@st.cache_resource(show_spinner=False, on_release=Client.close, max_entries=100)
def _client(url: str, token: str | None) -> Client:
    # A page that waits ten seconds for an unavailable service would appear broken.
    return Client(url, token, timeout=ANSWER_SECONDS, retry_for=0.5)


def client() -> Client:
    return _client(address(), token())


def read(seconds: float, entries: int = 200) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Cache the newest `entries` answers of a read for `seconds`. Address and token are part of the
    key, so nobody sees what another token may read; failures are never cached."""

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        def answer(at: tuple[str, str | None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
            failed, message = _failures.get(at[0], (-math.inf, ""))
            if time.monotonic() < failed + AWAY_SECONDS:
                raise ServiceUnreachable(message)
            try:
                return function(*args, **kwargs)
            except ServiceUnreachable as error:
                _failures[at[0]] = (time.monotonic(), str(error))
                raise

        # Streamlit identifies cached functions by name, so each needs a distinct name.
        answer.__qualname__ = f"read.{function.__qualname__}"
        cached = st.cache_data(ttl=seconds, max_entries=entries, show_spinner=False)(answer)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return cached((address(), token()), args, kwargs)

        return call

    return wrap


_failures: dict[str, tuple[float, str]] = {}
"""By address: when it last did not answer, and what was said."""


def refresh() -> None:
    """Clear all cached reads."""
    st.cache_data.clear()
    _failures.clear()


def prefetch(*reads: Callable[[], object]) -> None:
    """Make reads at the same time, before a page draws anything: its parts find them in the cache.

    Pages that drew between their reads waited longer for each, because the browser uses the same
    processors. A read that fails is made again by the part that needs it, which shows the error.
    """
    context = get_script_run_ctx()
    failed = threading.Event()

    def attempt(read_one: Callable[[], object]) -> None:
        if failed.is_set():  # each would wait for a failure of its own
            return
        try:
            read_one()
        except StepwellError as error:
            if isinstance(error, ServiceUnreachable) or getattr(error, "status", 0) == 401:
                failed.set()

    def join_session() -> None:
        add_script_run_ctx(threading.current_thread(), context)

    with ThreadPoolExecutor(QUERIES_AT_ONCE, initializer=join_session) as pool:
        for done in [pool.submit(attempt, one) for one in reads]:
            done.result()


# --- reads -------------------------------------------------------------------------------------


def method(
    seconds: float, of_client: Callable[Concatenate[Client, P], R], entries: int = 200
) -> Callable[P, R]:
    """A cached read that calls one method of the client."""

    @read(seconds, entries)
    @functools.wraps(of_client)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return of_client(client(), *args, **kwargs)

    return call


health = method(2, Client.health)
datasets = method(3, Client.datasets)
job = method(0.3, Client.job)
run = method(3, Client.run)
run_log = method(3, Client.run_log)
policies = method(3, Client.policies)
workers = method(2, Client.workers)
snapshots = method(5, Client.snapshots)
versions = method(3, Client.versions)
diff_versions = method(60, Client.diff_versions)
trajectory = method(3, Client.trajectory)
steps = method(60, Client.steps)
"""A whole trajectory; it never changes, only its labels do."""
query_schema = method(60, Client.query_schema)
saved_queries = method(3, Client.saved_queries)
tokens = method(3, Client.tokens)
annotations_of = method(10, Client.annotations)
videos = method(3, Client.videos)
video = method(60, Client.video, entries=8)
"""The bytes of a video, which may be many megabytes."""


def is_ready() -> bool:
    """Whether the service answers and is ready; never cached. If it is, reads ask it again."""
    ready = client().ready()
    if ready:
        _failures.clear()
    return ready


@read(3)
def runs(**filters: Any) -> RunPage:
    """One page, newest first, and the number of matches. `filters`: those of `Client.runs_page`; ""
    for no filter."""
    given = {"brief": True, "limit": PAGE} | {k: v for k, v in filters.items() if v != ""}
    return client().runs_page(**given)


def chosen_runs(names: Sequence[str]) -> list[Run]:
    """Return existing runs with config and newest metrics, in the order of `names`. A run that has
    ended is not read again."""
    if not names:
        return []
    listed = _named(tuple(names))
    ended = tuple((r.name, r.heartbeat_at) for r in listed if not r.alive)
    live = tuple(r.name for r in listed if r.alive)
    found = {r.name: r for r in [*_ended(ended), *_live(live)]}
    return [found[name] for name in dict.fromkeys(names) if name in found]


@read(3)
def _named(names: tuple[str, ...]) -> list[Run]:
    return client().runs_page(names=names, brief=True).items


def known_runs(names: Iterable[str | None]) -> dict[str, Run]:
    """Name → run, without config and metrics, of those that exist; any number of names."""
    wanted = sorted({name for name in names if name})
    parts = [tuple(wanted[start : start + PAGE]) for start in range(0, len(wanted), PAGE)]
    return {run.name: run for part in parts for run in _named(part)}


def label(name: str, known: Mapping[str, Run]) -> str:
    """A run, or a policy RUN/VERSION, with the title of the run if it has one."""
    run = known.get(run_of(name))
    return f"{run.title} ({name})" if run is not None and run.title else name


@read(600, entries=50)
def _ended(heard: tuple[tuple[str, float], ...]) -> list[Run]:
    """Runs by name and last heartbeat: a run that was resumed or changed is read again."""
    return client().runs_page(names=[name for name, _ in heard]).items if heard else []


@read(3)
def _live(names: tuple[str, ...]) -> list[Run]:
    return client().runs_page(names=names).items if names else []


@read(60)
def configs(names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Name → its config, with one key per setting, such as "agent.gamma"."""
    # No metric has an empty key, so none is read.
    found = client().runs_page(names=names, keys=[""]).items if names else []
    return {run.name: flatten(run.config) for run in found}


SEED_NAMES = frozenset(NAMES)
"""Settings in which training seeds of one experiment may differ."""


@read(60)
def trend(name: str, key: str, last_step: int) -> list[float]:
    """A few values of one metric. `last_step` changes the cache key when a point is added."""
    del last_step
    found = client().metrics(name, (key,) if "," not in key else None, 40).get(key)
    return [v for v in found.values if v is not None] if found else []


@read(3)
def estimates(name: str) -> dict[int, tuple[float, ...]]:
    """Version -> (estimate, lower and upper bound of its interval), by `stepwell estimate`."""
    keys = [f"estimate/{what}" for what in ("return", "low", "high")]
    found = client().metrics(name, keys, ESTIMATES)
    columns = [dict(zip(s.steps, s.values, strict=True)) for s in found.values()]
    if len(columns) < len(keys):
        return {}
    rows = {version: [column.get(version) for column in columns] for version in columns[0]}
    return {v: tuple(x for x in row if x is not None) for v, row in rows.items() if None not in row}


@read(3)
def evaluations() -> list[Evaluation]:
    """All evaluations, newest first; the page ranks them."""
    return client().items(Evaluation, "/v1/evaluations", limit=1000)


def diagnose(dataset: str, progress: Callable[[int, int, str], object]) -> Report:
    """All checks of the doctor; never cached, as it is asked for by a button."""
    return doctor.diagnose(client(), dataset, progress=progress)


def plan_repair(report: Report, kinds: list[str]) -> Repair:
    """What a version without the trajectories of these findings would be."""
    return doctor.plan_repair(client(), report, kinds=kinds)


def make_version(repair: Repair, name: str) -> Version:
    return doctor.make_version(client(), repair, name)


@read(10)
def lineage() -> Lineage:
    return read_lineage(client())


@read(3)
def comparisons() -> list[str]:
    """Names of all comparisons, newest first."""
    found = run_query(NAMES_SQL, limit=1000)
    return [name for (name,) in found.rows]


@dataclass(slots=True)
class ComparisonTable:
    """What the evaluation page shows of a comparison."""

    rows: list[Row]
    """Recipes by descending mean, then random actions and the dataset's mean."""
    curves: list[CurvePoint]
    numbers: dict[str, int]
    """Recipe → the number of its oldest run."""
    reference: str | None
    """What normalises the scores."""
    published: dict[str, float]
    """CORL's normalised scores, if the dataset is one of D4RL's by name."""
    sql: str
    """The query of the recipes' means."""


@read(3)
def comparison(name: str) -> ComparisonTable:
    found = read_comparison(client(), name)
    rows = sorted(
        recipe_rows(found),
        key=lambda row: (row.recipe == "random", np.inf if row.mean is None else -row.mean),
    )
    if found.dataset:
        rows.append(read_data_row(client(), found))
    sql = TABLE_SQL.replace("NAME", name.replace("'", "''"), 1)
    published = published_scores(found.dataset)
    numbers = {recipe_of(run): run.number for run in reversed(found.runs)}
    return ComparisonTable(rows, curves(found), numbers, found.reference, published, sql)


@read(60, entries=8)
def film(trajectory_id: str, key: str) -> bytes:
    """The frames of one image observation as a GIF."""
    return gif(steps(trajectory_id).obs[key])


def _page(page: Any, path: str, **params: Any) -> tuple[list[Any], str | None]:
    """One page of a list, newest first, and the cursor of the next one."""
    found = client().ask(page, "GET", path, params={"limit": PAGE, **params})
    return found.items, found.next  # a Page[…] cannot be pickled for the cache


@read(2)
def launches(cursor: str | None = None) -> tuple[list[Launch], str | None]:
    return _page(Page[Launch], "/v1/launches", cursor=cursor)


@read(2)
def audit(cursor: str | None = None) -> tuple[list[AuditEntry], str | None]:
    return _page(Page[AuditEntry], "/v1/audit", cursor=cursor)


@read(2)
def open_launches() -> list[Launch]:
    """All launches that have not ended, from all pages of the list."""
    states = ("queued", "claimed", "running")
    lists = [client().items(Launch, "/v1/launches", state=s, limit=1000) for s in states]
    return [launch for found in lists for launch in found]


@read(2)
def jobs(cursor: str | None = None, state: str | None = None) -> tuple[list[Job], str | None]:
    return _page(Page[Job], "/v1/jobs", cursor=cursor, state=state)


def open_jobs() -> list[Job]:
    """The newest jobs that have not ended."""
    return [job for state in ("queued", "running") for job in jobs(state=state)[0]]


# --- queries ------------------------------------------------------------------------------------


@functools.cache
def _places(_address: str, _token: str | None, _long: bool) -> threading.BoundedSemaphore:
    return threading.BoundedSemaphore(QUERIES_AT_ONCE)


def run_query(
    query: str,
    params: Mapping[str, Any] | None = None,
    *,
    dataset: str | None = None,
    limit: int = 1000,
    timeout: float | None = None,
) -> SqlResult:
    """`Client.sql`, when it is this query's turn. Not cached. `timeout`: seconds; None for those of
    a page."""
    seconds = timeout or SQL_SECONDS
    places = _places(address(), token(), seconds > SQL_SECONDS)
    waited = places.acquire(timeout=ANSWER_SECONDS)
    try:
        return client().sql(query, params, dataset=dataset, limit=limit, timeout=seconds)
    finally:
        if waited:
            places.release()


@dataclass(slots=True)
class Answer:
    """A query's result."""

    frame: pd.DataFrame
    truncated: bool
    """Whether the query has more rows."""
    elapsed_ms: float
    excluded: list[Excluded]
    """Damaged files whose rows are missing."""


@read(3)
def sql(
    query: str,
    params: dict[str, Any] | None = None,
    *,
    dataset: str | None = None,
    limit: int = 1000,
    timeout: float | None = None,
) -> Answer:
    result = run_query(query, params, dataset=dataset, limit=limit, timeout=timeout)
    frame = _plain(result.to_pandas())
    return Answer(frame, result.truncated, result.elapsed_ms, result.excluded)


@read(20)
def values_of_steps(trajectory: str) -> dict[str, pd.DataFrame]:
    """The annotations of a trajectory: name → step, q, v, advantage, weight."""
    frame = sql(VALUES_SQL, {"trajectory": trajectory}, limit=MOST_ROWS).frame
    return {str(name): part.reset_index(drop=True) for name, part in frame.groupby("name")}


def whole_answer(query: str, params: dict[str, Any], dataset: str | None, suffix: str) -> bytes:
    """All rows of a query, up to MOST_ROWS, as a file: csv, parquet or arrow."""
    result = run_query(query, params or None, dataset=dataset, limit=MOST_ROWS, timeout=60.0)
    if suffix == "csv":
        return bytes(result.to_pandas().to_csv(index=False).encode())
    buffer, table = io.BytesIO(), result.to_arrow()
    if suffix == "parquet":
        pyarrow.parquet.write_table(table, buffer)
    else:
        with pyarrow.ipc.new_file(buffer, table.schema) as writer:
            writer.write_table(table)
    return buffer.getvalue()


def _plain(frame: pd.DataFrame) -> pd.DataFrame:
    """Convert decimals (such as DuckDB's sums of integers) to numbers for charts and tables."""
    for column in (c for c in frame.columns if pd.api.types.is_object_dtype(frame[c])):
        present = frame[column].dropna()
        if len(present) and isinstance(present.iloc[0], Decimal):
            frame[column] = pd.to_numeric(frame[column])
    return frame


# --- writes ------------------------------------------------------------------------------------


def tag_runs(names: Sequence[str], add: Sequence[str], remove: Sequence[str]) -> None:
    """Add and remove tags of each run; stops at the first error."""
    for name in names:
        tags = client().run(name).tags
        changed = [tag for tag in dict.fromkeys([*tags, *add]) if tag not in remove]
        if changed != tags:
            client().patch_run(name, tags=changed)


def npz(trajectory: Trajectory) -> bytes:
    """The arrays of a trajectory as an .npz file: obs.<key>, action.<key>, rewards, ends."""
    arrays: dict[str, Any] = {f"obs.{k}": v for k, v in trajectory.obs.items()}
    arrays |= {f"action.{k}": v for k, v in trajectory.actions.items()}
    arrays["rewards"] = trajectory.rewards
    arrays["terminated"] = np.asarray(trajectory.terminated)
    arrays["truncated"] = np.asarray(trajectory.truncated)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def vector_spec(width: int, kind: str, size: int, bound: float, env: str) -> EnvSpec:
    """The spec of the most common case: one observation vector, and as action either a vector
    within ±bound or a discrete choice."""
    action = Discrete(size) if kind == "discrete" else Box((size,), low=-bound, high=bound)
    return EnvSpec.of(Box((width,)), action, env=env)
