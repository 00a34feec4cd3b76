"""The data generators: D4RL's layout, real physics, the same bytes every time."""

import json
import sys
from pathlib import Path
from typing import Any

import gymnasium
import h5py
import numpy as np
import pytest
from numpy.typing import NDArray

from collector.builtin.__main__ import KINDS, main
from collector.builtin.generate import (
    Behaviour,
    MissingPackage,
    first_episode_seed,
    generate,
    write_d4rl,
)
from collector.builtin.generate_pendulum import expert_torque
from collector.builtin.generate_toy_text import best_actions
from stepwell.errors import InvalidData

Columns = dict[str, NDArray[Any]]
GENERATORS = {
    "pendulum-stitch": (("f4", (3,)), ("f4", (1,))),
    "lunarlander-noisy": (("f4", (8,)), ("f4", (2,))),
    "tmaze-passive": (("f4", (2,)), ("i4", ())),
    "pendulum-mixed": (("f4", (3,)), ("f4", (1,))),
    "lunarlander-discrete-noisy": (("f4", (8,)), ("i4", ())),
    "gridworld-random": (("f4", (2,)), ("i4", ())),
    "bandit-discrete": (("f4", (4,)), ("i4", ())),
    "bandit-continuous": (("f4", (4,)), ("f4", (2,))),
    "recall-random": (("f4", (6,)), ("i4", ())),
    "cartpole-position": (("f4", (2,)), ("i4", ())),
    "cartpole-velocity": (("f4", (2,)), ("i4", ())),
    "find-block-noisy": (("u1", (6, 18, 3)), ("i4", ())),
    "mountaincar-noisy": (("f4", (2,)), ("i4", ())),
    "mountaincar-continuous-noisy": (("f4", (2,)), ("f4", (1,))),
    "acrobot-noisy": (("f4", (6,)), ("i4", ())),
    "inverted-double-pendulum-noisy": (("f4", (9,)), ("f4", (1,))),
    "reacher-noisy": (("f4", (10,)), ("f4", (2,))),
    "pusher-noisy": (("f4", (23,)), ("f4", (7,))),
    "swimmer-noisy": (("f4", (8,)), ("f4", (2,))),
    "bipedal-walker-noisy": (("f4", (24,)), ("f4", (4,))),
    "frozen-lake-noisy": (("i4", ()), ("i4", ())),
    "taxi-noisy": (("i4", ()), ("i4", ())),
    "cliff-walking-noisy": (("i4", ()), ("i4", ())),
}


def read(path: Path) -> Columns:
    with h5py.File(path) as h5:
        return {name: h5[name][()] for name in h5 if isinstance(h5[name], h5py.Dataset)}


def metadata(path: Path) -> dict[str, Any]:
    with h5py.File(path) as h5:
        return {name: leaf[()] for name, leaf in h5["metadata"].items()}


