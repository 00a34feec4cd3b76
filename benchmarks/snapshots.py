"""Snapshots of a large dataset: time and memory to create one and to refresh it with 1% new data.

    python -m benchmarks.snapshots [--trajectories 1000000] [--rounds 5] [--before DIR]

SQL statements fill an index with `--trajectories` rows. Its shards have empty files: snapshots do
not open them. A client sends requests to a service in a separate process. Before each refresh 1%
more rows are inserted, in alternation over four seconds, like data from collectors, and all at once
(`at_once`). Memory is the growth of the resident memory of the service and its SQL workers
together, sampled every 50 ms. `--before` also measures another checkout, with 160,000
trajectories. Writes benchmarks/results/snapshots.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

PER_SHARD = 1000
BEFORE = 160_000
ARRIVES = 4.0
"""Seconds over which new rows are inserted before a refresh (except with `at_once`)."""


def fill(data: Path, count: int) -> None:
    """Create an index with one dataset of `count` trajectories."""
    from server.index.db import upgrade
    from stepwell.testing import make_spec

    data.mkdir(parents=True)
    upgrade(data / "index.sqlite")
    spec = json.dumps(make_spec(observation=3, action=2).to_json())
    with sqlite3.connect(data / "index.sqlite") as c:
        _register(c)
        c.execute("PRAGMA synchronous = OFF")
        c.execute("PRAGMA cache_size = -400000")
        c.execute(
            "INSERT INTO datasets (pk, name, spec, spec_digest, next_seq, created_at)"
            " VALUES (1, 'd', ?, ?, 1, 0)",
            (spec, "0" * 64),
        )
    add(data, count)


def _register(c: sqlite3.Connection) -> None:
    """Let the connection write; an older checkout has no checksums of rows."""
    with contextlib.suppress(ImportError):
        from server.index import row_checksums

        row_checksums.register(c)


def add(data: Path, count: int) -> None:
    """Insert `count` more trajectories, in shards of PER_SHARD."""
    with sqlite3.connect(data / "index.sqlite", timeout=60) as c:
        _register(c)
        c.execute("PRAGMA cache_size = -400000")
        columns = {row[1] for row in c.execute("PRAGMA table_info(trajectories)")}
        # An older checkout, measured with `--before`, may have other column names.
        change = "change_id" if "change_id" in columns else "mark"
        bump = f"UPDATE counters SET value = value + 1 WHERE name = '{change}' RETURNING value"
        values = {
            "change": c.execute(bump).fetchone()[0],
            "shard": c.execute("SELECT coalesce(max(pk), 0) + 1 FROM shards").fetchone()[0],
            "first": c.execute("SELECT next_seq FROM datasets").fetchone()[0],
            "per": PER_SHARD,
            "count": count,
        }
        shard_columns = {row[1] for row in c.execute("PRAGMA table_info(shards)")}
        newer = "checksums" in shard_columns  # may be absent in an older checkout
        c.execute(
            f"""
            WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n
                WHERE (i + 1) * :per < :count)
            INSERT INTO shards (pk, id, dataset_pk, partition, state, sha256, bytes, rows,
                trajectories, seq_min, seq_max, created_at
                {", verified_at, checksums" if newer else ""})
            SELECT :shard + i, printf('sh_00000000-0000-7000-8000-%012x', :shard + i), 1,
                'protected', 'live', lower(hex(randomblob(32))), 33554432, :per * 201, :per,
                :first + i * :per, :first + i * :per + :per - 1, 0
                {", strftime('%s', 'now'), x''" if newer else ""} FROM n
            """,
            values,
        )
        c.execute(
            f"""
            WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < :count)
            INSERT INTO trajectories (pk, id, dataset_pk, seq, partition, state, env, length,
                "return", terminated, truncated, final_obs_valid, purpose, policy, run, collector,
                episode_id, first_step, source, digest, bytes, created_at, shard_pk, traj_idx,
                row_start, {change})
            SELECT :first + i, printf('%08x-%04x-7%s-8%s-%s', :first + i, i & 65535,
                    substr(lower(hex(randomblob(2))), 2), substr(lower(hex(randomblob(2))), 2),
                    lower(hex(randomblob(6)))),
                1, :first + i, 'protected', 'sealed', 'Test-v0', 200,
                (abs(random()) % 100000) / 1000.0, i % 2, 1 - i % 2, 1, 'train',
                'run/' || (i / 10000), 'run', 'c' || (i % 64), 'e' || i, 0, '',
                lower(hex(randomblob(32))), 10000, 0, :shard + i / :per, i % :per,
                (i % :per) * 201, :change FROM n
            """,
            values,
        )
        c.execute("UPDATE datasets SET next_seq = next_seq + ?", (count,))
        made = c.execute("SELECT id FROM shards WHERE pk >= :shard", values).fetchall()
    folder = data / "shards" / "protected"
    folder.mkdir(parents=True, exist_ok=True)
    for (name,) in made:  # a start looks whether they are there, and nothing reads them
        (folder / f"{name}.parquet").touch()


class Memory:
    """Resident bytes of a process and its descendants: current, and the peak since `reset`."""

    def __init__(self, pid: int):
        self.pid, self.peak, self._stop = pid, 0, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def now(self) -> int:
        pids, total = [self.pid], 0
        while pids:
            pid = pids.pop()
            try:
                for task in Path(f"/proc/{pid}/task").iterdir():
                    pids += map(int, (task / "children").read_text().split())
                total += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            except (OSError, IndexError):
                continue
        return total * os.sysconf("SC_PAGE_SIZE")

    def reset(self) -> int:
        self.peak = self.now()
        return self.peak

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.05):  # more frequent sampling would slow down the service
            self.peak = max(self.peak, self.now())


def serve(data: Path) -> tuple[subprocess.Popen[bytes], str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "stepwell.cli", "serve", "--data", str(data)]
    env = {**os.environ, "STEPWELL_MAINTENANCE_INTERVAL": "0", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=env,
    )
    return process, f"http://127.0.0.1:{port}"


def measure(data: Path, count: int, rounds: int) -> dict[str, Any]:
    """Measure the code that this process imports, with an existing index."""
    from stepwell import Client
    from trainer.data import snapshot as snapshots

    load = getattr(snapshots, "load_manifest", None) or snapshots.load  # the older name

    process, url = serve(data)
    client = Client(url, timeout=300.0)
    deadline = time.monotonic() + 120
    while not client.ready() and time.monotonic() < deadline:
        time.sleep(0.05)
    result: dict[str, Any] = {"trajectories": count, "load_before": os.getloadavg()[0]}

    def timed(name: str, do: Any) -> Any:
        began = time.perf_counter()
        found = do()
        result.setdefault(name, []).append(round((time.perf_counter() - began) * 1e3, 1))
        return found

    memory = Memory(process.pid)
    kept = tempfile.TemporaryDirectory()
    folder = Path(kept.name)
    columnar = "since" in load.__annotations__
    try:
        timed("first_query_ms", lambda: client.sql("SELECT count(*) FROM trajectories", timeout=60))
        for where in ("return >= 0", None):
            name = "all" if where is None else "where"
            ask = partial(client.create_snapshot, dataset="d", where=where)
            low = memory.reset()
            for number in range(rounds):
                # A different query is a new selection, so all rows are read again.
                fresh = partial(ask, where=f"return >= {number - rounds + 1}") if where else ask
                snapshot = timed(f"create_{name}_ms", fresh)
                if number == 0:
                    result[f"create_{name}_memory_mb"] = round((memory.peak - low) / 1e6, 1)
            timed(f"manifest_{name}_ms", partial(client.manifest, snapshot.id))
            result[f"create_and_manifest_{name}_memory_mb"] = round((memory.peak - low) / 1e6, 1)
            timed("trainer_load_ms", partial(load, client, snapshot.id, folder))
            low = memory.reset()
            for number in range(2 * rounds):
                at_once = number % 2
                pieces = 1 if at_once else 20
                added = pieces * (snapshot.trajectories // (100 * pieces))
                for _ in range(pieces):
                    add(data, added // pieces)
                    time.sleep(0 if at_once else ARRIVES / pieces)
                before = snapshot
                how = f"refresh_{name}{'_at_once' if at_once else ''}_ms"
                snapshot = timed(how, partial(ask, since=before.id))
                assert snapshot.added == added, snapshot
                again = partial(load, client, snapshot.id, folder)
                if columnar:
                    again = partial(again, since=before.id)
                    changes = partial(client.manifest, snapshot.id, since=before.id)
                    timed("changes_ms", changes)
                assert len(timed("trainer_refresh_ms", again)) == snapshot.trajectories
            result[f"refresh_{name}_memory_mb"] = round((memory.peak - low) / 1e6, 1)
        files = [path.stat().st_size for path in (data / "snapshots").iterdir()]
        result["manifest_files_mb"] = [round(size / 1e6, 2) for size in sorted(files)]
    finally:
        memory.close()
        client.close()
        process.terminate()
        process.wait(30)
        kept.cleanup()
    times = {name: values for name, values in result.items() if name.endswith("_ms")}
    summary = {
        "median": {name: round(statistics.median(values), 1) for name, values in times.items()},
        "least": {name: min(values) for name, values in times.items()},
    }
    return {**result, **summary, "load_after": os.getloadavg()[0]}


def in_child(code: Path, count: int, rounds: int) -> dict[str, Any]:
    """Measure the code of a checkout in a separate process."""
    env = {**os.environ, "PYTHONPATH": str(code)}
    script = [sys.executable, "-P", str(Path(__file__).resolve()), "--child", str(count)]
    done = subprocess.run(
        [*script, "--rounds", str(rounds)], env=env, stdout=subprocess.PIPE, check=True, cwd="/"
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trajectories", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--before", type=Path, help="another checkout to compare with")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        with tempfile.TemporaryDirectory() as folder:
            data = Path(folder) / "data"
            fill(data, options.child)
            print(json.dumps(measure(data, options.child, options.rounds)))
        return
    from benchmarks.report import ROOT, write

    result: dict[str, Any] = {}
    if options.before:
        result["before"] = in_child(options.before, BEFORE, 1)
        result["same_size_now"] = in_child(ROOT, BEFORE, 3)
    result["now"] = in_child(ROOT, options.trajectories, options.rounds)
    path = write("snapshots", result)
    print(json.dumps(result, indent=1), path, sep="\n")


if __name__ == "__main__":
    main()
