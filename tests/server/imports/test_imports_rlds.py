"""RLDS datasets as TFDS (4.9.10) writes them, made small without it.

Genuine datasets of TFDS with the same features were read, too, and equalled what TFDS itself reads.
"""

from __future__ import annotations

import base64
import io
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from server.imports import tfrecord
from server.imports.raw_file import ImportRefused, Reading
from stepwell import InvalidData
from stepwell._folders import files_of, zipped
from stepwell.spaces import Box, Discrete, EnvSpec
from stepwell.trajectory import Trajectory
from tests.imported import read_file

Values = dict[str, Any]
Read = Callable[..., tuple[Reading, list[Trajectory]]]
# One record of a file that TFDS wrote: observations [4, 3], row i is 10 x episode + i.
GENUINE = base64.b64decode(
    "DAEAAAAAAADy+G3UCokCCiYKDnN0ZXBzL2Rpc2NvdW50EhQSEgoQAACAPwAAgD8AAIA/AACAPwoaCg5zdGVwcy9pc19m"
    "aXJzdBIIGgYKBAEAAAAKSQoRc3RlcHMvb2JzZXJ2YXRpb24SNBIyCjAAAAAAAAAAAAAAAAAAAIA/AACAPwAAgD8AAABA"
    "AAAAQAAAAEAAAEBAAABAQAAAQEAKGQoNc3RlcHMvaXNfbGFzdBIIGgYKBAAAAAEKGAoMc3RlcHMvYWN0aW9uEggaBgoE"
    "AAECAAodChFzdGVwcy9pc190ZXJtaW5hbBIIGgYKBAAAAAAKJAoMc3RlcHMvcmV3YXJkEhQSEgoQAAAAAAAAgD8AAABA"
    "AABAQER5mdg="
)


def example(values: Values) -> bytes:
    """A tf.train.Example: floats, integers and byte strings by their Python or numpy types."""
    made = tfrecord.example_type()()
    for key, value in values.items():
        pair = made.features.feature.add(key=key)
        if isinstance(value, list) and value and isinstance(value[0], bytes):
            pair.value.bytes_list.value.extend(value)
        elif np.asarray(value).dtype.kind == "f":
            pair.value.float_list.value.extend(np.ravel(value).tolist())
        else:
            pair.value.int64_list.value.extend(np.ravel(value).astype(int).tolist())
    return bytes(made.SerializeToString())


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    sums = [struct.pack("<I", tfrecord.masked_crc(part)) for part in (length, data)]
    return length + sums[0] + data + sums[1]


def tensor(*shape: int, dtype: str = "float32", **more: Any) -> dict[str, Any]:
    dimensions = {"dimensions": [str(n) for n in shape]} if shape else {}
    return {"tensor": {"dtype": dtype, "encoding": "none", "shape": dimensions, **more}}


def scalars(*names: str, dtype: str = "bool") -> dict[str, Any]:
    return {name: tensor(dtype=dtype) for name in names}


STEPS = {
    "observation": tensor(2),
    "action": tensor(1),
    **scalars("reward", dtype="float32"),
    **scalars("is_first", "is_last", "is_terminal"),
}


def episode(rows: int, *, terminal: bool = True, seed: int = 0, **changes: Any) -> Values:
    """Of `rows` steps; what its last action and reward are has no meaning."""
    rng = np.random.default_rng(seed)
    places = np.arange(rows)
    values = {
        "observation": rng.normal(size=(rows, 2)).astype(np.float32),
        "action": np.append(rng.uniform(-1, 1, rows - 1), 9.0).astype(np.float32),
        "reward": np.append(places[:-1], 0.0).astype(np.float32),
        "is_first": places == 0,
        "is_last": places == rows - 1,
        "is_terminal": (places == rows - 1) & terminal,
    }
    return {f"steps/{k}": v for k, v in (values | changes).items() if v is not None}


