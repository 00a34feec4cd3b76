"""Columns by name: the order of a vector's elements, and the columns that are an episode's id."""

from __future__ import annotations

import decimal
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from server.imports.raw_file import ImportRefused, Reading
from stepwell import Box, Client, Conflict, EnvSpec, InvalidSpace
from stepwell._folders import files_of, zipped
from stepwell.trajectory import Trajectory
from tests.imported import read_file

from .conftest import Importing

ROWS = 8
Columns = dict[str, Any]


def write(path: Path, columns: Columns) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {k: v if isinstance(v, pa.Array) else pa.array(v) for k, v in columns.items()}
    pq.write_table(pa.table(arrays), path)
    return path


def read(path: Path, *given: str, spec: EnvSpec | None = None) -> tuple[Reading, list[Trajectory]]:
    return read_file(path, *given, kind="parquet", spec=spec)


def said(found: Reading) -> str:
    return " | ".join(found.warnings)


# --- the order of a vector's elements -------------------------------------------------------------


def numbered(names: list[str], **changes: Any) -> Columns:
    """Column NAME_3 is 3.0 in every row."""
    made = {name: np.full(ROWS, float(name.rpartition("_")[2])) for name in names}
    ends = np.arange(ROWS) % 4 == 3
    return made | {"action": np.full(ROWS, 0.5), "reward": np.ones(ROWS), "done": ends} | changes


TWELVE = [f"f_{number}" for number in range(12)]


@pytest.mark.parametrize("order", [TWELVE, TWELVE[::-1], sorted(TWELVE)])
def test_what_a_pattern_matches_is_in_numeric_order_and_printed(
    tmp_path: Path, order: list[str]
) -> None:
    found, got = read(write(tmp_path / "a.parquet", numbered(order)), "observation=f_*")
    assert got[0].obs["observation"][0].tolist() == [float(n) for n in range(12)]
    assert f"columns: observation={', '.join(TWELVE)}" in found.warnings
    assert found.spec.names == {"observation/observation": tuple(TWELVE)}


@pytest.mark.parametrize("stem", ["obs_", "observation.", "state"])
@pytest.mark.parametrize("numbers", [range(12), range(1, 13), (0, 1, 3, 4)])
def test_a_guessed_family_is_in_numeric_order(tmp_path: Path, stem: str, numbers: Any) -> None:
    expected = [float(number) for number in numbers]
    for order in (sorted(numbers, key=str), [*numbers][::-1]):
        made = {f"{stem}{number}": np.full(ROWS, float(number)) for number in order}
        others = {k: v for k, v in numbered([]).items()}
        found, got = read(write(tmp_path / "a.parquet", made | others))
        assert got[0].obs["observation"][0].tolist() == expected
        assert ",".join(f"{stem}{number}" for number in numbers) in found.warnings[0]


@pytest.mark.parametrize(
    "names",
    [["qx1y10", "qx1y9", "qx10y1"], ["qa", "qB", "qc2", "qc10"], ["q_007", "q_7", "q_08"]],
)
def test_names_of_any_shape_have_one_order(tmp_path: Path, names: list[str]) -> None:
    """Numbers anywhere in a name, leading zeros, letters of both cases: any file's order gives the
    same."""
    got = set()
    for order in (names, names[::-1], sorted(names)):
        made = numbered([], **{name: np.full(ROWS, float(names.index(name))) for name in order})
        made = {k: made[k] for k in (*order, "action", "reward", "done")}
        found, _ = read(write(tmp_path / "a.parquet", made), "observation=q*")
        got.add(found.spec.names["observation/observation"])
    assert len(got) == 1


