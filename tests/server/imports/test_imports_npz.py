"""An .npz with D4RL's names reads as the same arrays in an HDF5 file do."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

from server.imports import npz
from server.imports.episodes import plan, trajectories
from server.imports.raw_file import ImportOptions, ImportRefused

from .conftest import table


def read(arrays: dict[str, Any], *, packed: bool = True) -> Any:
    out = io.BytesIO()
    (np.savez_compressed if packed else np.savez)(out, **arrays)
    size = out.tell()
    out.seek(0)
    return npz.read(out, size, 1 << 30)


def made(source: Any) -> list[Any]:
    options = ImportOptions(dataset="d", sha256="0" * 64, format="npz")
    return list(trajectories(plan(source, options, 1000), options))


@pytest.mark.parametrize("packed", [True, False])
def test_the_same_trajectories_as_from_hdf5(packed: bool) -> None:
    arrays = table(30, terminals=[9], timeouts=[19])
    arrays["infos/qpos"] = np.arange(60.0).reshape(30, 2)
    found = made(read(arrays, packed=packed))
    assert [len(t) for t in found] == [10, 10, 10]
    assert np.array_equal(np.concatenate([t.actions["action"] for t in found]), arrays["actions"])
    assert np.array_equal(found[1].infos["qpos"][:-1], arrays["infos/qpos"][10:20])


def test_fortran_order_is_read_right() -> None:
    arrays = table(30, timeouts=[29])
    plain = made(read(arrays))
    arrays["observations"] = np.asfortranarray(arrays["observations"])
    assert made(read(arrays))[0].digest == plain[0].digest


def test_members_it_does_not_know_are_named_and_left() -> None:
    source = read(table(5) | {"extra": np.zeros(3)})
    assert source.warnings == ["not read: extra"]


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
def test_what_is_no_plain_number_is_refused_with_the_cure(name: str, array: Any, cure: str) -> None:
    arrays = table(6, terminals=[5])
    with pytest.raises(ImportRefused, match=f"{name} does not contain plain numbers") as caught:
        read(arrays | {name: array})
    assert caught.value.expected.endswith(f" {cure}")
    cured = eval(cure.rpartition(": ")[2], {"np": np, "array": array})
    assert made(read(arrays | {name: cured}))


def test_more_memory_than_granted_is_refused() -> None:
    out = io.BytesIO()
    np.savez(out, **table(1000))
    size = out.tell()
    out.seek(0)
    with pytest.raises(ImportRefused, match="memory") as caught:
        npz.read(out, size, 1000)
    assert caught.value.status == 413