def write(
    folder: Path,
    shards: list[list[Values]],
    *,
    steps: dict[str, Any] = STEPS,
    split: str = "train",
    **info: Any,
) -> Path:
    """A version's folder of TFDS."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, episodes in enumerate(shards):
        data = b"".join(record(example(values)) for values in episodes)
        path = folder / f"toy-{split}.tfrecord-{number:05d}-of-{len(shards):05d}"
        path.write_bytes(data)
    dataset = {"sequence": {"feature": {"featuresDict": {"features": steps}}, "length": "-1"}}
    written = {"featuresDict": {"features": {"steps": dataset}}}
    (folder / "features.json").write_text(json.dumps(written))
    lengths = [str(len(episodes)) for episodes in shards]
    said = {
        "name": "toy",
        "version": "1.0.0",
        "fileFormat": "tfrecord",
        "splits": [{"name": split, "shardLengths": lengths}],
    }
    (folder / "dataset_info.json").write_text(json.dumps(said | info))
    return folder


def read_folder(folder: Path, **chosen: Any) -> tuple[Reading, list[Trajectory]]:
    return read_file(folder, **chosen)


@pytest.fixture
def read(tmp_path: Path) -> Read:
    return lambda *episodes, **fields: read_folder(write(tmp_path / "d", [[*episodes]], **fields))


def test_the_last_step_is_only_an_observation(read: Read) -> None:
    """reward_i is of action_i: nothing is shifted, and what the last step has does not count."""
    first = episode(4)
    found, made = read(first, episode(2, terminal=False, seed=1))
    assert found.spec == EnvSpec.of(Box((2,)), Box((1,), low=-1, high=1))
    assert found.warnings == []
    one, two = made
    assert one.obs["observation"].tolist() == first["steps/observation"].tolist()
    assert one.actions["action"].ravel().tolist() == first["steps/action"][:-1].tolist()
    assert one.rewards.tolist() == [0, 1, 2]
    assert [(t.terminated, t.truncated) for t in made] == [(True, False), (False, True)]
    assert len(two) == 1
    assert all(t.final_obs_valid for t in made)


def test_the_last_step_counts_where_asked(tmp_path: Path) -> None:
    """Of robots' data it has the action and often the only reward."""
    last = {"action": np.array([0.5, 0.25, -1.0]), "reward": np.array([0.0, 0.0, 1.0])}
    first = episode(3, **last)
    single = episode(1, seed=1, terminal=False, action=np.array([0.5]), reward=np.array([2.0]))
    folder = write(tmp_path / "d", [[first, single]])
    found, made = read_folder(folder, keep_last_step=True)
    assert found.warnings == []
    one, two = made
    rows = first["steps/observation"].tolist()
    assert one.obs["observation"].tolist() == [*rows, rows[-1]]
    assert one.actions["action"].ravel().tolist() == [0.5, 0.25, -1.0]
    assert (one.rewards.tolist(), two.rewards.tolist()) == ([0, 0, 1], [2])
    assert [(t.terminated, t.truncated) for t in made] == [(True, False), (False, True)]
    assert not any(t.final_obs_valid for t in made)
    found, made = read_folder(folder)
    assert [t.rewards.tolist() for t in made] == [[0, 0]]
    assert any("keep_last_step=true" in line for line in found.warnings)


def test_a_record_that_tfds_wrote() -> None:
    """Checksums and messages are TensorFlow's."""
    file = io.BytesIO(GENUINE)
    ((offset, length),) = tfrecord.records(file, "x")
    found = tfrecord.parse(GENUINE[offset : offset + length], "x")
    assert found["steps/action"].tolist() == [0, 1, 2, 0]
    assert found["steps/reward"].tolist() == [0, 1, 2, 3]
    assert found["steps/is_last"].tolist() == [0, 0, 0, 1]
    rows = found["steps/observation"].reshape(4, 3)
    assert (rows - rows[0]).tolist() == [[n] * 3 for n in range(4)]
    assert tfrecord.masked_crc(b"123456789") == (
        ((0xE3069283 >> 15 | 0xE3069283 << 17) + 0xA282EAD8) & 0xFFFFFFFF
    )


