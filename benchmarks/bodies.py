"""Many large request bodies at once: the service's memory, responses, and latency of small posts.

    python -m benchmarks.bodies [--clients 200] [--mb 60] [--budget 512] [--disk DIR]

Each of many clients posts one large trajectory over a raw socket and retries after Retry-After
until it is stored. At the same time another client posts trajectories of 10 steps. Then the service
is killed (SIGKILL) and restarted: every acknowledged trajectory must exist, and some are read back
and compared.

The observations are repetitive, so that the compressed shards fit on any disk; the cost of ingest
does not depend on their content. The small shards also cause compaction during the posts. Writes
benchmarks/results/bodies.json.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import write
from stepwell import Client
from stepwell.codec import encode
from stepwell.messages import ARROW
from stepwell.spaces import Box, EnvSpec
from stepwell.trajectory import Trajectory

SPEC = EnvSpec.of(Box((64, 64, 3), "uint8"), Box((6,), low=-1.0, high=1.0), env="Bodies-v0")
ROW_BYTES = 64 * 64 * 3
READ_BACK = 5
STEPWELL = [sys.executable, "-m", "stepwell.cli", "serve"]


def make(rows: int, seed: int = 0) -> Trajectory:
    rng = np.random.default_rng(seed)
    block = rng.integers(0, 256, (16, 64, 64, 3), dtype=np.uint8)
    return Trajectory(
        obs={"observation": np.tile(block, (rows // 16 + 1, 1, 1, 1))[:rows]},
        actions={"action": np.zeros((rows - 1, 6), np.float32)},
        rewards=np.ones(rows - 1, np.float32),
        truncated=True,
    )


class Body:
    """An encoded request body that all clients share; each sends it with a different id."""

    def __init__(self, rows: int):
        made = make(rows)
        self.data = memoryview(encode([made], SPEC))
        place = bytes(self.data[: 1 << 16]).find(made.id.encode())
        assert place > 0
        self.before, self.after = self.data[:place], self.data[place + 36 :]

    def parts(self, name: str) -> tuple[memoryview, bytes, memoryview]:
        return self.before, name.encode(), self.after


def send(port: int, body: Body, name: str) -> tuple[int, dict[str, str]]:
    """One attempt. Returns (status, headers), or (0, {}) if there was no response."""
    with socket.create_connection(("127.0.0.1", port), timeout=600) as sock:
        head = (
            f"POST /v1/datasets/bench/trajectories HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
            f"Content-Type: {ARROW}\r\nContent-Length: {len(body.data)}\r\n\r\n"
        )
        try:
            sock.sendall(head.encode())
            for part in body.parts(name):
                sock.sendall(part)
        except (BrokenPipeError, ConnectionResetError):
            pass  # rejected while sending: the response can still be read
        answer = b""
        try:
            while b"\r\n\r\n" not in answer and (chunk := sock.recv(65536)):
                answer += chunk
        except ConnectionResetError:
            pass
    head_text = answer.partition(b"\r\n\r\n")[0].decode("latin-1")
    found = re.match(r"HTTP/1.1 (\d+)", head_text)
    lines = (line.partition(":") for line in head_text.split("\r\n")[1:])
    return int(found[1]) if found else 0, {k.lower(): v.strip() for k, _, v in lines}


def big_clients(port: int, rows: int, count: int, queue: Any) -> None:
    """Run `count` clients in parallel threads until each has stored one trajectory."""
    body = Body(rows)
    answers: Counter[int] = Counter()
    stored: list[tuple[str, float]] = []
    begin = threading.Barrier(count)

    def run() -> None:
        name = str(uuid.uuid4())
        begin.wait()
        began = time.monotonic()
        while True:
            status, headers = send(port, body, name)
            answers[status] += 1
            if status == 200:
                stored.append((name, time.monotonic() - began))
                return
            time.sleep(float(headers.get("retry-after", "1")) * random.uniform(1.0, 1.25))

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    queue.put((stored, dict(answers)))


def small_posts(port: int, stop: Any, queue: Any) -> None:
    """Send small posts in sequence until `stop`; report latencies, stored ids and statuses."""
    waits: list[float] = []
    names: list[str] = []
    statuses: Counter[int] = Counter()
    body = Body(11)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    while not (stop.is_set() and waits):
        name = str(uuid.uuid4())
        began = time.monotonic()
        connection.request(
            "POST",
            "/v1/datasets/bench/trajectories",
            b"".join(body.parts(name)),
            {"Content-Type": ARROW},
        )
        response = connection.getresponse()
        response.read()
        statuses[response.status] += 1
        if response.status == 200:
            waits.append(time.monotonic() - began)
            names.append(name)
        time.sleep(0.02)
    queue.put((waits, names, dict(statuses)))


def memory(pid: int) -> dict[str, float]:
    """VmRSS and VmHWM of a process, in MB."""
    text = Path(f"/proc/{pid}/status").read_text()
    return {
        key: round(int(re.search(rf"{key}:\s+(\d+)", text)[1]) * 1024 / 1e6, 1)  # type: ignore[index]
        for key in ("VmRSS", "VmHWM")
    }


def serve(folder: Path, port: int, env: dict[str, str]) -> subprocess.Popen[bytes]:
    command = [*STEPWELL, "--data", str(folder / "data"), "--port", str(port)]
    process = subprocess.Popen(
        [*command, "--log-level", "error"],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "STEPWELL_SQL_WORKERS": "1", **env},
    )
    with Client(f"http://127.0.0.1:{port}") as client:
        client.wait_ready(60)
    return process


def _at(values: list[float], share: float) -> float:
    """A quantile, in milliseconds."""
    return round(sorted(values)[min(len(values) - 1, int(share * len(values)))] * 1e3, 1)


def measure(
    folder: Path,
    clients: int,
    mb: float,
    budget: int,
    processes: int,
    *,
    quiet_seconds: float = 3.0,
    env: dict[str, str] | None = None,
) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {**(env or {}), "STEPWELL_BODY_MEMORY": str(budget << 20)}
    rows = max(2, int(mb * 1e6 / ROW_BYTES))
    service = serve(folder, port, env)
    context = multiprocessing.get_context("spawn")
    stop, queue, small_queue = context.Event(), context.Queue(), context.Queue()
    try:
        with Client(f"http://127.0.0.1:{port}") as client:
            client.create_dataset("bench", SPEC)
        alone = context.Process(target=small_posts, args=(port, stop, small_queue))
        alone.start()
        time.sleep(quiet_seconds)
        stop.set()
        quiet, quiet_names, _ = small_queue.get(timeout=60)
        alone.join()
        stop.clear()
        before = memory(service.pid)
        small = context.Process(target=small_posts, args=(port, stop, small_queue))
        small.start()
        shares = [clients // processes + (i < clients % processes) for i in range(processes)]
        began = time.monotonic()
        workers = [
            context.Process(target=big_clients, args=(port, rows, share, queue))
            for share in shares
            if share
        ]
        for worker in workers:
            worker.start()
        found = [queue.get(timeout=3600) for _ in workers]
        took = time.monotonic() - began
        stop.set()
        waits, small_names, small_statuses = small_queue.get(timeout=60)
        for process in (small, *workers):
            process.join()
        peak = memory(service.pid)
    finally:
        service.send_signal(signal.SIGKILL)
        service.wait()
    stored = [one for part, _ in found for one in part]
    answers: Counter[int] = Counter()
    for _, part in found:
        answers.update(part)
    names = [name for name, _ in stored]
    lost, wrong = check(folder, port, env, names, quiet_names + small_names, rows)
    return {
        "clients": clients,
        "body_mb": round(rows * ROW_BYTES / 1e6, 1),
        "budget_mb": round((budget << 20) / 1e6, 1),
        "seconds": round(took, 1),
        "mb_per_second": round(clients * rows * ROW_BYTES / 1e6 / took, 1),
        "answers": {str(status): count for status, count in sorted(answers.items())},
        "stored": len(stored),
        "wait_median_s": round(statistics.median(wait for _, wait in stored), 1),
        "wait_longest_s": round(max(wait for _, wait in stored), 1),
        "rss_before_mb": before["VmRSS"],
        "rss_peak_mb": peak["VmHWM"],
        "rss_after_mb": peak["VmRSS"],
        "acknowledged_and_lost": lost,
        "read_back_and_wrong": wrong,
        "small_quiet_p50_ms": _at(quiet, 0.5),
        "small_quiet_p99_ms": _at(quiet, 0.99),
        "small_posts": len(waits),
        "small_answers": {str(status): count for status, count in sorted(small_statuses.items())},
        "small_p50_ms": _at(waits, 0.5),
        "small_p99_ms": _at(waits, 0.99),
        "small_longest_ms": _at(waits, 1.0),
    }


def check(
    folder: Path, port: int, env: dict[str, str], big: list[str], small: list[str], rows: int
) -> tuple[int, int]:
    """Restart the service. Returns the number of acknowledged trajectories that are missing, and
    of those read back whose contents differ."""
    service = serve(folder, port, env)
    try:
        with Client(f"http://127.0.0.1:{port}", timeout=120) as client:
            there: set[str] = set()
            cursor: str | None = None
            while True:
                page = client.trajectories("bench", limit=1000, cursor=cursor)
                there.update(one.id for one in page.items)
                if (cursor := page.next) is None:
                    break
            lost = sum(name not in there for name in (*big, *small))
            sent = make(rows)
            wrong = 0
            for name in random.sample(big, min(READ_BACK, len(big))):
                got = client.steps(name)
                same = np.array_equal(got.obs["observation"], sent.obs["observation"])
                wrong += not (same and len(got) == len(sent))
    finally:
        service.terminate()
        service.wait(120)
    return lost, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--mb", type=float, default=60.0, help="size of each body, in MB")
    parser.add_argument("--budget", type=int, default=512, help="STEPWELL_BODY_MEMORY, in MiB")
    parser.add_argument("--processes", type=int, default=4, help="number of client processes")
    parser.add_argument("--disk", type=Path, help="use the disk of this folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.disk) as temporary:
        result = measure(Path(temporary), args.clients, args.mb, args.budget, args.processes)
    result["load_average"] = os.getloadavg()
    print(json.dumps(result, indent=1))
    print(f"written to {write('bodies', result)}")
    limit = result["budget_mb"] + 300
    good = (
        result["rss_peak_mb"] <= limit
        and result["stored"] == args.clients
        and result["answers"].get("0", 0) == 0
        and result["acknowledged_and_lost"] == result["read_back_and_wrong"] == 0
    )
    print("holds" if good else f"DOES NOT HOLD (at most {limit} MB, every one answered, none lost)")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
