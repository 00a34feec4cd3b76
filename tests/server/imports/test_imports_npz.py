"""An .npz with D4RL's names reads as the same arrays in an HDF5 file do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from server.imports.raw_file import ImportRefused, Reading
from stepwell.trajectory import Trajectory
from tests.imported import read_file

from .conftest import table


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., tuple[Reading, list[Trajectory]]]:
    def read_(arrays: dict[str, Any], *, packed: bool = True, **options: Any) -> Any:
        path = tmp_path / "file.npz"
        (np.savez_compressed if packed else np.savez)(path, **arrays)
        return read_file(path, kind="npz", **options)

    return read_


@pytest.mark.parametrize("packed", [True, False])
def test_the_same_trajectories_as_from_hdf5(read: Any, packed: bool) -> None:
    arrays = table(30, terminals=[9], timeouts=[19])
    arrays["infos/qpos"] = np.arange(60.0).reshape(30, 2)
    _, found = read(arrays, packed=packed)
    assert [len(t) for t in found] == [10, 10, 10]
    assert np.array_equal(np.concatenate([t.actions["action"] for t in found]), arrays["actions"])
    assert np.array_equal(found[1].infos["qpos"][:-1], arrays["infos/qpos"][10:20])


def test_fortran_order_is_read_right(read: Any) -> None:
    arrays = table(30, timeouts=[29])
    (plain,) = read(arrays)[1]
    arrays["observations"] = np.asfortranarray(arrays["observations"])
    assert read(arrays)[1][0].digest == plain.digest


def test_members_it_does_not_know_are_named_and_left(read: Any) -> None:
    found, _ = read(table(5, timeouts=[4]) | {"extra": np.zeros(3)})
    assert found.warnings == ["not read: extra"]


@pytest.mark.parametrize(
    ("name", "array", "cure"),
    [
        ("observations", np.ones((6, 2), np.longdouble), "array.astype(np.float64)"),
        (
            "observations",
            np.array([(1, 2)] * 6, [("x", "f4"), ("y", "f4")]),
            "each field as an array of its own: array['x']",
        ),
        ("actions", np.array(["l", "r"] * 3), "np.unique(array, return_inverse=True)[1]"),
    ],
)
def test_what_is_no_plain_number_is_refused_with_the_cure(
    read: Any, name: str, array: Any, cure: str
) -> None:
    arrays = table(6, terminals=[5])
    with pytest.raises(ImportRefused, match=f"{name} does not contain plain numbers") as caught:
        read(arrays | {name: array})
    assert caught.value.expected.endswith(f" {cure}")
    cured = eval(cure.rpartition(": ")[2], {"np": np, "array": array})
    assert read(arrays | {name: cured})[1]


def test_more_memory_than_granted_is_refused(read: Any) -> None:
    with pytest.raises(ImportRefused, match="memory") as caught:
        read(table(1000), memory=1000)
    assert caught.value.status == 413
