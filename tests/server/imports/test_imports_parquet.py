"""Parquet files of anybody: columns by name or as given, episodes in any order, nothing assumed."""

from __future__ import annotations

import decimal
import io
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from PIL import Image

from server.imports.raw_file import ImportRefused, Reading
from stepwell import Discrete
from stepwell.spaces import MultiBinary
from stepwell.trajectory import Trajectory
from tests.imported import read_file

LENGTHS = (3, 1, 4)
ROWS = sum(LENGTHS)
Columns = dict[str, Any]


def columns(**changes: Any) -> Columns:
    """Three episodes, one row a step; a change to None takes a column away."""
    rng = np.random.default_rng(0)
    made = {
        "observation": list(rng.normal(size=(ROWS, 2)).astype(np.float32)),
        "action": rng.integers(0, 3, ROWS),
        "reward": rng.normal(size=ROWS).astype(np.float32),
        "episode": np.repeat([5, 7, 6], LENGTHS),
        "step": np.concatenate([np.arange(n) for n in LENGTHS]),
        "terminated": np.isin(np.arange(ROWS), [2, 7]),
    } | changes
    return {name: column for name, column in made.items() if column is not None}


def write(path: Path, made: Columns, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {k: v if isinstance(v, pa.Array) else pa.array(v) for k, v in made.items()}
    pq.write_table(pa.table(arrays), path, **options)
    return path


def read(path: Path, *given: str, **options: Any) -> tuple[Reading, list[Trajectory]]:
    return read_file(path, *given, kind="parquet", **options)


def test_usual_names_are_recognised_and_said(tmp_path: Path) -> None:
    made = columns()
    found, got = read(write(tmp_path / "a.parquet", made))
    assert [len(t) for t in got] == list(LENGTHS)
    assert [(t.terminated, t.truncated) for t in got] == [
        (True, False),
        (False, True),
        (True, False),
    ]
    obs = np.stack(made["observation"])
    assert got[2].obs["observation"].tobytes() == np.stack([*obs[4:], obs[-1]]).tobytes()
    assert not got[2].final_obs_valid
    assert got[2].actions["action"].tolist() == made["action"][4:].tolist()
    assert got[2].rewards.tobytes() == made["reward"][4:].tobytes()
    assert "observation=observation action=action" in found.warnings[0]
    assert "final observations are unknown" in " ".join(found.warnings)


def test_given_columns_make_vectors_and_named_arrays(tmp_path: Path) -> None:
    x = np.arange(ROWS, dtype=np.float64)
    path = write(
        tmp_path / "a.parquet",
        {"x": x, "y": x + 0.5, "hand": list(np.ones((ROWS, 2, 2), np.uint8).tolist()), "u_0": x / 8,
         "u_1": -x / 8, "gain": x, "run": [str(n) for n in columns()["episode"]], "heat": x},
    )  # fmt: skip
    given = ("observation/pose=x,y", "observation/hand=hand", "action=u_*", "reward=gain")
    found, got = read(path, *given, "episode=run", "info/heat=heat")
    assert {k: s.shape for k, s in found.spec.observations.items()} == {
        "pose": (2,),
        "hand": (2, 2),
    }
    assert got[1].obs["pose"].tolist() == [[3.0, 3.5], [3.0, 3.5]]
    assert got[0].actions["action"].tolist() == [[0, 0], [0.125, -0.125], [0.25, -0.25]]
    assert got[2].infos["heat"].tolist() == [4, 5, 6, 7, 7]
    assert [len(t) for t in got] == list(LENGTHS)


def test_rows_in_any_order_are_put_in_order(tmp_path: Path) -> None:
    """Across files, too, where a whole is needed; without steps the order of the file counts."""
    made, order = columns(), np.random.default_rng(3).permutation(ROWS)
    table = pa.table({k: pa.array(v) for k, v in made.items()}).take(pa.array(order))
    (tmp_path / "data").mkdir()
    pq.write_table(table.slice(0, 3), tmp_path / "data/a.parquet", row_group_size=2)
    pq.write_table(table.slice(3), tmp_path / "data/b.parquet")
    _, straight = read(write(tmp_path / "straight.parquet", made))
    (tmp_path / "straight.parquet").unlink()
    _, got = read(tmp_path)
    by_length = {len(t): t for t in got}
    for one in straight:
        other = by_length[len(one)]
        assert one.obs["observation"].tobytes() == other.obs["observation"].tobytes()
        assert one.rewards.tobytes() == other.rewards.tobytes()


def test_steps_that_are_missing_are_said(tmp_path: Path) -> None:
    """Every second row, as of a table that was thinned, looks whole once it is stored."""

    def said(steps: Any) -> list[str]:
        found, got = read(write(tmp_path / "a.parquet", columns(step=steps, terminated=None)))
        assert [len(t) for t in got] == [3, 1, 4]
        return [line for line in found.warnings if "steps are missing" in line]

    assert said([0, 1, 2, 0, 0, 1, 2, 3]) == said([7.0, 8.0, 9.0, 4.0, 1.0, 2.0, 3.0, 4.0]) == []
    assert said([0.02, 0.04, 0.06, 0.02, 0.02, 0.04, 0.06, 0.08]) == [], "times"
    (one,) = said([0, 1, 2, 0, 0, 1, 3, 4])
    assert one == (
        "steps are missing in episode 6: step goes from 1 to 3; the rows are stored one after "
        "another"
    )
    (two,) = said([0, 4, 2, 0, 0, 2, 4, 6])  # in order: 0, 2, 4
    assert two.startswith("steps are missing in episode 5 and 1 other: step goes from 0 to 2;")


def test_many_row_groups_and_files_are_one_table(tmp_path: Path) -> None:
    made = columns()
    _, straight = read(write(tmp_path / "a.parquet", made))
    _, got = read(write(tmp_path / "b.parquet", made, row_group_size=2))
    assert [t.digest for t in got] == [t.digest for t in straight]


def test_episodes_end_at_flags_where_no_column_names_them(tmp_path: Path) -> None:
    cut = np.isin(np.arange(ROWS), [3])
    found, got = read(write(tmp_path / "a.parquet", columns(episode=None, step=None, timeouts=cut)))
    assert [len(t) for t in got] == list(LENGTHS)
    assert [t.terminated for t in got] == [True, False, True]
    made = columns(episode=None, terminated=np.isin(np.arange(ROWS), [2]))
    found, got = read(write(tmp_path / "a.parquet", made), "step=")
    assert [len(t) for t in got] == [3, 5]
    assert "last 5 steps have no end" in " ".join(found.warnings)


def test_each_file_is_an_episode_where_nothing_else_tells(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path / f"{name}.parquet", columns(episode=None, terminated=None, step=None))
    found, got = read(tmp_path)
    assert [len(t) for t in got] == [ROWS, ROWS]
    assert "each file is one" in " ".join(found.warnings)


def test_done_is_terminated_unless_told_otherwise(tmp_path: Path) -> None:
    done = np.isin(np.arange(ROWS), [2, 3, 7])
    path = write(tmp_path / "a.parquet", columns(terminated=None, done=done))
    found, got = read(path)
    assert [t.terminated for t in got] == [True] * 3
    assert "columns=truncated=done done=" in " ".join(found.warnings)
    _, got = read(path, "truncated=done", "done=")
    assert [t.truncated for t in got] == [True] * 3
    timeouts = np.isin(np.arange(ROWS), [3])
    path = write(tmp_path / "a.parquet", columns(terminated=None, done=done, timeout=timeouts))
    assert [t.terminated for t in read(path)[1]] == [True, False, True]


def test_next_observations_are_the_final_ones_unless_they_are_shifted_rows(tmp_path: Path) -> None:
    obs = np.stack(columns()["observation"])
    true = obs + 1
    _, got = read(write(tmp_path / "a.parquet", columns(next_obs=list(true))))
    assert all(t.final_obs_valid for t in got)
    assert got[0].obs["observation"][-1].tolist() == true[2].tolist()
    shifted = np.concatenate([obs[1:], obs[-1:]])
    found, got = read(write(tmp_path / "a.parquet", columns(next_obs=list(shifted))))
    assert not any(t.final_obs_valid for t in got)
    assert "shifted rows" in " ".join(found.warnings)


def test_one_row_an_episode(tmp_path: Path) -> None:
    """Lists of steps, as datasets of decision transformers have them; T + 1 observations count."""
    obs = [
        np.full((n + extra, 2), i, np.float32).tolist()
        for i, (n, extra) in enumerate(((3, 0), (1, 0)))
    ]
    made = {"observations": obs, "actions": [[0, 1, 2], [1]], "rewards": [[1.0, 2, 3], [4]]}
    found, got = read(
        write(tmp_path / "a.parquet", made | {"dones": [[False] * 2 + [True], [False]]})
    )
    assert [len(t) for t in got] == [3, 1]
    assert [t.terminated for t in got] == [True, False]
    assert found.spec.actions["action"] == Discrete(3)
    assert got[0].rewards.tolist() == [1, 2, 3]
    assert not any(t.final_obs_valid for t in got)
    assert "final observations are unknown" in " ".join(found.warnings)
    made["observations"] = [o + [[9.0, 9.0]] for o in obs]
    found, got = read(write(tmp_path / "a.parquet", made))
    assert got[1].obs["observation"].tolist() == [[1, 1], [9, 9]]
    assert all(t.final_obs_valid for t in got)
    assert "final observations" not in " ".join(found.warnings)


def of_imitation(lengths: list[int], discrete: bool) -> Columns:
    """As imitation saves trajectories: T+1 observations, infos as texts, rewards only if known."""
    rng = np.random.default_rng(0)
    act = (lambda n: rng.integers(0, 2, n)) if discrete else (lambda n: rng.normal(size=(n, 1)))
    return {
        "obs": [rng.normal(size=(n + 1, 2)).tolist() for n in lengths],
        "acts": [act(n).tolist() for n in lengths],
        "infos": [["{}"] * n for n in lengths],
        "terminal": [n == 3 for n in lengths],
    }


@pytest.mark.parametrize(
    ("lengths", "discrete"), [([3, 1, 4], True), ([3, 1], False), ([3, 3], False)]
)
def test_imitations_trajectories_without_rewards(
    tmp_path: Path, lengths: list[int], discrete: bool
) -> None:
    made = of_imitation(lengths, discrete)
    path = write(tmp_path / "a.parquet", made)
    with pytest.raises(ImportRefused, match="known to be the reward") as caught:
        read(path)
    assert "columns=reward= if there is none" in caught.value.expected
    found, got = read(path, "reward=")
    assert [(len(t), t.terminated, t.final_obs_valid) for t in got] == [
        (n, n == 3, True) for n in lengths
    ]
    assert "there is no reward: all are 0" in found.warnings
    for number, t in enumerate(got):
        assert np.array_equal(t.obs["observation"], np.float32(made["obs"][number]))
        assert not t.rewards.any()
        assert np.allclose(t.actions["action"], made["acts"][number])


def test_lists_that_can_be_a_step_or_an_episode_are_refused_with_the_cure(tmp_path: Path) -> None:
    made = of_imitation([3, 3], True)
    path = write(tmp_path / "a.parquet", made)
    with pytest.raises(ImportRefused, match="a row can be a step or an episode") as caught:
        read(path, "reward=")
    assert "[[0.0] * len(a) for a in table['acts']]" in caught.value.expected
    lists = [[0.0] * len(a) for a in made["acts"]]
    assert [len(t) for t in read(write(path, made | {"reward": lists}))[1]] == [3, 3]
    found, got = read(write(path, made | {"reward": [0.0, 0.0]}))
    assert [len(t) for t in got] == [1, 1] and found.spec.observations["observation"].shape == (
        4,
        2,
    )


def test_vectors_without_rewards_are_steps(tmp_path: Path) -> None:
    vectors = {"observation": [[0.0, 1.0, 2.0]] * ROWS, "action": [[0.0, 1.0]] * ROWS}
    _, got = read(write(tmp_path / "a.parquet", columns(reward=None, **vectors)), "reward=")
    assert [len(t) for t in got] == list(LENGTHS)
    made = columns(reward=None, episode=None, step=None, **vectors)
    _, got = read(write(tmp_path / "a.parquet", made), "reward=")
    assert [len(t) for t in got] == [3, 5]
    deep = {"observation": [[[0.0], [1.0], [2.0]]] * ROWS, "action": [[0.0, 1.0]] * ROWS}
    _, got = read(write(tmp_path / "a.parquet", columns(reward=None, **deep)), "reward=")
    assert [len(t) for t in got] == list(LENGTHS), "with ids"


RLDS = pa.struct(
    {
        "observation": pa.struct({"state": pa.list_(pa.float32())}),
        "action": pa.list_(pa.float32()),
        "reward": pa.float32(),
        **dict.fromkeys(("is_first", "is_last", "is_terminal"), pa.bool_()),
    }
)


def rlds_steps(rows: int, start: int) -> list[Any]:
    """Of T = rows - 1; what the last one has beside its observation has no meaning."""
    return [
        {
            "observation": {"state": [start + n, 0.5]},
            "action": [9.0 if n == rows - 1 else 0.25],
            "reward": float(n),
            "is_first": n == 0,
            "is_last": n == rows - 1,
            "is_terminal": n == rows - 1 and start == 0,
        }
        for n in range(rows)
    ]


def check_rlds(got: list[Trajectory]) -> None:
    assert [(len(t), t.terminated, t.final_obs_valid) for t in got] == [
        (3, True, True),
        (1, False, True),
    ]
    assert [t.actions["action"].max() for t in got] == [0.25, 0.25]
    assert [t.rewards.tolist() for t in got] == [[0, 1, 2], [0]]
    assert got[0].obs["observation"][:, 0].tolist() == [0, 1, 2, 3]
    assert got[1].obs["observation"][:, 0].tolist() == [10, 11]


def test_a_list_of_rlds_steps_is_refused_with_the_command_that_unnests_it(tmp_path: Path) -> None:
    rows = [rlds_steps(4, 0), rlds_steps(2, 10)]
    path = write(
        tmp_path / "FILE.parquet", {"id": ["a", "b"], "steps": pa.array(rows, pa.list_(RLDS))}
    )
    with pytest.raises(ImportRefused, match="steps is a list of steps, as in RLDS") as caught:
        read(path)
    command = caught.value.expected.partition("in DuckDB: ")[2]
    for name in ("FILE.parquet", "steps.parquet"):
        command = command.replace(f"'{name}'", f"'{tmp_path / name}'")
    duckdb.sql(command)
    check_rlds(read(tmp_path / "steps.parquet")[1])
    boxes = pa.array([[{"x": 1.0}]] * ROWS)
    with pytest.raises(ImportRefused) as caught:
        read(write(path, columns(reward=None, boxes=boxes)))
    assert caught.value.detail == "no column is known to be the reward"


def test_rows_that_are_episodes_of_rlds_end_with_a_final_observation(tmp_path: Path) -> None:
    """The third has no step; the second comes after it."""
    rows = [rlds_steps(4, 0), rlds_steps(1, 5), rlds_steps(2, 10)]
    made = {name: [[step[name] for step in one] for one in rows] for name in RLDS.names}
    made |= {"observation": [[step["observation"]["state"] for step in one] for one in rows]}
    found, got = read(write(tmp_path / "a.parquet", made))
    check_rlds(got)
    assert "1 episode without a step left out" in found.warnings
    assert "columns=first= makes them steps" in " ".join(found.warnings)
    assert [len(t) for t in read(tmp_path / "a.parquet", "first=")[1]] == [4, 1, 2]


def test_rows_without_a_step_are_left_out_and_counted(tmp_path: Path) -> None:
    made = {
        "obs": [[0.0, 0.5], [], [1.0, 1.5, 2.0], [9.0]],
        "action": [[1, 0], [], [1, 1], []],
        "reward": [[1.0, 2.0], [], [3.0, 4.0], []],
        "terminated": [False, True, True, True],
    }
    found, got = read(write(tmp_path / "a.parquet", made))
    assert [t.rewards.tolist() for t in got] == [[1, 2], [3, 4]]
    assert [t.terminated for t in got] == [False, True]
    assert [t.final_obs_valid for t in got] == [False, True]
    assert "2 episodes without a step left out" in found.warnings


def test_a_final_observation_is_known_where_all_arrays_of_the_episode_have_one(
    tmp_path: Path,
) -> None:
    made = {
        "obs.arm": [[[0.0], [0.5], [1.0]], [[0.0], [0.5]], [[0.0], [0.5]]],
        "obs.hand": [[[1.0], [1.5], [2.0]], [[1.0]], [[1.0], [1.5]]],
        "action": [[0, 1], [1], [1]],
        "reward": [[1.0, 2.0], [3.0], [4.0]],
    }
    found, got = read(write(tmp_path / "a.parquet", made))
    assert [t.final_obs_valid for t in got] == [True, False, True]
    assert "final observations of 1 trajectory are unknown" in " ".join(found.warnings)
    assert got[1].obs["hand"].tolist() == [[1.0], [1.0]]


def png(value: int, size: tuple[int, ...] = (4, 5, 3), kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.full(size, value, np.uint8)).save(out, kind)
    return out.getvalue()


@pytest.mark.parametrize("struct", [True, False])
def test_images_in_the_table_become_pixels(tmp_path: Path, struct: bool) -> None:
    images = [{"bytes": png(i), "path": None} if struct else png(i) for i in range(ROWS)]
    made = columns(
        observation=None, **{"observation.image": images, "observation.state": [0.5] * ROWS}
    )
    found, got = read(write(tmp_path / "a.parquet", made, row_group_size=3))
    assert found.spec.observations["image"].shape == (4, 5, 3)
    assert got[2].obs["image"][:, 0, 0, 0].tolist() == [4, 5, 6, 7, 7]
    images = [{"bytes": png(9, kind="JPEG"), "path": None}] * ROWS
    found, _ = read(write(tmp_path / "a.parquet", made | {"observation.image": images}))
    assert "JPEG" in " ".join(found.warnings)


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    image.save(out, kind)
    return out.getvalue()


def png16(colour_type: int, channels: int) -> bytes:
    """2 x 2 pixels of 16 bits a channel, which Pillow writes only in grey."""
    row = b"\0" + struct.pack(">H", 0x0102) * (2 * channels)
    header = struct.pack(">IIBBBBB", 2, 2, 16, colour_type, 0, 0, 0)
    made = b"\x89PNG\r\n\x1a\n"
    for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(row * 2)), (b"IEND", b"")):
        made += struct.pack(">I", len(data)) + kind + data
        made += struct.pack(">I", zlib.crc32(kind + data))
    return made


