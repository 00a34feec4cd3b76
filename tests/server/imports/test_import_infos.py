"""Infos that cannot be kept are left out, each with the reason; they never refuse a file."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from server.imports.raw_file import ImportRefused, Reading
from stepwell.spaces import Box, Discrete, EnvSpec
from tests.imported import read_file

from .conftest import Arrays, Importing, table, write

ROWS = 20
Change = Callable[[h5py.File], Any]
UNKEPT: dict[str, tuple[Change, str]] = {
    # as BabyAI's files have it
    "bytes": (
        lambda f: f.create_dataset("infos/x", data=np.array([b"go to the red ball"] * ROWS)),
        "not plain numbers (|S18)",
    ),
    "fixed_strings": (lambda f: f.create_dataset("infos/x", (ROWS,), "S10"), "|S10"),
    "variable_strings": (
        lambda f: f.create_dataset("infos/x", data=["a"] * ROWS, dtype=h5py.string_dtype()),
        "object",
    ),
    "variable_arrays": (
        lambda f: f.create_dataset("infos/x", (ROWS,), h5py.vlen_dtype(np.float32)),
        "object",
    ),
    "references": (lambda f: f.create_dataset("infos/x", (ROWS,), h5py.ref_dtype), "object"),
    "compound": (lambda f: f.create_dataset("infos/x", (ROWS,), [("a", "f4"), ("b", "i8")]), "'a'"),
    "complex": (lambda f: f.create_dataset("infos/x", (ROWS,), np.complex64), "complex64"),
    "opaque": (lambda f: f.create_dataset("infos/x", (ROWS,), "V4"), "V4"),
    "long_double": (lambda f: f.create_dataset("infos/x", (ROWS,), np.longdouble), "float128"),
    "uint64": (lambda f: f.create_dataset("infos/x", (ROWS,), np.uint64), "uint64"),
    "named_type": (lambda f: f.__setitem__("infos/x", np.dtype("f4")), "no array"),
    "null_space": (lambda f: f.create_dataset("infos/x", data=h5py.Empty("f4")), "empty"),
    "scalar": (lambda f: f.create_dataset("infos/x", data=3.0), "not one row per step"),
    "wrong_length": (
        lambda f: f.create_dataset("infos/x", (ROWS - 1,), "f4"),
        "not one row per step",
    ),
    "no_columns": (lambda f: f.create_dataset("infos/x", (ROWS, 0), "f4"), "an invalid size"),
    "many_dimensions": (
        lambda f: f.create_dataset("infos/x", (ROWS,) + (1,) * 9, "f4"),
        "dimensions",
    ),
    "unknown_filter": (
        lambda f: f.create_dataset("infos/x", data=np.arange(ROWS * 100), scaleoffset=0),
        "unknown filter",
    ),
}


def read(path: Path, change: Change, **chosen: Any) -> tuple[Reading, Arrays]:
    """A small good file with a change; its infos, without the repeated last ones."""
    write(path, table(ROWS, timeouts=[9, 19]))
    with h5py.File(path, "a") as file:
        change(file)
    found, made = read_file(path, **chosen)
    assert [len(t) for t in made] == [10, 10]
    return found, {k: np.concatenate([t.infos[k][:-1] for t in made]) for k in made[0].infos}


@pytest.mark.parametrize("name", UNKEPT)
def test_an_info_that_cannot_be_kept_is_left_out_with_the_reason(name: str, tmp_path: Path) -> None:
    change, why = UNKEPT[name]

    def both(file: h5py.File) -> None:
        change(file)
        file["infos/good"] = np.arange(ROWS, dtype=np.float32)

    found, infos = read(tmp_path / "f.hdf5", both)
    assert list(found.spec.infos) == list(infos) == ["good"]
    assert list(found.dropped) == ["x"] and why in found.dropped["x"]
    (warning,) = [w for w in found.warnings if w.startswith("info 'x' left out")]
    assert found.dropped["x"] in warning


def test_groups_of_infos_are_judged_one_by_one(tmp_path: Path) -> None:
    """What is below a group is kept or not by itself; NaN is no reason."""

    def change(file: h5py.File) -> None:
        file["infos/state/qpos"] = np.full((ROWS, 2), np.nan)
        file["infos/state/text"] = np.array([b"a"] * ROWS)
        file["infos/a name/deep"] = np.zeros(ROWS)
        file["infos/true"] = np.ones(ROWS, np.bool_)

    found, infos = read(tmp_path / "f.hdf5", change)
    assert sorted(found.spec.infos) == ["state/qpos", "true"]
    assert np.isnan(infos["state/qpos"]).all()
    assert sorted(found.dropped) == ["a name/deep", "state/text"]
    assert "characters" in found.dropped["a name/deep"]


def test_infos_as_one_array_of_texts(tmp_path: Path) -> None:
    found, _ = read(tmp_path / "f.hdf5", lambda f: f.create_dataset("infos", (ROWS,), "S3"))
    assert not found.spec.infos and list(found.dropped) == ["infos"]


def test_drop_infos_leaves_out_what_it_names(tmp_path: Path) -> None:
    """By name, by group, or all; a name that the file does not have is told, with the nearest."""

    def change(file: h5py.File) -> None:
        for name in ("qpos", "state/a", "state/b", "statement"):
            file[f"infos/{name}"] = np.zeros(ROWS)

    found, _ = read(tmp_path / "f.hdf5", change, drop_infos=("state", "qpso"))
    assert sorted(found.spec.infos) == ["qpos", "statement"]
    assert sorted(found.dropped) == ["state/a", "state/b"]
    assert set(found.dropped.values()) == {"listed in drop_infos"}
    assert "drop_infos: the file has no info 'qpso'; did you mean 'qpos'?" in found.warnings
    found, _ = read(tmp_path / "g.hdf5", change, drop_infos=("*",))
    assert not found.spec.infos and len(found.dropped) == 4
    assert not [w for w in found.warnings if "no info" in w]


def test_what_is_dropped_is_not_read(tmp_path: Path) -> None:
    """Its chunks may be damaged, and its size counts for nothing."""

    def change(file: h5py.File) -> None:
        file.create_dataset("infos/big", (ROWS, 1 << 20), "f8", chunks=(1, 1 << 20))

    with pytest.raises(ImportRefused):
        read(tmp_path / "f.hdf5", change, memory=1 << 20)
    found, infos = read(tmp_path / "g.hdf5", change, memory=1 << 20, drop_infos=("big",))
    assert infos == {} and list(found.dropped) == ["big"]


@pytest.mark.parametrize("name", ["observations", "actions", "rewards", "terminals", "timeouts"])
def test_only_infos_are_left_out(tmp_path: Path, name: str) -> None:
    def change(file: h5py.File) -> None:
        del file[name]
        file.create_dataset(name, (ROWS,), "S10")

    with pytest.raises(ImportRefused, match=f"{name} does not contain plain numbers"):
        read(tmp_path / "f.hdf5", change, drop_infos=("*",))


def test_a_dataset_of_floats_gets_nan_for_an_info_that_cannot_be_kept(tmp_path: Path) -> None:
    """One whose type has no word for unknown refuses the file, and says which info and why."""

    def spec(**infos: Any) -> EnvSpec:
        return EnvSpec.of(Box((3,)), Box((2,), low=-1.0, high=1.0), infos=infos)

    def change(file: h5py.File) -> None:
        file["infos/x"] = np.array([b"a"] * ROWS)
        file["infos/wide"] = np.zeros((ROWS, 4))
        file["infos/fine"] = np.arange(ROWS)

    found, infos = read(
        tmp_path / "f.hdf5", change, spec=spec(x=Box(()), wide=Box((2,)), fine=Box(()))
    )
    assert np.isnan(infos["x"]).all() and np.isnan(infos["wide"]).all()
    assert infos["wide"].shape == (ROWS, 2)
    assert np.array_equal(infos["fine"], np.arange(ROWS))
    assert sorted(found.dropped) == ["wide", "x"] and "another shape" in found.dropped["wide"]
    with pytest.raises(ImportRefused, match="infos/x cannot be kept.*not plain numbers") as caught:
        read(tmp_path / "g.hdf5", change, spec=spec(x=Discrete(3)))
    assert caught.value.code == "schema_mismatch"
    with pytest.raises(ImportRefused, match="infos/absent is missing"):
        read(tmp_path / "h.hdf5", change, spec=spec(absent=Box(())))


def npz_file(path: Path, arrays: Arrays, raw: dict[str, bytes] | None = None) -> Path:
    np.savez(path, **arrays)
    with zipfile.ZipFile(path, "a") as archive:
        for name, data in (raw or {}).items():
            archive.writestr(name, data)
    return path


def test_npz_infos_that_cannot_be_kept_are_left_out(tmp_path: Path) -> None:
    """Texts, objects (never unpickled), records, and headers that do not read."""
    arrays = table(ROWS, timeouts=[9, 19]) | {
        "infos/text": np.array(["go"] * ROWS),
        "infos/bytes": np.array([b"go"] * ROWS),
        "infos/objects": np.array([{"a": 1}] * ROWS, object),
        "infos/records": np.zeros(ROWS, [("a", "f4"), ("b", "i8")]),
        "infos/short": np.zeros(3),
        "infos/good": np.arange(ROWS),
    }
    torn = {"infos/torn.npy": b"\x93NUMPY\x01", "infos/odd.npy": b"hello"}
    path = npz_file(tmp_path / "f.npz", arrays, torn)
    found, _ = read_file(path, kind="npz")
    assert list(found.spec.infos) == ["good"]
    unkept = ["bytes", "objects", "odd", "records", "short", "text", "torn"]
    assert sorted(found.dropped) == unkept
    found, _ = read_file(path, kind="npz", drop_infos=("text", "good"))
    assert sorted(found.dropped) == sorted([*unkept, "good"]) and not found.spec.infos
    assert found.dropped["text"] == found.dropped["good"] == "listed in drop_infos"


@pytest.mark.parametrize("name", ["observations", "rewards", "terminals"])
def test_npz_refuses_the_same_for_what_an_agent_learns_from(tmp_path: Path, name: str) -> None:
    arrays = table(ROWS, timeouts=[9, 19]) | {name: np.array(["x"] * ROWS)}
    with pytest.raises(ImportRefused, match=f"{name} does not contain plain numbers"):
        read_file(npz_file(tmp_path / "f.npz", arrays), kind="npz", drop_infos=("*",))


def test_a_file_of_missions_goes_through_the_whole_service(
    importing: Importing, tmp_path: Path
) -> None:
    """The job's result names what was left out, and why; a second file of the kind follows."""
    arrays = table(ROWS, timeouts=[9, 19])
    arrays["infos/mission"] = np.array([b"go to the red ball"] * ROWS)
    arrays["infos/seed"] = np.arange(ROWS)
    job = importing.run(write(tmp_path / "a.hdf5", arrays), "babyai")
    assert job.state == "succeeded" and job.result is not None, job.error
    assert list(job.result["infos_left_out"]) == ["mission"]
    assert any("info 'mission' left out: not plain" in w for w in job.result["warnings"])
    arrays["rewards"] = arrays["rewards"] + 1
    job = importing.run(write(tmp_path / "b.hdf5", arrays), "babyai")
    assert job.state == "succeeded" and job.result is not None, job.error
    assert (job.result["trajectories"], job.result["created"]) == (2, False)
    job = importing.run(
        write(tmp_path / "c.hdf5", arrays), "babyai-2", drop_infos=("mission", "seed")
    )
    assert job.result is not None and sorted(job.result["infos_left_out"]) == ["mission", "seed"]
