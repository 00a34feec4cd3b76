"""Minari's HDF5 layout, as its own writer (0.5.4) leaves it, made small with h5py."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import h5py
import numpy as np
import pytest
from PIL import Image

from collector.interface import interface_of
from server.imports.raw_file import ImportRefused, Reading
from stepwell._folders import files_of, zipped
from stepwell.spaces import Box, Discrete, EnvSpec, MultiBinary, MultiDiscrete
from stepwell.trajectory import Trajectory
from stepwell.vocabulary import Vocabulary
from tests.imported import read_file

WORDS = ("go to the Red ball", "open it")
BOX = {"type": "Box", "dtype": "float64", "shape": [2], "low": [-1, -1], "high": [1, float("inf")]}
ACTION = {"type": "Box", "dtype": "float32", "shape": [1], "low": [-3.0], "high": [3.0]}
TEXT = {"type": "Text", "max_length": 30, "min_length": 1, "charset": "abc"}


def jpeg(number: int) -> np.ndarray:
    out = io.BytesIO()
    Image.fromarray(np.full((40, 36, 3), number, np.uint8)).save(out, format="JPEG")
    return np.frombuffer(out.getvalue(), np.uint8)


def episode(steps: int, **changes: Any) -> dict[str, Any]:
    """Arrays of one episode by path; None removes one."""
    rng = np.random.default_rng(steps)
    ends = np.arange(steps) == steps - 1
    arrays = {
        "observations": rng.uniform(-1, 1, (steps + 1, 2)),
        "actions": rng.uniform(-1, 1, (steps, 1)).astype(np.float32),
        "rewards": rng.normal(size=steps),
        "terminations": ends,
        "truncations": np.zeros(steps, np.bool_),
    }
    return {k: v for k, v in (arrays | changes).items() if v is not None}


def write(folder: Path, episodes: list[dict[str, Any]], **metadata: Any) -> Path:
    """A dataset's folder; its metadata.json declares `metadata` and the counts."""
    data = folder / "data"
    data.mkdir(parents=True)
    with h5py.File(data / "main_data.hdf5", "w", track_order=True) as file:
        for number, arrays in enumerate(episodes):
            group = file.create_group(f"episode_{number}")
            group.attrs.update({"id": number, "seed": 7 + number})
            for name, array in arrays.items():
                texts = isinstance(array, list)
                kind = h5py.string_dtype() if texts else None
                group.create_dataset(name, data=array, dtype=kind)
            if "rewards" in arrays:
                group.attrs["total_steps"] = len(arrays["rewards"])
    said = {
        "total_episodes": len(episodes),
        "total_steps": sum(len(e.get("rewards", ())) for e in episodes),
        "data_format": "hdf5",
        "algorithm_name": "random",
        **metadata,
    }
    (data / "metadata.json").write_text(json.dumps(said))
    return folder


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., tuple[Reading, list[Trajectory]]]:
    """Read a dataset back as the child does, in this process; `bare`: its HDF5 file alone."""

    def read_(
        episodes: list[dict[str, Any]], *, bare: bool = False, spec: Any = None, **metadata: Any
    ) -> tuple[Reading, list[Trajectory]]:
        folder = write(tmp_path / f"d{len(list(tmp_path.iterdir()))}", episodes, **metadata)
        if bare:
            return read_file(folder / "data/main_data.hdf5", kind="minari", spec=spec)
        return read_file(folder, spec=spec)

    return read_


def test_observations_have_their_last_row_and_the_declared_spaces(read: Any) -> None:
    episodes = [episode(n) for n in (3, 1, 5)]
    spaces = {"observation_space": json.dumps(BOX), "action_space": json.dumps(ACTION)}
    found, made = read(episodes, **spaces, env_spec=json.dumps({"id": "Maze-v3"}))
    assert found.spec == EnvSpec.of(
        Box((2,), "float32", -1, (1, np.inf)), Box((1,), low=-3, high=3), env="Maze-v3"
    )
    assert found.warnings == [
        "observations: float64 stored as float32",
        "rewards: float64 stored as float32, which rounds them",
    ]
    for number, (arrays, trajectory) in enumerate(zip(episodes, made, strict=True)):
        wanted = arrays["observations"].astype(np.float32)
        assert trajectory.obs["observation"].tobytes() == wanted.tobytes()
        assert trajectory.actions["action"].tobytes() == arrays["actions"].tobytes()
        assert trajectory.rewards.tobytes() == arrays["rewards"].astype(np.float32).tobytes()
        assert (trajectory.terminated, trajectory.truncated) == (True, False)
        assert trajectory.final_obs_valid
        assert (trajectory.metadata.seed, trajectory.metadata.env) == (7 + number, "Maze-v3")


