"""Ingest throughput: durable posts to the service, compared with plain append + fdatasync.

    python -m benchmarks.ingest [--threads 1 2 4 8] [--seconds 8] [--disk DIR]
    python -m benchmarks.ingest --before DIR [--rounds 8] [--threads 2] [--seconds 4]

A trajectory has 1000 steps of 17 + 6 floats; a request body contains 8. Client threads in a
separate process send them. To keep the client's cost low, bodies are encoded once and only their
ids are replaced. Between slices of posting, the same bytes are appended to a file with fdatasync.
The speed of a shared disk varies, so the ratio of the two is the relevant figure. Writes
benchmarks/results/ingest.json.

With `--before`, the service of another checkout and the service of this one receive posts in
alternation; measured are throughput and the service's CPU time per trajectory. Writes
benchmarks/results/ingest_before.json.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import psutil

from benchmarks.report import ROOT, write
from stepwell import Client
from stepwell.codec import encode
from stepwell.messages import ARROW
from stepwell.spaces import Box, EnvSpec
from stepwell.testing import make_trajectory

STEPS, PER_BODY = 1000, 8
SPEC = EnvSpec.of(Box((17,)), Box((6,), low=-1.0, high=1.0), env="HalfCheetah-v5")
SLICES = 4


class Body:
    """An encoded request body whose trajectory ids can be replaced in place."""

    def __init__(self, seed: int):
        made = [make_trajectory(SPEC, length=STEPS, seed=seed + i) for i in range(PER_BODY)]
        self.array_bytes = sum(one.nbytes for one in made)
        self.data = bytearray(encode(made, SPEC))
        self._places = []
        for one in made:
            place = self.data.find(one.id.encode())
            assert self.data.count(one.id.encode()) == 1
            self._places.append(place)

    def renew(self) -> bytearray:
        for place in self._places:
            self.data[place : place + 36] = str(uuid.uuid4()).encode()
        return self.data


def post_for(host: str, port: int, threads: int, seconds: float) -> dict[str, Any]:
    """Post from `threads` connections for `seconds`; returns the client's measurements."""
    waits: list[float] = []
    bodies = [Body(1000 * number) for number in range(threads)]
    start = threading.Barrier(threads + 1)
    until = [0.0]

    def run(body: Body) -> None:
        connection = http.client.HTTPConnection(host, port, timeout=60)
        connection.connect()
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        start.wait()
        while time.perf_counter() < until[0]:
            data = body.renew()
            began = time.perf_counter()
            connection.request(
                "POST", "/v1/datasets/bench/trajectories", data, {"Content-Type": ARROW}
            )
            response = connection.getresponse()
            items = json.loads(response.read())["items"]
            waits.append(time.perf_counter() - began)
            assert [item["status"] for item in items] == ["stored"] * PER_BODY, items
        connection.close()

    workers = [threading.Thread(target=run, args=(body,)) for body in bodies]
    for worker in workers:
        worker.start()
    until[0] = time.perf_counter() + seconds
    start.wait()
    began = time.perf_counter()
    for worker in workers:
        worker.join()
    took = time.perf_counter() - began
    return {"seconds": took, "waits": waits, "bytes": len(waits) * bodies[0].array_bytes}


def append_for(folder: Path, seconds: float) -> dict[str, float]:
    """The reference: append a body of the same size to a file, with fdatasync after each."""
    data = bytes(Body(7).data)
    path = folder / "plain"
    waits = []
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        at = time.perf_counter()
        os.write(descriptor, data)
        os.fdatasync(descriptor)
        waits.append(time.perf_counter() - at)
    took = time.perf_counter() - began
    os.close(descriptor)
    path.unlink()
    return {"mb_per_second": len(waits) * len(data) / took / 1e6, "p50": _at(waits, 0.5)}


def _at(values: list[float], share: float) -> float:
    """A quantile, in milliseconds."""
    return round(sorted(values)[min(len(values) - 1, int(share * len(values)))] * 1e3, 2)