@pytest.mark.parametrize("nested", [True, False])
def test_a_jpeg_in_any_row_is_said(tmp_path: Path, nested: bool) -> None:
    images = [png(1)] * ROWS
    images[-1] = png(1, kind="JPEG")
    made = columns(observation=images)
    if nested:
        made = {"obs": [images[:2], images[2:]], "action": [[0, 1], [0] * 6]}
        made["reward"] = [[1.0] * 2, [1.0] * 6]
    found, _ = read(write(tmp_path / "a.parquet", made))
    assert "observation/observation: 1 image stored as JPEG" in " ".join(found.warnings)
    images[-1] = b"GIF89a.."
    made = columns(observation=images) if not nested else made | {"obs": [images[:2], images[2:]]}
    with pytest.raises(ImportRefused, match="no image") as caught:
        read(write(tmp_path / "a.parquet", made))
    assert f"row {5 if nested else 3} of episode" in caught.value.got


def test_pixels_of_all_modes_that_bytes_hold(tmp_path: Path) -> None:
    grey = np.arange(4, dtype=np.uint8).reshape(2, 2)
    both = Image.fromarray(np.stack([grey, 9 + grey], axis=2), "LA")
    black = Image.fromarray(grey * 255).convert("1")
    for image, pixels in ((both, [[[0, 9], [1, 10]], [[2, 11], [3, 12]]]),
                          (black, [[[0], [255]], [[255], [255]]])):  # fmt: skip
        made = columns(observation=[encoded(image)] * ROWS)
        _, got = read(write(tmp_path / "a.parquet", made))
        assert got[0].obs["observation"][0].tolist() == pixels


