"""`stepwell reproduce`: a run again, on its own data, with the same numbers bit by bit."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from amago_model.policy_file import load_policy
from stepwell.errors import Gone, NotFound
from stepwell.messages import Run
from stepwell.testing import make_spec, make_trajectory
from trainer import reproduce
from trainer.errors import SettingError
from trainer.main import main as train
from trainer.reproduce import compare_curves, main, make_plan

SPEC = make_spec(env="Tiny-v0")
UPDATES = 4
TINY = [
    *("--data.batch", "8", "--data.window", "8", "--schedule.log-every", "1"),
    *("--agent.timestep-encoder.d-hidden", "16", "--agent.timestep-encoder.d-output", "16"),
    *("--agent.actor.d-hidden", "16", "--optimizer.warmup", "0", "--seed", "3"),
    *("--device", "cpu", "--updates", str(UPDATES)),
]


@pytest.fixture
def run(service, client, name, tmp_path, monkeypatch) -> Run:
    """A finished run on 24 trajectories of a dataset of the same name."""
    monkeypatch.setenv("STEPWELL_URL", service.url)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    client.create_dataset(name, SPEC)
    found = [make_trajectory(SPEC, length=6 + i % 9, seed=i) for i in range(24)]
    client.post(name, found, wait_sealed=True)
    assert train(["offline", "--dataset", name, "--run", name, *TINY]) == 0
    return client.run(name)


def answer(capsys, *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def weights(client, policy: str) -> dict[str, torch.Tensor]:
    return load_policy(client.download_policy(*policy.split("/")).data).state_dict()


def test_a_run_again_has_the_same_curves_and_weights_although_its_dataset_has_grown(
    client, run, capsys, tmp_path
) -> None:
    client.post(run.name, [make_trajectory(SPEC, length=9, seed=99)], wait_sealed=True)
    found = answer(capsys, run.name, "--output", str(tmp_path / "elsewhere"))
    assert found["new"] == f"{run.name}-again" and found["snapshot"] == run.snapshots[0]
    (data,) = [d for d in found["differences"] if d["what"] == "data"]
    assert data["then"] == "24 trajectories"
    assert data["now"] == "25 trajectories; the recorded ones are used"
    assert {c["key"] for c in found["curves"]} >= {"loss/total", "loss/critic"}
    for curve in found["curves"]:
        assert (curve["first"], curve["missing"], curve["largest"]) == (None, 0, 0.0), curve
    (total,) = [c for c in found["curves"] if c["key"] == "loss/total"]
    assert total["steps"] == UPDATES
    again = client.run(found["new"])
    assert (again.parent, again.seed, again.status) == (run.name, 3, "finished")
    assert again.snapshots == run.snapshots
    assert again.config["agent"] == run.config["agent"], "derived settings are those of then"
    before, after = (weights(client, f"{r}/{UPDATES}") for r in (run.name, again.name))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    # Of a run that is a reproduction, too; and the name is free.
    assert answer(capsys, again.name, "--dry-run")["new"] == f"{again.name}-again"
    assert main([run.name, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert f"{run.name} again, as {run.name}-again-2: seed 3, {UPDATES} updates" in said


def test_a_dry_run_says_what_differs_and_trains_nothing(
    client, run, capsys, monkeypatch, tmp_path
) -> None:
    monkeypatch.setattr(reproduce, "git_commit", lambda: "f00")
    monkeypatch.setattr("trainer.distributed.platform.python_version", lambda: "3.99")
    monkeypatch.setattr("trainer.distributed._cpu_model", lambda: "Abacus")
    found = answer(capsys, run.name, "--dry-run", "--name", "new")
    rows = {d["what"]: (d["then"], d["now"]) for d in found["differences"]}
    assert rows.keys() == {"commit", "python", "device"}
    assert rows["commit"][1] == "f00" and rows["python"][1] == "3.99"
    assert rows["device"] == (run.config["hardware"], "Abacus (cpu)")
    assert main([run.name, "--dry-run"]) == 0
    assert "Abacus (cpu)" in capsys.readouterr().out
    with pytest.raises(NotFound):
        client.run("new")
    # A run of a program that recorded no versions.
    old = run.model_copy(update={"config": {**run.config, "versions": None, "hardware": None}})
    rows = {d.what: d.then for d in make_plan(client, old, "new", tmp_path).differences}
    assert rows["packages"] == rows["device"] == "not recorded"


def test_what_cannot_be_reproduced_is_refused_with_the_reason(client, run, tmp_path) -> None:
    def refused(**changes: Any) -> str:
        with pytest.raises(SettingError) as error:
            make_plan(client, run.model_copy(update=changes), "new", tmp_path)
        return str(error.value)

    assert "expected one of kind train" in refused(kind="eval")
    assert "not those of this program" in refused(config={**run.config, "lern": 1})
    assert "2 processes" in refused(config={**run.config, "processes": 2})
    grown = run.model_copy(update={"snapshots": [*run.snapshots, "sn_later"]})
    (data,) = [d for d in make_plan(client, grown, "new", tmp_path).differences if d.what == "data"]
    assert (data.then, data.now) == ("2 snapshots, of growing data", "the first, 24 trajectories")


def test_data_of_a_deleted_dataset_serves_as_long_as_its_snapshot_can_be_leased(
    client, run, tmp_path, monkeypatch
) -> None:
    def data(**changes: Any) -> tuple[str, str, str]:
        plan = make_plan(client, run.model_copy(update=changes), "new", tmp_path)
        (found,) = [d for d in plan.differences if d.what == "data"]
        return plan.snapshot, found.then, found.now

    assert data(snapshots=[]) == ("", "not recorded", "24 trajectories")

    def gone(*_: object) -> None:
        raise Gone({"detail": "snapshot expired", "status": 410})

    with monkeypatch.context() as patched:
        patched.setattr(type(client), "lease", gone)
        then = f"snapshot {run.snapshots[0]}, partly deleted"
        assert data() == ("", then, "24 trajectories, selected now")
    client.delete_dataset(run.name)
    now = "0 trajectories; the recorded ones are used"
    assert data() == (run.snapshots[0], "24 trajectories", now)
    monkeypatch.setattr(type(client), "lease", gone)
    with pytest.raises(SettingError, match="the data of .* is gone: snapshot"):
        data()


def test_the_first_and_the_largest_difference_are_named() -> None:
    then = {1: 1.0, 2: 2.0, 3: 3.0, 4: None, 9: 0.0}
    found = compare_curves("loss/total", then, {1: 1.0, 2: 2.5, 3: 1.0, 4: None, 5: 7.0})
    assert (found.steps, found.missing) == (4, 2)
    assert (found.first, found.first_values) == (2, (2.0, 2.5))
    assert (found.largest, found.largest_at, found.largest_values) == (2.0, 3, (3.0, 1.0))
    found = compare_curves("loss/total", then, {4: 1.0})
    assert (found.first, found.largest) == (4, math.inf)
    assert compare_curves("loss/total", then, then).first is None
