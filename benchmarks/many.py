"""Many small things: 2,000 datasets, 360,000 trajectories of 3 steps, a restart at a million rows.

    python -m benchmarks.many [--parts datasets imports posts restart] [--before DIR]
        [--datasets 2000] [--trajectories 360000] [--rows 1000000]

    datasets   pages of the list, and SQL on bare `steps` of all datasets with a filter on `dataset`
    imports    an npz file of tiny trajectories: trajectories per second, peak memory of the service
               and of its child processes, and how long GET /v1/jobs takes meanwhile
    posts      tiny trajectories, 500 per request, encoded by the client as it sends them
    restart    the first query after a restart, and GET /v1/jobs beside it, with an index that SQL
               statements filled (its shards have empty files, because the query does not open them)

Each part runs a service in a separate process, with this checkout's code and, with `--before`, with
that of another checkout, one after the other. Writes benchmarks/results/many.json.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.report import RESULTS, ROOT, provenance, write
from benchmarks.snapshots import Memory
from stepwell import Client, new_id
from stepwell.codec import encode
from stepwell.errors import StepwellError
from stepwell.testing import make_spec, make_trajectory

SPEC = make_spec(observation=4, action=1)
PER_DATASET, PER_POST, LENGTH = 3, 500, 3
ROUNDS = 7


@contextmanager
def service(data: Path, code: Path) -> Iterator[tuple[Client, subprocess.Popen[bytes]]]:
    """A service of the checkout `code`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "stepwell.cli", "serve", "--data", str(data)]
    env = {**os.environ, "PYTHONPATH": str(code)}
    process = subprocess.Popen(
        [*command, "--port", str(port), "--log-level", "error"],
        stdout=subprocess.DEVNULL,
        stderr=None if os.environ.get("VERBOSE") else subprocess.DEVNULL,
        env=env,
        cwd="/",
    )
    try:
        with Client(f"http://127.0.0.1:{port}", timeout=600.0) as client:
            client.wait_ready(300)
            yield client, process
    finally:
        process.terminate()
        process.wait(300)


def cpu(process: subprocess.Popen[bytes]) -> float:
    """CPU seconds of the service and of its child processes that have ended."""
    used = psutil.Process(process.pid).cpu_times()
    return float(used.user + used.system + used.children_user + used.children_system)


def milliseconds(do: Callable[..., object], *given: Any, **options: Any) -> float:
    began = time.perf_counter()
    do(*given, **options)
    return round((time.perf_counter() - began) * 1e3, 1)


