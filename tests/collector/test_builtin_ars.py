"""ARS and its generators: it learns, repeats itself bit by bit, and reuses its snapshots."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import gymnasium
import h5py
import numpy as np
import pytest
from numpy.typing import NDArray

import collector.builtin.ars as ars
from collector.builtin.__main__ import main
from collector.builtin.ars import Settings, Snapshots, load_or_train, train
from collector.builtin.generate import first_episode_seed, generate
from collector.builtin.generate_ars import ARS_KINDS, HALFCHEETAH, HOPPER, ars_kind

TINY = Settings(
    env_id="Hopper-v5",
    iterations=3,
    directions=4,
    top=2,
    step_size=0.02,
    noise=0.03,
    horizon=40,
)
CARTPOLE = Settings(
    env_id="InvertedPendulum-v5",
    iterations=12,
    directions=8,
    top=4,
    step_size=0.1,
    noise=0.1,
    alive_bonus=False,
    horizon=200,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the snapshots of TINY."""
    path = tmp_path_factory.mktemp("snapshots")
    load_or_train(TINY, path)
    return path


def read(path: Path) -> dict[str, NDArray[Any]]:
    with h5py.File(path) as h5:
        return {name: h5[name][()] for name in h5 if isinstance(h5[name], h5py.Dataset)}


def test_ars_solves_the_inverted_pendulum() -> None:
    """From an untrained policy that falls at once to one that stands for the whole horizon."""
    snapshots = train(CARTPOLE)
    assert snapshots.returns[0] < 60
    assert snapshots.returns[snapshots.expert] == 200
    assert 0 < snapshots.medium <= snapshots.expert
    assert snapshots.returns[snapshots.medium] >= 100


def test_the_first_iteration_is_the_papers_update() -> None:
    """Against the update written out: the best directions, their differences over the deviation of
    the returns, and the running mean and deviation of all observations."""
    one = dataclasses.replace(TINY, iterations=1)
    snapshots = train(one)
    env = gymnasium.make("Hopper-v5", healthy_reward=0.0).unwrapped
    deltas = np.random.default_rng(0).standard_normal((4, 3, 11))
    results, seen = [], []
    for i, delta in enumerate(deltas):
        for sign in (1, -1):
            obs, _ = env.reset(seed=i + 1)
            total = 0.0
            for _ in range(40):
                seen.append(obs)
                obs, reward, terminated, *_ = env.step(np.clip(sign * 0.03 * delta @ obs, -1, 1))
                total += float(reward)
                if terminated:
                    break
            results.append(total)
    plus, minus = results[::2], results[1::2]
    best = sorted(range(4), key=lambda i: -max(plus[i], minus[i]))[:2]
    deviation = np.std([[plus[i], minus[i]] for i in best])
    update = sum((plus[i] - minus[i]) * deltas[i] for i in best) / 2
    np.testing.assert_allclose(
        snapshots.weights[1], 0.02 / (deviation + 1e-6) * update, rtol=1e-9, atol=1e-12
    )
    np.testing.assert_allclose(snapshots.means[1], np.mean(seen, 0), atol=1e-9)
    np.testing.assert_allclose(snapshots.scales[1], np.std(seen, 0), atol=1e-6)


def test_the_policy_is_normalised_and_linear() -> None:
    """matrix @ obs + offset = weights @ (obs - mean) / scale, also with a perturbation."""
    rng = np.random.default_rng(0)
    weights, mean, scale = rng.normal(size=(1, 2, 3)), rng.normal(size=(1, 3)), np.full((1, 3), 2.0)
    snapshots = Snapshots(weights, mean, scale, np.zeros(1))
    obs, shift = rng.normal(size=3), rng.normal(size=(2, 3))
    matrix, offset = snapshots.policy(0, shift)
    np.testing.assert_allclose(
        matrix @ obs + offset, (weights[0] + shift) @ ((obs - mean[0]) / scale[0])
    )