def test_without_metadata_the_data_tell_the_spaces(read: Any) -> None:
    found, _ = read([episode(3), episode(4)], bare=True)
    assert found.spec == EnvSpec.of(Box((2,)), Box((1,), low=-1, high=1))
    whole = episode(3, observations=np.array([0, 4, 1, 2]), actions=np.array([0, 1, 1]))
    later = episode(3, observations=np.array([0, 1, 1, 6]), actions=np.array([0, 3, 1]))
    found, _ = read([whole, later], bare=True)
    assert found.spec == EnvSpec.of(Discrete(7), Discrete(4))


def test_actions_beyond_declared_bounds_widen_them(read: Any) -> None:
    beyond = episode(3, actions=np.full((3, 1), 3.5, np.float32))
    endless = ACTION | {"low": [float("-inf")]}
    for declared in (ACTION, endless):
        found, _ = read([beyond], action_space=json.dumps(declared))
        assert found.spec.actions["action"] == Box((1,), low=-5, high=5)
        assert any("bounds of the actions" in warning for warning in found.warnings)


def test_an_option_for_actions_leaves_the_declared_observations(tmp_path: Path) -> None:
    folder = write(tmp_path / "d", [episode(3)], observation_space=json.dumps(BOX))
    found, _ = read_file(folder, action_low=(-5.0,), action_high=(5.0,))
    declared = EnvSpec.of(Box((2,), "float32", -1, (1, np.inf)), Box((1,), low=-5, high=5))
    assert found.spec == declared


def test_an_info_of_another_shape_is_unknown_and_said(read: Any) -> None:
    spec = EnvSpec.of(Box((2,)), Box((1,), low=-9, high=9), infos={"x": Box((2,))})
    found, made = read([episode(3, **{"infos/x": np.zeros(4)})], spec=spec)
    assert "another shape" in found.dropped["x"] and np.isnan(made[0].infos["x"]).all()
    assert any("info 'x' left out" in warning for warning in found.warnings)


def test_nested_spaces_texts_and_infos(read: Any) -> None:
    def nested(steps: int, first: int) -> dict[str, Any]:
        texts = [WORDS[(first + i) % 2] for i in range(steps + 1)]
        return episode(
            steps,
            observations=None,
            actions=None,
            **{
                "observations/arm/a b": np.zeros((steps + 1, 2), np.float32),
                "observations/room": np.full(steps + 1, 6),
                "observations/mission": texts,
                "actions/_index_0": np.zeros(steps, np.int64),
                "actions/_index_1": np.ones((steps, 2), np.int8),
                "infos/goal/xy": np.full((steps + 1, 2), np.nan),
                "infos/note": texts,
                "infos/short": np.zeros(1),
                f"infos/only_{first}": np.zeros(steps + 1),
            },
        )

    spaces = {
        "observation_space": json.dumps(
            {
                "type": "Dict",
                "subspaces": {
                    "arm": {"type": "Dict", "subspaces": {"a b": BOX | {"dtype": "float32"}}},
                    "room": {"type": "Discrete", "n": 5, "start": 2},
                    "mission": TEXT,
                },
            }
        ),
        "action_space": json.dumps(
            {
                "type": "Tuple",
                "subspaces": [{"type": "Discrete", "n": 4}, {"type": "MultiBinary", "n": 2}],
            }
        ),
    }
    found, made = read([nested(2, 0), nested(3, 1)], **spaces)
    vocabulary = Vocabulary(("ball", "go", "it", "open", "red", "the", "to"))
    assert found.spec.observations == {
        "arm/a_b": Box((2,), "float32", -1, (1, np.inf)),
        "mission": MultiDiscrete((vocabulary.n,) * 5),
        "room": Discrete(5, 2),
    }
    assert found.spec.vocabularies == {"mission": vocabulary}
    assert found.spec.actions == {"action/0": Discrete(4), "action/1": MultiBinary(2)}
    assert found.spec.infos == {"goal/xy": Box((2,), "float64")}
    assert set(found.dropped) == {"note", "short", "only_0", "only_1"}
    assert [vocabulary.decode(ids) for ids in made[1].obs["mission"]] == [
        *("open it", "go to the red ball", "open it", "go to the red ball")
    ]
    # Into the dataset that this made: the same vocabulary, words that it lacks are unknown.
    more = nested(1, 0) | {"observations/mission": ["open the gate", "it " * 9]}
    _, (other,) = read([more], spec=found.spec)
    assert [vocabulary.decode(ids) for ids in other.obs["mission"]] == [
        "open the ?",
        "it it it it it",
    ]


