"""The doctor finds what is planted, where it is planted, and is silent on clean data."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pytest

from stepwell import Box, Client, EnvSpec
from stepwell.cli import main
from stepwell.doctor import CHECKS, SEVERITIES, Report, diagnose
from stepwell.errors import NotFound
from tests.stepwell.doctor_corpus import CLEAN, PLANTS, Episode, Plant, make

pytestmark = pytest.mark.timeout(600)


def store(client: Client, name: str, spec: EnvSpec, episodes: list[Episode]) -> list[str]:
    """The ids of the episodes, in order."""
    client.create_dataset(name, spec)
    for episode in episodes:
        client.add(name, **episode)
    client.flush(name)
    rows = client.sql("select id from trajectories where dataset = ? order by seq", [name]).rows
    return [str(row[0]) for row in rows]


def loud(report: Report) -> dict[str, str]:
    return {f.kind: str(f) for f in report.findings if f.severity != "note"}


@pytest.mark.parametrize("base", CLEAN)
def test_clean_data_have_no_warning(client: Client, name: str, base: str) -> None:
    for seed in (0, 1):
        store(client, f"{name}-{seed}", CLEAN[base][1], make(base, seed))
        report = diagnose(client, f"{name}-{seed}")
        assert report.failed == {}
        assert loud(report) == {}


@pytest.mark.parametrize("plant", PLANTS, ids=lambda p: f"{p.kind}-{p.base}-{p.where}")
def test_a_planted_defect_is_found(client: Client, name: str, plant: Plant) -> None:
    episodes = make(plant.base)
    wrong = plant.change(episodes)
    ids = store(client, name, CLEAN[plant.base][1], episodes)
    only = tuple(check for check in CHECKS if check.kind == plant.kind)
    report = diagnose(client, name, checks=only)
    assert report.failed == {}
    (finding,) = report.findings
    if wrong is None:
        assert finding.trajectories == 0
    else:
        rows = client.sql(finding.sql, dataset=name, limit=10_000).rows
        assert {str(row[0]) for row in rows} == {ids[i] for i in wrong}
        assert finding.trajectories == len(wrong)


def test_there_are_enough_plants_and_every_check_that_can_be_fooled_has_one() -> None:
    assert len(PLANTS) >= 40
    planted = {plant.kind for plant in PLANTS}
    # These need infos, or values that a service refuses, or are said about clean data.
    assert {check.kind for check in CHECKS} - planted == {
        *("nan_info", "action_outside", "saturated", "return_outlier")
    }


def test_the_docs_list_all_checks_and_plants() -> None:
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    for check in CHECKS:
        said = check.says.format(n="trajectories", what="…")
        assert f"| `{check.kind}` | {check.severity} | {said} |" in page
    for plant in PLANTS:
        assert f"| `{plant.kind}` | {plant.base} | {plant.where} |" in page


def test_a_repair_works_as_it_is_written(client: Client, service, name: str, capsys) -> None:
    episodes = make("pendulum")
    next(p for p in PLANTS if p.kind == "duplicate").change(episodes)
    store(client, name, CLEAN["pendulum"][1], episodes)
    (finding,) = [f for f in diagnose(client, name).findings if f.kind == "duplicate"]
    label, train = shlex.split(finding.repair.replace("\n", " ")), finding.repair.split("--where")
    words = shlex.split(finding.repair)
    split = words.index("stepwell", 1)
    assert main([*words[1:split], "--url", service.url]) == 0
    where = words[words.index("--where", split) + 1]
    assert client.create_snapshot(dataset=name, where=where).trajectories == len(episodes) - 5
    assert label and len(train) == 3


def test_infos_that_are_not_finite_are_noted(client: Client, name: str) -> None:
    spec = EnvSpec.of(Box((1,)), Box((1,)), infos={"x": Box((2,))})
    info = np.zeros((4, 2), np.float32)
    info[2, 1] = np.nan
    client.create_dataset(name, spec)
    client.add(
        name, obs=np.arange(4, dtype=np.float32)[:, None], actions=np.ones((3, 1), np.float32),
        rewards=np.ones(3, np.float32), terminated=True, infos={"x": info},
    )  # fmt: skip
    found = {f.kind: f for f in diagnose(client, name).findings}
    assert found["nan_info"].message.endswith("(step 2)")


def test_of_very_large_data_a_part_is_read(client: Client, name: str) -> None:
    store(client, name, CLEAN["pendulum"][1], make("pendulum"))
    report = diagnose(client, name, most_steps=400)
    assert report.one_in == 4 and report.steps == 1600
    assert report.failed == {} and loud(report) == {}


def test_the_command_names_what_it_finds(client: Client, service, name: str, capsys) -> None:
    episodes = make("lander")
    next(p for p in PLANTS if p.kind == "open_end").change(episodes)
    store(client, name, CLEAN["lander"][1], episodes)
    assert main(["doctor", name, "--url", service.url, "--severity", "warning"]) == 1
    said = capsys.readouterr().out
    assert "warning" in said and "open_end" in said and "stepwell trajectories label" in said
    assert main(["doctor", name, "--url", service.url, "--severity", "error"]) == 0
    assert "nothing" in capsys.readouterr().out
    assert main(["doctor", "nobody", "--url", service.url]) == 1
    with pytest.raises(NotFound):
        diagnose(client, "nobody")
    assert SEVERITIES[0] == "error"