def test_columns_in_the_order_given_stay_so(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", numbered(["f_2", "f_10", "g_0"]))
    found, got = read(path, "observation=g_0,f_*", "action/arm=f_10", "action/hand=g_0")
    assert got[0].obs["observation"][0].tolist() == [0.0, 2.0, 10.0]
    assert found.spec.names == {"observation/observation": ("g_0", "f_2", "f_10")}


def test_a_later_file_is_matched_by_name(tmp_path: Path) -> None:
    """Whatever its own order, and whatever order was asked for."""
    spec = read(write(tmp_path / "a.parquet", numbered(TWELVE)), "observation=f_*")[0].spec
    other = write(tmp_path / "b.parquet", numbered(TWELVE[::-1]))
    for given in ("observation=f_*", f"observation={','.join(TWELVE[::-1])}"):
        found, got = read(other, given, spec=spec)
        assert got[0].obs["observation"][0].tolist() == [float(n) for n in range(12)]
        assert found.spec == spec
    assert "put in the dataset's order: f_0, f_1" in said(found)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (TWELVE[:-1], "lacks f_11"),
        ([*TWELVE, "f_12"], "adds f_12"),
        ([*TWELVE[:-1], "f_99"], "lacks f_11; adds f_99"),
    ],
)
def test_a_file_that_lacks_or_adds_a_name_is_refused(
    tmp_path: Path, names: list[str], says: str
) -> None:
    spec = read(write(tmp_path / "a.parquet", numbered(TWELVE)), "observation=f_*")[0].spec
    with pytest.raises(ImportRefused, match=says) as caught:
        read(write(tmp_path / "b.parquet", numbered(names)), "observation=f_*", spec=spec)
    assert caught.value.code == "schema_mismatch"


def test_one_column_by_a_pattern_has_a_name_too(tmp_path: Path) -> None:
    spec = read(write(tmp_path / "a.parquet", numbered(["f_1"])), "observation=f_*")[0].spec
    assert spec.names == {"observation/observation": ("f_1",)}
    with pytest.raises(ImportRefused, match="lacks f_1; adds f_2"):
        read(write(tmp_path / "b.parquet", numbered(["f_2"])), "observation=f_*", spec=spec)


def test_names_of_actions_and_of_several_wide_columns(tmp_path: Path) -> None:
    """A column that is a list itself gives each of its elements a name."""
    pose = [[1.0, 2.0]] * ROWS
    made = numbered(["f_0"], pose=pose, u_2=np.full(ROWS, 0.2), u_10=np.full(ROWS, 0.1))
    found, got = read(
        write(tmp_path / "a.parquet", made), "observation=pose,f_0", "action=u_*", "reward=reward"
    )
    assert found.spec.names == {
        "observation/observation": ("pose[0]", "pose[1]", "f_0"),
        "action/action": ("u_2", "u_10"),
    }
    assert np.allclose(got[0].actions["action"][0], [0.2, 0.1])
    made = {k: made[k] for k in reversed(made)}
    given = ("observation=f_0,pose", "action=u_10,u_2")
    _, again = read(write(tmp_path / "b.parquet", made), *given, spec=found.spec)
    assert again[0].obs["observation"].tolist() == got[0].obs["observation"].tolist()
    assert again[0].actions["action"].tolist() == got[0].actions["action"].tolist()


def test_a_file_or_a_dataset_without_names_is_said(tmp_path: Path) -> None:
    spec = read(write(tmp_path / "a.parquet", numbered(TWELVE)), "observation=f_*")[0].spec
    whole = numbered([], obs=list(np.zeros((ROWS, 12), np.float32)))
    found, _ = read(write(tmp_path / "b.parquet", whole), spec=spec)
    assert "no names of its elements in this file" in said(found)
    bare = EnvSpec.of(dict(spec.observations), dict(spec.actions))
    found, _ = read(tmp_path / "a.parquet", "observation=f_*", spec=bare)
    assert found.spec.names == {}
    assert "columns: observation=f_0, f_1" in said(found)


def test_next_observations_follow_the_same_order(tmp_path: Path) -> None:
    made = numbered(["f_0", "f_1"]) | {
        "next_1": np.full(ROWS, 11.0),
        "next_0": np.full(ROWS, 10.0),
    }
    given = ("observation=f_*", "next_observation=next_*")
    spec = read(write(tmp_path / "a.parquet", made), *given)[0].spec
    swapped = ("observation=f_1,f_0", "next_observation=next_1,next_0")
    _, got = read(tmp_path / "a.parquet", *swapped, spec=spec)
    assert got[0].obs["observation"][-1].tolist() == [10.0, 11.0]


