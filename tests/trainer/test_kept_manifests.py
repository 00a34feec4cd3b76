"""What a trainer keeps of a growing dataset: what differs, no more; it reads it back exactly."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from stepwell import manifest
from stepwell.testing import make_spec, make_trajectory
from trainer.config import TrainConfig
from trainer.data import snapshot as module
from trainer.data.snapshot import Manifest, create_snapshot, delete_manifests, load_manifest

SPEC = make_spec()


def same(one: Manifest, other: Manifest) -> bool:
    """All but the order in which shards are numbered."""
    for field in fields(Manifest):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if field.name in ("shards", "shard"):
            continue
        if not (np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b):
            return False
    return [one.shards[i] for i in one.shard] == [other.shards[i] for i in other.shard]


def post(client, name: str, count: int, first: int) -> None:
    client.post(name, [make_trajectory(SPEC, length=4, seed=first + i) for i in range(count)])


def test_a_refresh_fetches_and_keeps_what_differs(client, name: str, tmp_path: Path) -> None:
    client.create_dataset(name, SPEC)
    config = TrainConfig(dataset=name)
    post(client, name, 30, 0)
    ids = [create_snapshot(client, config, "t")]
    load_manifest(client, ids[0], tmp_path / "kept")
    assert create_snapshot(client, config, "t", since=ids[0]) == ids[0], "nothing new"
    for i in range(4):
        post(client, name, 3, 100 * (i + 1))
        ids.append(create_snapshot(client, config, "t", since=ids[-1]))
        grown = load_manifest(client, ids[-1], tmp_path / "kept", since=ids[-2])
        assert len(grown) == 33 + 3 * i
        assert same(grown, load_manifest(client, ids[-1], tmp_path / f"fresh{i}"))
        # An earlier life's files are all that a resumed run needs.
        assert same(grown, load_manifest(None, ids[-1], tmp_path / "kept"))
    assert len(list((tmp_path / "kept").iterdir())) == 5
    assert delete_manifests(tmp_path / "kept", ids[-1:]) == 5 - chain(tmp_path / "kept", ids[-1])
    assert same(grown, load_manifest(None, ids[-1], tmp_path / "kept"))


def chain(folder: Path, snapshot: str) -> int:
    return 1 + module._depth(folder, snapshot)


def test_a_forgotten_snapshot_costs_a_whole_manifest_and_nothing_else(
    client, name: str, tmp_path: Path
) -> None:
    client.create_dataset(name, SPEC)
    post(client, name, 5, 0)
    snapshot = create_snapshot(client, TrainConfig(dataset=name), "t")
    found = load_manifest(client, snapshot, tmp_path, since="sn_0")
    assert len(found) == 5 and chain(tmp_path, snapshot) == 1


@pytest.mark.parametrize("longest", [0, 2])
def test_kept_changes_are_no_long_chain(
    client, name: str, tmp_path: Path, monkeypatch, longest: int
) -> None:
    """One that is long enough ends with a whole manifest."""
    monkeypatch.setattr(module, "LONGEST_CHAIN", longest)
    monkeypatch.setattr(manifest, "BLOCK", 4)
    client.create_dataset(name, SPEC)
    post(client, name, 30, 0)
    ids = [create_snapshot(client, TrainConfig(dataset=name), "t")]
    load_manifest(client, ids[0], tmp_path)
    for i in range(6):
        post(client, name, 1, 100 * (i + 1))
        ids.append(create_snapshot(client, TrainConfig(dataset=name), "t", since=ids[-1]))
        load_manifest(client, ids[-1], tmp_path, since=ids[-2])
        assert chain(tmp_path, ids[-1]) <= longest + 1


def test_a_million_rows_become_a_manifest_without_an_object_each() -> None:
    """Names and ids stay bytes and numbers: a few calls of Python, however many rows there are."""
    import sys

    def calls(count: int) -> int:
        ids = np.random.default_rng(0).bytes(16 * count)
        names = pa.array(["sh_1", "sh_2"])
        codes = pa.array((np.arange(count) % 2).astype(np.int32))
        shard = pa.DictionaryArray.from_arrays(codes, names)
        made = {
            "id": pa.FixedSizeBinaryArray.from_buffers(
                pa.binary(16), count, [None, pa.py_buffer(ids)]
            ),
            "dataset": shard,
            "shard": shard,
            "env": shard,
        }
        table = pa.table(
            [
                made[f.name]
                if f.name in made
                else pa.array(np.zeros(count, f.type.to_pandas_dtype()))
                for f in manifest.SCHEMA
            ],
            schema=manifest.SCHEMA.with_metadata(
                {"snapshot": "s", "digest": "d", "shares": "[1.0]"}
            ),
        )
        seen = 0

        def see(_frame, _event: str, _arg) -> None:
            nonlocal seen
            seen += 1

        sys.setprofile(see)
        try:
            module.manifest_from_table(table, SPEC)
        finally:
            sys.setprofile(None)
        return seen

    few, many = calls(1000), calls(1_000_000)
    assert many < few + 1000