@pytest.mark.parametrize("shape", [(2,), (1, 2), (2, 1)])
def test_choices_have_the_numbers_that_their_space_declares(read: Any, shape: Any) -> None:
    """The same spec as a collector's: both can share a dataset."""
    space = gymnasium.spaces.MultiDiscrete(
        np.reshape([3, 2], shape), start=np.reshape([-1, 5], shape)
    )
    said = json.dumps(
        {
            "type": "MultiDiscrete",
            "dtype": "int64",
            "nvec": space.nvec.tolist(),
            "start": space.start.tolist(),
        }
    )
    values = np.stack([space.sample() for _ in range(5)])
    one = episode(4, observations=values, actions=values[:4])
    found, (made,) = read([one], observation_space=said, action_space=said)
    env = gymnasium.Env[Any, Any]()
    env.observation_space = env.action_space = space
    assert found.spec.digest == interface_of(env, "x").spec.digest
    assert made.actions["action"].tolist() == values[:4].reshape(4, 2).tolist()
    assert made.obs["observation"].tolist() == values.reshape(5, 2).tolist()


def test_binary_vectors_are_flat(read: Any) -> None:
    said = json.dumps({"type": "MultiBinary", "n": [2, 2]})
    one = episode(2, observations=np.eye(2, dtype=np.int8)[None].repeat(3, 0))
    found, (made,) = read([one], observation_space=said)
    assert found.spec.observations["observation"] == MultiBinary(4)
    assert made.obs["observation"].tolist() == [[1, 0, 0, 1]] * 3


@pytest.mark.parametrize("same_size", [True, False])
def test_jpeg_frames_become_pixels(read: Any, same_size: bool) -> None:
    frames = [jpeg(0), jpeg(0 if same_size else 200), jpeg(0)]
    if same_size:
        stored: Any = np.stack(frames)
    else:
        frames[1] = np.concatenate([frames[1], np.zeros(5, np.uint8)])
        stored = np.empty(3, h5py.vlen_dtype(np.uint8))
        stored[:] = frames
    found, (made,) = read([episode(2, observations=stored)], bare=True)
    assert found.spec.observations["observation"] == Box((40, 36, 3), "uint8", 0, 255)
    assert made.obs["observation"][:, 0, 0, 0].tolist() == [0, 0 if same_size else 200, 0]
    assert any("JPEG" in warning for warning in found.warnings)


def test_ends(read: Any) -> None:
    """Both flags: terminated. Neither: cut off, unless an export of ours says that it goes on."""
    last = np.array([False, True])
    none = np.zeros(2, np.bool_)
    cases = [(last, last, (True, False)), (none, last, (False, True)), (none, none, (False, True))]
    for terminations, truncations, expected in cases:
        flags = {"terminations": terminations, "truncations": truncations}
        _, (made,) = read([episode(2, **flags)])
        assert (made.terminated, made.truncated) == expected


