"""Speed of reading data: SQL over steps, shards over HTTP, single trajectories.

    python -m benchmarks.reading [--rounds 7] [--shards 8]

A service in a separate process stores shards of 400 trajectories of 1000 steps (17 + 6 floats).
Each round measures all requests in turn; the result is the minimum and the median over rounds. On a
shared machine the minimum is the more comparable figure. To compare two versions, run this program
in both checkouts at the same time. Writes benchmarks/results/reading.json.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.report import write
from stepwell import Client
from stepwell.spaces import Box, EnvSpec
from stepwell.testing import make_trajectory, wait_until

SPEC = EnvSpec.of(Box((17,)), Box((6,), low=-1.0, high=1.0), env="HalfCheetah-v5")
STEPS, PER_SHARD = 1000, 400
QUERIES = {
    "count": "select count(*) from d.steps",
    "one column": "select avg(reward) from d.steps",
    "one trajectory": "select sum(reward) from d.steps where trajectory_id = ?",
    "one dimension": "select avg(obs.observation[1]) from d.steps",
    "everything": "select sum(hash(s)::hugeint) from d.steps as s",
    "trajectories": "select sum(length) from trajectories",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--print", action="store_true", help="print the result, do not write it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
        probe.close()
        environment = {
            **os.environ,
            "STEPWELL_SQL_WORKERS": "1",
            "STEPWELL_MAINTENANCE_INTERVAL": "0",
        }
        command = [sys.executable, "-m", "stepwell.cli", "serve", "--data", folder]
        service = subprocess.Popen(
            [*command, "--port", str(port)],
            env=environment | {"STEPWELL_SEAL_BYTES": "1000000000"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            with Client(f"http://127.0.0.1:{port}", timeout=120.0) as client:
                wait_until(client.ready, seconds=60)
                result = measure(client, Path(folder), options.shards, options.rounds)
        finally:
            service.terminate()
            service.wait(60)
    for name, row in result["questions"].items():
        print(f"{name:16} {row['least_ms']:9.1f} ms least {row['median_ms']:9.1f} ms median")
    if not options.print:
        print(write("reading", result))


def measure(client: Client, data: Path, shards: int, rounds: int) -> dict[str, Any]:
    client.create_dataset("d", SPEC)
    for shard in range(shards):
        for part in range(0, PER_SHARD, 50):
            first = shard * PER_SHARD + part
            client.post(
                "d", [make_trajectory(SPEC, length=STEPS, seed=first + i) for i in range(50)]
            )
        client.flush("d")
    files = sorted(data.glob("shards/*/*.parquet"))
    identity = client.trajectories("d", limit=1).items[0].id
    http = httpx2.Client(base_url=client.url, trust_env=False, timeout=120.0)
    requests: dict[str, Callable[[], object]] = {
        f"sql: {name}": lambda sql=sql: client.sql(sql, [identity] * sql.count("?"), timeout=60)
        for name, sql in QUERIES.items()
    }
    shard = f"/v1/shards/{files[0].stem}"
    part = {"range": "bytes=1000000-1099999"}
    requests["shard"] = lambda: http.get(shard).raise_for_status()
    requests["shard range"] = lambda: http.get(shard, headers=part).raise_for_status()
    requests["steps"] = lambda: client.steps(identity)
    times: dict[str, list[float]] = {name: [] for name in requests}
    for _ in range(rounds):
        for name, request in requests.items():
            began = time.perf_counter()
            request()
            times[name].append((time.perf_counter() - began) * 1e3)
    return {
        "shards": len(files),
        "shard_bytes": files[0].stat().st_size,
        "stored_bytes": sum(file.stat().st_size for file in files),
        "questions": {
            name: {
                "least_ms": round(min(some), 2),
                "median_ms": round(statistics.median(some), 2),
            }
            for name, some in times.items()
        },
    }


if __name__ == "__main__":
    main()