def test_snapshots_are_read_and_only_for_the_same_settings(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second training of the same settings is none; other settings are trained again."""
    trained: list[Settings] = []

    def spy(settings: Settings) -> Snapshots:
        trained.append(settings)
        return train(settings)

    monkeypatch.setattr(ars, "train", spy)
    first = load_or_train(TINY, folder)
    assert trained == []
    again = load_or_train(TINY, None)
    assert trained == [TINY]
    for name in ("weights", "means", "scales", "returns"):
        np.testing.assert_array_equal(getattr(first, name), getattr(again, name))
    other = dataclasses.replace(TINY, iterations=1)
    load_or_train(TINY, tmp_path)
    assert len(load_or_train(other, tmp_path).returns) == 2
    assert trained == [TINY, TINY, other]


@pytest.mark.parametrize("quality", ["medium", "replay", "early", "expert", "medium-expert"])
def test_generated_files(quality: str, folder: Path, tmp_path: Path) -> None:
    """D4RL's columns; the same bytes again; a shorter file is a prefix; the replay is exact."""
    kind = ars_kind(TINY, quality)
    one, two, short = (tmp_path / name for name in ("one", "two", "short"))
    policy_args = {"snapshots": folder}
    generate(kind, one, 300, 1, policy_args=policy_args)
    generate(kind, two, 300, 1, policy_args=policy_args)
    generate(kind, short, 60, 1, policy_args=policy_args)
    assert one.read_bytes() == two.read_bytes()
    columns, prefix = read(one), read(short)
    assert {name: column.shape[1:] for name, column in columns.items()} == {
        "observations": (11,),
        "next_observations": (11,),
        "actions": (3,),
        "rewards": (),
        "terminals": (),
        "timeouts": (),
    }
    np.testing.assert_array_equal(columns["actions"][: len(prefix["actions"])], prefix["actions"])
    assert columns["terminals"].any()
    assert np.abs(columns["actions"]).max() <= 1
    env = gymnasium.make("Hopper-v5")
    obs, _ = env.reset(seed=first_episode_seed(1))
    for t in range(int(columns["terminals"].argmax()) + 1):
        np.testing.assert_array_equal(np.float32(obs), columns["observations"][t])
        obs, reward, terminated, _, _ = env.step(columns["actions"][t])
        assert (np.float32(reward), terminated) == (columns["rewards"][t], columns["terminals"][t])


def test_replay_has_all_snapshots_and_early_the_first_third(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TINY has four snapshots: 0 to 3 are played in replay, 0 alone in early."""
    played: list[int] = []
    policy = Snapshots.policy

    def spy(self: Snapshots, k: int, perturbation: Any = 0.0) -> Any:
        played.append(k)
        return policy(self, k, perturbation)

    monkeypatch.setattr(Snapshots, "policy", spy)
    found = []
    for quality in ("replay", "early"):
        path = tmp_path / quality
        generate(ars_kind(TINY, quality), path, episodes=30, policy_args={"snapshots": folder})
        found.append(set(played))
        played.clear()
    assert found == [{0, 1, 2, 3}, {0}]


def test_mixed_data_alternate_medium_and_expert(folder: Path, tmp_path: Path) -> None:
    """Even episodes are those of medium, odd ones those of expert, at the same place."""
    episodes: dict[str, list[list[float]]] = {}
    for quality in ("medium", "expert", "medium-expert"):
        path = tmp_path / quality
        policy_args = {"snapshots": folder}
        generate(ars_kind(TINY, quality), path, episodes=4, policy_args=policy_args)
        columns = read(path)
        ends = np.flatnonzero(columns["terminals"] | columns["timeouts"])[:-1] + 1
        episodes[quality] = [part.tolist() for part in np.split(columns["rewards"], ends)]
    mixed = episodes["medium-expert"]
    assert mixed[::2] == episodes["medium"][::2]
    assert mixed[1::2] == episodes["expert"][1::2]


def test_command_line_reuses_snapshots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each name has its environment; `--snapshots` is written once and read by the next command."""
    assert len(ARS_KINDS) == 15
    monkeypatch.setattr(ARS_KINDS["hopper-medium"], "training", TINY)
    monkeypatch.setattr(ARS_KINDS["hopper-replay"], "training", TINY)
    for name in ("hopper-medium", "hopper-replay"):
        out = str(tmp_path / f"{name}.hdf5")
        snapshots = ["--snapshots", str(tmp_path / "kept")]
        assert main([name, out, "--steps", "30", "--json", *snapshots]) == 0
        assert json.loads(capsys.readouterr().out)["steps"] >= 30
        monkeypatch.setattr(ars, "train", lambda *_: pytest.fail("trained again"))
    assert ARS_KINDS["halfcheetah-expert"].env_id == HALFCHEETAH.env_id
    assert (HALFCHEETAH.alive_bonus, HOPPER.alive_bonus) == (False, True)