@pytest.mark.parametrize("bare", [False, True])
def test_an_episode_without_its_final_observation(read: Any, bare: bool) -> None:
    """T rows instead of T+1: what was seen last is unknown, in that episode alone."""
    short = episode(3)
    short["observations"] = short["observations"][:3]
    short["infos/x"] = np.arange(3.0)
    whole = episode(4) | {"infos/x": np.arange(5.0)}
    found, got = read([whole, short, episode(2) | {"infos/x": np.zeros(3)}], bare=bare)
    assert [len(t) for t in got] == [4, 3, 2]
    assert [t.final_obs_valid for t in got] == [True, False, True]
    last = got[1].obs["observation"]
    assert np.array_equal(last[:-1], short["observations"].astype(np.float32))
    assert np.array_equal(last[-1], last[-2])
    assert got[1].infos["x"].tolist() == [0, 1, 2, 2]
    assert "1 episode without a final observation: it is unknown" in found.warnings


def test_named_observations_of_which_one_lacks_the_last(read: Any) -> None:
    arrays = {"observations/a": np.arange(6.0).reshape(3, 2), "observations/b": np.ones((4, 1))}
    _, ((got,)) = (None, read([episode(3, observations=None) | arrays])[1])
    assert not got.final_obs_valid
    assert got.obs["a"].tolist() == [[0, 1], [2, 3], [4, 5], [4, 5]]
    assert got.obs["b"].shape == (4, 1)


def test_texts_and_frames_without_the_last(read: Any) -> None:
    arrays = {"observations/mission": ["go", "to", "it"], "observations/x": np.zeros((3, 1))}
    _, (got,) = read([episode(3, observations=None) | arrays])
    assert not got.final_obs_valid
    assert np.array_equal(got.obs["mission"][-1], got.obs["mission"][-2])


@pytest.mark.parametrize("bare", [False, True])
def test_an_episode_of_zero_steps_is_left_out_and_counted(read: Any, bare: bool) -> None:
    """Its first observation is no step; metadata.json counts it."""
    empty = {k: v[:0] for k, v in episode(1).items()} | {"observations": np.zeros((1, 2))}
    found, got = read([episode(2), empty, episode(3), empty], bare=bare)
    assert [len(t) for t in got] == [2, 3]
    assert [t.metadata.seed for t in got] == [7, 9]
    assert "2 episodes without a step left out" in found.warnings


def test_an_empty_space_is_refused_with_its_key(read: Any) -> None:
    box = {"type": "Box", "dtype": "float32", "shape": [0], "low": [], "high": []}
    declared = {"type": "Dict", "subspaces": {"arm": BOX, "tool": box}}
    arrays = {"observations/arm": np.zeros((4, 2)), "observations/tool": np.zeros((4, 0))}
    made = [episode(3, observations=None) | arrays]
    wide = [made[0] | {"observations/tool": np.zeros((4, 1))}]
    with pytest.raises(ImportRefused, match="tool in metadata.json: bad shape"):
        read(wide, observation_space=json.dumps(declared))
    with pytest.raises(ImportRefused, match="observations/tool has rows of an invalid size"):
        read(made, bare=True)
    found, _ = read([episode(3) | {"infos/none": np.zeros((4, 0))}])
    assert "none" in found.dropped


def test_dict_spaces_are_matched_by_name(read: Any) -> None:
    """Whatever order the groups of a later file have."""

    def made(*names: str) -> Any:
        values = {"arm": np.ones((4, 2)), "hand": np.zeros((4, 2)), "leg": np.zeros((4, 2))}
        return [episode(3, observations=None) | {f"observations/{n}": values[n] for n in names}]

    found, _ = read(made("arm", "hand"))
    _, (got,) = read(made("hand", "arm"), spec=found.spec)
    assert got.obs["arm"].all() and not got.obs["hand"].any()
    with pytest.raises(ImportRefused, match="other observations than the dataset"):
        read(made("arm", "leg"), spec=found.spec)


def test_columns_of_one_number_a_row(read: Any) -> None:
    """Environments that return array([1.0]) are stored so."""
    columns = {"rewards": [[1.0], [2.0], [3.0]], "terminations": [[False], [False], [True]]}
    _, (got,) = read([episode(3, **{k: np.array(v) for k, v in columns.items()})])
    assert got.rewards.tolist() == [1, 2, 3] and got.terminated
    with pytest.raises(ImportRefused, match="rewards is no column") as caught:
        read([episode(3, rewards=np.ones((3, 2)))])
    assert caught.value.got == "float64 [3, 2]"


