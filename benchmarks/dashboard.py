"""CPU cost of an open dashboard page: CPU seconds per five seconds, by process.

    python -m benchmarks.dashboard [--cases few_ended …] [--seconds 30] [--before DIR]

The processes are the service, Streamlit and a headless Chromium (`--browser`). The browser shows
the page Runs with three runs selected, without any user input. In the cases with `running` runs,
every metric gets a new point each second. `--before` also measures the dashboard of another
checkout, alternating case by case. Writes benchmarks/results/dashboard.json.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil

from benchmarks.report import ROOT, write
from stepwell import Client
from stepwell._ports import free_port
from stepwell.messages import MetricPoint

CASES = {
    "few_ended": {"keys": 12, "running": False},
    "few_running": {"keys": 12, "running": True},
    "many_ended": {"keys": 300, "running": False},
    "many_running": {"keys": 300, "running": True},
}
RUNS = ("first", "second", "third")
POINTS = 500
SECTIONS = ("train", "evaluation", "actor", "critic", "optimizer", "data")


def key(number: int) -> str:
    return f"{SECTIONS[number % len(SECTIONS)]}/metric_{number:03d}"


def points(keys: int, steps: range) -> list[MetricPoint]:
    now = time.time()
    return [
        MetricPoint(key=key(k), step=step, value=1 / (step + k + 1), time=now + step - steps.stop)
        for k in range(keys)
        for step in steps
    ]


@contextlib.contextmanager
def started(command: list[str], checkout: Path, log: Path, **env: str) -> Iterator[psutil.Process]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("STEPWELL_")}
    with log.open("ab") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, cwd=checkout,
            env={**inherited, "PYTHONPATH": str(checkout), **env},
        )  # fmt: skip
    try:
        yield psutil.Process(process.pid)
    finally:
        children = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def wait_for(url: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (OSError, urllib.error.URLError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def cpu(process: psutil.Process) -> float:
    """CPU seconds used by a process and its descendants."""
    total = 0.0
    for one in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = one.cpu_times()
            total += times.user + times.system
    return total


def measure(case: str, checkout: Path, browser: str, settle: float, seconds: float) -> dict:
    """CPU seconds per five seconds in one case, by process."""
    keys, running = CASES[case]["keys"], CASES[case]["running"]
    with (
        tempfile.TemporaryDirectory(prefix="stepwell-bench-") as folder,
        contextlib.ExitStack() as s,
    ):
        place = Path(folder)
        port, page_port = free_port(), free_port()
        url, page = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{page_port}"
        serve = [sys.executable, "-m", "stepwell.cli", "serve", "--data", str(place / "data")]
        service = s.enter_context(
            started([*serve, "--port", str(port)], checkout, place / "service.log")
        )
        wait_for(f"{url}/readyz")
        client = s.enter_context(Client(url))
        for name in RUNS:
            client.create_run(name, "train")
            client.log_metrics(name, points(keys, range(POINTS)))
            if not running:
                client.patch_run(name, status="finished")
        dash = [sys.executable, "-m", "dashboard.main", "--port", str(page_port), "--url", url]
        streamlit = s.enter_context(started(dash, checkout, place / "page.log"))
        wait_for(f"{page}/_stcore/health")
        chosen = "&".join(f"run={name}" for name in RUNS)
        profile = [f"--user-data-dir={place / 'profile'}", "--window-size=1400,1400"]
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
        tab = s.enter_context(
            started([browser, *flags, *profile, f"{page}/runs?{chosen}"], checkout, place / "b.log")
        )
        stop = threading.Event()

        def post_metrics() -> None:
            step = POINTS
            while not stop.wait(1.0):
                for name in RUNS:
                    client.log_metrics(name, points(keys, range(step, step + 1)))
                step += 1

        if running:
            thread = threading.Thread(target=post_metrics)
            thread.start()
            s.callback(thread.join)
            s.callback(stop.set)
        time.sleep(settle)
        watched = {"streamlit": streamlit, "service": service, "browser": tab}
        before = {name: cpu(process) for name, process in watched.items()}
        began = time.monotonic()
        time.sleep(seconds)
        share = 5.0 / (time.monotonic() - began)
        found = {name: round((cpu(p) - before[name]) * share, 3) for name, p in watched.items()}
        return {"case": case, "runs": len(RUNS), "keys": keys, "running": running, **found}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--seconds", type=float, default=30.0, help="measured time per case")
    parser.add_argument(
        "--settle", type=float, default=20.0, help="wait before it, while the page loads"
    )
    parser.add_argument("--before", type=Path, help="folder of another checkout to compare with")
    parser.add_argument("--browser", default="chromium")
    options = parser.parse_args()
    checkouts = {"before": options.before} if options.before else {}
    checkouts["now"] = ROOT
    rows = []
    for case in options.cases:
        for name, checkout in checkouts.items():
            found = measure(case, checkout, options.browser, options.settle, options.seconds)
            rows.append({"code": name, **found})
            print(rows[-1], flush=True)
    load = round(os.getloadavg()[0], 1)
    print(write("dashboard", {"cpu_seconds_per_5_s": rows, "load_after": load}))


if __name__ == "__main__":
    main()
