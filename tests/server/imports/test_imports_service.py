"""An upload's way through the service: all of it or nothing, once, visible to every reader."""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from starlette.testclient import TestClient

from server.app import create_app
from server.imports import parser_process
from server.index.tables import shards, trajectories
from server.ingest import bulk_insert
from server.pipe_frames import FrameReader
from server.service import Service
from server.settings import Settings
from server.storage.shards import read_footer
from stepwell.codec import decode
from stepwell.messages import ARROW
from stepwell.testing import wait_until

from .conftest import table, write


def episodes(count: int, length: int = 10, seed: int = 0) -> dict[str, Any]:
    rows = count * length
    return table(rows, timeouts=range(length - 1, rows, length), seed=seed)


def test_a_file_becomes_trajectories_steps_and_a_dataset(importing: Any, tmp_path: Path) -> None:
    arrays = episodes(20) | {"metadata/algorithm": np.bytes_("SAC")}
    job = importing.run(write(tmp_path / "a.hdf5", arrays), "whole", env="Hopper-v5")
    assert job.state == "succeeded", job
    result = job.result
    assert (result["trajectories"], result["steps"], result["created"]) == (20, 200, True)
    assert result["metadata"] == {"algorithm": "SAC"}
    assert importing.rows(
        "select partition, state, env, count(*), sum(length) from trajectories"
        " where dataset = 'whole' group by all"
    ) == [["protected", "sealed", "Hopper-v5", 20, 200]]
    total = importing.rows("select sum(reward) from steps", dataset="whole")[0][0]
    assert total == pytest.approx(arrays["rewards"].sum(), abs=1e-4)
    assert importing.rows("select description, tags from datasets where name = 'whole'") == [
        ["Imported (d4rl): algorithm=SAC", ["d4rl"]]
    ]


def test_the_same_file_again_stores_nothing(importing: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "a.hdf5", episodes(5))
    importing.run(path, "twice")
    before = importing.files()
    again = importing.run(path, "twice")
    assert again.state == "succeeded"
    assert (again.result["trajectories"], again.result["duplicates"]) == (0, 5)
    assert importing.rows("select count(*) from trajectories where dataset='twice'") == [[5]]
    assert importing.files() == before


def test_another_file_of_the_same_layout_is_added(importing: Any, tmp_path: Path) -> None:
    importing.run(write(tmp_path / "a.hdf5", episodes(5)), "added")
    job = importing.run(write(tmp_path / "b.hdf5", episodes(3, seed=1)), "added", create=False)
    assert job.result["trajectories"] == 3
    rows = importing.rows("select seq from trajectories where dataset='added' order by seq")
    assert len({seq for (seq,) in rows}) == 8


def test_the_same_file_read_differently_is_a_conflict(importing: Any, tmp_path: Path) -> None:
    """Ids come from the file; its content under them never changes."""
    path = write(tmp_path / "a.hdf5", episodes(5))
    importing.run(path, "differs", env="A-v0")
    job = importing.run(path, "differs", env="B-v0")
    assert (job.state, job.error.status, job.error.code) == ("failed", 409, "conflict")
    envs = importing.rows("select distinct env from trajectories where dataset='differs'")
    assert envs == [["A-v0"]]


def test_a_file_that_fails_leaves_nothing(importing: Any, tmp_path: Path) -> None:
    """Not even the dataset, though the fault stands at the very end."""
    arrays = episodes(50)
    arrays["rewards"][-1] = np.inf
    before = importing.files()
    job = importing.run(write(tmp_path / "a.hdf5", arrays), "nothing")
    assert (job.state, job.error.code) == ("failed", "import_refused")
    assert "rewards" in job.error.detail
    assert importing.files() == before
    assert importing.rows("select count(*) from datasets where name = 'nothing'") == [[0]]