def test_through_the_service_by_name(importing: Importing, tmp_path: Path) -> None:
    given = {"format": "parquet", "columns": ("observation=f_*",)}
    first = importing.run(write(tmp_path / "a.parquet", numbered(TWELVE)), "byname", **given)
    assert first.state == "succeeded"
    turned = numbered(TWELVE[::-1], reward=np.zeros(ROWS))
    second = importing.run(write(tmp_path / "b.parquet", turned), "byname", **given)
    assert second.state == "succeeded" and second.result is not None
    rows = importing.rows("select distinct array_to_string(obs.observation, ' ') from byname.steps")
    assert len(rows) == 1
    third = importing.run(write(tmp_path / "c.parquet", numbered(TWELVE[:3])), "byname", **given)
    assert third.state == "failed" and third.error is not None
    assert "lacks f_3" in third.error.detail


# --- names in the spec ----------------------------------------------------------------------------


def test_names_are_no_part_of_the_digest_and_survive_json() -> None:
    bare = EnvSpec.of(Box((2,)), Box((1,)))
    named = EnvSpec.of(Box((2,)), Box((1,)), names={"observation/observation": ("x", "y")})
    assert named.digest == bare.digest and named != bare
    assert "names" not in bare.to_json()
    again = EnvSpec.from_json(json.loads(json.dumps(named.to_json())))
    assert again == named and hash(again) == hash(named)
    turned = EnvSpec.of(Box((2,)), Box((1,)), names={"observation/observation": ("y", "x")})
    assert named.other_names(turned) == "observation/observation"
    assert named.other_names(bare) is bare.other_names(named) is None


@pytest.mark.parametrize(
    "names",
    [
        {"observation/observation": ("x",)},
        {"observation/observation": ("x", "x")},
        {"observation/observation": ("x", "")},
        {"observation/observation": "xy"},
        {"observation": ("x", "y")},
        {"observation/absent": ("x", "y")},
        {"action/action": ("x", "y")},
    ],
)
def test_names_that_do_not_fit_are_refused(names: Any) -> None:
    with pytest.raises(InvalidSpace, match="names of"):
        EnvSpec.of(Box((2,)), Box((1,)), names=names)


def test_the_service_refuses_trajectories_with_other_names(client: Client) -> None:
    spec = EnvSpec.of(Box((2,)), Box((1,)), names={"observation/observation": ("x", "y")})
    turned = EnvSpec.of(Box((2,)), Box((1,)), names={"observation/observation": ("y", "x")})
    bare = EnvSpec.of(Box((2,)), Box((1,)))
    client.create_dataset("named", spec)
    client.create_dataset("named", bare, exist_ok=True)
    with pytest.raises(Conflict):
        client.create_dataset("named", turned, exist_ok=True)
    arrays = {"obs": np.zeros((3, 2)), "actions": np.zeros((2, 1)), "rewards": np.zeros(2)}
    made = Trajectory.from_arrays(**arrays, truncated=True, spec=bare)
    assert client.post("named", [made], spec=bare).items[0].status == "stored"
    with pytest.raises(Exception, match=r"names\[observation/observation\]"):
        client.post("named", [made], spec=turned)


# --- LeRobot's names of elements ------------------------------------------------------------------


def lerobot_folder(folder: Path, names: Any, **columns: Any) -> Path:
    made = {
        "observation.state": list(np.tile(np.float32([1, 2]), (ROWS, 1))),
        "action": list(np.tile(np.float32([0.1, 0.2]), (ROWS, 1))),
        "episode_index": np.repeat([0, 1], 4),
        "frame_index": np.tile(np.arange(4), 2),
        "timestamp": np.tile(np.arange(4) / 10, 2),
        "index": np.arange(ROWS),
        "task_index": np.zeros(ROWS, np.int64),
    } | columns
    write(folder / "data/chunk-000/file-000.parquet", made)
    described = {"dtype": "float32", "shape": [2], "names": names}
    features: dict[str, Any] = {"observation.state": described, "action": described}
    for name in [*list(made)[2:7], *columns]:
        features[name] = {"dtype": "bool" if name in columns else "int64", "shape": [1]}
    (folder / "meta").mkdir()
    info = {"codebase_version": "v3.0", "features": features, "fps": 10}
    (folder / "meta/info.json").write_text(json.dumps(info))
    return folder


