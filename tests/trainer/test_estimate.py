"""`stepwell estimate`: policies of a real run at a real service, and what is stored of them."""

from __future__ import annotations

import json
import uuid

import numpy as np
import pytest
import torch

from amago_model.data.batch import encode_action
from amago_model.policy_file import load_policy
from stepwell import Box, Discrete, EnvSpec, Trajectory, TrajectoryMetadata
from stepwell.errors import Gone
from trainer.data.snapshot import LeaseKeeper
from trainer.main import main as train
from trainer.offline_evaluation import estimate as command
from trainer.offline_evaluation import fitted_q
from trainer.offline_evaluation import policy_transitions as policy_transitions_module
from trainer.offline_evaluation.estimate import choose_best, main
from trainer.offline_evaluation.fitted_q import Estimate
from trainer.offline_evaluation.policy_transitions import open_run_data, policy_transitions

SPEC = EnvSpec.of(Box((2,)), Discrete(2), env="Walk-v0")
CONTINUOUS = EnvSpec.of(Box((2,)), Box((1,), low=-1.0, high=1.0), env="Walk-v0")
TINY = [
    *("--agent.timestep_encoder.d_hidden", "16", "--agent.timestep_encoder.d_output", "16"),
    *("--agent.actor.d_hidden", "16", "--data.batch", "8"),
    *("--device", "cpu", "--derive", "off", "--agent.losses.gamma", "0.9", "--data.window", "8"),
    *(
        "--optimizer.warmup",
        "0",
        "--updates",
        "6",
        "--optimizer.learning-rate",
        "0.02",
        "--schedule.publish-every",
        "2",
        "--data.validation",
        "0.2",
    ),
]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitted_q, "FEATURES", 32)
    monkeypatch.setattr(fitted_q, "RESAMPLES", 20)


@pytest.fixture
def run(service, tmp_path, monkeypatch, request) -> str:
    """A run with the versions 2, 4 and 6, trained on a dataset of the same name."""
    name = f"est-{uuid.uuid4().hex[:8]}"
    monkeypatch.setenv("STEPWELL_URL", service.url)
    spec, recipe, *more = getattr(request, "param", (SPEC, "offline"))
    rng = np.random.default_rng(0)
    found = []
    for i in range(24):
        length = 3 + i % 9
        actions = rng.integers(0, 2, length)
        if spec is CONTINUOUS:
            actions = rng.uniform(-1, 1, (length, 1)).astype(np.float32)
        found.append(
            Trajectory(
                obs={"observation": rng.normal(size=(length + 1, 2)).astype(np.float32)},
                actions={"action": actions},
                rewards=rng.normal(size=length).astype(np.float32),
                terminated=i % 3 == 0,
                truncated=i % 3 != 0,
                final_obs_valid=i % 3 == 1,
                metadata=TrajectoryMetadata(env="Walk-v0"),
            )
        )
    with service.client() as client:
        client.create_dataset(name, spec)
        client.post(name, found, wait_sealed=True)
    words = [recipe, "--dataset", name, "--run", name, "--output", str(tmp_path), *TINY]
    words += ["--data.cache", str(tmp_path / "cache"), *more]
    assert train(words) == 0
    return name


def estimated(capsys, tmp_path, run: str, *words: str) -> dict:
    capsys.readouterr()
    assert main([run, "--json", "--cache", str(tmp_path / "cache"), *words]) == 0
    return json.loads(capsys.readouterr().out)


def alias(client, run: str) -> list[int]:
    return [policy.version for policy in client.policies(run) if "best" in policy.aliases]


def test_a_run_is_estimated_stored_and_its_best_version_named(
    service, run, tmp_path, capsys
) -> None:
    found = estimated(capsys, tmp_path, run)
    assert list(found["estimates"]) == ["2", "4", "6"] and found["gamma"] == 0.9
    assert (found["trajectories"], found["best_by"]) == (24, "estimate")  # also the held back ones
    values = {int(v): e["value"] for v, e in found["estimates"].items()}
    assert found["best"] == max(values, key=lambda version: (values[version], version))
    with service.client() as client:
        assert alias(client, run) == [found["best"]]
        rows = client.sql(
            "select step, value from metrics where run = ? and key = 'estimate/return' order by 1",
            [run],
        ).rows
    assert dict(rows) == pytest.approx(values)
    assert main([run, "--cache", str(tmp_path / "cache")]) == 0
    out = capsys.readouterr().out
    assert "discounted by 0.9" in out and f"{run}:best is version {found['best']}, by" in out