def test_a_long_episode_is_whole_and_the_order_is_numeric(read: Any) -> None:
    """Alphabetically episode_10 comes before episode_2; Minari's Arrow reader cuts at 32,767."""
    lengths = [1] * 11 + [40_000]
    _, made = read([episode(n, rewards=np.full(n, i)) for i, n in enumerate(lengths)])
    assert [len(t) for t in made] == lengths
    assert [t.rewards[0] for t in made] == list(range(12))


def external(folder: Path) -> Path:
    secret = folder / "secret"
    secret.write_bytes(bytes(24))
    with h5py.File(folder / "data/main_data.hdf5", "r+") as file:
        del file["episode_0/rewards"]
        place = [(str(secret), 0, 24)]
        file["episode_0"].create_dataset("rewards", (3,), "float64", external=place)
    return folder


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no rewards": (lambda p: write(p, [episode(3, rewards=None)]), "lacks rewards"),
    "no observations": (lambda p: write(p, [episode(3, observations=None)]), "lacks observations"),
    "another tool's names": (
        lambda p: write(p, [episode(3, observations=None) | {"obs": np.zeros((3, 2))}]),
        "each episode is a group of its own",
    ),
    "T+2 observations": (
        lambda p: write(p, [episode(3, observations=np.zeros((5, 2)))]),
        "not 4 rows",
    ),
    "T and T+2 observations": (
        lambda p: write(
            p,
            [
                episode(3, observations=None)
                | {"observations/a": np.zeros((3, 2)), "observations/b": np.zeros((5, 2))}
            ],
        ),
        "not 4 rows",
    ),
    "short actions": (lambda p: write(p, [episode(3, actions=np.zeros((2, 1)))]), "not 3 rows"),
    "no steps": (
        lambda p: write(p, [{k: v[:0] for k, v in episode(1).items()}] * 2),
        "no episode has a step",
    ),
    "another shape later": (
        lambda p: write(p, [episode(3), episode(3, observations=np.zeros((4, 3)))]),
        "observations of episode_1 differ",
    ),
    "another name later": (
        lambda p: write(
            p, [episode(3), episode(3, observations=None, **{"observations/x": np.zeros(4)})]
        ),
        "observations of episode_1 differ",
    ),
    "NaN": (
        lambda p: write(p, [episode(3), episode(2, rewards=np.array([0, np.nan]))]),
        r"episode_1/rewards",
    ),
    "an end in the middle": (
        lambda p: write(p, [episode(3, terminations=np.array([True, False, True]))]),
        "terminations is set before the last step",
    ),
    "objects": (
        lambda p: write(p, [episode(2, observations=np.zeros(3, np.complex64))]),
        "unsupported type",
    ),
    "fewer episodes than declared": (
        lambda p: write(p, [episode(3)], total_episodes=2),
        "episodes are missing",
    ),
    "fewer steps than declared": (
        lambda p: write(p, [episode(3)], total_steps=4),
        "steps are missing",
    ),
    "another format": (lambda p: write(p, [episode(3)], data_format="arrow"), "another format"),
    "an unknown space": (
        lambda p: write(p, [episode(3)], observation_space='{"type": "Graph"}'),
        "observation_space in metadata.json cannot be read",
    ),
    "a space that is no JSON": (
        lambda p: write(p, [episode(3)], action_space="{"),
        "action_space in metadata.json cannot be read",
    ),
    "a damaged JPEG": (
        lambda p: write(p, [episode(1, observations=np.stack([jpeg(0)[:200]] * 2))]),
        "damaged JPEG",
    ),
    "data in another file": (lambda p: external(write(p, [episode(3)])), "in another file"),
    "a bad spec": (lambda p: write(p, [episode(3)], stepwell_spec={"env": 1}), "stepwell_spec"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_by_name(read: Any, tmp_path: Path, name: str) -> None:
    make, says = BAD[name]
    folder = make(tmp_path / "bad")
    with pytest.raises(ImportRefused, match=says):
        read_file(folder)


def links(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        del file["episode_0/observations"]
        file["episode_0/observations"] = h5py.ExternalLink("/etc/passwd", "x")


def soft_episode(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        file["episode_1"] = h5py.SoftLink("/episode_0")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2000])


@pytest.mark.parametrize("harm", [links, soft_episode, cut])
def test_a_hostile_file_is_refused(tmp_path: Path, harm: Any) -> None:
    folder = write(tmp_path / "d", [episode(3)])
    path = folder / "data/main_data.hdf5"
    harm(path)
    for kind, file in (("zip", folder), ("minari", path)):
        with pytest.raises(ImportRefused):
            read_file(file, kind=kind)


def test_a_damaged_folder_stores_nothing(importing: Any, tmp_path: Path) -> None:
    folder = write(tmp_path / "d", [episode(3)])
    cut(folder / "data/main_data.hdf5")
    before = importing.files()
    with zipped(files_of(folder)[1]) as packed:
        job = importing.run(packed, "hostile-minari", format="minari")
    assert (job.state, job.error.code) == ("failed", "import_refused"), job
    assert importing.files() == before
    assert importing.rows("select count(*) from datasets where name = 'hostile-minari'") == [[0]]


def test_a_zip_made_by_hand_is_read_and_others_are_refused(importing: Any, tmp_path: Path) -> None:
    """As a file manager makes one: compressed, with the folder's name, with files of its own."""
    write(tmp_path / "mine", [episode(3)])
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("metadata.json", "main_data.hdf5"):
            archive.write(tmp_path / "mine/data" / name, f"mine/data/{name}")
            archive.writestr(f"__MACOSX/mine/data/._{name}", b"nothing")
    job = importing.run(path, "archive", format="zip")
    assert (job.state, job.result["format"], job.result["steps"]) == ("succeeded", "minari", 3)
    for name, format_, says in (
        ("metadata.json", "minari", "not the zip of a Minari dataset"),
        ("holiday.jpg", "zip", "not of a known dataset"),
    ):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(name, "{}")
        job = importing.run(path, "archive", format=format_)
        assert (job.state, job.error.code) == ("failed", "import_refused"), job
        assert says in job.error.detail


def test_a_minari_file_is_recognised_and_stored_once(importing: Any, tmp_path: Path) -> None:
    """Its suffix says d4rl; the dataset is tagged and described as what it is."""
    folder = write(tmp_path / "d", [episode(3), episode(4)], dataset_id="a/b-v0")
    with zipped(files_of(folder)[1]) as packed:
        for expected in (2, 0):
            job = importing.run(packed, "from-minari", env="Maze-v3")
            assert job.state == "succeeded", job
            assert (job.result["format"], job.result["trajectories"]) == ("minari", expected)
    bare = importing.run(folder / "data/main_data.hdf5", "from-minari-bare")
    assert (bare.result["trajectories"], bare.result["steps"]) == (2, 7)
    assert importing.rows(
        "select name, tags, description from datasets where name like 'from-minari%' order by name"
    ) == [
        ["from-minari", ["minari"], "Imported (minari): dataset_id=a/b-v0, algorithm_name=random"],
        ["from-minari-bare", ["minari"], "Imported (minari)"],
    ]
    assert importing.rows(
        "select env, seed, split_part(source, ':', 1) from trajectories"
        " where dataset = 'from-minari' order by seq"
    ) == [["Maze-v3", 7, "minari"], ["Maze-v3", 8, "minari"]]


@pytest.mark.parametrize("names", [("joint-1", "joint_1"), ("温度", "湿度")])
def test_names_that_become_one_are_refused_with_both(read: Any, names: tuple[str, str]) -> None:
    """One of the two arrays was lost. Of infos, both are left out."""
    arrays = {f"observations/{name}": np.zeros((4, 1)) for name in names}
    with pytest.raises(ImportRefused, match="would both be named") as caught:
        read([episode(3, observations=None) | arrays])
    assert all(f"observations/{name}" in caught.value.detail for name in names)
    infos = {f"infos/{name}": np.zeros(4) for name in names} | {"infos/x": np.zeros(4)}
    found, _ = read([episode(3) | infos] * 2)
    assert {*found.spec.infos} == {"x"}
    assert all(any(f"infos/{name}" in line for line in found.warnings) for name in names)