def episodes(columns: Columns) -> list[slice]:
    ends = np.flatnonzero(columns["terminals"] | columns["timeouts"]) + 1
    return [slice(a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One file of 2000 steps by each generator, with seed 3."""
    folder = tmp_path_factory.mktemp("generated")
    made = {}
    for name in GENERATORS:
        made[name] = folder / f"{name}.hdf5"
        generate(KINDS[name], made[name], steps=2000, seed=3)
    return made


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", GENERATORS)
def test_layout_is_d4rls(files: dict[str, Path], name: str) -> None:
    """Flat columns of D4RL's names, types and shapes; gzip 4; no HDF5 attribute anywhere."""
    observation, action = GENERATORS[name]
    with h5py.File(files[name]) as h5:
        layout = {
            key: (h5[key].dtype.str[1:], h5[key].shape[1:])
            for key in h5
            if isinstance(h5[key], h5py.Dataset)
        }
        assert len({len(h5[key]) for key in layout}) == 1
        assert {(h5[key].compression, h5[key].compression_opts) for key in layout} == {("gzip", 4)}
        attributes: list[str] = list(h5.attrs)
        h5.visititems(lambda _, item: attributes.extend(item.attrs))
        assert attributes == []
    assert layout == {
        "observations": observation,
        "next_observations": observation,
        "actions": action,
        "rewards": ("f4", ()),
        "terminals": ("b1", ()),
        "timeouts": ("b1", ()),
    }


@pytest.mark.parametrize("name", GENERATORS)
def test_episodes_are_whole_and_their_rows_join(files: dict[str, Path], name: str) -> None:
    """The last row ends an episode; no row carries both flags; inside, s' is the next row's s."""
    columns = read(files[name])
    assert len(columns["rewards"]) >= 2000
    assert columns["terminals"][-1] or columns["timeouts"][-1]
    assert not (columns["terminals"] & columns["timeouts"]).any()
    for episode in episodes(columns):
        np.testing.assert_array_equal(
            columns["observations"][episode][1:], columns["next_observations"][episode][:-1]
        )
    assert all(np.isfinite(column).all() for column in columns.values())


def test_pendulum_is_cut_every_200_steps_and_never_ends(files: dict[str, Path]) -> None:
    """Pendulum has no end: timeouts at rows 199, 399, ..., no terminal."""
    columns = read(files["pendulum-stitch"])
    assert np.flatnonzero(columns["timeouts"]).tolist() == list(range(199, 2000, 200))
    assert not columns["terminals"].any()
    assert np.abs(columns["actions"]).max() == 2.0


def test_lunarlander_lands_and_crashes(files: dict[str, Path]) -> None:
    """Episodes end in terminals with +-100 (landed, crashed), unless 1000 steps are up."""
    columns = read(files["lunarlander-noisy"])
    lengths = np.array([episode.stop - episode.start for episode in episodes(columns)])
    assert columns["terminals"].any()
    assert np.abs(columns["rewards"][columns["terminals"]]).min() > 50
    assert lengths.max() <= 1000
    ends = np.cumsum(lengths) - 1
    assert (lengths[columns["timeouts"][ends]] == 1000).all()
    assert np.abs(columns["actions"]).max() <= 1.0


def test_tmaze_data_walks_well_and_turns_at_random(files: dict[str, Path]) -> None:
    """Every 21st row is a terminal; about half of those at the junction chose the right arm."""
    columns = read(files["tmaze-passive"])
    assert np.flatnonzero(columns["terminals"]).tolist() == list(range(20, 2016, 21))
    junction = columns["terminals"] & (columns["observations"][:, 0] == 1)
    assert set(columns["actions"][junction]) == {1, 3}
    assert 0.3 < columns["rewards"][junction].mean() < 0.7
    assert (columns["actions"][~columns["terminals"]] == 0).mean() > 0.95


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", GENERATORS)
def test_replaying_the_file_gives_the_file(files: dict[str, Path], name: str) -> None:
    """The environment named in metadata, reset with the recorded seeds and given the recorded
    actions, yields the recorded observations, rewards and endings, bit for bit."""
    columns, about = read(files[name]), metadata(files[name])
    dtype = columns["observations"].dtype  # MuJoCo's own are float64
    kwargs = json.loads(about.get("environment_kwargs", b"{}"))
    env = gymnasium.make(about["environment"].decode(), **kwargs)
    assert about["first_episode_seed"] == first_episode_seed(3)
    for i, episode in enumerate(episodes(columns)):
        obs, _ = env.reset(seed=int(about["first_episode_seed"]) + i)
        np.testing.assert_array_equal(
            np.asarray(obs, dtype), columns["observations"][episode.start]
        )
        for t in range(episode.start, episode.stop):
            obs, reward, terminated, truncated, _ = env.step(columns["actions"][t])
            np.testing.assert_array_equal(np.asarray(obs, dtype), columns["next_observations"][t])
            assert np.float32(reward) == columns["rewards"][t]
            assert terminated == columns["terminals"][t]
            assert truncated == columns["timeouts"][t]
    env.close()


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", GENERATORS)
def test_the_same_arguments_give_the_same_bytes(
    files: dict[str, Path], name: str, tmp_path: Path
) -> None:
    """Bit-identical when made again; another seed plays otherwise; a shorter file is a prefix."""
    kind = KINDS[name]
    again, other, shorter = (tmp_path / part for part in ("again", "other", "shorter"))
    generate(kind, again, steps=2000, seed=3)
    assert again.read_bytes() == files[name].read_bytes()
    generate(kind, other, steps=600, seed=4)
    generate(kind, shorter, steps=600, seed=3)
    whole, prefix = read(files[name]), read(shorter)
    rows = len(prefix["rewards"])
    np.testing.assert_array_equal(whole["actions"][:rows], prefix["actions"])
    assert not np.array_equal(read(other)["actions"][:rows], prefix["actions"])


def test_the_demos_data_has_no_good_episode_to_copy(tmp_path: Path) -> None:
    """Pendulum-stitch's mean is far below the scripted expert's, and so is its best decile."""
    summary = generate(KINDS["pendulum-stitch"], tmp_path / "stitch.hdf5", steps=20_000)
    assert (summary.steps, summary.episodes) == (20_000, 100)
    assert summary.mean_return == pytest.approx(-850, abs=60)
    assert -650 < summary.p90_return < -500
    env = gymnasium.make("Pendulum-v1")
    expert = []
    for seed in range(10):
        obs, _ = env.reset(seed=seed)
        total, truncated = 0.0, False
        while not truncated:
            action = np.array([expert_torque(obs)], np.float32)
            obs, reward, _, truncated, _ = env.step(action)
            total += float(reward)
        expert.append(total)
    assert np.mean(expert) > -220


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("name", "steps", "mean", "p90"),
    [
        ("pendulum-mixed", 40_000, (-900, -760), (-130, -110)),
        ("lunarlander-discrete-noisy", 20_000, (-65, -10), (0, 80)),
        ("gridworld-random", 20_000, (0.13, 0.20), (1, 1)),
        ("bandit-discrete", 3000, (0.29, 0.37), (1, 1)),
        ("bandit-continuous", 3000, (0.1, 0.3), (0.8, 1.2)),
        ("recall-random", 10_000, (0.2, 0.3), (1, 1)),
        ("cartpole-position", 20_000, (130, 210), (500, 500)),
        ("find-block-noisy", 3000, (3.3, 3.7), (5, 5)),
        ("mountaincar-noisy", 5000, (-195, -178), (-175, -140)),
        ("mountaincar-continuous-noisy", 5000, (70, 90), (92, 97)),
        ("acrobot-noisy", 5000, (-280, -190), (-125, -90)),
        ("inverted-double-pendulum-noisy", 5000, (900, 3000), (9300, 9360)),
        ("reacher-noisy", 5000, (-54, -40), (-28, -10)),
        ("pusher-noisy", 5000, (-75, -55), (-45, -33)),
        ("swimmer-noisy", 5000, (-20, 15), (10, 50)),
        ("bipedal-walker-noisy", 5000, (-110, -60), (-110, 300)),
        ("frozen-lake-noisy", 5000, (0.01, 0.08), (0, 0)),
        ("taxi-noisy", 5000, (-130, -70), (1, 7)),
        ("cliff-walking-noisy", 5000, (-520, -340), (-40, -15)),
    ],
)
def test_returns_are_as_documented(
    tmp_path: Path, name: str, steps: int, mean: tuple[float, float], p90: tuple[float, float]
) -> None:
    """The mean and the 90th percentile of the returns, as the generators' docstrings say."""
    summary = generate(KINDS[name], tmp_path / "out.hdf5", steps=steps)
    assert mean[0] <= summary.mean_return <= mean[1]
    assert p90[0] <= summary.p90_return <= p90[1]


def test_episodes_can_be_asked_for_instead_of_steps(tmp_path: Path) -> None:
    """Five episodes are the first five of a longer file; both numbers at once are an error."""
    five, many = tmp_path / "five.hdf5", tmp_path / "many.hdf5"
    calls: list[tuple[int, int]] = []
    summary = generate(
        KINDS["gridworld-random"], five, episodes=5, progress=lambda *counts: calls.append(counts)
    )
    assert summary.episodes == len(episodes(read(five))) == 5
    assert calls == [(n, 5) for n in range(1, 6)]
    generate(KINDS["gridworld-random"], many, steps=500)
    np.testing.assert_array_equal(
        read(many)["observations"][: summary.steps], read(five)["observations"]
    )
    with pytest.raises(InvalidData, match="^episodes; expected at least 1"):
        generate(KINDS["gridworld-random"], five, episodes=0)
    with pytest.raises(InvalidData, match="^steps; expected none"):
        generate(KINDS["gridworld-random"], five, 10, episodes=1)


def test_modified_data_differs_only_by_the_modification(tmp_path: Path) -> None:
    """Rewards times 1000, actions with a column of zeros; the environment replays the file."""
    plain, changed = tmp_path / "plain.hdf5", tmp_path / "changed.hdf5"
    generate(KINDS["pendulum-mixed"], plain, episodes=2)
    generate(KINDS["pendulum-mixed"], changed, episodes=2, reward_scale=1000, constant_action=True)
    before, after = read(plain), read(changed)
    np.testing.assert_allclose(after["rewards"], 1000 * before["rewards"], rtol=1e-6)
    np.testing.assert_array_equal(after["actions"], np.pad(before["actions"], ((0, 0), (0, 1))))
    for name in ("observations", "next_observations", "terminals", "timeouts"):
        np.testing.assert_array_equal(after[name], before[name])
    units = tmp_path / "units.hdf5"
    generate(
        KINDS["pendulum-mixed"], units, episodes=2, observation_scale=0.5, observation_shift=2.0
    )
    seen = read(units)
    np.testing.assert_array_equal(seen["actions"], before["actions"])
    for name in ("observations", "next_observations"):
        np.testing.assert_allclose(seen[name], 0.5 * before[name] + 2.0, rtol=1e-6)
    about = metadata(changed)
    env = gymnasium.make(
        about["environment"].decode(), **json.loads(about["environment_kwargs"].decode())
    )
    obs, _ = env.reset(seed=0)
    rewards = [env.step(action)[1] for action in after["actions"][:200]]
    np.testing.assert_array_equal(np.float32(rewards), after["rewards"][:200])
    with pytest.raises(InvalidData, match="^constant_action; expected an environment with a flat"):
        generate(KINDS["gridworld-random"], plain, 10, constant_action=True)
    with pytest.raises(InvalidData, match="^reward_scale; expected above 0"):
        generate(KINDS["gridworld-random"], plain, 10, reward_scale=-1)


def test_progress_rises_to_the_total(tmp_path: Path) -> None:
    """One call an episode, never past what was asked for, the last one complete."""
    calls: list[tuple[int, int]] = []
    generate(
        KINDS["pendulum-stitch"], tmp_path / "out.hdf5", 500, progress=lambda *n: calls.append(n)
    )
    assert calls == [(200, 500), (400, 500), (500, 500)]


@pytest.mark.parametrize(
    ("kind", "module", "extra"),
    [
        (KINDS["lunarlander-noisy"], "box2d.lunar_lander", "box2d"),
        (KINDS["bipedal-walker-noisy"], "box2d.bipedal_walker", "box2d"),
        (KINDS["swimmer-noisy"], "mujoco.swimmer_v5", "mujoco"),
        (KINDS["reacher-noisy"], "mujoco.reacher_v5", "mujoco"),
        (KINDS["inverted-double-pendulum-noisy"], "mujoco.inverted_double_pendulum_v5", "mujoco"),
        (KINDS["pusher-noisy"], "mujoco.pusher_v5", "mujoco"),
    ],
)
def test_without_a_package_the_error_says_what_to_install(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[Behaviour],
    module: str,
    extra: str,
) -> None:
    """The absence of Box2D or MuJoCo costs one sentence, and no half file stays."""
    monkeypatch.setitem(sys.modules, f"gymnasium.envs.{module}", None)
    with pytest.raises(MissingPackage, match=rf'pip install "gymnasium\[{extra}\]"'):
        generate(kind, tmp_path / "out.hdf5", steps=100)
    assert list(tmp_path.iterdir()) == []


def test_the_best_actions_solve_toy_text() -> None:
    """Along the cliff: up, eleven steps to the right, down. Else: what leads to a reward, a nearer
    one rather than one that is hardly larger, and the first of equally good actions."""
    cliff: Any = gymnasium.make("CliffWalking-v1").unwrapped
    best = best_actions(cliff.P)
    assert [best[36], *best[24:35], best[35]] == [0, *[1] * 11, 2]
    stay, later = (1.0, 0, 0.0, False), (1.0, 1, 0.0, False)
    end, less = (1.0, 1, 1.0, True), (1.0, 1, 0.995, True)
    assert best_actions({0: {0: [stay], 1: [later]}, 1: {0: [end], 1: [less]}}).tolist() == [1, 0]
    assert best_actions({0: {0: [later], 1: [less]}, 1: {0: [end], 1: [end]}}).tolist() == [1, 0]


def test_the_number_of_discrete_observations_is_in_the_metadata(files: dict[str, Path]) -> None:
    assert metadata(files["taxi-noisy"])["discrete_observations"] == 500
    assert metadata(files["frozen-lake-noisy"])["discrete_observations"] == 64
    assert "discrete_observations" not in metadata(files["acrobot-noisy"])


COLUMNS: Columns = {
    "observations": np.zeros((4, 3), np.float32),
    "actions": np.zeros((4, 1), np.float32),
    "rewards": np.zeros(4, np.float32),
    "terminals": np.zeros(4, np.bool_),
}


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    """Whole or not at all: the new file takes the name only when it is complete."""
    path = tmp_path / "out.hdf5"
    write_d4rl(path, COLUMNS, {"algorithm": "first"})
    before = path.read_bytes()
    unstorable: Any = object()
    with pytest.raises(TypeError):
        write_d4rl(path, COLUMNS, {"algorithm": unstorable})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_nested_names_become_groups(tmp_path: Path) -> None:
    """`infos/qpos` and `metadata/policy/weight` as in D4RL's files; strings become bytes."""
    path = tmp_path / "out.hdf5"
    columns = COLUMNS | {"infos/qpos": np.ones((4, 2), np.float32)}
    write_d4rl(path, columns, {"algorithm": "SAC", "policy/weight": np.eye(2)})
    with h5py.File(path) as h5:
        assert h5["infos/qpos"].shape == (4, 2)
        assert h5["metadata/algorithm"][()] == b"SAC"
        np.testing.assert_array_equal(h5["metadata/policy/weight"][()], np.eye(2))


def test_the_docs_list_every_generator() -> None:
    """The table in docs/reference/own_data.md has one row per generator."""
    text = Path(__file__).parents[2].joinpath("docs/reference/own_data.md").read_text()
    section = text.split("## Generated datasets")[1].split("\n## ")[0]
    names = [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")]
    names = [name for name in names if not name.startswith("--")]
    assert sorted(names) == sorted(KINDS)


def test_arguments_of_environments_may_be_named_like_those_of_the_generator(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out.hdf5"
    arguments = ["--steps", "30", "--env-args", "steps=3", "colours=2"]
    assert main(["find-block-noisy", str(out), *arguments]) == 0
    ends = read(out)["terminals"].astype(bool).nonzero()[0]
    assert ends.tolist() == list(range(2, 30, 3))


def test_command_line_writes_the_same_file_and_reports_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`tmaze-passive OUT --steps --seed --json`: exit 0, JSON alone on stdout, the facts right."""
    by_hand, by_command = tmp_path / "hand.hdf5", tmp_path / "command.hdf5"
    generate(KINDS["tmaze-passive"], by_hand, steps=300, seed=5, env_args={"corridor_length": 9})
    arguments = ["--steps", "300", "--seed", "5", "--corridor-length", "9", "--json"]
    assert main(["tmaze-passive", str(by_command), *arguments]) == 0
    assert by_command.read_bytes() == by_hand.read_bytes()
    facts = json.loads(capsys.readouterr().out)
    assert (facts["steps"], facts["episodes"]) == (300, 30)
    columns = read(by_command)
    assert facts["mean_return"] == pytest.approx(columns["rewards"].sum() / 30, abs=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["out.hdf5", "--steps", "0"], "steps; expected at least 1; got 0"),
        (["out.hdf5", "--seed", "-1"], "seed; expected 0"),
        (["no/such/folder/out.hdf5", "--steps", "200"], "no folder no/such/folder to write into"),
    ],
)
def test_command_line_errors_are_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    """Exit 2, the reason on stderr, nothing on stdout, no file."""
    monkeypatch.chdir(tmp_path)
    assert main(["pendulum-stitch", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == []


def test_hidden_numbers_are_left_out_and_known_to_the_behaviour(tmp_path: Path) -> None:
    """The same episodes, of which the file lacks the velocity; its environment lacks it, too."""
    plain, hidden = tmp_path / "plain.hdf5", tmp_path / "hidden.hdf5"
    generate(KINDS["pendulum-mixed"], plain, episodes=2)
    generate(KINDS["pendulum-mixed"], hidden, episodes=2, hide=[2])
    full, part = read(plain), read(hidden)
    assert np.array_equal(part["observations"], full["observations"][:, :2])
    assert np.array_equal(part["next_observations"], full["next_observations"][:, :2])
    assert np.array_equal(part["actions"], full["actions"])
    about = metadata(hidden)
    assert about["partially_observable"] == 1
    arguments = json.loads(about["environment_kwargs"])
    env = gymnasium.make(about["environment"].decode(), **arguments)
    obs, _ = env.reset(seed=0)
    assert obs.shape == env.observation_space.shape == (2,)
    assert env.metadata["partially_observable"]
    env.close()
    for wrong in ([3], [0, 1, 2]):
        with pytest.raises(InvalidData, match="hide"):
            generate(KINDS["pendulum-mixed"], hidden, episodes=2, hide=wrong)
