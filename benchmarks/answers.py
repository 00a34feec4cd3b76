"""Answers that are large, or that nobody reads: the service's memory, and what others notice.

    python -m benchmarks.answers [--before DIR] [--scale 1] [--only json arrow import sockets]

    json      the steps of a trajectory of 39 MB of pictures as JSON, by 4 clients
    import    an .npz of one trajectory of 491 MB
    arrow     the steps of that trajectory as Arrow, by 2 clients
    sockets   500 clients that ask for a shard of 15 MB and do not read it

During each attack another client posts 10 steps, reads a row of the index and the steps of a small
trajectory, again and again, and a third one asks for /healthz every 50 ms. Peak memory is the
kernel's (VmHWM, set back before each attack); of the process that parses an import it is read every
50 ms. With `--before` the same attacks run on another checkout first. Writes
benchmarks/results/answers.json.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bodies import ROW_BYTES, SPEC, make, memory
from benchmarks.report import ROOT, write
from stepwell import Client
from stepwell.trajectory import Trajectory

JSON_MB, ARROW_MB, SHARD_MB, SOCKETS = 39, 491, 15, 500
QUIET, HOLD = 6.0, 20.0
"""Seconds of the quiet measurement, and of holding sockets open."""
ATTACKS = ("json", "import", "arrow", "sockets")


def serve(folder: Path, code: Path) -> tuple[subprocess.Popen[bytes], int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "-m", "stepwell.cli", "serve", "--data", str(folder / "data")]
    process = subprocess.Popen(
        [*command, "--port", str(port), "--log-level", "error"],
        stdout=subprocess.DEVNULL,
        cwd=code,
        env={**os.environ, "PYTHONPATH": str(code), "STEPWELL_SQL_WORKERS": "1"},
    )
    with Client(f"http://127.0.0.1:{port}") as client:
        client.wait_ready(60)
        client.create_dataset("bench", SPEC)
    return process, port


# --- clients that are measured --------------------------------------------------------------------


def normal_client(port: int, small: str, stop: Any, queue: Any) -> None:
    """Work like a collector and a dashboard until `stop`; reports seconds and statuses."""
    waits: list[float] = []
    failures: Counter[str] = Counter()
    with Client(f"http://127.0.0.1:{port}", timeout=120, retry_for=0) as client:
        while not (stop.is_set() and len(waits) > 3):
            trajectory = make(11)
            for work in (
                lambda: client.post("bench", [trajectory]),  # noqa: B023
                lambda: client.trajectories("bench", limit=10),
                lambda: client.steps(small),
            ):
                began = time.monotonic()
                try:
                    work()
                except Exception as error:
                    failures[type(error).__name__] += 1
                waits.append(time.monotonic() - began)
            time.sleep(0.02)
    queue.put((waits, dict(failures)))


def health_client(port: int, stop: Any, queue: Any) -> None:
    waits: list[float] = []
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    while not (stop.is_set() and waits):
        began = time.monotonic()
        connection.request("GET", "/healthz")
        connection.getresponse().read()
        waits.append(time.monotonic() - began)
        time.sleep(0.05)
    queue.put(waits)


# --- attacks --------------------------------------------------------------------------------------


def read_all(port: int, path: str, accept: str) -> int:
    """Read an answer to its end; returns its length, or minus its status."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("GET", path, headers={"Accept": accept})
    response = connection.getresponse()
    size = 0
    while part := response.read(1 << 20):
        size += len(part)
    connection.close()
    return size if response.status == 200 else -response.status


def readers(port: int, path: str, accept: str, count: int) -> dict[str, Any]:
    found: list[int] = []
    began = time.monotonic()
    threads = [
        threading.Thread(target=lambda: found.append(read_all(port, path, accept)))
        for _ in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"clients": count, "bytes": found, "seconds": round(time.monotonic() - began, 1)}


def deaf_sockets(port: int, path: str, count: int, seconds: float) -> dict[str, Any]:
    """Ask on `count` sockets and read nothing but the status of what is refused."""
    request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode()
    held = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(count)]
    selector = selectors.DefaultSelector()
    for one in held:
        one.setblocking(False)
        one.send(request)
        selector.register(one, selectors.EVENT_READ)
    statuses: Counter[str] = Counter()
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        for key, _ in selector.select(left):
            one: Any = key.fileobj
            statuses[one.recv(12, socket.MSG_PEEK).decode()[9:] or "closed"] += 1
            selector.unregister(one)
    for one in held:
        one.close()
    return {"clients": count, "statuses": dict(statuses)}


def import_file(port: int, path: Path) -> dict[str, Any]:
    began = time.monotonic()
    with Client(f"http://127.0.0.1:{port}", timeout=600) as client:
        job = client.upload("imported", path, format="npz", env="Bodies-v0")
    found: dict[str, Any] = {"state": job.state, "seconds": round(time.monotonic() - began, 1)}
    return found


def write_npz(path: Path, mb: float) -> None:
    rows = int(mb * 1e6 / ROW_BYTES)
    t = make(rows + 1)
    timeouts = np.zeros(rows, bool)
    timeouts[-1] = True
    np.savez(
        path,
        observations=t.obs["observation"][:-1],
        actions=t.actions["action"],
        rewards=t.rewards,
        terminals=np.zeros(rows, bool),
        timeouts=timeouts,
    )


# --- measuring ------------------------------------------------------------------------------------


