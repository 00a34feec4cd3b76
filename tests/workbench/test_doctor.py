"""The doctor finds what is planted, where it is planted, and is silent on clean data."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

import numpy as np
import pytest

from collector.builtin.__main__ import KINDS
from collector.builtin.generate import generate
from stepwell import Box, Client, Discrete, EnvSpec, Trajectory
from stepwell.cli import main
from stepwell.errors import BadRequest, InvalidData, NotFound
from tests.workbench.doctor_clean import CLEAN, EPISODES, TRAINING, Episode, make
from tests.workbench.doctor_corpus import PLANTS, Plant
from workbench.analysis.doctor import CHECKS, SEVERITIES, Report, diagnose, plan_repair
from workbench.analysis.doctor.asking import ask, ask_all
from workbench.analysis.doctor.check import MOST_NUMBERS, Check, Subject

pytestmark = pytest.mark.timeout(600)


def store(client: Client, name: str, spec: EnvSpec, episodes: list[Episode]) -> list[str]:
    """The ids of the episodes, in order."""
    client.create_dataset(name, spec)
    client.post(name, [Trajectory.from_arrays(spec=spec, **episode) for episode in episodes])
    client.flush(name)
    rows = client.sql("select id from trajectories where dataset = ? order by seq", [name]).rows
    return [str(row[0]) for row in rows]


def checks_of(*kinds: str) -> tuple[Check, ...]:
    return tuple(check for check in CHECKS if check.kind in kinds)


def plant(client: Client, name: str, base: str, *kinds: str) -> tuple[list[str], list[int]]:
    """Store a clean dataset with the first planted defect of each kind; the ids of its episodes,
    and which of them are wrong."""
    episodes, wrong = make(base), []
    for kind in kinds:
        wrong += next(p for p in PLANTS if (p.kind, p.base) == (kind, base)).change(episodes) or []
    return store(client, name, CLEAN[base][1], episodes), wrong


def loud(report: Report) -> dict[str, str]:
    return {f.kind: str(f) for f in report.findings if f.severity != "note"}


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("base", CLEAN)
def test_clean_data_have_no_warning(client: Client, name: str, base: str, seed: int) -> None:
    store(client, name, CLEAN[base][1], make(base, seed))
    report = diagnose(client, name)
    assert report.failed == {} and loud(report) == {}


GENERATED = {
    "cliff-walking-noisy": {"episodes": 60},
    "gridworld-random": {"episodes": 150},
    "find-block-noisy": {"episodes": 150},
    "mountaincar-noisy": {"episodes": 60},
    "maze2d-sparse": {"steps": 40_000},
    "maze2d-medium": {"steps": 12_000},
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", GENERATED)
def test_data_of_our_own_generators_have_no_warning(
    client: Client, service, name: str, tmp_path: Path, kind: str
) -> None:
    if kind.startswith("maze2d"):
        pytest.importorskip("gymnasium_robotics")
    path = tmp_path / "made.hdf5"
    generate(KINDS[kind], path, seed=0, **{"steps": None, **GENERATED[kind]})
    words = ["--dataset", name, "--env", "Made-v0", "--url", service.url]
    assert main(["import", str(path), *words]) == 0
    report = diagnose(client, name)
    # A maze with few successes may have episodes without any.
    true = {"zero_rewards"} if kind == "maze2d-sparse" else set()
    assert report.failed == {} and loud(report).keys() <= true


@pytest.mark.sample(24)
@pytest.mark.parametrize("plant", PLANTS, ids=lambda p: f"{p.kind}-{p.base}-{p.where}")
def test_a_planted_defect_is_found(client: Client, name: str, plant: Plant) -> None:
    episodes = make(plant.base)
    wrong = plant.change(episodes)
    ids = store(client, name, CLEAN[plant.base][1], episodes)
    report = diagnose(client, name, checks=checks_of(plant.kind))
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
        *("nan_info", "action_outside", "saturated", "return_outlier"),
        *("broken", "observation_outside"),  # tests/collector/test_broken_environments.py
    }


def test_the_docs_list_all_checks_and_plants() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "doctor.md").read_text()
    for check in CHECKS:
        said = check.says.format(n="trajectories", what="…")
        assert f"| `{check.kind}` | {check.severity} | {said} |" in page
    for plant in PLANTS:
        assert f"| `{plant.kind}` | {plant.base} | {plant.where} |" in page


def test_a_repair_works_as_it_is_written(client: Client, service, name: str, capsys) -> None:
    plant(client, name, "pendulum", "duplicate")
    (finding,) = diagnose(client, name, checks=checks_of("duplicate")).findings
    doctor, train = (shlex.split(line) for line in finding.repair.splitlines())
    assert main([*doctor[1:], "--url", service.url]) == 0
    assert "left out: 1 trajectories\n  duplicate: 1" in capsys.readouterr().out
    version = client.version(train[-1])
    assert version.statistics.trajectories == TRAINING - 1
    assert "duplicate 1" in version.description and not version.include_eval


def test_a_repaired_version_has_no_finding_and_can_itself_be_repaired(
    client: Client, service, name: str, capsys
) -> None:
    ids, wrong = plant(client, name, "pendulum", "teleport", "early_truncation")
    url = ("--url", service.url)
    assert main(["doctor", name, "--repair", "a", "--findings", "teleport,overlap", *url]) == 0
    both = ("--findings", "teleport,early_truncation")
    assert main(["doctor", f"{name}@a", "--severity", "warning", *both, *url]) == 1
    said = capsys.readouterr().out
    assert "early_truncation" in said and "teleport" not in said.split(f"{name}@a", 2)[-1]
    assert main(["doctor", f"{name}@a", "--repair", "b", *url]) == 0
    assert main(["doctor", f"{name}@b", "--severity", "warning", *both, *url]) == 0
    version = client.version(f"{name}@b")
    assert version.parent == f"{name}@a" and "teleport" not in version.description
    kept = {str(row[0]) for row in client.sql(version.select, dataset=name, limit=1000).rows}
    assert kept == set(ids[-TRAINING:]) - {ids[i] for i in wrong}


def test_what_leaving_out_cannot_repair_is_said(client: Client, service, name: str, capsys) -> None:
    plant(client, name, "pendulum", "last_is_zero")
    only = checks_of("last_is_zero", "duplicate")
    (finding,) = diagnose(client, name, checks=only).findings
    assert finding.wholesale and not finding.leave_out
    assert f"(nearly) all trajectories ({EPISODES})" in finding.message
    command = ["doctor", name, "--repair", "clean", "--url", service.url]
    assert main([*command, "--findings", "last_is_zero"]) == 2
    said = capsys.readouterr().err
    assert "can be left out" in said and "deletion cannot fix this" in said
    assert client.versions(name) == []


def test_an_empty_version_is_refused(client: Client, service, name: str, capsys) -> None:
    spec = EnvSpec.of(Box((1,)), Box((1,)))
    episode = dict(obs=np.ones((3, 1), np.float32), actions=np.ones((2, 1), np.float32))
    store(client, name, spec, [episode | {"rewards": np.ones(2, np.float32)}] * 2)
    command = ["doctor", name, "--repair", "clean", "--findings", "open_end"]
    assert main([*command, "--url", service.url]) == 2
    assert f"nothing of {name} would be left" in capsys.readouterr().err
    report = diagnose(client, name, checks=())
    with pytest.raises(InvalidData, match="no such finding: typo"):
        plan_repair(client, report, kinds=["typo"])
    assert client.versions(name) == []


@pytest.mark.parametrize("kind", ["teleport", "duplicate"])
def test_a_plan_names_the_trajectories_of_the_finding(client: Client, name: str, kind: str) -> None:
    ids, (wrong,) = plant(client, name, "pendulum", kind)
    plan = plan_repair(client, diagnose(client, name, checks=checks_of(kind)))
    assert (plan.count, plan.left_out) == (1, {kind: 1})
    (row,) = client.sql(
        f"select id from trajectories where dataset = ? and not ({plan.where})", [name]
    ).rows
    assert row[0] == ids[wrong]


def test_infos_that_are_not_finite_are_noted(client: Client, name: str) -> None:
    spec = EnvSpec.of(Box((1,)), Box((1,)), infos={"x": Box((2,))})
    info = np.zeros((4, 2), np.float32)
    info[2, 1] = np.nan
    client.create_dataset(name, spec)
    client.add(
        name, obs=np.arange(4, dtype=np.float32)[:, None], actions=np.ones((3, 1), np.float32),
        rewards=np.ones(3, np.float32), terminated=True, infos={"x": info},
    )  # fmt: skip
    (finding,) = diagnose(client, name, checks=checks_of("nan_info")).findings
    assert finding.message.endswith("(step 2)")


@pytest.mark.long
def test_of_very_large_data_a_part_is_read(client: Client, name: str) -> None:
    store(client, name, CLEAN["pendulum"][1], make("pendulum"))
    report = diagnose(client, name, most_steps=400)
    assert report.one_in == 4 and report.steps == 1600
    assert report.failed == {} and loud(report) == {}


def wide(numbers: int, episodes: int = 20, steps: int = 60) -> tuple[EnvSpec, list[Episode]]:
    rng = np.random.default_rng(0)
    spec = EnvSpec.of(Box((numbers,)), Box((2,), low=-1.0, high=1.0))
    return spec, [
        {
            "obs": np.cumsum(rng.normal(0, 0.1, (steps + 1, numbers)), axis=0, dtype=np.float32),
            "actions": rng.uniform(-1, 1, (steps, 2)).astype(np.float32),
            "rewards": rng.normal(size=steps).astype(np.float32),
            "terminated": False,
            "truncated": True,
        }
        for _ in range(episodes)
    ]


@pytest.mark.sample(1)
@pytest.mark.parametrize("numbers", [40, 348])
def test_wide_observations_are_examined_with_the_default_memory(
    client: Client, name: str, numbers: int
) -> None:
    spec, episodes = wide(numbers)
    episodes[5]["obs"][7, 3] = -999.0
    episodes[7]["obs"][9, numbers - 1] = -999.0
    episodes[7]["obs"][9, 2] = -999.0
    episodes[11]["obs"][:, numbers - 2] = 0.5
    episodes[13]["obs"][50:] += 6.0
    ids = store(client, name, spec, episodes)
    kinds = {"constant_number", "units", "last_is_zero"}
    checks = tuple(check for check in CHECKS if check.in_groups or check.kind in kinds)
    report = diagnose(client, name, checks=checks)
    assert report.failed == {} and report.numbers == report.numbers_read == numbers
    found = {f.kind: f for f in report.findings}
    for kind, wrong in (("sentinel", [5, 7]), ("stuck_number", [11]), ("teleport", [13])):
        rows = client.sql(found[kind].sql, dataset=name, limit=100).rows
        assert sorted(str(row[0]) for row in rows) == sorted(ids[i] for i in wrong)
        assert found[kind].trajectories == len(wrong)
    assert f"observation[{numbers - 2}]" in found["stuck_number"].message
    plan = plan_repair(client, report, kinds=["sentinel", "stuck_number"])
    assert plan.left_out == {"sentinel": 2, "stuck_number": 1} and plan.not_repaired == {}


@pytest.mark.long
def test_images_are_examined_with_the_default_memory(client: Client, name: str) -> None:
    rng = np.random.default_rng(0)
    spec = EnvSpec.of(Box((64, 64, 3), "uint8", 0, 255), Discrete(4))
    episodes: list[Episode] = [
        {
            "obs": rng.integers(0, 255, (151, 64, 64, 3), np.uint8),
            "actions": rng.integers(0, 4, 150),
            "rewards": rng.normal(size=150).astype(np.float32),
            "terminated": True,
        }
        for _ in range(16)
    ]
    episodes[3]["obs"][40:75] = episodes[3]["obs"][40]
    episodes[5]["obs"][100] = 77
    episodes[7]["obs"][60:75] //= 128
    store(client, name, spec, episodes)
    report = diagnose(client, name)
    assert report.failed == {}
    assert loud(report).keys() == {"frozen_image", "flat_image", "scaled_image"}


def test_numbers_that_are_not_examined_are_said(client: Client, service, name: str, capsys) -> None:
    spec, episodes = wide(MOST_NUMBERS + 8, episodes=2, steps=5)
    store(client, name, spec, episodes)
    main(["doctor", name, "--url", service.url, "--findings", "units"])
    assert "of 520 numbers of an observation, the first 512 were checked one by one" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize("only", [None, (0, 2), (1, 4), (3, 6)])
def test_numbers_of_several_keys_are_read_in_parts(only: tuple[int, int] | None) -> None:
    spec = EnvSpec.of({"a": Box((2,)), "b": Box(()), "c": Box((3,))}, Discrete(2))
    subject = dataclasses.replace(Subject("x", spec), only=only)
    names = ["a[0]", "a[1]", "b", "c[0]", "c[1]", "c[2]"]
    assert [number for number, _ in subject.numbers()] == names[slice(*(only or (0, 6)))]


def test_too_little_memory_for_numbers_halves_them_first(client: Client, name: str) -> None:
    spec, episodes = wide(20)
    store(client, name, spec, episodes)
    seen = []

    def query_of(s: Subject) -> str:
        seen.append(len(s.numbers()))
        if len(s.numbers()) > 5:
            return f"select error('out of memory') from {s.steps_table}"
        return f"select {len(s.numbers())} from {s.steps_table} limit 1"

    subject = Subject(name, spec)
    assert [a.rows for a in ask(client, query_of, subject, in_groups=True)] == [[(5,)]] * 4
    assert ask_all(client, query_of, subject, in_groups=True) == {5}
    with pytest.raises(BadRequest, match="out of memory"):
        ask(client, query_of, subject)


def test_bounds_of_each_element_are_used(client: Client, name: str) -> None:
    spec = EnvSpec.of(Box((1,)), Box((2,), low=(-1.0, -5.0), high=(1.0, 5.0)))
    rng = np.random.default_rng(0)
    at_bound = np.repeat([[0.3, 5.0]], 20, axis=0).astype(np.float32)
    episode = {"obs": rng.normal(size=(21, 1)).astype(np.float32), "actions": at_bound}
    store(client, name, spec, [{**episode, "rewards": np.ones(20, np.float32), "terminated": True}])
    assert diagnose(client, name, checks=checks_of("saturated")).findings
    (outside,) = checks_of("action_outside")
    query = outside.query(Subject(name, spec))
    assert query is not None and "5.001" in query and "1.0002" in query


@pytest.mark.sample(1)
@pytest.mark.parametrize("successes", [1, 2, 12])
def test_a_rare_success_is_no_outlier(client: Client, name: str, successes: int) -> None:
    """The rewards of all successes differ, as they do where earlier ones are worth more."""
    episodes = make("cart")
    for i, episode in enumerate(episodes):
        episode["rewards"] = np.zeros_like(episode["rewards"])
        if i >= len(episodes) - successes:
            episode["rewards"][-1] = 1 + i / 100
    store(client, name, CLEAN["cart"][1], episodes)
    report = diagnose(client, name, checks=tuple(c for c in CHECKS if "reward" in c.kind))
    assert report.failed == {} and loud(report) == {}


def test_a_cycle_is_no_repeated_piece(client: Client, name: str) -> None:
    episodes = make("rover")
    episodes[20]["obs"][20:84] = np.tile(episodes[20]["obs"][20:36], (4, 1))
    store(client, name, CLEAN["rover"][1], episodes)
    assert diagnose(client, name, checks=checks_of("repeated_piece")).findings == []


def test_an_episode_that_fails_has_no_other_baseline(client: Client, name: str) -> None:
    """Its rewards are 0, as one is in each other episode."""
    episodes = make("cart")
    for episode in episodes:
        episode["rewards"][-1] = 0.0
    episodes[20]["rewards"][:] = 0.0
    store(client, name, CLEAN["cart"][1], episodes)
    report = diagnose(client, name, checks=checks_of("reward_baseline"))
    assert report.failed == {} and report.findings == []


@pytest.mark.parametrize("repair", [False, True])
def test_a_check_that_could_not_be_made_is_no_clean_bill(
    client: Client, service, name: str, capsys, monkeypatch: pytest.MonkeyPatch, repair: bool
) -> None:
    store(client, name, CLEAN["pendulum"][1], make("pendulum"))
    broken = Check("sentinel", "warning", "{n}", lambda s: f"select no_such from {s.steps}")
    monkeypatch.setattr("workbench.commands.doctor.CHECKS", (broken,))
    words = ["--repair", "clean"] if repair else []
    assert main(["doctor", name, "--url", service.url, *words]) == (2 if repair else 1)
    said = capsys.readouterr()
    if not repair:
        assert "sentinel: not checked" in said.out
        assert "nothing found by the other checks" in said.out
    else:
        assert "sentinel" in said.err and client.versions(name) == []


def test_a_repair_without_a_check_that_was_asked_for_has_status_1(
    client: Client, service, name: str, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(client, name, "pendulum", "duplicate")
    broken = Check("sentinel", "warning", "{n}", lambda s: f"select no_such from {s.steps}")
    monkeypatch.setattr("workbench.commands.doctor.CHECKS", (broken, *checks_of("duplicate")))
    assert main(["doctor", name, "--url", service.url, "--repair", "clean"]) == 1
    assert "not repaired: sentinel" in capsys.readouterr().out
    assert client.version(f"{name}@clean").statistics.trajectories == TRAINING - 1


def test_the_command_names_what_it_finds(client: Client, service, name: str, capsys) -> None:
    plant(client, name, "grid", "open_end")
    command = ["doctor", name, "--url", service.url]
    assert main([*command, "--severity", "warning"]) == 1
    said = capsys.readouterr().out
    assert "warning: open_end" in said
    assert f"stepwell doctor {name} --repair without-open-end" in said
    assert main([*command, "--findings", "open_end", "--severity", "error"]) == 0
    assert "nothing" in capsys.readouterr().out
    assert main(["doctor", "nobody", "--url", service.url]) == 1
    with pytest.raises(NotFound):
        diagnose(client, "nobody")
    assert SEVERITIES[0] == "error"
