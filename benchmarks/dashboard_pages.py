"""Seconds until pages of the dashboard are drawn, over a service with many runs.

    python -m benchmarks.dashboard_pages [--runs 1000] [--keys 300] [--repeats 5]

A service is filled with runs of many metrics, and a headless Chromium (`--browser`), driven by its
DevTools protocol, opens each page (`load`: a new document, with Streamlit's own scripts in the
browser's cache) and changes what a person changes (`click`). A page is drawn when its script has
ended and as many charts as expected have a picture. Then the CPU seconds per five seconds are
measured while nobody does anything. Writes benchmarks/results/dashboard_pages.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

from benchmarks.dashboard import cpu, key, points, started, wait_for
from benchmarks.report import ROOT, write
from stepwell import Client
from stepwell._ports import free_port

LONG, SHORT = 500, 4
"""Points of each metric of the newest runs, which are drawn, and of all others."""
DRAWN = 5
DEADLINE = 60.0
STATE = """(() => {
  const all = (what) => [...document.querySelectorAll(what)];
  const app = document.querySelector('[data-testid="stApp"]');
  if (!app || app.dataset.testScriptState !== 'notRunning') return -1;
  if (!all('h1').length || all('[data-testid="stSkeleton"]').length) return -1;
  if (all('[data-testid="stException"]').length) throw new Error('a traceback');
  return all('[data-testid="stVegaLiteChart"] svg.marks').length;
})()"""


class Tab:
    """One tab of a browser, by the DevTools protocol."""

    def __init__(self, socket: ClientConnection):
        self._socket = socket
        self._number = 0

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            answer = json.loads(self._socket.recv(timeout=DEADLINE))
            if answer.get("id") == self._number:
                return dict(answer["result"])

    def evaluate(self, script: str) -> Any:
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"].get("description"))
        return found["result"].get("value")

    def drawn(self, since: float, charts: int, ready: str = "true") -> float:
        """Seconds from `since` until the page is drawn and `ready`, and still is 0.3 s later."""
        first = None
        while time.monotonic() - since < DEADLINE:
            if self.evaluate(STATE) >= charts and self.evaluate(ready):
                first = first or time.monotonic()
                if time.monotonic() - first > 0.3:
                    return first - since
            else:
                first = None
            time.sleep(0.01)
        raise TimeoutError(f"not drawn within {DEADLINE:g} s")

    def load(self, url: str, charts: int) -> float:
        self.call("Page.navigate", url="about:blank")
        began = time.monotonic()
        self.call("Page.navigate", url=url)
        return self.drawn(began, charts)

    def click(self, label: str, charts: int, ready: str) -> float:
        """A tab or a button with this text."""
        began = time.monotonic()
        self.evaluate(
            "[...document.querySelectorAll('[role=tab], button')]"
            f".find(e => e.textContent.trim() === {json.dumps(label)}).click()"
        )
        return self.drawn(began, charts, ready)


def fill(client: Client, runs: int, keys: int) -> None:
    for number in range(runs):
        name = f"run-{number:04d}"
        config = {
            "agent": {"gamma": 0.99, "lr": 10.0 ** -(number % 5)},
            "seed": number,
            "run": name,
        }
        client.create_run(name, "train", config=config, seed=number, tags=[f"sweep-{number // 50}"])
        length = LONG if number >= runs - DRAWN else SHORT
        client.log_metrics(name, points(keys, range(length)))
        client.patch_run(name, status="finished")


def measure(tab: Tab, page: str, keys: int, repeats: int) -> list[dict[str, Any]]:
    section = min(4, keys // 6)  # charts of the section that is open at first
    cases = {
        "overview": ("/", 0),
        "runs": ("/runs", section),
        "runs with columns": (
            f"/runs?metrics={key(0)}&metrics={key(7)}&settings=agent.lr",
            section,
        ),
        "runs folded by a setting": ("/runs?group=agent.lr", section),
        "runs, config": ("/runs?part=Config", 0),
        "runs, details": ("/runs?part=Details", 0),
    }
    rows = []
    for name, (path, charts) in cases.items():
        tab.load(page + path, charts)
        seconds = [tab.load(page + path, charts) for _ in range(repeats)]
        rows.append(_row(name, "load", seconds))
        print(rows[-1], flush=True)
    tab.load(f"{page}/runs", section)
    selected = "document.querySelector('[role=tab][aria-selected=true]').textContent.trim() === "
    for label, charts in (("Config", 0), ("Curves", section)):
        tab.click("Details", 0, f"{selected}'Details'")
        seconds = []
        for _ in range(repeats):
            seconds.append(tab.click(label, charts, f"{selected}'{label}'"))
            tab.click("Details", 0, f"{selected}'Details'")
        rows.append(_row(f"tab {label}", "click", seconds))
        print(rows[-1], flush=True)
    return rows


def _row(page: str, what: str, seconds: list[float]) -> dict[str, Any]:
    middle, longest = statistics.median(seconds), max(seconds)
    return {"page": page, "what": what, "median": round(middle, 2), "longest": round(longest, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--keys", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0, help="of the idle page")
    parser.add_argument("--browser", default="chromium")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="stepwell-bench-") as folder,
        contextlib.ExitStack() as s,
    ):
        place = Path(folder)
        port, page_port, tools = free_port(), free_port(), free_port()
        url, page = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{page_port}"
        serve = [sys.executable, "-m", "stepwell.cli", "serve", "--data", str(place / "data")]
        log = place / "service.log"
        service = s.enter_context(started([*serve, "--port", str(port)], ROOT, log))
        wait_for(f"{url}/readyz")
        with Client(url) as client:
            began = time.monotonic()
            fill(client, options.runs, options.keys)
            print(f"filled in {time.monotonic() - began:.0f} s", flush=True)
        dash = [sys.executable, "-m", "dashboard.main", "--port", str(page_port), "--url", url]
        streamlit = s.enter_context(started(dash, ROOT, place / "page.log"))
        wait_for(f"{page}/_stcore/health")
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,1400"]
        flags += [f"--remote-debugging-port={tools}", f"--user-data-dir={place / 'profile'}"]
        browser = s.enter_context(started([options.browser, *flags], ROOT, place / "b.log"))
        wait_for(f"http://127.0.0.1:{tools}/json")
        with urllib.request.urlopen(f"http://127.0.0.1:{tools}/json", timeout=10) as answer:
            (address,) = [
                p["webSocketDebuggerUrl"] for p in json.load(answer) if p["type"] == "page"
            ]
        tab = Tab(s.enter_context(connect(address, max_size=None)))
        rows = measure(tab, page, options.keys, options.repeats)
        tab.load(f"{page}/runs", 1)
        time.sleep(5.0)
        watched = {"streamlit": streamlit, "service": service, "browser": browser}
        before = {name: cpu(process) for name, process in watched.items()}
        time.sleep(options.seconds)
        share = 5.0 / options.seconds
        idle = {name: round((cpu(p) - before[name]) * share, 3) for name, p in watched.items()}
        print(idle, flush=True)
    size = {"runs": options.runs, "keys": options.keys, "repeats": options.repeats}
    load = round(os.getloadavg()[0], 1)
    print(write("dashboard_pages", {
        **size, "seconds": rows, "idle_cpu_seconds_per_5_s": idle, "load_after": load,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