def picture(kind: str, number: int) -> bytes:
    out = io.BytesIO()
    pixels = np.full((4, 5, 3), number, np.uint8)
    Image.fromarray(pixels).save(out, format=kind)
    return out.getvalue()


def test_kinds_of_features(read: Read) -> None:
    observation = {
        "state": tensor(2, 2, dtype="float64"),
        "raw": tensor(3, dtype="int16", encoding="bytes"),
        "png": {"image": {"dtype": "uint8", "shape": {"dimensions": ["4", "5", "3"]}}},
        "jpg": {
            "image": {
                "dtype": "uint8",
                "encodingFormat": "jpeg",
                "shape": {"dimensions": ["4", "5", "3"]},
            }
        },
        "deep": {"featuresDict": {"features": {"to do": {"text": {}}}}},
    }
    steps = STEPS | {
        "observation": {"featuresDict": {"features": observation}},
        "action": {"classLabel": {"numClasses": "5"}},
        "discount": tensor(),
        "ragged": tensor(-1),
        "note": {"text": {}},
        "odd": {"audio": {}},
    }
    values = episode(
        2,
        **{
            "observation": None,
            "observation/state": np.arange(8.0),
            "observation/raw": [np.full(3, n, "<i2").tobytes() for n in (-7, 7)],
            "observation/png": [picture("PNG", n) for n in (3, 4)],
            "observation/jpg": [picture("JPEG", n) for n in (3, 4)],
            "observation/deep/to do": [b"open it", b"open"],
            "action": [3, 0],
            "discount": np.array([1.0, 0.5]),
            "ragged": np.array([1.0]),
            "note": [b"a", b"b"],
        },
    )
    found, (made,) = read(values, steps=steps)
    observations = dict(found.spec.observations)
    assert observations.pop("deep/to_do").shape == (2,)
    assert observations == {
        "state": Box((2, 2)),
        "raw": Box((3,), "int16"),
        "png": Box((4, 5, 3), "uint8", 0, 255),
        "jpg": Box((4, 5, 3), "uint8", 0, 255),
    }
    assert found.spec.actions == {"action": Discrete(5)}
    assert made.actions["action"].tolist() == [3]
    assert made.obs["state"][1].tolist() == [[4, 5], [6, 7]]
    assert made.obs["raw"].tolist() == [[-7] * 3, [7] * 3]
    assert made.obs["png"].mean(axis=(1, 2, 3)).tolist() == [3, 4]
    assert made.infos["discount"].tolist() == [1.0, 0.5]
    assert set(found.dropped) == {"ragged", "note", "odd"}
    assert any("JPEG" in w for w in found.warnings)
    assert any("float64 as float32" in w for w in found.warnings)


def test_a_jpeg_is_said_whatever_is_declared(read: Read) -> None:
    steps = STEPS | {
        "observation": {"image": {"dtype": "uint8", "shape": tensor(4, 5, 3)["tensor"]["shape"]}}
    }
    for kind, said in (("PNG", False), ("JPEG", True)):
        images = [picture("PNG", 1), picture("PNG", 2), picture(kind, 3)]
        found, _ = read(
            episode(2, observation=images[:2]), episode(3, observation=images), steps=steps
        )
        assert any("JPEG" in line for line in found.warnings) is said


def test_what_the_last_step_has_is_named_and_single_steps_are_left_out(read: Read) -> None:
    found, made = read(episode(1), episode(3, reward=np.ones(3, np.float32)))
    assert [t.rewards.tolist() for t in made] == [[1, 1]]
    assert any("1 episode has a reward" in w for w in found.warnings)
    assert any("1 episode of a single step left out" in w for w in found.warnings)


