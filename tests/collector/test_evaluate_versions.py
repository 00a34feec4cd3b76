"""Which version of a run is the best: the highest score of many is partly luck."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from collector import evaluate_versions as module
from collector.config import EvaluateConfig
from collector.evaluate_versions import evaluate_versions, table_of
from stepwell import Client

LUCK = {0: 10.0, 100: 90.0, 200: 80.0, 300: 85.0}
"""Means over the first seeds, by version."""
FRESH = {100: 40.0, 200: 80.0, 300: 60.0}
"""Means of the three best over other seeds."""


@pytest.fixture
def played(client: Client, name: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(version, first seed) of each evaluation; it stores the means above."""
    client.create_run(name, "train")
    for version in LUCK:
        client.publish_policy(name, version, b"weights", step=version)
    client.patch_run(name, status="finished")
    found: list[tuple[int, int]] = []

    def run_evaluation(config: EvaluateConfig, *_: Any, **__: Any) -> tuple[None, dict[str, Any]]:
        version = int(config.policy.rpartition("/")[2])
        found.append((version, config.seeds))
        mean = (LUCK if config.seeds == 0 else FRESH)[version]
        scores = {"mean": mean, "iqm": mean, "ci_low": mean, "ci_high": mean}
        details = {"greedy": not config.sample, "env_args": {}, "target_return": None}
        client.create_evaluation(
            policy=config.policy,
            env=config.env,
            seeds=[*range(config.seeds, config.seeds + config.episodes)],
            returns=[mean] * config.episodes,
            details=details,
            **scores,
        )
        return None, {}

    monkeypatch.setattr(module, "run_evaluation", run_evaluation)
    return found


def test_the_best_is_chosen_by_other_seeds(
    client: Client, name: str, played: list[tuple[int, int]]
) -> None:
    config = EvaluateConfig(
        env="Made-v0", policy=f"{name}:all", episodes=2, seeds=0, url=client.url
    )
    scores, best, broken = evaluate_versions(config, Console(quiet=True))
    assert sorted(played[:4]) == [(version, 0) for version in LUCK]
    assert sorted(played[4:]) == [(version, 2) for version in FRESH]
    assert best == 200 and not broken
    assert {p.version for p in client.policies(name) if "best" in p.aliases} == {200}
    assert [e.mean for e in scores] == [LUCK[0], FRESH[100], FRESH[200], FRESH[300]]
    table = table_of(scores, best, "")
    assert [*table.columns[-1].cells] == ["", "", "best", ""]
    played.clear()
    assert evaluate_versions(config, Console(quiet=True))[1] == 200
    assert played == []  # nothing is played again