class Watch:
    """The two measured clients and the memory of the service, while an attack runs."""

    def __init__(self, port: int, pid: int, small: str):
        context = multiprocessing.get_context("spawn")
        self._stop, self._pid = context.Event(), pid
        self._queues = context.Queue(), context.Queue()
        targets = (normal_client, (port, small)), (health_client, (port,))
        self._processes = [
            context.Process(target=target, args=(*args, self._stop, queue))
            for (target, args), queue in zip(targets, self._queues, strict=True)
        ]
        self._child = 0.0
        self._sampler = threading.Thread(target=self._sample)

    def _sample(self) -> None:
        while not self._stop.wait(0.05):
            for child in children(self._pid):
                try:
                    if b"server.imports.parser" in Path(f"/proc/{child}/cmdline").read_bytes():
                        self._child = max(self._child, memory(child)["VmHWM"])
                except (OSError, TypeError):  # it has ended
                    pass

    def run(self, attack: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        for process in self._processes:
            process.start()
        time.sleep(2.0)  # they have started
        Path(f"/proc/{self._pid}/clear_refs").write_text("5")
        before = memory(self._pid)["VmRSS"]
        self._sampler.start()
        found = attack()
        self._stop.set()
        (waits, failures), health = (queue.get(timeout=300) for queue in self._queues)
        for process in self._processes:
            process.join()
        self._sampler.join()
        return {
            **found,
            "rss_before_mb": before,
            "rss_peak_mb": memory(self._pid)["VmHWM"],
            "parser_peak_mb": self._child,
            "healthz_longest_ms": _ms(health, 1.0),
            "healthz_p99_ms": _ms(health, 0.99),
            "normal_requests": len(waits),
            "normal_p50_ms": _ms(waits, 0.5),
            "normal_p95_ms": _ms(waits, 0.95),
            "normal_failures": failures,
        }


def children(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        for task in Path(f"/proc/{pid}/task").iterdir():
            text += " " + (task / "children").read_text()
    except OSError:
        return []
    return [int(child) for child in text.split()]


def _ms(values: list[float], share: float) -> float:
    return round(sorted(values)[min(len(values) - 1, int(share * len(values)))] * 1e3, 1)


def noisy(rows: int) -> Trajectory:
    """Pictures that do not compress: a shard as large as they are."""
    rng = np.random.default_rng(0)
    return Trajectory(
        obs={"observation": rng.integers(0, 256, (rows, 64, 64, 3), dtype=np.uint8)},
        actions={"action": np.zeros((rows - 1, 6), np.float32)},
        rewards=np.ones(rows - 1, np.float32),
        truncated=True,
    )


def measure(folder: Path, code: Path, scale: float, only: list[str]) -> dict[str, Any]:
    process, port = serve(folder, code)
    found: dict[str, Any] = {}
    url = f"http://127.0.0.1:{port}"
    try:
        with Client(url, timeout=300) as client:
            pictures, small = make(int(JSON_MB * scale * 1e6 / ROW_BYTES)), make(11)
            client.post("bench", [small])
            client.flush("bench")
            found["quiet"] = Watch(port, process.pid, small.id).run(lambda: _sleep(QUIET))
            client.post("bench", [pictures])
            client.flush("bench")
            client.create_dataset("noise", SPEC)
            noise = noisy(int(SHARD_MB * scale * 1e6 / ROW_BYTES))
            client.post("noise", [noise])
            client.flush("noise")
            (shard,) = {one.shard for one in client.trajectories("noise").items}
        path = folder / "long.npz"
        steps = f"/v1/trajectories/{pictures.id}/steps"

        def imported() -> dict[str, Any]:
            return import_file(port, path)

        def as_arrow() -> dict[str, Any]:
            with Client(url) as client:
                (one,) = client.trajectories("imported").items
            arrow = "application/vnd.apache.arrow.stream"
            return readers(port, f"/v1/trajectories/{one.id}/steps", arrow, 2)

        attacks: dict[str, Callable[[], dict[str, Any]]] = {
            "json": lambda: readers(port, steps, "application/json", 4),
            "import": imported,
            "arrow": as_arrow,
            "sockets": lambda: deaf_sockets(
                port, f"/v1/shards/{shard}", int(SOCKETS * scale), HOLD
            ),
        }
        for name in only:
            if name == "import":
                write_npz(path, ARROW_MB * scale)
            found[name] = Watch(port, process.pid, small.id).run(attacks[name])
            print(name, json.dumps(found[name]), flush=True)
    finally:
        process.terminate()
        process.wait(120)
    return found


def _sleep(seconds: float) -> dict[str, Any]:
    time.sleep(seconds)
    return {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0, help="of sizes and of clients")
    parser.add_argument("--only", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--budget", type=int, default=256, help="STEPWELL_ANSWER_MEMORY, in MiB")
    parser.add_argument("--before", type=Path, help="another checkout to compare with")
    parser.add_argument("--disk", type=Path, help="use the disk of this folder")
    args = parser.parse_args()
    os.environ["STEPWELL_ANSWER_MEMORY"] = str(args.budget << 20)
    result: dict[str, Any] = {"scale": args.scale, "budget_mb": round((args.budget << 20) / 1e6, 1)}
    for name, code in (("before", args.before), ("now", ROOT)):
        if code is not None:
            with tempfile.TemporaryDirectory(dir=args.disk) as temporary:
                result[name] = measure(Path(temporary), code, args.scale, args.only)
    result["load_average"] = os.getloadavg()
    print(json.dumps(result, indent=1))
    print(f"written to {write('answers', result)}")
    now, quiet = result["now"], result["now"]["quiet"]["normal_p95_ms"]
    good = all(
        now[name]["rss_peak_mb"] <= result["budget_mb"] + 300
        and now[name]["healthz_longest_ms"] <= 100
        and now[name]["normal_p95_ms"] <= 3 * quiet
        for name in args.only
    )
    print("holds" if good else "DOES NOT HOLD (memory, /healthz or the normal client)")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
