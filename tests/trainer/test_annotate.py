"""`stepwell annotate`: a real run's critics value a dataset at a real service."""

from __future__ import annotations

import json
import uuid
from typing import Any

import numpy as np
import pytest

from amago_model.policy_file import load_agent, save_policy
from stepwell import Box, Client, Discrete, EnvSpec, Trajectory
from trainer.main import main as train
from trainer.offline_evaluation import annotate as command
from trainer.offline_evaluation.annotate import annotate, main

SPEC = EnvSpec.of(Box((2,)), Discrete(2), env="Walk-v0", action_known=True)
TINY = [
    *("--agent.timestep_encoder.d_hidden", "16", "--agent.timestep_encoder.d_output", "16"),
    *("--agent.actor.d_hidden", "16", "--data.batch", "8", "--data.window", "8"),
    *("--device", "cpu", "--derive", "off", "--updates", "4"),
]


def walk(seed: int) -> Trajectory:
    rng = np.random.default_rng(seed)
    length = 3 + seed % 7
    known = np.ones(length, bool)
    known[1] = False
    return Trajectory(
        obs={"observation": rng.normal(size=(length + 1, 2)).astype(np.float32)},
        actions={"action": rng.integers(0, 2, length)},
        rewards=rng.normal(size=length).astype(np.float32),
        terminated=True,
        truncated=False,
        action_known=known,
    )


@pytest.fixture
def run(service: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run on a dataset of the same name, with ten trajectories."""
    name = f"note-{uuid.uuid4().hex[:8]}"
    monkeypatch.setenv("STEPWELL_URL", service.url)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with service.client() as client:
        client.create_dataset(name, SPEC)
        client.post(name, [walk(i) for i in range(10)], wait_sealed=True)
    words = ["offline", "--dataset", name, "--run", name, "--output", str(tmp_path), *TINY]
    assert train([*words, "--data.cache", str(tmp_path / "cache")]) == 0
    return name


@pytest.fixture
def client(service: Any) -> Client:
    return service.client()


def test_each_step_gets_the_values_of_the_critics(
    run: str, client: Client, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "STEPS_AT_ONCE", 20)  # several requests
    assert main([run, "--policy", f"{run}:latest", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    name = f"{run}/4"
    steps = sum(len(walk(i)) for i in range(10))
    assert found == {"name": name, "policy": name, "trajectories": 10, "steps": steps}
    rows = client.sql(
        "SELECT s.action_known, count(*), count(a.q), count(a.weight), avg(a.advantage), "
        "max(abs(a.q)) FROM annotations AS a JOIN "
        f'"{run}".steps AS s ON s.trajectory_id = a.trajectory AND s.t = a.step '
        f"WHERE a.name = '{name}' GROUP BY 1 ORDER BY 1"
    ).rows
    assert rows[0][:4] == (False, 10, 0, 0), "an unknown action has no value"
    assert rows[1][:4] == (True, steps - 10, steps - 10, steps - 10)
    assert rows[1][4] is not None and rows[1][5] > 0


def test_the_same_command_annotates_what_is_missing(
    run: str, client: Client, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    post = Client.annotate

    def stops(self: Client, dataset: str, name: str, policy: str, values: Any) -> Any:
        if len(sent) == 2:
            raise KeyboardInterrupt
        sent.append(len(values))
        return post(self, dataset, name, policy, values)

    words = [run, "--policy", run, "--name", "critic"]
    with monkeypatch.context() as patched:
        patched.setattr(command, "STEPS_AT_ONCE", 15)
        patched.setattr(Client, "annotate", stops)
        assert main(words) == 130
    (stored,) = client.annotations(run)
    assert 0 < stored.trajectories == sum(sent) < 10
    rest = annotate(client, run, run, name="critic")
    assert rest["trajectories"] == 10 - sum(sent)
    assert main(words) == 0
    assert "nothing to do" in capsys.readouterr().out
    client.post(run, [walk(20)])
    assert annotate(client, run, run, name="critic", where="length < 100")["trajectories"] == 1
    assert client.annotations(run)[0].trajectories == 11
    assert main([run, "--delete", "critic"]) == 0
    assert client.annotations(run) == []


def test_values_do_not_depend_on_what_is_valued_with_them(run: str, client: Client) -> None:
    annotate(client, run, run, name="all")
    annotate(client, run, run, name="long", where="length > 6")
    (far,) = client.sql(
        "SELECT max(abs(a.q - b.q)) FROM annotations AS a JOIN annotations AS b USING "
        "(trajectory, step) WHERE a.name = 'all' AND b.name = 'long'"
    ).rows[0]
    assert far < 1e-4


def test_what_cannot_be_annotated_says_why(
    run: str, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    downloaded = client.download_policy(run)
    assert downloaded is not None
    client.create_run(f"{run}-old", "train")
    acting = save_policy(load_agent(downloaded.data).policy)
    client.publish_policy(f"{run}-old", 1, acting)
    assert main([run, "--policy", f"{run}-old"]) != 0
    assert "no critics" in capsys.readouterr().err
    other = EnvSpec.of(Box((2,)), Discrete(3), env="Walk-v0", action_known=True)
    client.create_dataset(f"{run}-other", other)
    client.post(f"{run}-other", [walk(0)])
    assert main([f"{run}-other", "--policy", run]) != 0
    assert "takes other actions" in capsys.readouterr().err
    assert main([run, "--policy", run, "--where", "length > 100"]) != 0
    assert "empty" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([run])