def test_a_long_trajectory_is_mapped_and_stored_as_one_that_is_held(
    importing: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages are given back while it is in use, and its file has no name."""
    mapped: list[weakref.ref[Any]] = []
    trim = parser_process._trim

    def noted(pages: weakref.ref[Any]) -> None:
        mapped.append(pages)
        trim(pages)

    monkeypatch.setattr(parser_process, "TRIM", 0.0)
    monkeypatch.setattr(parser_process, "_trim", noted)
    path = write(tmp_path / "a.hdf5", episodes(2, length=3000))
    importing.run(path, "held")
    assert not mapped
    monkeypatch.setattr(parser_process, "HELD", 1000)
    importing.run(path, "mapped")
    assert mapped
    wait_until(lambda: not any(one() for one in mapped), what="the pages released")
    assert list((importing.service.settings.data / "tmp").iterdir()) == []
    query = "select t, is_last, reward, action from steps order by trajectory_id, t"
    held, long = (
        sorted(importing.rows(query, dataset=name, limit=10_000)) for name in ("held", "mapped")
    )
    assert len(held) == 6002 and held == long


def test_a_child_that_dies_within_a_long_trajectory_is_named(tmp_path: Path) -> None:
    source, sink = os.pipe()
    os.write(sink, bytes(1000))
    os.close(sink)
    reader = FrameReader(source, lambda: 0.1, 1000)
    with open(tmp_path / "f", "w+b", buffering=0) as file, pytest.raises(EOFError):
        reader.mapped(1 << 20, file)
    os.close(source)


def test_a_file_of_another_layout_is_refused_by_name(importing: Any, tmp_path: Path) -> None:
    importing.run(write(tmp_path / "a.hdf5", episodes(2)), "layout")
    wide = episodes(2)
    wide["observations"] = np.zeros((20, 5), np.float32)
    job = importing.run(write(tmp_path / "b.hdf5", wide), "layout")
    assert (job.error.status, job.error.code) == (422, "schema_mismatch")
    assert "observations" in job.error.detail
    assert (job.error.expected, job.error.got) == ([3], [5])


def test_a_missing_dataset_is_made_only_on_request(importing: Any, tmp_path: Path) -> None:
    job = importing.run(write(tmp_path / "a.hdf5", episodes(2)), "unmade", create=False)
    assert (job.error.status, job.error.code) == (404, "not_found")


def test_into_fifo_the_oldest_go(importing: Any, tmp_path: Path) -> None:
    from server.routes import datasets
    from stepwell.messages import Capacity, PatchDataset

    importing.run(write(tmp_path / "a.hdf5", episodes(2)), "ring", partition="fifo")
    datasets.patch_dataset(
        importing.service, "ring", PatchDataset(capacity=Capacity(trajectories=3)), caller=""
    )
    importing.run(write(tmp_path / "b.hdf5", episodes(4, seed=1)), "ring", partition="fifo")
    rows = importing.rows("select episode_id from trajectories where dataset='ring' order by seq")
    assert [r[0].split("/")[1] for r in rows] == ["1", "2", "3"]


def test_the_footer_describes_what_was_imported(importing: Any, tmp_path: Path) -> None:
    importing.run(write(tmp_path / "a.hdf5", episodes(4)), "footer")
    with importing.service.db.read() as c:
        row = c.execute(
            sa.select(shards.c.id, trajectories.c.id, trajectories.c.seq)
            .join(trajectories, trajectories.c.shard_pk == shards.c.pk)
            .where(trajectories.c.source.like("d4rl:%"))
            .order_by(trajectories.c.pk.desc())
        ).first()
    source = importing.service.store.source("shards/protected", f"{row[0]}.parquet")
    footer = read_footer(source)
    assert footer.dataset == "footer"
    assert (footer.entries[-1].id, footer.entries[-1].seq) == (row[1], row[2])


def test_an_import_of_many_shards_is_one_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody ever sees a part of it; cancelled or failing before the end, nothing is left."""
    service = Service(Settings(data=tmp_path / "data", sql_workers=1, shard_bytes=2000))
    service.start()
    try:
        from .conftest import Importing

        importing = Importing(service)
        path = write(tmp_path / "a.hdf5", episodes(40))
        seen: list[int] = []
        real = bulk_insert.BulkInsert._insert

        def look(self: Any, *args: Any) -> None:
            seen.append(importing.rows("select count(*) from trajectories")[0][0])
            seen.append(len(self._shards))
            real(self, *args)

        monkeypatch.setattr(bulk_insert.BulkInsert, "_insert", look)
        assert importing.run(path, "many").state == "succeeded"
        assert seen[0] == 0
        assert seen[1] >= 4
        assert importing.rows("select count(*) from trajectories") == [[40]]

        def fail(self: Any, *args: Any) -> None:
            raise OSError(28, "No space left on device")

        before = importing.files()
        monkeypatch.setattr(bulk_insert.BulkInsert, "_insert", fail)
        job = importing.run(write(tmp_path / "b.hdf5", episodes(40, seed=1)), "many")
        assert (job.state, job.error.code) == ("failed", "storage_full")
        assert importing.files() == before
        assert importing.rows("select count(*) from trajectories") == [[40]]
    finally:
        service.close()


def test_cancelling_stops_and_undoes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(Settings(data=tmp_path / "data", sql_workers=1, shard_bytes=2000))
    service.start()
    try:
        from .conftest import Importing

        importing = Importing(service)
        reached, go = threading.Event(), threading.Event()
        real = bulk_insert.BulkInsert.add

        def slow(self: Any, items: Any) -> None:
            real(self, items)
            reached.set()
            go.wait(240)

        monkeypatch.setattr(bulk_insert.BulkInsert, "add", slow)
        job = importing.submit(write(tmp_path / "a.hdf5", episodes(40)), "stopped")
        assert reached.wait(240)
        assert service.jobs.cancel(job.id).state == "running"
        go.set()
        assert importing.wait(job).state == "cancelled"
        assert importing.files() == set()
        assert importing.rows("select count(*) from datasets") == [[0]]
    finally:
        service.close()


def test_a_start_removes_what_a_dead_import_left(tmp_path: Path) -> None:
    """Shards with a pending mark and unfinished uploads go; committed ones stay."""
    settings = Settings(data=tmp_path / "data", sql_workers=1)
    service = Service(settings)
    service.start()
    from .conftest import Importing

    Importing(service).run(write(tmp_path / "a.hdf5", episodes(3)), "kept")
    store = service.store
    kept = store.names("shards/protected")
    store.put("uploads", kept[0].replace(".parquet", ".pending"), b"shards/protected")
    store.put("uploads", "sh_0190.pending", b"shards/protected")
    store.put("shards/protected", "sh_0190.parquet", b"half an import")
    store.put("shards/protected", "sh_0191.parquet", b"somebody else's")
    store.put("uploads", "up_1.part", b"half a file")
    service.close()
    again = Service(settings)
    again.start()
    try:
        assert again.store.names("shards/protected") == kept
        assert again.store.quarantined("shards/protected") == ["sh_0191.parquet"]
        assert again.store.names("uploads") == []
        assert Importing(again).rows("select count(*) from steps", dataset="kept") == [[33]]
    finally:
        again.close()


# --- over HTTP ------------------------------------------------------------------------------------


def wait(client: TestClient, job: dict[str, Any]) -> dict[str, Any]:
    def ended() -> Any:
        found = client.get(f"/v1/jobs/{job['id']}").json()
        return None if found["state"] in ("queued", "running") else found

    return dict(wait_until(ended, what="the end of the job"))


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Any:
    data = tmp_path_factory.mktemp("http") / "data"
    app = create_app(Settings(data=data, sql_workers=1, max_upload=200_000))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        yield client


def upload(client: TestClient, path: Path, query: str, **headers: str) -> Any:
    return client.post(f"/v1/datasets/{query}", content=path.read_bytes(), headers=headers)


@pytest.mark.parametrize("kind", ["application/octet-stream", "application/x-hdf5", ""])
def test_upload_by_http(client: TestClient, tmp_path: Path, kind: str) -> None:
    """With any content type, or none at all, as curl -T sends it."""
    path = write(tmp_path / "a.hdf5", episodes(4, seed=len(kind)))
    name = f"http-{len(kind)}"
    headers = {"content-type": kind} if kind else {}
    answer = upload(client, path, f"{name}/imports?create=true&env=X-v0", **headers)
    assert answer.status_code == 202, answer.text
    job = wait(client, answer.json()["job"])
    assert (job["state"], job["progress"], job["result"]["trajectories"]) == ("succeeded", 1.0, 4)
    rows = client.post(
        "/v1/query", json={"sql": "select id from trajectories where dataset=?", "params": [name]}
    )
    steps = client.get(
        f"/v1/trajectories/{rows.json()['rows'][0][0]}/steps", headers={"accept": ARROW}
    )
    _, made = decode(steps.content)
    assert len(made[0]) == 10


@pytest.mark.parametrize(
    ("query", "status", "code"),
    [
        ("nobody/imports", 404, "not_found"),
        ("Bad%20Name/imports?create=true", 422, "validation_error"),
        ("x/imports?create=true&format=pickle", 422, "validation_error"),
        ("x/imports?create=true&partition=other", 422, "validation_error"),
        ("x/imports?create=true&action_low=one", 422, "validation_error"),
        ("x/imports?create=true&max_steps=-1", 422, "validation_error"),
    ],
)
def test_bad_requests_are_refused_before_the_job(
    client: TestClient, tmp_path: Path, query: str, status: int, code: str
) -> None:
    path = write(tmp_path / "a.hdf5", episodes(1))
    answer = upload(client, path, query, **{"content-type": "application/octet-stream"})
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert client.app.state.service.store.names("uploads") == []  # type: ignore[attr-defined]


def test_an_empty_body_and_one_too_large(client: TestClient, tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "large").write_bytes(bytes(200_001))
    kind = {"content-type": "application/octet-stream"}
    empty = upload(client, tmp_path / "empty", "e/imports?create=true", **kind)
    assert (empty.status_code, empty.json()["code"]) == (422, "import_refused")
    large = upload(client, tmp_path / "large", "e/imports?create=true", **kind)
    assert (large.status_code, large.json()["code"]) == (413, "body_too_large")
    assert client.app.state.service.store.names("uploads") == []  # type: ignore[attr-defined]


def test_a_chunked_body_is_counted_while_it_streams(client: TestClient) -> None:
    def chunks() -> Any:
        for _ in range(100):
            yield bytes(10_000)

    answer = client.post(
        "/v1/datasets/e/imports?create=true",
        content=chunks(),
        headers={"content-type": "application/octet-stream"},
    )
    assert answer.status_code == 413
    assert client.app.state.service.store.names("uploads") == []  # type: ignore[attr-defined]


def test_npz_by_http(client: TestClient, tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, **episodes(3))
    answer = upload(
        client, path, "n/imports?create=true&format=npz", **{"content-type": "application/x-npz"}
    )
    job = wait(client, answer.json()["job"])
    assert (job["state"], job["result"]["steps"]) == ("succeeded", 30)