def post(url: str, threads: int, seconds: float) -> dict[str, Any]:
    """`post_for` in a separate process."""
    command = [sys.executable, "-m", "benchmarks.ingest", "--client", url]
    command += ["--threads", str(threads), "--seconds", str(seconds)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def compare(
    folder: Path, before: Path, rounds: int, threads: int, seconds: float
) -> dict[str, Any]:
    """Post to two services in alternation. The first round is a warm-up and is not counted."""
    codes = {"before": before, "now": ROOT}
    services = {name: serve(folder / name, code) for name, code in codes.items()}
    found: dict[str, Any] = {name: {"per_second": [], "cpu_ms_each": []} for name in codes}
    try:
        for number in range(rounds + 1):
            for name, (process, url) in services.items():
                service = psutil.Process(process.pid)
                began = service.cpu_times()
                posted = post(url, threads, seconds)
                ended, count = service.cpu_times(), len(posted["waits"]) * PER_BODY
                if number:
                    cpu = ended.user + ended.system - began.user - began.system
                    found[name]["per_second"].append(round(count / posted["seconds"], 1))
                    found[name]["cpu_ms_each"].append(round(1e3 * cpu / count, 3))
    finally:
        for process, _ in services.values():
            process.terminate()
            process.wait(30)
    for key in ("per_second", "cpu_ms_each"):
        pairs = zip(found["before"][key], found["now"][key], strict=True)
        found[f"{key}_now_by_before"] = round(statistics.median(b / a for a, b in pairs), 3)
    return found


def measure(url: str, folder: Path, threads: int, seconds: float) -> dict[str, Any]:
    """Alternate slices of posting and of plain appending."""
    posted, plain = [], []
    for _ in range(SLICES):
        plain.append(append_for(folder, seconds / SLICES / 4))
        posted.append(post(url, threads, seconds / SLICES))
    waits = [wait for one in posted for wait in one["waits"]]
    took = sum(one["seconds"] for one in posted)
    mb = sum(one["bytes"] for one in posted) / took / 1e6
    floor = statistics.median(one["mb_per_second"] for one in plain)
    return {
        "threads": threads,
        "trajectories_per_second": round(len(waits) * PER_BODY / took, 1),
        "mb_per_second": round(mb, 1),
        "ack_p50_ms": _at(waits, 0.5),
        "ack_p99_ms": _at(waits, 0.99),
        "posts": len(waits),
        "plain_mb_per_second": round(floor, 1),
        "plain_p50_ms": round(statistics.median(one["p50"] for one in plain), 2),
        "share_of_plain": round(mb / floor, 3),
    }


def serve(folder: Path, code: Path | None = None) -> tuple[subprocess.Popen[bytes], str]:
    """Start a service with the benchmark's dataset, from the checkout `code` if given."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "stepwell.cli", "serve", "--data", str(folder / "data")]
    env = os.environ if code is None else {**os.environ, "PYTHONPATH": str(code)}
    process = subprocess.Popen(
        [*command, "--port", str(port), "--log-level", "error"], stdout=subprocess.DEVNULL, env=env
    )
    url = f"http://127.0.0.1:{port}"
    with Client(url) as client:
        client.wait_ready(30)
        client.create_dataset("bench", SPEC, capacity={"trajectories": 5000})
    return process, url


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds of posting, per line")
    parser.add_argument("--disk", type=Path, help="measure the disk of this folder")
    parser.add_argument("--before", type=Path, help="another checkout to compare with")
    parser.add_argument("--rounds", type=int, default=8, help="rounds of that comparison")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        host, _, port = args.client.removeprefix("http://").partition(":")
        print(json.dumps(post_for(host, int(port), args.threads[0], args.seconds)))
        return 0
    if args.before:
        threads = args.threads[0] if len(args.threads) == 1 else 2
        with tempfile.TemporaryDirectory(dir=args.disk) as temporary:
            compared = compare(Path(temporary), args.before, args.rounds, threads, args.seconds)
        compared |= {"threads": threads, "load_average": os.getloadavg()}
        print(json.dumps(compared, indent=1), write("ingest_before", compared), sep="\n")
        return 0
    with tempfile.TemporaryDirectory(dir=args.disk) as temporary:
        process, url = serve(Path(temporary))
        try:
            lines = [measure(url, Path(temporary), n, args.seconds) for n in args.threads]
        finally:
            process.terminate()
            process.wait(30)
    result = {"steps": STEPS, "floats_per_step": 24, "per_body": PER_BODY, "lines": lines}
    result["load_average"] = os.getloadavg()
    path = write("ingest", result)
    for line in lines:
        print(line)
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