PICTURE = Image.fromarray(np.arange(12, dtype=np.uint8).reshape(2, 2, 3))


@pytest.mark.parametrize(
    ("odd", "says", "cure"),
    [
        (encoded(PICTURE.convert("P")), "image of the mode P", "numpy.asarray(image).tolist()"),
        (encoded(PICTURE.convert("CMYK"), "JPEG"), "image of the mode CMYK", "convert('RGB')"),
        (png16(0, 1), "16 bits a channel", "(pixels >> 8).astype('uint8')"),
        (png16(2, 3), "16 bits a channel", "(pixels >> 8).astype('uint8')"),
        (png16(6, 4), "16 bits a channel", "(pixels >> 8).astype('uint8')"),
        (encoded(PICTURE.resize((3, 2))), "several sizes", "image.resize((W, H))"),
        (encoded(PICTURE.convert("L")), "several sizes", "image.convert('RGB')"),
    ],
)
def test_images_that_are_not_damaged_are_refused_with_the_cure(
    tmp_path: Path, odd: bytes, says: str, cure: str
) -> None:
    images = [encoded(PICTURE)] * ROWS
    images[5] = odd
    with pytest.raises(ImportRefused, match=says) as caught:
        read(write(tmp_path / "a.parquet", columns(observation=images)))
    assert cure in caught.value.expected
    assert "row 1" in f"{caught.value.detail} {caught.value.got}", "of the third episode"