class Watch:
    """Asks for GET /v1/jobs every 100 ms; a response may take 30 s."""

    def __init__(self, url: str):
        self.waits: list[float] = []
        self.failed = 0
        self._client = Client(url, timeout=30.0, retry_for=0.0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> dict[str, Any]:
        self._stop.set()
        self._thread.join()
        self._client.close()
        waits = sorted(self.waits) or [-1.0]
        return {
            "requests": len(self.waits),
            "failed": self.failed,
            "p50_ms": round(statistics.median(waits), 1),
            "p99_ms": waits[int(0.99 * len(waits))],
            "longest_ms": waits[-1],
        }

    def _run(self) -> None:
        while not self._stop.wait(0.1):
            try:
                self.waits.append(milliseconds(self._client.jobs))
            except StepwellError:
                self.failed += 1


def datasets(folder: Path, code: Path, count: int) -> dict[str, Any]:
    """Pages of the list, and SQL on bare `steps`."""
    result: dict[str, Any] = {"datasets": count}
    data = folder / "data"
    with service(data, code) as (client, _):
        for number in range(count):
            # Each of its own environment, as tasks of a benchmark are; of eight layouts.
            spec = make_spec(observation=3 + number % 8, env=f"Test-{number}")
            client.create_dataset(f"d{number:05}", spec)
            made = [make_trajectory(spec, length=20, seed=number) for _ in range(PER_DATASET)]
            client.post(f"d{number:05}", made)
        client.flush("d00000")
    with service(data, code) as (client, _):

        def page(limit: int) -> object:
            url = f"{client.url}/v1/datasets?limit={limit}"
            with urllib.request.urlopen(url, timeout=60) as response:
                return response.read()

        for limit in (100, 1000):
            page(limit)
            waits = [milliseconds(page, limit) for _ in range(ROUNDS)]
            result[f"page_of_{limit}_ms"] = waits
        where = f"WHERE dataset = 'd{count // 2:05}'"
        texts = {
            "filtered": f"SELECT count(*), avg(reward) FROM steps {where}",
            "bare": "SELECT count(*) FROM steps",
        }
        for name, sql in texts.items():
            waits, failures = [], []
            for _ in range(3 if name == "bare" else ROUNDS):
                try:
                    waits.append(milliseconds(client.sql, sql, timeout=60))
                except StepwellError as error:
                    failures.append(str(error)[:200])
            result[f"steps_{name}_ms"] = waits
            if failures:
                result[f"steps_{name}_failures"] = failures
    return result


def tiny_file(path: Path, count: int) -> None:
    """An npz file of `count` trajectories of LENGTH steps."""
    rng = np.random.default_rng(0)
    rows = count * LENGTH
    ends = np.arange(rows) % LENGTH == LENGTH - 1
    np.savez(
        path,
        observations=rng.standard_normal((rows, 4), np.float32),
        actions=rng.random((rows, 1), np.float32),
        rewards=rng.standard_normal(rows, np.float32),
        terminals=ends,
        timeouts=np.zeros(rows, np.bool_),
    )


def imports(folder: Path, code: Path, count: int) -> dict[str, Any]:
    """One file of tiny trajectories."""
    path = folder / "tiny.npz"
    tiny_file(path, count)
    with service(folder / "data", code) as (client, process):
        memory = Memory(process.pid)
        low = memory.reset()
        watch = Watch(client.url)
        began, used = time.perf_counter(), cpu(process)
        job = client.upload("tiny", path, format="npz", create=True)
        seen: list[tuple[float, str]] = []
        while job.state in ("queued", "running"):
            time.sleep(0.2)
            job = client.job(job.id)
            if not seen or seen[-1][1] != job.message.split(" of ")[-1]:
                seen.append((round(time.perf_counter() - began, 1), job.message.split(" of ")[-1]))
        took = time.perf_counter() - began
        used = cpu(process) - used
        assert job.state == "succeeded", job
        waits = watch.close()
        memory.close()
    return {
        "trajectories": count,
        "seconds": round(took, 1),
        "per_second": round(count / took),
        "cpu_us_each": round(1e6 * used / count),
        "memory_before_mb": round(low / 1e6),
        "peak_memory_mb": round(memory.peak / 1e6),
        "phases": seen,
        "jobs": waits,
    }


def send(url: str, count: int) -> None:
    """Encode and post, with two threads."""
    made = [make_trajectory(SPEC, length=LENGTH, seed=seed) for seed in range(PER_POST)]

    def run() -> None:
        with Client(url, timeout=120.0) as client:
            for _ in range(count // PER_POST // 2):
                body = encode([replace(one, id=new_id()) for one in made], SPEC)
                client.post_stream("tiny", body)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def posts(folder: Path, code: Path, count: int) -> dict[str, Any]:
    """Tiny trajectories, PER_POST in each request."""
    with service(folder / "data", code) as (client, process):
        client.create_dataset("tiny", SPEC)
        memory = Memory(process.pid)
        memory.reset()
        watch = Watch(client.url)
        began, used = time.perf_counter(), cpu(process)
        script = [sys.executable, "-m", "benchmarks.many", "--client", client.url]
        subprocess.run([*script, "--trajectories", str(count)], check=True, cwd=ROOT)
        took = time.perf_counter() - began
        waits = watch.close()
        began = time.perf_counter()
        client.flush("tiny")
        sealed = time.perf_counter() - began
        used = cpu(process) - used
        found = client.dataset("tiny")
        memory.close()
        total = count // PER_POST // 2 * PER_POST * 2
        assert found.fifo.trajectories == total, found
    return {
        "trajectories": total,
        "per_second": round(total / took),
        "cpu_us_each": round(1e6 * used / total),
        "seconds_until_sealed_after": round(sealed, 2),
        "peak_memory_mb": round(memory.peak / 1e6),
        "jobs": waits,
    }


def fill(data: Path, code: Path, rows: int) -> None:
    """An index of `rows` trajectories, made by the checkout's own benchmark."""
    script = "import sys; from pathlib import Path; from benchmarks.snapshots import fill; "
    script += "fill(Path(sys.argv[1]), int(sys.argv[2]))"
    subprocess.run([sys.executable, "-c", script, str(data), str(rows)], check=True, cwd=code)


def restart(folder: Path, code: Path, rows: int) -> dict[str, Any]:
    """The first query after a restart."""
    data = folder / "data"
    fill(data, code, rows)
    result: dict[str, Any] = {"rows": rows}
    sql = "SELECT count(*), sum(length) FROM trajectories"
    for name in ("first_start", "restart", "restart_again"):
        with service(data, code) as (client, process):
            watch = Watch(client.url)
            wait = milliseconds(client.sql, sql, timeout=60)
            again = milliseconds(client.sql, sql, timeout=60)
            result[name] = {"first_sql_ms": wait, "second_sql_ms": again, "jobs": watch.close()}
            if name == "restart":
                process.kill()  # the next start follows a crash
    return result


PARTS = {"datasets": datasets, "imports": imports, "posts": posts, "restart": restart}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--datasets", type=int, default=2000)
    parser.add_argument("--trajectories", type=int, default=360_000)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--before", type=Path, help="another checkout to compare with")
    parser.add_argument("--only-before", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--client", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        send(args.client, args.trajectories)
        return 0
    sizes = {
        "datasets": args.datasets,
        "imports": args.trajectories,
        "posts": args.trajectories,
        "restart": args.rows,
    }
    codes = {"before": args.before.resolve()} if args.before else {}
    if not args.only_before:
        codes["now"] = ROOT
    path = RESULTS / "many.json"
    result: dict[str, Any] = json.loads(path.read_text())["parts"] if path.exists() else {}
    for part in args.parts:
        result[part] = {"measured": provenance()}  # the other parts stay as they are
        for name, code in codes.items():
            with tempfile.TemporaryDirectory() as folder:
                found = PARTS[part](Path(folder), code, sizes[part])
            result[part][name] = found | {"load_average": os.getloadavg()[0]}
            print(part, name, json.dumps(result[part][name]), flush=True)
    if not args.only_before:
        print(write("many", {"parts": result}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
