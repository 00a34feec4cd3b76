"""One bit is flipped in each of several stored files; then everything is read. No answer is wrong.

A flip ends `found` (the file is refused, quarantined or named, and every answer says what it
lacks), `healed` (made anew: the mirror) or `harmless` (all answers are right and complete).
STEPWELL_FLIPS=1000 is the proof of docs/reliability.md; the suite does a few.
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from server.service import Service
from stepwell import Client
from stepwell.errors import Gone
from stepwell.messages import MetricPoint
from stepwell.testing import make_spec, make_trajectory
from tests.faults.serving import serving
from tests.specs import make_rich_spec
from trainer.data.cache import Cache
from trainer.data.fields import fields_of
from trainer.data.snapshot import manifest_from_table

FLIPS = int(os.environ.get("STEPWELL_FLIPS", "13"))
SEED = int(os.environ.get("STEPWELL_SEED", "11"))
PLAIN, RICH = make_spec(observation=6, action=2), make_rich_spec()
CONTENT = "select trajectory_id, count(*), bit_xor(hash(s)) from {} as s group by 1"
TABLES = ("trajectories", "metrics", "runs", "policies", "datasets", "evaluations", "videos")
ALONE = ("policy", "video", "snapshot")
"""Kinds of files of which one is flipped at a time."""


@dataclass
class Served:
    """A service on a real socket in this process, and a client of it."""

    service: Service
    client: Client
    url: str


@contextmanager
def serve(data: Path) -> Iterator[Served]:
    with serving(data) as (url, service), Client(url, retry_for=5.0, timeout=60.0) as client:
        yield Served(service, client, url)


class World:
    """What is stored, and what each question is rightly answered with."""

    def __init__(self, served: Served, http: httpx2.Client):
        self.http = http
        self.client = client = served.client
        for name, spec in (("plain", PLAIN), ("rich", RICH)):
            client.create_dataset(name, spec)
            for shard in range(3):
                many = [make_trajectory(spec, length=5 + i, seed=100 * shard + i) for i in range(4)]
                client.post(name, many)
                client.flush(name)
        # One of several megabytes: it travels in more than one part.
        client.post("plain", [make_trajectory(PLAIN, length=40_000, seed=i) for i in range(2)])
        client.flush("plain")
        client.create_run("r", "train")
        client.log_metrics(
            "r", [MetricPoint(key="x", step=i, time=i, value=i / 3) for i in range(500)]
        )
        client.publish_policy("r", 1, random.Random(0).randbytes(1_500_000))
        scores = {"returns": [1.0], "mean": 1.0, "iqm": 1.0, "ci_low": 1.0, "ci_high": 1.0}
        scored = client.create_evaluation(policy="r/1", env="Made-v0", seeds=[0], **scores)
        film = b"GIF89a" + random.Random(1).randbytes(1_500_000)
        client.put_video(scored.id, 0, film, media_type="image/gif", total_reward=1.0, length=5)
        self.video = f"evaluations/{scored.id}/videos/0"
        self.snapshot = client.create_snapshot(dataset="plain").id
        self.data = served.service.settings.data
        self.digests = {
            item.id: item.digest
            for name in ("plain", "rich")
            for item in client.trajectories(name, limit=1000).items
        }
        self.files = {p.stem: p.read_bytes() for p in self.data.glob("shards/*/*.parquet")}
        self.sent = {
            "runs/r/policies/1": next(self.data.glob("policies/*")).read_bytes(),
            self.video: next(self.data.glob("videos/*")).read_bytes(),
        }
        """What was sent as a file, by its place below /v1/."""
        self.manifest = client.manifest(self.snapshot)
        self.content = {name: self._content(client, name)[0] for name in ("plain", "rich")}
        self.tables = {table: self._table(client, table) for table in TABLES}
        self.columns = self._columns(client, self.data.parent / "cache-truth")[0]

    # --- every way to read; AssertionError: a wrong answer. True: all of it came ----------------

    def judge(self, served: Served, rng: random.Random, *, trainer: bool) -> bool:
        client = served.client
        whole = [self.judge_sql(client)]
        whole += [self.judge_shard(served.url, shard, rng) for shard in self.files]
        whole += [self.judge_steps(client, i, digest) for i, digest in self.digests.items()]
        whole += [self.judge_sent(served.url, place, rng) for place in self.sent]
        whole.append(self.judge_snapshot(client))
        if trainer:
            whole.append(self.judge_trainer(client))
        return all(whole)

    def judge_sql(self, client: Client) -> bool:
        complete = True
        for table, truth in self.tables.items():
            assert self._table(client, table) == truth, table
        for name, truth in self.content.items():
            found, lost = self._content(client, name)
            assert found.items() <= truth.items(), f"wrong rows in {name}"
            assert lost == len(truth) - len(found), "what is left out is said"
            complete &= not lost
        return complete

    def judge_shard(self, url: str, shard: str, rng: random.Random) -> bool:
        truth = self.files[shard]
        first = rng.randrange(len(truth))
        last = rng.randrange(first, len(truth))
        part = fetched(self.http, f"{url}/v1/shards/{shard}", {"range": f"bytes={first}-{last}"})
        assert part is None or part == truth[first : last + 1]
        whole = fetched(self.http, f"{url}/v1/shards/{shard}")
        assert whole is None or whole == truth
        return None not in (part, whole)

    def judge_sent(self, url: str, place: str, rng: random.Random) -> bool:
        truth = self.sent[place]
        first = rng.randrange(len(truth))
        part = fetched(self.http, f"{url}/v1/{place}", {"range": f"bytes={first}-"})
        assert part is None or part == truth[first:]
        whole = fetched(self.http, f"{url}/v1/{place}")
        assert whole is None or whole == truth
        return None not in (part, whole)

    def judge_steps(self, client: Client, identity: str, digest: str) -> bool:
        try:
            assert client.steps(identity).digest == digest
        except Gone as error:
            assert error.code == "damaged"
            return False
        return True

    def judge_snapshot(self, client: Client) -> bool:
        fresh = client.create_snapshot(dataset="plain")
        lost = sum(one.trajectories for one in fresh.excluded)
        assert fresh.trajectories + lost == self.manifest.num_rows
        client.release(fresh.id)
        try:
            assert client.manifest(self.snapshot).equals(self.manifest)
        except Gone as error:
            assert error.code == "damaged"
            return False
        return not lost

    def judge_trainer(self, client: Client) -> bool:
        folder = self.data.parent / "cache"
        columns, lost = self._columns(client, folder)
        shutil.rmtree(folder)
        for key, array in columns.items():
            assert np.array_equal(array, self.columns[key]), "a trainer was fed wrong numbers"
        assert columns.keys() == {key for key in self.columns if key[0] not in lost}
        return not lost

    def _content(self, client: Client, name: str) -> tuple[dict[str, tuple[Any, ...]], int]:
        sql = CONTENT.format(f'"{name}".steps')
        answer = client.sql(sql, limit=10_000, timeout=60)
        rows = {row[0]: row[1:] for row in answer}
        return rows, sum(one.trajectories for one in answer.excluded)

    def _table(self, client: Client, table: str) -> Any:
        # Heartbeats and the like are left out: they may change between two looks.
        columns = {"runs": "name, kind", "datasets": "name, spec_digest, fifo_steps"}.get(
            table, "*"
        )
        where = {"trajectories": "dataset", "datasets": "name"}.get(table)
        only = f" where {where} in ('plain', 'rich')" if where else ""
        sql = f"select count(*), bit_xor(hash(q)) from (select {columns} from {table}{only}) as q"
        return client.sql(sql, timeout=60).rows

    def _columns(self, client: Client, folder: Path) -> tuple[dict[Any, Any], set[str]]:
        """(shard, field) → all its numbers, as a trainer would have them; and shards left out."""
        manifest, fields = manifest_from_table(self.manifest, PLAIN), fields_of(PLAIN)
        cache = Cache(folder, 1e9, client)
        lost = set(cache.ensure(manifest, fields))
        return {
            (shard, field.column): np.array(cache.column(shard, field))
            for shard in manifest.shards
            if shard not in lost
            for field in fields
        }, lost


def fetched(http: httpx2.Client, url: str, headers: dict[str, str] | None = None) -> bytes | None:
    """The content of a response that ended well; None where it was refused or broken off."""
    try:
        response = http.get(url, headers=headers)
    except httpx2.TransportError:
        return None
    if response.is_success:
        return bytes(response.content)
    assert response.json()["code"] == "damaged", response.text
    return None


@contextmanager
def flipped(path: Path, rng: random.Random) -> Iterator[None]:
    """The file with one bit flipped; half of the time nothing but its ctime tells."""
    before = path.stat()
    byte, mask = rng.randrange(before.st_size), 1 << rng.randrange(8)

    def flip() -> None:
        with open(path, "r+b") as file:
            file.seek(byte)
            (value,) = file.read(1)
            file.seek(byte)
            file.write(bytes([value ^ mask]))

    flip()
    if rng.random() < 0.5:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    try:
        yield
    finally:
        if path.exists():  # a piece of the mirror is made anew under another name
            flip()


def named(served: Served) -> set[str]:
    """Everything that /readyz calls damaged."""
    sealer = served.service.ingest.sealer
    return (
        served.service.integrity.quarantined
        | served.service.integrity.damaged_files
        | sealer.damaged
    )


def flips_while_it_runs(
    world: World, served: Served, rng: random.Random, trainer: bool
) -> Iterator[tuple[str, str]]:
    """One bit in each of several files of a running service; everything is read; all is put back.

    Yields (kind, outcome) of each flip.
    """
    integrity = served.service.integrity
    shards = rng.sample(candidates(world, served, "shard"), 3)
    others = {k: rng.choice(candidates(world, served, k)) for k in (*ALONE, "mirror")}
    damaged = [*shards, *(others[kind] for kind in ALONE)]
    served.service.snapshots.cache.clear()  # from memory it would be right
    with ExitStack() as stack:
        for path in (*damaged, others["mirror"]):
            stack.enter_context(flipped(path, rng))
        assert not world.judge(served, rng, trainer=trainer)
        names = {name.rpartition("/")[2].partition(".")[0] for name in named(served)}
        assert names == {path.stem for path in damaged}, "all of it was read, and nothing else"
    integrity.damaged_files.clear()
    integrity.restore_quarantined()
    assert not integrity.quarantined
    yield from (("shard", "found") for _ in shards)
    yield from ((kind, "found") for kind in ALONE)
    yield "mirror", "harmless" if others["mirror"] in in_mirror(served) else "healed"
    yield "segment", one_segment(served, rng)


def candidates(world: World, served: Served, kind: str) -> list[Path]:
    data = served.service.settings.data
    if kind == "shard":
        return sorted(p for p in data.glob("shards/*/*") if p.stem in world.files)
    if kind in ("policy", "video"):
        return sorted(data.glob({"policy": "policies/*", "video": "videos/*"}[kind]))
    if kind == "mirror":
        return in_mirror(served)
    with served.service.db.read() as connection:
        sql = "SELECT file FROM snapshots WHERE id = ?"
        file = connection.exec_driver_sql(sql, (world.snapshot,)).scalar_one()
    return [data / "snapshots" / file]


def in_mirror(served: Served) -> list[Path]:
    """Files that queries and snapshots read."""
    state = served.service.mirror.state()
    files = [*state.locations.values(), *(file for some in state.tables.values() for file in some)]
    return sorted(served.service.settings.data / file for file in files)


def add_unsealed(client: Client, rng: random.Random) -> tuple[str, dict[str, str]]:
    """A dataset whose trajectories all wait in a segment: its name, and digests by id."""
    name = f"s{rng.getrandbits(48):x}"
    client.create_dataset(name, PLAIN)
    sent = [make_trajectory(PLAIN, length=10, seed=rng.getrandbits(30)) for _ in range(4)]
    client.post(name, sent)
    return name, {t.id: t.digest for t in sent}


def one_segment(served: Served, rng: random.Random) -> str:
    """Trajectories are read while they wait, then sealed, then read again."""
    name, sent = add_unsealed(served.client, rng)
    path = max(served.service.settings.data.glob("segments/*"))
    with flipped(path, rng):
        outcome = judge_segment(served, name, sent, path)
    served.client.delete_dataset(name)
    served.service.integrity.damaged_files.clear()
    served.service.ingest.sealer.damaged.clear()
    return outcome


def judge_segment(served: Served, name: str, sent: dict[str, str], path: Path) -> str:
    client, world = served.client, World.__new__(World)
    for identity, digest in sent.items():
        world.judge_steps(client, identity, digest)
    client.flush(name)
    complete = all([world.judge_steps(client, i, digest) for i, digest in sent.items()])
    assert {t.id for t in client.trajectories(name, limit=100).items} == set(sent), "one vanished"
    answer = client.sql(
        f'select trajectory_id, count(*) from "{name}".steps group by 1', timeout=60
    )
    assert all(row[1] == 11 and row[0] in sent for row in answer)
    lost = sum(one.trajectories for one in answer.excluded)
    assert len(answer) + lost == len(sent), "what is left out is said"
    assert complete == (lost == 0)
    assert complete or f"segments/{path.name}" in named(served)
    return "harmless" if complete else "found"


def flips_while_it_is_stopped(
    world: World, served: Served, rng: random.Random, copy: Path
) -> Iterator[tuple[str, str]]:
    """The same, of a copy of the directory on which a service is then started."""
    name, sent = add_unsealed(served.client, rng)
    shutil.copytree(world.data, copy, ignore=shutil.ignore_patterns("lock", "mirror"))
    served.client.flush(name)
    served.client.delete_dataset(name)
    here = [p for p in copy.glob("shards/*/*") if p.stem in world.files]
    shards = rng.sample(sorted(here), 3)
    files = [rng.choice(sorted(copy.glob(f"{folder}/*"))) for folder in ("policies", "videos")]
    snapshot = copy / "snapshots" / candidates(world, served, "snapshot")[0].name
    segment = max(copy.glob("segments/*"))
    damaged = [*shards, *files, snapshot]
    with ExitStack() as stack:
        for path in (*damaged, segment):
            stack.enter_context(flipped(path, rng))
        started = stack.enter_context(serve(copy))
        outcome = judge_segment(started, name, sent, segment)
        assert not world.judge(started, rng, trainer=True)
        names = {one.rpartition("/")[2].partition(".")[0] for one in named(started)}
        assert names - {segment.stem} == {path.stem for path in damaged}
    shutil.rmtree(copy)
    yield from (("shard", "found") for _ in shards)
    yield from ((kind, "found") for kind in ALONE)
    yield "segment", outcome


@pytest.mark.timeout(300 + 10 * FLIPS)
def test_no_flipped_bit_ever_becomes_a_wrong_answer(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    outcomes: Counter[tuple[str, str, str]] = Counter()
    http = httpx2.Client(timeout=60.0, trust_env=False)
    with http, serve(tmp_path / "data") as served:
        world = World(served, http)
        assert world.judge(served, rng, trainer=True), "before anything is flipped"
        for number in count(1):
            if number % 4 == 2:
                outcomes.update(
                    ("stopped", *one)
                    for one in flips_while_it_is_stopped(world, served, rng, tmp_path / "copy")
                )
            else:
                trainer = number % 4 == 1
                outcomes.update(
                    ("running", *one) for one in flips_while_it_runs(world, served, rng, trainer)
                )
            print(sum(outcomes.values()), "flips", flush=True)
            if sum(outcomes.values()) >= FLIPS:
                break
        assert world.judge(served, rng, trainer=True), "after everything was put back"
    for (state, kind, outcome), total in sorted(outcomes.items()):
        print(f"{state:8} {kind:9} {outcome:9} {total}")