def test_a_name_of_several_columns_is_refused_where_it_is_needed(tmp_path: Path) -> None:
    """With the cure, which works; one that nobody needs is not read."""
    path = tmp_path / "a.parquet"
    made = pa.table({k: pa.array(v) for k, v in columns().items()})
    pair = pa.StructArray.from_arrays([made["reward"].combine_chunks()] * 2, names=["x", "x"])
    for name, column in (("reward", made["reward"]), ("pair", pair)):
        pq.write_table(made.append_column(name, column), path)
        given = ("observation=pair.x",) if name == "pair" else ()
        with pytest.raises(ImportRefused, match="several columns are called") as caught:
            read(path, *given)
        assert ".read().rename_columns(NAMES); .flatten() before it" in caught.value.expected
        whole = pq.ParquetFile(path).read().flatten()
        pq.write_table(
            whole.rename_columns([*made.column_names, "x", "y"][: whole.num_columns]), path
        )
        assert len(read(path, "observation=x")[1]) == 3
    pq.write_table(made.append_column("note", pair).append_column("note", pair), path)
    assert len(read(path)[1]) == 3


def test_fields_with_dots_in_their_names_are_columns(tmp_path: Path) -> None:
    x = pa.array(np.arange(ROWS, dtype=np.float32))
    names = ["arm.x", "arm", "arm.y.z"]
    state = pa.StructArray.from_arrays([x, pc.add(x, 10), pc.add(x, 20)], names=names)
    given = "observation=state.arm.x,state.arm,state.arm.y.z"
    _, got = read(write(tmp_path / "a.parquet", columns(observation=None, state=state)), given)
    assert got[0].obs["observation"][1].tolist() == [1, 11, 21]