@pytest.mark.parametrize("wrap", [list, lambda n: {"motors": [*n]}, lambda n: {"axes": [*n]}])
def test_lerobots_names_are_matched(tmp_path: Path, wrap: Any) -> None:
    found, got = read(lerobot_folder(tmp_path / "a", wrap(("x", "y"))))
    assert found.spec.names == {
        "observation/observation": ("x", "y"),
        "action/action": ("x", "y"),
    }
    _, turned = read(lerobot_folder(tmp_path / "b", wrap(("y", "x"))), spec=found.spec)
    assert got[0].obs["observation"][0].tolist() == [1, 2]
    assert turned[0].obs["observation"][0].tolist() == [2, 1]
    with pytest.raises(ImportRefused, match="lacks y; adds z"):
        read(lerobot_folder(tmp_path / "c", wrap(("x", "z"))), spec=found.spec)


@pytest.mark.parametrize("names", [None, [], ["height"], ["a", "a"], {"motors": 3}, [1, 2]])
def test_lerobots_names_that_are_none_are_left_out(tmp_path: Path, names: Any) -> None:
    assert read(lerobot_folder(tmp_path / "a", names))[0].spec.names == {}


def test_padding_flags_are_no_observations(tmp_path: Path) -> None:
    flag = {
        "observation.state_is_pad": np.zeros(ROWS, np.bool_),
        "action_is_pad": np.zeros(ROWS, np.bool_),
    }
    found, _ = read(lerobot_folder(tmp_path / "a", ["x", "y"], **flag))
    assert list(found.spec.observations) == ["observation"]
    assert list(found.spec.actions) == ["action"]
    made = numbered([]) | {
        "obs.arm": np.ones(ROWS),
        "obs.arm_is_pad": np.zeros(ROWS, np.bool_),
        "obs.hand": np.ones(ROWS),
    }
    found, _ = read(write(tmp_path / "b.parquet", made))
    assert list(found.spec.observations) == ["arm", "hand"]
    assert "not read: obs.arm_is_pad" in found.warnings


def test_lerobot_2_1_is_refused_with_the_ways_to_read_it(tmp_path: Path) -> None:
    """One of them is its table, as any Parquet files."""
    folder = lerobot_folder(tmp_path / "a", None)
    info = json.loads((folder / "meta/info.json").read_text()) | {"codebase_version": "v2.1"}
    (folder / "meta/info.json").write_text(json.dumps(info))
    (folder / "data/chunk-000/file-000.parquet").rename(
        folder / "data/chunk-000/episode_000000.parquet"
    )
    with pytest.raises(ImportRefused) as caught:
        read(folder)
    for way in ("convert_dataset_v21_to_v30", "--format parquet"):
        assert way in str(caught.value.expected)
    kind, files = files_of(folder, "parquet")
    with zipped(files) as packed:
        found, got = read(packed, "reward=")
    assert kind == "parquet"
    assert [len(t) for t in got] == [4, 4]
    assert list(found.spec.observations) == ["observation"]


# --- ids of episodes ------------------------------------------------------------------------------

WORKER, EPISODE = np.tile([0, 1], 12), np.repeat([0, 1, 2], 8)
STEP = np.repeat(np.tile(np.arange(4), 3), 2)
SERIAL = (np.repeat([0, 1], 12), np.tile(np.repeat([0, 1, 2], 4), 2), np.tile(np.arange(4), 6))


def workers(serial: bool = False, **changes: Any) -> Columns:
    """Two workers with three episodes of four steps, each counting its own."""
    worker, episode, step = SERIAL if serial else (WORKER, EPISODE, STEP)
    made = {
        "worker": worker,
        "episode": episode,
        "step": step,
        "obs": worker * 100.0 + episode * 10 + step,
        "action": np.full(24, 0.5),
        "reward": worker * 1.0,
        "done": step == 3,
    } | changes
    return {name: column for name, column in made.items() if column is not None}


VARIANTS = [{"done": None}, {"done": None, "step": None}, {"step": None}, {}]


@pytest.mark.parametrize("serial", [False, True])
@pytest.mark.parametrize("changes", VARIANTS)
def test_an_id_of_several_columns(tmp_path: Path, serial: bool, changes: Columns) -> None:
    path = write(tmp_path / "a.parquet", workers(serial, **changes))
    _, got = read(path, "episode=worker,episode")
    assert [len(t) for t in got] == [4] * 6
    firsts = {tuple(t.obs["observation"][:-1, 0].tolist()) for t in got}
    assert firsts == {
        tuple(100.0 * w + 10 * e + s for s in range(4)) for w in range(2) for e in range(3)
    }