def test_a_stopped_command_continues_and_repeats_nothing(
    service, run, tmp_path, capsys, monkeypatch
) -> None:
    real, calls = fitted_q.estimate_value, []

    def stops_at_second(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(fitted_q, "estimate_value", stops_at_second)
    assert main([run, "--cache", str(tmp_path / "cache")]) == 130
    assert "the same command continues" in capsys.readouterr().err
    with service.client() as client:
        assert client.metrics(run, ["estimate/return"])["estimate/return"].steps == [2]
        assert alias(client, run) == []
    found = estimated(capsys, tmp_path, run)
    assert len(calls) == 4 and len(found["estimates"]) == 3  # the first is not repeated
    assert estimated(capsys, tmp_path, run) == found and len(calls) == 4
    assert estimated(capsys, tmp_path, run, "--again") == found and len(calls) == 7
    other = estimated(capsys, tmp_path, run, "--gamma", "0.5", "--versions", "4")
    assert list(other["estimates"]) == ["4"] and len(calls) == 8


def test_without_the_newest_version_none_is_called_best(service, run, tmp_path, capsys) -> None:
    some = estimated(capsys, tmp_path, run, "--versions", "2")
    assert (some["best"], some["best_by"]) == (None, "")
    main([run, "--cache", str(tmp_path / "cache"), "--versions", "2"])
    assert "the newest version, 6, is not estimated" in capsys.readouterr().out
    with service.client() as client:
        assert alias(client, run) == []
        client.create_evaluation(
            policy=f"{run}/6", env="Walk-v0", seeds=[1], returns=[1.0],
            mean=1.0, iqm=1.0, ci_low=1.0, ci_high=1.0,
        )  # fmt: skip
        some = estimated(capsys, tmp_path, run, "--versions", "2")  # another one is evaluated
        assert (some["best"], some["best_by"]) == (6, "evaluation") and alias(client, run) == [6]
    main([run, "--cache", str(tmp_path / "cache"), "--versions", "2"])
    assert "by evaluation in an environment (1 of 3 versions)" in capsys.readouterr().out


def test_an_estimate_at_the_limit_says_so(service, run, tmp_path, capsys) -> None:
    """One trajectory, and values beyond what it shows."""
    one = estimated(capsys, tmp_path, run, "--steps", "1")
    low, high = one["bounds"]
    assert {(e["low"], e["high"]) for e in one["estimates"].values()} == {(low, high)}
    assert one["best"] == 6  # nothing separates it from others
    main([run, "--cache", str(tmp_path / "cache"), "--steps", "1"])
    out = capsys.readouterr().out
    assert "one trajectory shows no interval" in out
    found = command.RunEstimates(
        run, 0.9, "sn", 2, 9, 0.5, {1: Estimate(1.0, 1.0, 1.0), 2: Estimate(0.9, 0.8, 1.0)}, (0, 1)
    )
    command._print(found, {}, 2, [1, 2], set_alias=True)
    assert "a margin, 0 … 1), so the true value may be beyond: 1\n" in capsys.readouterr().out


def test_columns_are_read_from_the_cache_of_the_training(service, run, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert main([run]) == 0 and not (tmp_path / "home").exists()


def test_best_follows_evaluations_where_there_are_some(service, run, tmp_path, capsys) -> None:
    with service.client() as client:
        for version, mean in ((2, 5.0), (4, 1.0)):
            client.create_evaluation(
                policy=f"{run}/{version}", env="Walk-v0", seeds=[1], returns=[mean],
                mean=mean, iqm=mean, ci_low=mean, ci_high=mean,
            )  # fmt: skip
        found = estimated(capsys, tmp_path, run, "--no-alias")
        assert (found["best"], found["best_by"]) == (2, "evaluation")
        assert alias(client, run) == []
        estimated(capsys, tmp_path, run)
        assert alias(client, run) == [2]
    main([run, "--cache", str(tmp_path / "cache")])
    assert "by evaluation in an environment (2 of 3 versions)" in capsys.readouterr().out


def test_the_newest_is_best_unless_an_interval_is_above_its() -> None:
    found = {2: Estimate(2.0, 0.9, 3.0), 4: Estimate(1.0, 0.5, 1.5), 6: Estimate(0.0, -1.0, 1.0)}
    assert choose_best(found, {}) == (6, "estimate")
    assert choose_best({**found, 4: Estimate(1.5, 1.1, 1.9)}, {}) == (4, "estimate")
    assert choose_best({**found, 2: Estimate(1.5, 1.1, 2), 4: Estimate(1.5, 1.1, 2)}, {})[0] == 4
    assert choose_best(found, {2: -3.0, 4: -3.0}) == (4, "evaluation")


def test_errors_name_what_there_is(service, run, capsys, monkeypatch) -> None:
    assert main(["nothing-here"]) == 1
    assert "nothing-here" in capsys.readouterr().err
    assert main([run, "--versions", "3"]) == 2
    assert "it has 2, 4, 6" in capsys.readouterr().err
    assert main([f"{run}/6"]) == 2
    assert f"expected a run: stepwell estimate {run}, " in capsys.readouterr().err
    with service.client() as client:
        client.create_run(f"{run}-played", "collect")
        client.create_run(f"{run}-empty", "train")
    assert main([f"{run}-played"]) == 2 and "published by trainers" in capsys.readouterr().err
    assert main([f"{run}-empty"]) == 2 and "no policy yet" in capsys.readouterr().err
    for words in (["--gamma", "1"], ["--versions", "last"], ["--steps", "0"]):
        with pytest.raises(SystemExit):
            main([run, *words])


CLOSE = {"rtol": 0.0, "atol": 1e-4}
GRU = (CONTINUOUS, "offline", "--agent.trajectory-encoder.kind", "gru")
CONDITIONED = (CONTINUOUS, "dt", "--agent.return-conditioning.target-return", "2")


@pytest.mark.parametrize(
    "run",
    [(SPEC, "offline"), GRU, CONDITIONED],
    indirect=True,
    ids=["none", "gru", "return-conditioned"],
)
def test_transitions_have_the_actions_that_the_policy_takes_step_by_step(
    service, run, tmp_path
) -> None:
    with service.client() as client:
        leases = LeaseKeeper(client, "test")
        data = open_run_data(client, client.run(run), leases, 10**6, tmp_path / "cache")
        leases.close()
        policy = load_policy(client.download_policy(run).data)
    found = policy_transitions(policy, data)
    memory = policy.config.trajectory_encoder.kind in ("gru", "transformer")
    assert found.state.shape[1] == 2 + memory * policy.d_state
    seen = 0
    for rows, batch in data.batches():
        for row, index in enumerate(rows):
            length = int(data.view.manifest.length[index])
            hidden, acted = policy.initial_hidden(1, "cpu"), []
            for t in range(length + 1):
                action, hidden = policy.act(
                    {key: value[row : row + 1, t] for key, value in batch.obs.items()},
                    batch.prev_action[row : row + 1, t],
                    batch.prev_reward[row : row + 1, t],
                    batch.time_idx[row : row + 1, t],
                    hidden,
                    sample=False,
                )
                encoded = encode_action(policy.spaces.action, action)
                acted.append(encoded[0])
            mine = found.trajectory == int(index)
            ends = bool(data.view.manifest.terminated[index])
            known = bool(data.view.manifest.final_obs_valid[index])
            used = length - (not (ends or known))  # a truncation into the unknown is left out
            assert int(mine.sum()) == used
            assert bool(found.terminated[mine].any()) == ends
            checked = used - (ends and not known)
            expected = torch.stack(acted)[1 : checked + 1]
            torch.testing.assert_close(found.next_action[mine][:checked], expected, **CLOSE)
            first = found.initial_action[found.initial_trajectory == int(index)]
            torch.testing.assert_close(first, acted[0][None], **CLOSE)
            torch.testing.assert_close(found.reward[mine], batch.reward[row, :used])
            seen += used
    assert seen == len(found.reward)


def test_of_much_data_some_whole_trajectories_are_used(service, run, tmp_path) -> None:
    with service.client() as client:
        leases = LeaseKeeper(client, "test")
        trained = client.run(run)
        data = open_run_data(client, trained, leases, 60, tmp_path / "cache")
        leases.close()
        assert 20 < data.steps < 100 and data.trajectories < 24
        lost = trained.model_copy(update={"snapshots": ["sn_forgotten"]})
        leases = LeaseKeeper(client, "test")
        again = open_run_data(client, lost, leases, 10**6, tmp_path / "cache")
        leases.close()
    assert again.trajectories == 24  # selected again, by the dataset in the run's config
    low, high = again.bounds(0.9)
    assert low < again.value(0.9) < high


def test_data_is_selected_again_where_trajectories_were_evicted(
    service, run, tmp_path, monkeypatch
) -> None:
    """The service still knows the snapshot, but cannot serve its manifest."""
    real = policy_transitions_module.load_manifest
    with service.client() as client:
        trained = client.run(run)

        def load(client, snapshot, folder):
            if snapshot == trained.snapshots[-1]:
                raise Gone({"status": 410, "title": "gone", "code": "snapshot_expired"})
            return real(client, snapshot, folder)

        monkeypatch.setattr(policy_transitions_module, "load_manifest", load)
        leases = LeaseKeeper(client, "test")
        again = open_run_data(client, trained, leases, 10**6, tmp_path / "cache")
        leases.close()
    assert again.trajectories == 24 and again.snapshot != trained.snapshots[-1]


def test_help_is_understood_without_torch(capsys) -> None:
    with pytest.raises(SystemExit):
        command.main(["--help"])
    assert "expected discounted return" in capsys.readouterr().out