def test_hugging_face_classes_and_splits(tmp_path: Path) -> None:
    features = {"action": {"names": ["l", "r", "u", "d"], "_type": "ClassLabel"}}
    schema = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    for split in ("train", "test"):
        made = pa.table({k: pa.array(v) for k, v in columns().items()})
        path = tmp_path / f"data/{split}-00000-of-00001.parquet"
        path.parent.mkdir(exist_ok=True)
        pq.write_table(made.replace_schema_metadata(schema), path)
    with pytest.raises(ImportRefused, match="several splits") as error:
        read(tmp_path)
    assert (error.value.expected, error.value.got) == ("split=NAME", "test, train")
    found, got = read(tmp_path, split="test")
    assert found.spec.actions["action"] == Discrete(4)
    assert len(got) == 3
    with pytest.raises(ImportRefused, match="no such split"):
        read(tmp_path, split="eval")


REFUSED: dict[str, tuple[Callable[[], Columns], tuple[str, ...], str]] = {
    "no reward": (lambda: columns(reward=None), (), "known to be the reward"),
    "no observation": (lambda: columns(observation=None), (), "known to be the observation"),
    "no ends": (lambda: columns(episode=None, terminated=None), (), "known to be the episode"),
    "an unknown column": (columns, ("action=push",), "does not exist"),
    "an unknown role": (columns, ("torque=action",), "unknown role"),
    "two rewards": (columns, ("reward=reward,step",), "is one column"),
    "NaN in rewards": (lambda: columns(reward=[0.5, None] * 4), (), "invalid numbers"),
    "NaN in observations": (lambda: columns(observation=[np.nan] * ROWS), (), "invalid numbers"),
    "text as action": (lambda: columns(action=["a"] * ROWS), (), "text"),
    "lists of several lengths": (
        lambda: columns(observation=[[1.0]] * 7 + [[1.0, 2.0]]),
        (),
        "differ in length",
    ),
    "no ids": (lambda: columns(episode=[None, *[1] * 7]), (), "empty cells"),
    "a step twice": (lambda: columns(step=[0] * ROWS), (), "twice in episode 5"),
    "a flag inside": (lambda: columns(terminated=[True] * ROWS), (), "before the last step"),
    "numbers as flags": (lambda: columns(terminated=[3] * ROWS), (), "does not contain flags"),
    "no image": (lambda: columns(observation=[b"GIF89a.."] * ROWS), (), "no image"),
    "a damaged image": (lambda: columns(observation=[png(1)[:45]] * ROWS), (), "damaged"),
    "an image elsewhere": (
        lambda: columns(observation=[{"bytes": None, "path": "/etc/passwd"}] * ROWS),
        (),
        "without an image",
    ),
    "episodes of 0 steps": (
        lambda: {
            "obs": pa.array([[], []], pa.list_(pa.float32())),
            "action": pa.array([[], []], pa.list_(pa.int64())),
            "reward": pa.array([[], []], pa.list_(pa.float32())),
        },
        (),
        "no episode has a step",
    ),
    "an episode without rewards": (
        lambda: {"obs": [[0.5], [1.0]], "action": [[1], [1]], "reward": [[0.5, 1.0], None]},
        (),
        "empty cells",
    ),
    "observations of no elements": (
        lambda: columns(observation=pa.array([[]] * ROWS, pa.list_(pa.float32()))),
        (),
        "observation/observation has rows of an invalid size",
    ),
    "no rows": (lambda: {k: v[:0] for k, v in columns().items()}, (), "empty"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path, name: str) -> None:
    make, given, why = REFUSED[name]
    with pytest.raises(ImportRefused, match=why):
        read(write(tmp_path / "a.parquet", make()), *given)


def test_a_refusal_names_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(ImportRefused) as error:
        read(write(tmp_path / "a.parquet", {"x": [1.0], "u": [1.0]}))
    assert error.value.expected == "columns=observation=NAME, of the columns of the file"
    assert error.value.got == "x, u"


@pytest.mark.parametrize(
    "success",
    [
        pa.nulls(ROWS),
        pa.nulls(ROWS, pa.bool_()),
        pa.array([None, *[True] * 7]),
        pa.array([0.5] * ROWS),
        pa.array(["yes"] * ROWS),
    ],
)
def test_a_guessed_success_that_cannot_be_read_is_left_out(tmp_path: Path, success: Any) -> None:
    """It is a label; named by somebody, it is refused as anything else is."""
    path = write(tmp_path / "a.parquet", columns(success=success))
    found, got = read(path)
    assert [t.metadata.success for t in got] == [None] * 3
    (note,) = [line for line in found.warnings if "success" in line]
    assert note.startswith("not used as success: column success")
    with pytest.raises(ImportRefused, match="column success"):
        read(path, "success=success")


def test_rewards_that_float32_does_not_have_are_said(tmp_path: Path) -> None:
    for rewards, rounded in (
        (np.full(ROWS, 0.5), False),
        (np.full(ROWS, 0.1, np.float32), False),
        (np.append(np.zeros(ROWS - 1), 0.1), True),  # in the last episode
    ):
        found, _ = read(write(tmp_path / "a.parquet", columns(reward=rewards)))
        said = "rewards: float64 stored as float32, which rounds them" in found.warnings
        assert said == rounded


def test_boolean_actions_are_choices(tmp_path: Path) -> None:
    push = [True, False] * (ROWS // 2)
    found, got = read(write(tmp_path / "a.parquet", columns(action=push)))
    assert found.spec.actions["action"] == Discrete(2)
    assert got[0].actions["action"].tolist() == [1, 0, 1]
    pairs = [[one, True] for one in push]
    found, got = read(write(tmp_path / "a.parquet", columns(action=pairs)))
    assert found.spec.actions["action"] == MultiBinary(2)
    assert got[0].actions["action"].tolist() == [[1, 1], [0, 1], [1, 1]]


def test_a_role_that_is_given_empty_has_no_column(tmp_path: Path) -> None:
    found, got = read(write(tmp_path / "a.parquet", columns()), "reward=", "terminated=")
    assert not any(t.rewards.any() or t.terminated for t in got)
    assert "there is no reward" in " ".join(found.warnings)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    """Every cut, and a hundred wrong bytes: refused, or read as numbers; no other error."""
    whole = write(tmp_path / "a.parquet", columns()).read_bytes()
    path = tmp_path / "b.parquet"
    for cut in (4, len(whole) // 2, len(whole) - 9, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(ImportRefused):
            read(path)
    rng = np.random.default_rng(0)
    for _ in range(100):
        broken = bytearray(whole)
        broken[rng.integers(4, len(whole) - 8)] ^= 1 << rng.integers(8)
        path.write_bytes(broken)
        try:
            read(path)
        except ImportRefused:
            continue


def test_claimed_sizes_are_checked_before_reading(tmp_path: Path) -> None:
    """Millions of equal numbers take a few kilobytes; the footer says what they would become."""
    codes = pa.array(np.zeros(3_000_000, np.int32))
    zeros = pa.DictionaryArray.from_arrays(codes, pa.array([0.0]))
    path = write(tmp_path / "a.parquet", dict.fromkeys(("obs", "action", "reward", "done"), zeros))
    with pytest.raises(ImportRefused, match="far more than it holds"):
        read(path)


def test_files_of_other_columns_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", columns())
    write(tmp_path / "b.parquet", columns(reward=list(range(ROWS))))
    with pytest.raises(ImportRefused, match="other columns") as error:
        read(tmp_path)
    assert "reward: int64" in str(error.value.got)


def test_through_the_service(importing: Any, tmp_path: Path) -> None:
    """In the sandbox, with a column map, all or nothing."""
    path = write(tmp_path / "a.parquet", columns(reward=None, gain=np.arange(ROWS)))
    before = importing.files()
    job = importing.run(path, "tabular", format="parquet")
    assert (job.state, job.error.status) == ("failed", 422)
    assert "reward" in job.error.detail
    assert importing.files() == before
    job = importing.run(path, "tabular", format="parquet", columns=("reward=gain",))
    assert job.state == "succeeded", job
    assert (job.result["trajectories"], job.result["steps"]) == (3, ROWS)
    assert importing.rows("select sum(\"return\") from trajectories where dataset = 'tabular'") == [
        [sum(range(ROWS))]
    ]


CODES = 'the same in every file: df[…].astype("category").cat.codes'
FLOATS = "decimals as floats: df[…].astype(float)"
TEXTS, DECIMALS = ["left", "up"] * 4, [decimal.Decimal("1.10")] * ROWS


@pytest.mark.parametrize(
    ("changes", "given", "said", "cure"),
    [
        ({"action": TEXTS}, (), "made of texts: action", CODES),
        ({"action": pa.array(TEXTS).dictionary_encode()}, (), "made of texts: action", CODES),
        ({"action": None, "a": TEXTS, "b": TEXTS}, ("action=a,b",), "made of texts: a, b", CODES),
        ({"observation": DECIMALS}, (), "cannot be made of the columns observation", FLOATS),
        ({"action": DECIMALS}, (), "cannot be made of the columns action", FLOATS),
    ],
)
def test_texts_as_actions_and_decimals_are_refused_with_the_cure(
    tmp_path: Path, changes: Columns, given: tuple[str, ...], said: str, cure: str
) -> None:
    made = columns(**changes)
    with pytest.raises(ImportRefused, match=said) as caught:
        read(write(tmp_path / "a.parquet", made), *given)
    assert caught.value.expected.endswith(cure)
    frame = pa.table({k: v if isinstance(v, pa.Array) else pa.array(v) for k, v in made.items()})
    df = frame.to_pandas()
    for name in changes.keys() & set(df):
        column = df[name]
        cured = column.astype("category").cat.codes if cure == CODES else column.astype(float)
        made[name] = np.asarray(cured)
    assert read(write(tmp_path / "b.parquet", made), *given)[1]


def test_texts_as_actions_in_rows_of_episodes_are_refused(tmp_path: Path) -> None:
    made = {"observation": [[0.0, 1.0, 2.0]], "action": [["l", "r"]], "reward": [[0.0, 1.0]]}
    with pytest.raises(ImportRefused, match="made of texts: action") as caught:
        read(write(tmp_path / "a.parquet", made))
    assert caught.value.expected == "numbers of the choices, the same in every file"
