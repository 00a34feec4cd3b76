"""`stepwell evaluate --policy RUN:all` and `--follow`: the score of every version of a run.

Versions that have a score with the same seeds and settings are not played again, so the command
can be stopped and repeated; videos that such a score lacks are made. Newer versions come first:
while a run trains, its state now matters more than its past.

The highest of many scores is partly luck. So at the end the three best of more versions play other
seeds, and these scores say which is best, and how good.
"""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.table import Table

from collector.config import EvaluateConfig, UsageError, parse_reference
from collector.envs import parse_pairs
from collector.evaluate import record_videos, run_evaluation
from stepwell.client import Client
from stepwell.errors import Busy, NotFound, ServiceUnreachable, Undelivered
from stepwell.messages import Evaluation
from stepwell.spaces import env_name

POLL = 1.0
"""Seconds between two looks for a new version."""
BEST = "best"
"""The alias that points to the best version."""
FINALISTS = 3
"""Versions that are scored again, on other seeds."""


def evaluate_versions(
    config: EvaluateConfig, console: Console, *, quiet: bool = False
) -> tuple[list[Evaluation], int, bool]:
    """Score the versions of the run, with --follow until it ends. Returns the scores by version,
    for the finalists those of other seeds; the best version; and whether episodes broke and were
    played again.

    Points the alias `best` to the version with the highest mean, at the end of the finalists, the
    newer one of two equal ones.
    Raises `NotFound` or `UsageError` if there is no policy, `Undelivered` like one evaluation.
    """
    run, _ = parse_reference(config.policy)
    best, shown, broken = -1, set[int](), False
    other = config.replace(seeds=config.seeds + config.episodes, videos=0)
    again: dict[int, Evaluation] = {}
    with Client(config.url, config.token) as client:
        while True:
            try:
                training, versions = _look(client, run, config.follow)
                if not (training or versions):
                    raise UsageError(
                        f"--policy: run {run} has no policy yet; --follow would wait for it"
                    )
                scores = _scores(client, config, run, versions)
                if training and scores and (found := _ranked(scores)[0]) != best:
                    best = found
                    client.set_alias(run, BEST, best)
                chosen = spaced(versions, config.every, ended=not training)
                pending = [version for version in chosen if version not in scores]
                if not pending and config.videos:
                    shown |= {
                        v
                        for v in chosen
                        if v not in shown and _has_videos(client, config, scores[v])
                    }
                unseen = [v for v in chosen if v not in pending and v not in shown]
                if pending:
                    broken |= _play(_one(config, run, pending[0]), console, quiet)
                elif unseen and config.videos:
                    version = unseen[0]
                    record_videos(_one(config, run, version), scores[version], console)
                elif not training:
                    finalists = _ranked(scores)[:FINALISTS] if len(scores) > FINALISTS else []
                    again = _scores(client, other, run, finalists) if finalists else {}
                    if missing := [version for version in finalists if version not in again]:
                        broken |= _play(_one(other, run, missing[0]), console, quiet)
                        continue
                    if scores:
                        client.set_alias(run, BEST, best := _ranked(again or scores)[0])
                    break
                else:
                    time.sleep(POLL)
            except (Busy, ServiceUnreachable):
                if not config.follow:
                    raise
                time.sleep(POLL)
    scores |= again
    return [scores[version] for version in sorted(scores)], best, broken


def _play(config: EvaluateConfig, console: Console, quiet: bool) -> bool:
    """Score one version. Returns whether episodes broke and were played again."""
    _, notes = run_evaluation(config, console, quiet=quiet)
    if undelivered := notes.get("undelivered"):
        raise Undelivered(undelivered)
    if said := notes.get("broken"):
        console.print(f"{config.policy}: {said}", highlight=False, markup=False)
    return bool(said)


def _ranked(scores: dict[int, Evaluation]) -> list[int]:
    """Versions, those with the highest mean first, of equal ones the newer."""
    return sorted(scores, key=lambda v: (scores[v].mean, v), reverse=True)


def _one(config: EvaluateConfig, run: str, version: int) -> EvaluateConfig:
    """The config that evaluates one version."""
    return config.replace(policy=f"{run}/{version}", follow=False, every=0)


def _has_videos(client: Client, config: EvaluateConfig, score: Evaluation) -> bool:
    have = {video.seed for video in client.videos(score.id)}
    return have.issuperset(score.seeds[: config.videos])


def _look(client: Client, run: str, follow: bool) -> tuple[bool, list[int]]:
    """Whether to wait for more versions, and the versions, newest first."""
    try:
        training = follow and client.run(run).status == "running"
        return training, sorted((p.version for p in client.policies(run)), reverse=True)
    except NotFound:
        if not follow:
            raise
        return True, []  # the run does not exist yet


def spaced(versions: list[int], every: int, *, ended: bool) -> list[int]:
    """Select versions, newest first, that are at least `every` updates apart, from the first one,
    and, if the run has ended, the last."""
    kept: list[int] = []
    for version in reversed(versions):
        if not kept or version - kept[-1] >= every:
            kept.append(version)
    if ended and versions and kept[-1] != versions[0]:
        kept.append(versions[0])
    return kept[::-1]


def _scores(
    client: Client, config: EvaluateConfig, run: str, versions: list[int]
) -> dict[int, Evaluation]:
    """The newest score of each version that was made with these settings."""
    wanted: dict[str, Any] = {
        "greedy": not config.sample,
        "env_args": parse_pairs(config.env_args, "--env-args"),
        "target_return": config.target_return,
    }
    seeds = list(range(config.seeds, config.seeds + config.episodes))
    found: dict[int, Evaluation] = {}
    names = {f"{run}/{version}": version for version in versions}
    for e in client.evaluations(env=env_name(config.env)):  # newest first
        same = e.seeds == seeds and {name: e.details.get(name) for name in wanted} == wanted
        if same and e.policy in names:
            found.setdefault(names[e.policy], e)
    return found


def table_of(scores: list[Evaluation], best: int, title: str) -> Table:
    """`best` is the best version."""
    table = Table(title=title)
    for name in ("version", "mean return", "interval", "IQM", "20th percentile", ""):
        table.add_column(name, justify="left" if name == "" else "right")
    for e in scores:
        version = e.policy.rpartition("/")[2]
        low = e.details.get("bottom_quintile")
        table.add_row(
            version,
            f"{e.mean:.2f}",
            f"{e.ci_low:.2f} … {e.ci_high:.2f}",
            f"{e.iqm:.2f}",
            "" if low is None else f"{low:.2f}",
            BEST if version == str(best) else "",
        )
    return table