@pytest.mark.parametrize("serial", [False, True])
@pytest.mark.parametrize("changes", VARIANTS)
@pytest.mark.parametrize("name", ["worker", "env_id", "actorIdx", "seed", "rank", "run_name"])
def test_an_id_that_repeats_for_each_worker_is_refused_with_the_cure(
    tmp_path: Path, serial: bool, changes: Columns, name: str
) -> None:
    made = {name if k == "worker" else k: v for k, v in workers(serial, **changes).items()}
    if name == "run_name":
        made[name] = [f"run {number}" for number in made[name]]
    with pytest.raises(ImportRefused) as caught:
        read(write(tmp_path / "a.parquet", made))
    assert f"columns=episode={name},episode" in str(caught.value.expected)


def test_one_episode_of_each_worker_under_one_id(tmp_path: Path) -> None:
    """The rows are together, so that nothing but the worker tells them apart."""
    made = workers(True, episode=np.zeros(24, np.int64), step=None, done=None)
    with pytest.raises(ImportRefused, match="several values of worker") as caught:
        read(write(tmp_path / "a.parquet", made))
    assert caught.value.got == "worker: 0, 1"
    found, got = read(tmp_path / "a.parquet", "episode=episode")
    assert [len(t) for t in got] == [24] and "several values of worker" in said(found)


def test_what_varies_between_episodes_only_is_no_part_of_the_id(tmp_path: Path) -> None:
    made = workers(True, episode=np.repeat(np.arange(6), 4), seed=np.repeat(np.arange(6), 4))
    made["env"] = ["Hopper-v5"] * 24
    made["run"] = pa.nulls(24, pa.int64())
    found, got = read(write(tmp_path / "a.parquet", made))
    assert [len(t) for t in got] == [4] * 6
    assert "not read: worker, seed, env, run" in found.warnings


def test_ids_that_come_back_without_a_step_are_said(tmp_path: Path) -> None:
    made = workers(step=None, done=None, worker=None, reward=np.zeros(24), obs=np.arange(24.0))
    made["episode"] = np.tile([3, 4, 5], 8)
    found, _ = read(write(tmp_path / "a.parquet", made))
    assert "the rows of 3 episodes are not together: those of episode 3 are in 8 places" in said(
        found
    )
    made["episode"] = np.sort(made["episode"])
    assert "not together" not in said(read(write(tmp_path / "b.parquet", made))[0])


def test_two_columns_that_could_be_the_id(tmp_path: Path) -> None:
    """The coarser one would merge episodes; where they agree, either will do."""
    made = workers(True, worker=None, step=None, done=None, episode_id=np.repeat(np.arange(6), 4))
    with pytest.raises(ImportRefused) as caught:
        read(write(tmp_path / "a.parquet", made))
    assert "columns=episode=episode_id,episode" in str(caught.value.expected)
    assert [len(t) for t in read(tmp_path / "a.parquet", "episode=episode_id")[1]] == [4] * 6
    made["episode"] = made["episode_id"] + 7
    assert [len(t) for t in read(write(tmp_path / "b.parquet", made))[1]] == [4] * 6


def test_each_file_with_ids_of_its_own(tmp_path: Path) -> None:
    one = {k: v[:12] for k, v in workers(True, worker=None).items()}
    for number in range(2):
        write(tmp_path / f"both/{number}.parquet", one)
        write(tmp_path / f"bare/{number}.parquet", {k: one[k] for k in one if k[0] not in "sd"})
    for folder in ("both", "bare"):
        with pytest.raises(ImportRefused) as caught:
            read(tmp_path / folder)
        assert "episode" in str(caught.value.expected)
        _, got = read(tmp_path / folder, "episode=file,episode")
        assert [len(t) for t in got] == [4] * 6


def test_an_episode_may_go_on_in_the_next_file(tmp_path: Path) -> None:
    made = workers(True, worker=None, episode=np.repeat(np.arange(6), 4), step=None, done=None)
    for number, rows in enumerate((slice(0, 10), slice(10, 24))):
        write(tmp_path / f"{number}.parquet", {k: v[rows] for k, v in made.items()})
    assert [len(t) for t in read(tmp_path)[1]] == [4] * 6