def test_shards_and_splits(tmp_path: Path) -> None:
    shards = [[episode(2), episode(3)], [episode(4)]]
    folder = write(tmp_path / "toy/1.0.0", shards)
    info = {"splits": [{"shardLengths": ["2", "1"]}, {"shardLengths": ["1"]}]}
    write(folder, [[episode(5)]], split="val", **info)
    found, made = read_folder(folder.parent)
    assert [len(t) for t in made] == [1, 2, 3, 4]
    assert [t.metadata.tags for t in made] == [("split:train",)] * 3 + [("split:val",)]
    assert found.metadata == {"name": "toy", "version": "1.0.0"}
    (folder / "toy-train.tfrecord-00000-of-00002").unlink()
    with pytest.raises(ImportRefused, match="files of the split train are missing"):
        read_folder(folder)
    (tmp_path / "toy/2.0.0").mkdir()
    (tmp_path / "toy/2.0.0/features.json").write_text("{}")
    with pytest.raises(InvalidData, match="several versions"):
        files_of(tmp_path / "toy")


def marks(*at: int) -> np.ndarray:
    return np.isin(np.arange(3), at)


BAD: dict[str, tuple[Values, dict[str, Any], str]] = {
    "two ends": (episode(3, is_last=marks(1, 2)), {}, "is_last"),
    "no end": (episode(3, is_last=marks()), {}, "is_last"),
    "a late start": (episode(3, is_first=marks(1)), {}, "is_first"),
    "an early terminal": (episode(3, is_terminal=marks(0, 2)), {}, "is_terminal"),
    "too few values": (episode(3, observation=np.zeros(5, "f4")), {}, "not what features.json"),
    "texts for numbers": (episode(3, action=[b"a", b"b", b"c"]), {}, "not what features.json"),
    "no rewards": (episode(3, reward=None), {}, "not what features.json"),
    "missing episodes": (episode(3), {"splits": [{"shardLengths": ["2"]}]}, "episodes are missing"),
    "splits of words": (episode(3), {"splits": [{"shardLengths": ["x"]}]}, "cannot be read"),
    "another file format": (episode(3), {"fileFormat": "array_record"}, "not stored in TFRecord"),
    "NaN": (episode(3, observation=np.full(6, np.nan)), {}, "invalid numbers"),
    "out of range": (
        episode(3, action=[1, 2, 300]),
        {"steps": STEPS | {"action": tensor(1, dtype="uint8")}},
        "cannot hold",
    ),
    "no such steps": (episode(3), {"steps": {}}, "no scalar reward"),
    "ragged": (episode(3), {"steps": STEPS | {"observation": tensor(-1)}}, "differs between"),
    "no action": (
        episode(3),
        {"steps": {k: v for k, v in STEPS.items() if k != "action"}},
        "steps have no action",
    ),
    "huge shape": (
        episode(3),
        {"steps": STEPS | {"observation": tensor(2**40, 2**40)}},
        "not what features.json",
    ),
    "no pictures": (
        episode(3, observation=[b"\x89PNG and no more"] * 3),
        {
            "steps": STEPS
            | {
                "observation": {
                    "image": {"dtype": "uint8", "shape": {"dimensions": ["1", "1", "3"]}}
                }
            }
        },
        "damaged",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_episode_is_refused_by_name(read: Read, name: str) -> None:
    values, fields, says = BAD[name]
    with pytest.raises(ImportRefused, match=says):
        read(values, **fields)


@pytest.mark.parametrize("text", ["{}", '{"featuresDict": 3}', "[]", "{"])
def test_features_that_describe_no_episodes_are_refused(tmp_path: Path, text: str) -> None:
    folder = write(tmp_path / "d", [[episode(3)]])
    (folder / "features.json").write_text(text)
    with pytest.raises(ImportRefused, match=r"features\.json"):
        read_folder(folder)


def giant(data: bytes) -> bytes:
    length = struct.pack("<Q", 2**62)
    return data + length + struct.pack("<I", tfrecord.masked_crc(length)) + b"x"


def flipped(at: int) -> Callable[[bytes], bytes]:
    def flip(data: bytes) -> bytes:
        place = at % len(data)
        return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]

    return flip


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "a giant length": (giant, "beyond the end"),
    "a flipped length": (flipped(0), "checksum of its length"),
    "a flipped byte": (flipped(40), "checksum is wrong"),
    "a flipped checksum": (flipped(-1), "checksum is wrong"),
    "cut": (lambda data: data[:-1], "beyond the end"),
    "cut in the head": (lambda data: data + b"1234567", "cut short"),
    "no message": (lambda _: record(b"\xff" * 30), "not a tf.train.Example"),
    "an empty message": (lambda _: record(b""), "is_last"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_refused(tmp_path: Path, name: str) -> None:
    harm, says = DAMAGE[name]
    folder = write(tmp_path / "d", [[episode(3)]])
    path = folder / "toy-train.tfrecord-00000-of-00001"
    path.write_bytes(harm(path.read_bytes()))
    with pytest.raises(ImportRefused, match=says):
        read_folder(folder)


def test_an_option_of_rlds_is_refused_elsewhere_and_named_where_content_differs(
    importing: Any, tmp_path: Path
) -> None:
    whole = episode(3, action=np.array([0.5, 0.25, -1.0]), reward=np.array([0.0, 0.0, 1.0]))
    with zipped(files_of(write(tmp_path / "d", [[whole]]))[1]) as packed:
        assert importing.run(packed, "from-rlds", format="rlds").state == "succeeded"
        job = importing.run(packed, "from-rlds", format="rlds", keep_last_step=True)
    assert (job.state, job.error.code) == ("failed", "conflict"), job
    assert "keep_last_step" in job.error.detail
    path = tmp_path / "steps.npz"
    np.savez(path, observations=np.zeros((4, 2)), actions=np.zeros((4, 1)), rewards=np.ones(4))
    job = importing.run(path, "from-npz", format="npz", keep_last_step=True)
    assert (job.state, job.error.code) == ("failed", "import_refused"), job
    assert "only in RLDS" in job.error.detail


def test_a_folder_is_stored_once_or_not_at_all(importing: Any, tmp_path: Path) -> None:
    folder = write(tmp_path / "d", [[episode(3), episode(4)], [episode(2)]])
    with zipped(files_of(folder)[1]) as packed:
        for expected in (3, 0):
            job = importing.run(packed, "from-rlds", format="zip")
            assert (job.state, job.result["format"]) == ("succeeded", "rlds"), job
            assert job.result["trajectories"] == expected
    path = folder / "toy-train.tfrecord-00001-of-00002"
    path.write_bytes(flipped(-20)(path.read_bytes()))
    before = importing.files()
    with zipped(files_of(folder)[1]) as packed:
        job = importing.run(packed, "from-bad-rlds", format="rlds")
    assert (job.state, job.error.code) == ("failed", "import_refused"), job
    assert importing.files() == before
    assert importing.rows("select count(*) from datasets where name = 'from-bad-rlds'") == [[0]]


@pytest.mark.parametrize("dtype", ["bool", "int64", "float32"])
def test_flags_of_any_type_and_nothing_else(tmp_path: Path, dtype: str) -> None:
    steps = {**STEPS, **scalars("is_terminal", dtype=dtype)}
    kind = np.float32 if dtype == "float32" else np.int64

    def read_terminal(last: float) -> bool:
        folder = tmp_path / f"{last}"
        marks = np.array([0, 0, last], kind)
        write(folder, [[episode(3, is_terminal=marks)]], steps=steps)
        return read_folder(folder)[1][0].terminated

    assert read_terminal(1) is True and read_terminal(0) is False
    with pytest.raises(ImportRefused, match="is_terminal does not contain flags"):
        read_terminal(2)


def test_names_that_become_one_are_refused_with_both(read: Read) -> None:
    names = ("joint-1", "joint_1")
    infos = {f"steps/{name}": np.zeros(4, np.float32) for name in names}
    found, _ = read(episode(4) | infos, steps=STEPS | scalars(*names, dtype="float32"))
    assert not found.spec.infos
    assert any("joint-1 and joint_1 would both be named" in line for line in found.warnings)
    two = {"featuresDict": {"features": scalars(*names, dtype="float32")}}
    arrays = {f"steps/observation/{name}": np.zeros(4, np.float32) for name in names}
    with pytest.raises(ImportRefused, match="would both be named"):
        read(episode(4, observation=None) | arrays, steps=STEPS | {"observation": two})
