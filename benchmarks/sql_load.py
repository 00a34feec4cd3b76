"""Runaway SQL queries: their effect on ingest and on other clients, their memory and deadlines.

    python -m benchmarks.sql_load  [--seconds 6] [--rounds 5] [--disk FOLDER] [--before DIR]

Over HTTP, against a service in a separate process, with a separate token for each client:
    ingest      throughput of one client alone, alternating with 16 clients that send runaway
                queries at the same time
    neighbour   small queries of one client while another client runs 16 runaway queries
    memory      resident memory of all SQL workers together while 8 clients send queries that
                allocate as much memory as they can
    deadlines   time from the request to the end of the response, minus the query's timeout, under
                runaway queries and ingest; deadlines_busy: also with 8 busy loops on the machine
`--before` also measures another checkout, except its deadlines. Writes
benchmarks/results/sql_load.json.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.ingest import PER_BODY, SPEC, Body
from stepwell import Client
from stepwell.messages import ARROW

ITSELF = [sys.executable, "-P", str(Path(__file__).resolve())]
FLOOD = 16
ENDLESS = "select count(*) from range(100000000000) a, range(1000000) b"
# One call of a vectorised function that takes a minute and does not check for an interrupt.
DEAF = "select levenshtein(repeat('a', 200000), repeat('b', 200000))"
BOMBS = (
    "select list(i) from range(10000000000) t(i)",
    "select string_agg(i::varchar, '') from range(10000000000) t(i)",
    "select i, random() from range(10000000000) t(i) order by 2",
    "select count(distinct hash(i)) from range(10000000000) t(i)",
    "select length(repeat('x', 4000000000))",
    "select repeat('x', 1000000) from range(1000000)",
    "select list_transform(range(100000000), x -> x::varchar)",
    "select levenshtein(repeat('a', 300000000), repeat('b', 300000000))",
)
RUNAWAY = [
    ENDLESS,
    DEAF,
    "select sum(a.length * b.length) from trajectories a, trajectories b, steps",
]
SMALL = "select count(*), max(length) from trajectories"


class Caller:
    """An HTTP connection of a client."""

    def __init__(self, port: int, token: str):
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        self._http.connect()
        self._http.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._token = {"Authorization": f"Bearer {token}"}

    def post(self, body: bytes | bytearray) -> None:
        path = "/v1/datasets/bench/trajectories"
        self._http.request("POST", path, body, {"Content-Type": ARROW, **self._token})
        items = json.loads(self._http.getresponse().read())["items"]
        assert [item["status"] for item in items] == ["stored"] * PER_BODY, items

    def ask(self, sql: str, timeout: float) -> tuple[str, float, float]:
        """Returns (error code or "ok", seconds until the response, seconds of Retry-After)."""
        body = json.dumps({"sql": sql, "timeout": timeout})
        began = time.perf_counter()
        headers = {"Content-Type": "application/json", **self._token}
        self._http.request("POST", "/v1/query", body, headers)
        response = self._http.getresponse()
        answer = response.read()
        took = time.perf_counter() - began
        code = "ok" if response.status == 200 else json.loads(answer)["code"]
        return code, took, float(response.getheader("retry-after") or 0)


# --- programs that run as separate processes ------------------------------------------------------


def poster(port: int, token: str, seconds: float) -> dict[str, Any]:
    """Post from two connections for `seconds`."""
    posts = [0, 0]

    def run(number: int) -> None:
        caller, body = Caller(port, token), Body(1000 * number)
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            caller.post(body.renew())
            posts[number] += 1

    began = time.perf_counter()
    _together([lambda n=n: run(n) for n in range(2)])
    return {"trajectories": sum(posts) * PER_BODY, "seconds": time.perf_counter() - began}


def flooder(
    port: int, tokens: list[str], queries: list[str], seconds: float, timeout: float
) -> Any:
    """Send runaway queries for `seconds`, from one thread per token, each in sequence."""
    codes: Counter[str] = Counter()
    until = time.perf_counter() + seconds

    def run(number: int) -> None:
        caller = Caller(port, tokens[number])
        while (left := until - time.perf_counter()) > 0:
            sql = queries[number % len(queries)]
            code, _, wait = caller.ask(sql, min(timeout, left + 0.1))
            codes[code] += 1
            time.sleep(min(wait, max(0.0, until - time.perf_counter())))

    _together([lambda n=n: run(n) for n in range(len(tokens))])
    return dict(codes)


def prober(port: int, token: str, sql: str, timeout: float, count: int) -> Any:
    """Send `count` queries in sequence; returns [code, seconds] of each."""
    caller = Caller(port, token)
    return [caller.ask(sql, timeout)[:2] for _ in range(count)]


PARTS = ["ingest", "neighbour", "memory", "deadlines", "deadlines_busy"]
PROGRAMS: dict[str, Callable[..., Any]] = {"post": poster, "flood": flooder, "probe": prober}


def _together(work: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=one) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Started:
    """Run a program of PROGRAMS in a separate process."""

    def __init__(self, name: str, *args: Any):
        command = [*ITSELF, "--program", name, json.dumps(args)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def result(self) -> Any:
        out, _ = self._process.communicate()
        assert self._process.returncode == 0, "a client failed"
        return json.loads(out)


# --- the service ----------------------------------------------------------------------------------


class Service:
    def __init__(self, folder: Path):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        operator = secrets.token_hex(16)
        command = [sys.executable, "-m", "stepwell.cli", "serve", "--data", str(folder / "data")]
        command += ["--port", str(self.port), "--log-level", "error"]
        environment = {**os.environ, "STEPWELL_TOKEN": operator}
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
        with Client(f"http://127.0.0.1:{self.port}", token=operator) as client:
            client.wait_ready(60)
            client.create_dataset("bench", SPEC, capacity={"trajectories": 5000})
        self._operator = operator

    def tokens(self, count: int, scopes: tuple[str, ...] = ("sql",)) -> list[str]:
        made = []
        for number in range(count):
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
            body = json.dumps({"name": f"client {number}", "scopes": list(scopes)})
            headers = {"Content-Type": "application/json"}
            headers["Authorization"] = f"Bearer {self._operator}"
            connection.request("POST", "/v1/tokens", body, headers)
            made.append(json.loads(connection.getresponse().read())["token"])
            connection.close()
        return made

    def workers(self) -> list[psutil.Process]:
        found = []
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                if "server.sql.worker" in child.cmdline():
                    found.append(child)
        return found

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60)


@contextlib.contextmanager
def serving(disk: Path | None) -> Iterator[Service]:
    with tempfile.TemporaryDirectory(dir=disk) as temporary:
        service = Service(Path(temporary))
        try:
            yield service
        finally:
            service.close()


# --- what is measured -----------------------------------------------------------------------------


def ingest(service: Service, seconds: float, rounds: int) -> dict[str, Any]:
    """Alternate ingest alone with ingest during runaway queries of 16 clients."""
    token = service.tokens(1, ("ingest",))[0]
    clients = service.tokens(FLOOD)
    alone, beside, codes = [], [], Counter[str]()
    for _ in range(rounds):
        one = Started("post", service.port, token, seconds).result()
        alone.append(one["trajectories"] / one["seconds"])
        flood = Started("flood", service.port, clients, RUNAWAY, seconds + 3, 5.0)
        time.sleep(1.5)  # until all 16 clients have sent a query
        one = Started("post", service.port, token, seconds).result()
        beside.append(one["trajectories"] / one["seconds"])
        codes.update(flood.result())
    return {
        "runaway_queries": FLOOD,
        "alone_trajectories_per_second": [round(x, 1) for x in alone],
        "beside_trajectories_per_second": [round(x, 1) for x in beside],
        # Ratio of consecutive measurements, because the load of the machine may vary.
        "share_of_alone": round(
            statistics.median(b / a for a, b in zip(alone, beside, strict=True)), 3
        ),
        "answers": dict(codes),
    }


def neighbour(service: Service, count: int) -> dict[str, Any]:
    """16 runaway queries of one token, and small queries of another with a timeout of 1 s."""
    flooding, modest = service.tokens(2)
    flood = Started("flood", service.port, [flooding] * FLOOD, [ENDLESS, DEAF], 12.0, 5.0)
    time.sleep(1.5)
    answers = Started("probe", service.port, modest, SMALL, 1.0, count).result()
    refused = flood.result()
    waits = [took for code, took in answers if code == "ok"]
    return {
        "queries": count,
        "answered": len(waits),
        "ms": quantiles([1e3 * wait for wait in waits]),
        "answers_of_the_flood": refused,
    }


def memory(service: Service, seconds: float) -> dict[str, Any]:
    """Peak resident memory of all SQL workers together, sampled every few milliseconds."""
    before = psutil.Process(service.process.pid).memory_info().rss
    flood = Started("flood", service.port, service.tokens(len(BOMBS)), list(BOMBS), seconds, 5.0)
    workers, most, listed_at, parent = service.workers(), 0, time.monotonic(), before
    until = time.monotonic() + seconds + 1
    while time.monotonic() < until:
        if time.monotonic() - listed_at > 0.05:  # workers start and exit
            workers, listed_at = service.workers(), time.monotonic()
        total = 0
        for worker in workers:
            with contextlib.suppress(psutil.Error):
                total += worker.memory_info().rss
        most = max(most, total)
        parent = max(parent, psutil.Process(service.process.pid).memory_info().rss)
        time.sleep(0.002)
    return {
        "workers_mib": round(most / 2**20),
        "service_grew_mib": round((parent - before) / 2**20),
        "answers": flood.result(),
    }


def deadlines(service: Service, count: int, busy: int) -> dict[str, Any]:
    """Runaway queries of four clients, with ingest and `busy` busy loops at the same time. Some
    of the queries do not check for interrupts."""
    spin = [sys.executable, "-c", "while True: pass"]
    loops = [subprocess.Popen(spin) for _ in range(busy)]
    try:
        post = Started("post", service.port, service.tokens(1, ("ingest",))[0], count * 0.2)
        asking = [
            Started("probe", service.port, token, sql, timeout, count // 4)
            for token, sql, timeout in zip(
                service.tokens(4),
                (ENDLESS, DEAF, ENDLESS, BOMBS[2]),
                (0.3, 0.5, 1.0, 0.7),
                strict=True,
            )
        ]
        over: list[float] = []
        codes: Counter[str] = Counter()
        for one, timeout in zip(asking, (0.3, 0.5, 1.0, 0.7), strict=True):
            for code, took in one.result():
                over.append(1e3 * (took - timeout))
                codes[code] += 1
        post.result()
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    return {
        "queries": len(over),
        "busy_loops": busy,
        "over_the_deadline_ms": quantiles(over),
        "later_than_500_ms": sum(one > 500 for one in over),
        "answers": dict(codes),
    }


def quantiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    ordered = sorted(values)
    at = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {
        k: round(ordered[min(len(ordered) - 1, int(q * len(ordered)))], 1) for k, q in at.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=6.0, help="seconds per ingest measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--disk", type=Path, help="measure the disk of this folder")
    parser.add_argument("--only", nargs="+", default=PARTS)
    parser.add_argument("--before", type=Path, help="another checkout to compare with")
    parser.add_argument("--program", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.program:
        name, raw = args.program
        print(json.dumps(PROGRAMS[name](*json.loads(raw))))
    elif args.child:
        print(json.dumps(measure(args)))
    else:
        from benchmarks.report import ROOT, write

        result: dict[str, Any] = {}
        if args.before:
            before = [name for name in args.only if not name.startswith("deadlines")]
            result["before"] = in_child(args.before, args, before)
        result |= in_child(ROOT, args, args.only)
        print(f"written to {write('sql_load', result)}")
    return 0


def in_child(code: Path, args: argparse.Namespace, only: list[str]) -> dict[str, Any]:
    """Measure the code of a checkout in separate processes."""
    command = [*ITSELF, "--child", "--seconds", str(args.seconds), "--rounds", str(args.rounds)]
    command += ["--only", *only, *(["--disk", str(args.disk)] if args.disk else [])]
    env = {**os.environ, "PYTHONPATH": str(code)}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True, cwd="/")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The selected parts, each with a separate service."""
    parts: dict[str, Callable[[Service], dict[str, Any]]] = {
        "ingest": lambda service: ingest(service, args.seconds, args.rounds),
        "neighbour": lambda service: neighbour(service, 50),
        "memory": lambda service: memory(service, 20.0),
        "deadlines": lambda service: deadlines(service, 200, 0),
        "deadlines_busy": lambda service: deadlines(service, 100, 8),
    }
    result: dict[str, Any] = {"load_before": os.getloadavg()[0]}
    for name in args.only:
        with serving(args.disk) as service:
            result[name] = parts[name](service)
        print(name, json.dumps(result[name]), file=sys.stderr, flush=True)
    return result


if __name__ == "__main__":
    sys.exit(main())