def test_rows_of_workers_without_any_id_are_not_cut_at_flags(tmp_path: Path) -> None:
    made = workers(episode=None)
    with pytest.raises(ImportRefused, match="several values of worker"):
        read(write(tmp_path / "a.parquet", made))
    made = workers(True, episode=None)
    assert [len(t) for t in read(write(tmp_path / "b.parquet", made))[1]] == [4] * 6


@pytest.mark.parametrize(
    ("times", "says"),
    [
        (np.tile(np.arange(4) / 10, 6), ""),
        (np.concatenate([np.arange(23) / 10, [50.0]]), "jumps in episode 2"),
        (np.zeros(24), "does not increase in episode 0"),
    ],
)
@pytest.mark.parametrize("given", [(), ("step=time",)])
def test_times_that_jump_or_stand_still_are_said(
    tmp_path: Path, times: Any, says: str, given: tuple[str, ...]
) -> None:
    episode = np.repeat(np.arange(6) if not says else np.arange(3), 24 // (3 if says else 6))
    made = workers(worker=None, step=None, done=None, episode=episode, time=times)
    path = write(tmp_path / "a.parquet", made)
    if given and "increase" in says:
        with pytest.raises(ImportRefused, match="a step occurs twice"):
            read(path, *given)
        return
    found = said(read(path, *given)[0])
    assert says in found if says else "time" not in found.replace("not read: time", "")


def test_a_length_that_is_a_multiple_of_the_others_is_said(tmp_path: Path) -> None:
    """The last episode of a worker and the first of the next may have one id."""
    made = workers(worker=None, step=None, done=None)
    made["episode"] = np.repeat([0, 1, 2, 3, 4], [4, 4, 8, 4, 4])
    assert "episode 2 has 8 steps, others 4" in said(read(write(tmp_path / "a.parquet", made))[0])


BASE = 877733342111222000


@pytest.mark.parametrize(
    "ids",
    [
        lambda n: pa.array(BASE + n),
        lambda n: pa.array((BASE + n).astype(np.uint64) + np.uint64(1 << 63)),
        lambda n: pa.array(-BASE - n),
        lambda n: pa.array([decimal.Decimal(BASE + int(i)) for i in n]),
        lambda n: pa.array([decimal.Decimal(10**30 + int(i)) for i in n]),
        lambda n: pa.array([decimal.Decimal(int(i)) / 8 for i in n]),
        lambda n: pa.array([str(BASE + i) for i in n]).dictionary_encode(),
        lambda n: pa.array([f"{i:032x}".encode() for i in n], pa.binary()),
        lambda n: pa.array([[int(BASE + i)] for i in n]),
        lambda n: pa.array(n.astype(float)),
    ],
)
def test_ids_are_exact(tmp_path: Path, ids: Any) -> None:
    made = workers(True, worker=None, episode=ids(np.repeat(np.arange(6), 4)))
    _, got = read(write(tmp_path / "a.parquet", made))
    assert [len(t) for t in got] == [4] * 6


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        (np.repeat(float(BASE) + np.arange(6), 4), "2\\^53 or more"),
        (np.where(np.arange(24) == 5, np.nan, 1.0), "no id in some rows|invalid numbers"),
        (pa.array([None if n == 5 else 1 for n in range(24)]), "empty cells"),
    ],
)
def test_ids_that_are_not_exact_or_empty_are_refused(tmp_path: Path, ids: Any, says: str) -> None:
    with pytest.raises(ImportRefused, match=says):
        read(write(tmp_path / "a.parquet", workers(True, worker=None, episode=ids)))


def test_steps_as_decimals_are_exact(tmp_path: Path) -> None:
    steps = [decimal.Decimal(2**60 + int(s)) for s in SERIAL[2]]
    made = workers(True, worker=None, episode=np.repeat(np.arange(6), 4), step=pa.array(steps))
    assert [len(t) for t in read(write(tmp_path / "a.parquet", made))[1]] == [4] * 6


# --- files of a folder ----------------------------------------------------------------------------


def chunk(number: int, **changes: Any) -> Columns:
    rows = {"obs": [[float(number), 0.0], [float(number), 1.0]], "action": [0.1, 0.2]}
    return rows | {"reward": [number, number + 0.5], "done": [False, number == 11]} | changes


