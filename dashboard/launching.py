"""What launchers can start, copies of earlier launches and runs, and expected times."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dashboard import api, programs
from dashboard.programs import Args, Setting
from stepwell._wording import duration
from stepwell.client import Client
from stepwell.errors import NotFound
from stepwell.messages import Program, Worker

RATE, TOTAL = "progress/updates_per_second", "progress/total"
RUNS = 5
"""Newest earlier runs whose median counts."""
TRAINED_SQL = """
SELECT name, host FROM runs
WHERE kind = 'train' AND json_extract_string(config, '$.recipe') = $recipe
ORDER BY created_at DESC LIMIT 50
"""
PLAYED_SQL = """
SELECT host, (finished_at - created_at) / (config ->> '$.episodes')::DOUBLE FROM runs
WHERE kind = $kind AND status = 'finished' AND config ->> '$.env' = $env
    AND (config ->> '$.episodes')::DOUBLE > 0
ORDER BY created_at DESC LIMIT 50
"""


@dataclass(frozen=True, slots=True)
class FoundProgram:
    """The program of the newest launcher that can start this role."""

    program: Program
    hosts: tuple[str, ...]
    """Machines of all launchers that can."""


@api.read(60)
def _program(launcher: str, started_at: float, role: str) -> Program | None:
    del started_at  # a launcher that was started again may have other settings
    try:
        return api.client().program(launcher, role)
    except NotFound:
        return None


def program(role: str) -> FoundProgram | None:
    """None if no launcher that runs can start the role."""
    able: list[tuple[Worker, Program]] = []
    for worker in api.workers():
        if worker.role == "launcher" and worker.alive:
            found = _program(worker.id, worker.started_at, role)
            if found is not None:
                able.append((worker, found))
    if not able:
        return None
    _, newest = max(able, key=lambda pair: pair[0].started_at)
    return FoundProgram(newest, tuple(sorted({worker.host for worker, _ in able})))


# --- copies ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Clone:
    """An earlier launch or run, to start again with other settings; or data to train on."""

    role: str
    recipe: str
    args: Callable[[Mapping[str, Setting]], Args]


ROLES = {"train": "train", "collect": "collect", "eval": "evaluate"}
"""Kind of a run -> role of its launch."""


OFFLINE = "offline"
"""The recipe that learns from data as they are."""


def selected(dataset: str, where: str = "") -> dict[str, str]:
    """The address of a form that trains on this selection of a dataset, or of a version."""
    # Not "where": Streamlit takes from the address what a widget of the last page has put there.
    return {"clone": f"dataset:{dataset}"} | ({"selection": where} if where else {})


def clone(reference: str, where: str = "") -> Clone | None:
    """Resolve "launch:ID", "run:NAME" or "dataset:NAME" (with a condition); None for others.
    Raises `NotFound`."""
    what, _, name = reference.partition(":")
    if what == "dataset":
        given: Args = {"dataset": name, **({"where": where} if where else {})}
        return Clone("train", OFFLINE, lambda _: given)
    if what == "launch":
        found = launch(name)
        # A name that the launcher made up is not given again; nor is the run's own.
        args = {key: value for key, value in found.args.items() if key != "run"}
        return Clone(found.role, found.recipe, lambda _: args)
    if what == "run":
        run = api.run(name)
        config = api.flatten(run.config)
        recipe = str(config.get("recipe", "")) if run.kind == "train" else ""
        return Clone(ROLES[run.kind], recipe, lambda s: programs.args_of_run(config, s))
    return None


launch = api.method(2, Client.launch)
launch_log = api.method(2, Client.launch_log)


# --- expected times -------------------------------------------------------------------------------


@api.read(30)
def _trained(recipe: str) -> list[tuple[str, float, float]]:
    """Host, updates per second and updates of earlier runs of a recipe, newest first."""
    listed = api.run_query(TRAINED_SQL, {"recipe": recipe}).rows
    hosts = {str(name): str(host) for name, host in listed}
    if not hosts:
        return []
    runs = api.client().runs_page(names=list(hosts), keys=[RATE, TOTAL], brief=True).items
    speeds = {run.name: (run.latest.get(RATE), run.latest.get(TOTAL)) for run in runs}
    return [
        (host, speeds[name][0], speeds[name][1])  # type: ignore[misc]
        for name, host in hosts.items()
        if name in speeds and speeds[name][0] and speeds[name][1]
    ]


@api.read(30)
def _played(kind: str, env: str) -> list[tuple[str, float]]:
    """Host and seconds per episode of earlier runs in an environment, newest first."""
    params = {"kind": kind, "env": env}
    rows = api.run_query(PLAYED_SQL, params).rows
    return [(str(host), float(seconds)) for host, seconds in rows]


def estimate(role: str, recipe: str, args: Mapping[str, Any], found: FoundProgram) -> str:
    """How long it will take, and from what that is known."""
    try:
        if role == "train":
            return _training(recipe, args, found)
        return _playing(role, args, found)
    except api.Unauthorized:
        return "Time: unknown, because your token may not read earlier runs by SQL."


def _training(recipe: str, args: Mapping[str, Any], found: FoundProgram) -> str:
    earlier, where = _on_these(_trained(recipe), found.hosts)
    described = found.program.recipes.get(recipe)
    asked = args.get("updates")
    if not asked and described is not None and described.values.get("derive", "off") == "off":
        asked = described.values.get("updates")  # as the form shows it; else the data decide
    if earlier:
        speed = statistics.median(rate for _, rate, _ in earlier)
        updates = float(asked or statistics.median(total for _, _, total in earlier))
        known = f"the median of {_runs(len(earlier))} of `{recipe}` on {where}"
        known += "" if asked else "; this recipe derives their number from the data"
    elif described is not None and described.updates_per_second:
        speed, updates = described.updates_per_second, float(asked or described.updates or 0)
        known = (
            "one thread of the machine of docs/reference/training.md, as no run of this recipe has "
            "been measured here"
        )
    else:
        return "Time: not known before the first run of this recipe."
    work = f"{updates:,.0f} updates at {speed:,.3g}/s"
    return f"About **{duration(updates / speed)}**: {work}, {known}."


def _playing(role: str, args: Mapping[str, Any], found: FoundProgram) -> str:
    env, episodes = str(args.get("env", "")), args.get("episodes")
    if episodes is None and role == "evaluate":
        episodes = found.program.settings["episodes"].get("default")
    if not episodes or not isinstance(episodes, int | float):
        return "Time: until it is stopped, as the number of episodes is not limited."
    kind = "eval" if role == "evaluate" else "collect"
    earlier, where = _on_these(_played(kind, env), found.hosts) if env else ([], "")
    if not earlier:
        return f"Time: not known before the first run that ends in {env or 'its environment'}."
    each = statistics.median(seconds for _, seconds in earlier)
    known = f"the median of {_runs(len(earlier))} in `{env}` on {where}, start included"
    return f"About **{duration(each * episodes)}**: {episodes:,} episodes at {each:.3g} s, {known}."


def _on_these(rows: list[Any], hosts: tuple[str, ...]) -> tuple[list[Any], str]:
    """The newest rows of machines with a launcher, else of any; and the names of the machines."""
    own = [row for row in rows if row[0] in hosts]
    chosen = (own or rows)[:RUNS]
    names = ", ".join(sorted({row[0] or "an unknown machine" for row in chosen}))
    return chosen, names if own else f"{names}, which has no launcher"


def _runs(number: int) -> str:
    return "one earlier run" if number == 1 else f"the last {number} runs"