def test_files_of_a_folder_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number in range(12):
        write(tmp_path / f"set/part-{number}.parquet", chunk(number))
    (whole,) = read(tmp_path / "set")[1]
    assert whole.rewards.tolist() == [half / 2 for half in range(0, 24)]


def test_keys_in_the_names_of_folders_are_columns(tmp_path: Path) -> None:
    """As `to_parquet(partition_cols=…)` writes them: ids may be unique only within one."""
    for worker in range(2):
        made = chunk(worker, episode=[0, 0], t=[2 * worker, 2 * worker + 1])
        del made["done"]
        write(tmp_path / f"set/worker={worker}/x.parquet", made)
    with pytest.raises(ImportRefused, match="several values of worker"):
        read(tmp_path / "set")
    _, got = read(tmp_path / "set", "episode=worker,episode")
    assert [t.rewards.tolist() for t in got] == [[0, 0.5], [1, 1.5]]
    _, got = read(tmp_path / "set", "episode=worker,episode", "info/worker=worker")
    assert [t.infos["worker"].tolist() for t in got] == [[0] * 3, [1] * 3]


def test_next_observations_are_in_the_order_of_the_observation(tmp_path: Path) -> None:
    made = {"pos": np.full(ROWS, 1.0), "vel": np.full(ROWS, 2.0)}
    made |= {"next_pos": np.full(ROWS, 10.0), "next_vel": np.full(ROWS, 20.0)}
    path = write(tmp_path / "a.parquet", numbered([]) | made)
    found, got = read(path, "observation=vel,pos", "next_observation=next_*")
    assert got[0].obs["observation"][[0, -1]].tolist() == [[2, 1], [20, 10]]
    assert "next_observation=next_vel, next_pos" in said(found)
    with pytest.raises(ImportRefused, match="another order") as caught:
        read(path, "observation=vel,pos", "next_observation=next_pos,next_vel")
    assert caught.value.expected == "next_vel, next_pos"


@pytest.mark.parametrize("fixed", [False, True])
def test_rows_that_are_episodes_of_one_step(tmp_path: Path, fixed: bool) -> None:
    vectors = pa.list_(pa.list_(pa.float32()))
    made = {
        "obs": pa.array([[[1, 2], [3, 4]], [[5, 6], [7, 8]]], vectors),
        "action": pa.array([[[0.1]], [[0.2]]], vectors),
        "reward": pa.array([[1.0], [2.0]], pa.list_(pa.float32(), 1 if fixed else -1)),
        "terminated": [True, True],
    }
    found, got = read(write(tmp_path / "a.parquet", made))
    assert [t.obs["observation"].tolist() for t in got] == [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]
    assert all(t.final_obs_valid and len(t) == 1 for t in got)


def test_rewards_of_one_length_are_those_of_episodes(tmp_path: Path) -> None:
    made = {
        "obs": [[[1.0], [2.0], [3.0]], [[4.0], [5.0], [6.0]]],
        "action": [[0, 1], [1, 0]],
        "reward": pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32(), 2)),
        "terminated": [True, False],
    }
    _, got = read(write(tmp_path / "a.parquet", made))
    assert [t.rewards.tolist() for t in got] == [[1, 2], [3, 4]]


def test_names_that_become_one_are_refused_with_the_cure(tmp_path: Path) -> None:
    """Guessed or given, only "not read" was said of one."""
    made = {"episode": [0, 0], "reward": [0.0, 1.0], "action": [0, 1]}
    parts = pa.array([{"joint-1": 1.0, "joint_1": 2.0}] * 2)
    path = write(tmp_path / "t.parquet", made | {"observation": parts})
    with pytest.raises(
        ImportRefused, match=r"observation\.joint-1 and observation\.joint_1"
    ) as why:
        read(path)
    assert "columns=observation/NAME=COLUMN for each" in why.value.expected
    given = ("observation/a=observation.joint-1", "observation/{}=observation.joint_1")
    with pytest.raises(ImportRefused, match="would both be named observation/a"):
        read(path, given[0], given[1].format("a"))
    found, _ = read(path, given[0], given[1].format("b"))
    assert {*found.spec.observations} == {"a", "b"}
