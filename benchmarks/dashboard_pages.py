"""Seconds until pages of the dashboard are drawn, over a service with much in it.

    python -m benchmarks.dashboard_pages [--runs 1000] [--keys 300] [--trajectories 100000]

A service is filled with runs of many metrics, trajectories, policies and their evaluations, and
left alone until it has nothing to do. A headless Chromium (`--browser`) opens each page (`load`: a
new document, with Streamlit's own scripts in the browser's cache) and changes what a person changes
(`click`). A page is drawn when its script has ended, and all the charts and tables are there that
it had at a first visit, after a rest. Then the CPU seconds per five seconds are measured while
nobody does anything. Writes benchmarks/results/dashboard_pages.json.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from playwright.sync_api import Page, sync_playwright

from benchmarks.dashboard import cpu, key, points, started, wait_for
from benchmarks.report import ROOT, write
from stepwell import Client
from stepwell._ports import free_port
from stepwell.spaces import DEFAULT_ACTION, DEFAULT_OBSERVATION, Box, EnvSpec
from stepwell.trajectory import Trajectory, TrajectoryMetadata

LONG, SHORT = 500, 4
"""Points of each metric of the newest runs, which are drawn, and of all others."""
DRAWN = 5
STEPS, BATCH = 10, 1000
"""Steps of a trajectory, and trajectories of one request."""
EVALUATED = 100
"""Runs with a policy that was evaluated in two environments."""
DEADLINE = 60.0
REST = 3.0
WATCH = """
window.drawnParts = () => {
  const count = (what) => document.querySelectorAll(what).length;
  const app = document.querySelector('[data-testid="stApp"]');
  if (!app || app.dataset.testScriptState !== 'notRunning') return -1;
  if (!count('h1') || count('[data-testid="stSkeleton"]')) return -1;
  if (count('[data-testid="stException"]')) throw new Error('a traceback');
  return count('[data-testid="stVegaLiteChart"] svg.marks') + count('[data-testid="stDataFrame"]');
};
let clicked = 0, since = null;
addEventListener('pointerdown', () => { clicked = performance.now(); since = null; }, true);
window.drawnAt = (parts, ready) => {
  if (window.drawnParts() < parts || !ready()) since = null;
  else since ??= performance.now();
  return since !== null && performance.now() - since > 300 && (since - clicked) / 1000;
};
"""
"""In each document: seconds from its navigation, or from the last click, until all is drawn and
stays so for 0.3 s. Looked at before each frame: asking from outside would cost the page more."""
PATHS = {
    "Overview": "/",
    "Datasets": "/datasets",
    "Trajectories": "/trajectories",
    "Trajectories, filtered": "/trajectories?dataset=many&where=length>5&order=best+return",
    "Trajectories, an episode": "/trajectories?dataset=many&id={trajectory}",
    "Doctor": "/doctor",
    "SQL": "/sql",
    "SQL, an answer": "/sql?q=SELECT+*+FROM+trajectories",
    "Lineage": "/lineage",
    "Lineage of a dataset": "/lineage?node=dataset:many",
    "Start": "/start",
    "Runs": "/runs",
    "Runs with columns": f"/runs?metrics={key(0)}&metrics={key(7)}&settings=agent.lr",
    "Runs folded by a setting": "/runs?group=agent.lr",
    "Runs on Config": "/runs?part=Config",
    "Runs on Details": "/runs?part=Details",
    "Evaluation": "/evaluation",
    "Evaluation, one environment": "/evaluation?env=Some-v0",
    "Workers": "/workers",
    "Admin": "/admin",
}
TAB = "() => document.querySelector('[role=tab][aria-selected=true]').textContent.trim() === {!r}"


Act = Callable[[Page], None]


def press(role: str, name: str) -> Act:
    return lambda page: page.get_by_role(role, name=name).first.click()  # type: ignore[arg-type]


def choose(option: str) -> Act:
    """Of the menu that is open."""
    return lambda page: page.get_by_role("option", name=option, exact=True).first.click()


def tab(name: str) -> tuple[str, Act, Act, str]:
    return "/runs?part=Details", lambda _: None, press("tab", name), TAB.format(name)


def menu(path: str, label: str, option: str, then: str) -> tuple[str, Act, Act, str]:
    changed = f"() => location.search.includes('{then}')"
    return path, press("combobox", label), choose(option), changed


CLICKS = {
    "Runs, tab Config": tab("Config"),
    "Runs, tab Curves": tab("Curves"),
    "Trajectories, another order": menu(
        "/trajectories?dataset=many", "Order", "best return", "order="
    ),
    "Trajectories, another dataset": menu("/trajectories", "Dataset", "many", "dataset=many"),
    "Evaluation, an environment": menu("/evaluation", "Environment", "Some-v0", "Some-v0"),
}
"""Name → page, what is done before, the click, and what is true afterwards."""


def fill(client: Client, runs: int, keys: int, trajectories: int) -> str:
    """Returns the id of a trajectory."""
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
        if number >= runs - EVALUATED:
            client.publish_policy(name, 1, b"a policy", step=1)
            for env in ("Some-v0", "Other-v0"):
                returns = [float(number % 7), float(number % 5), 3.0, 4.0]
                mean = sum(returns) / 4
                client.create_evaluation(
                    run=name, policy=f"{name}/1", env=env, seeds=[0, 1, 2, 3], returns=returns,
                    mean=mean, iqm=mean, ci_low=mean - 1, ci_high=mean + 1, dataset="many",
                )  # fmt: skip
    spec = EnvSpec.of(Box((3,), "float32"), Box((1,), "float32", -1.0, 1.0), env="Some-v0")
    client.create_dataset("many", spec)
    rng = np.random.default_rng(0)
    made: list[Trajectory] = []
    for number in range(trajectories):
        made.append(
            Trajectory(
                obs={DEFAULT_OBSERVATION: rng.normal(size=(STEPS + 1, 3)).astype(np.float32)},
                actions={DEFAULT_ACTION: rng.uniform(-1, 1, (STEPS, 1)).astype(np.float32)},
                rewards=rng.normal(size=STEPS).astype(np.float32),
                truncated=True,
                metadata=TrajectoryMetadata(
                    env="Some-v0", policy=f"run-{runs - 1 - number % DRAWN:04d}/1"
                ),
            )
        )
        if len(made) == BATCH or number == trajectories - 1:
            client.post("many", made, spec=spec, partition="protected")
            last, made = made[-1].id, []
    client.flush("many")
    return last


def drawn(page: Page, parts: int, ready: str = "() => true") -> float:
    """Seconds until the page is drawn, with at least that many charts and tables, and `ready`."""
    expression = f"window.drawnAt({parts}, {ready})"
    return float(page.wait_for_function(expression, polling="raf").json_value())


def load(page: Page, url: str, parts: int) -> float:
    page.goto("about:blank")
    page.goto(url, wait_until="commit")
    return drawn(page, parts)


def rested(page: Page) -> int:
    """How many charts and tables are there in the end."""
    time.sleep(REST)
    return max(0, int(page.evaluate("window.drawnParts()")))


def measure(page: Page, address: str, trajectory: str, repeats: int) -> Iterator[dict[str, Any]]:
    for name, path in PATHS.items():
        url = address + path.format(trajectory=trajectory)
        load(page, url, 0)
        parts = rested(page)
        yield row(name, "load", parts, [load(page, url, parts) for _ in range(repeats)])
    for name, (path, before, click, ready) in CLICKS.items():
        seconds, parts = [], 0
        for number in range(repeats + 1):  # the first one only counts what there is
            load(page, address + path, 0)
            rested(page)
            before(page)
            time.sleep(0.5)
            click(page)
            seconds.append(drawn(page, parts, ready))
            if number == 0:
                parts = rested(page)
        yield row(name, "click", parts, seconds[1:])


def row(page: str, what: str, parts: int, seconds: list[float]) -> dict[str, Any]:
    middle, longest = round(statistics.median(seconds), 2), round(max(seconds), 2)
    return {"page": page, "what": what, "parts": parts, "median": middle, "longest": longest}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--keys", type=int, default=300)
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each idle page")
    parser.add_argument("--browser", default="chromium")
    parser.add_argument("--pictures", type=Path, help="folder for a picture of each page")
    options = parser.parse_args()
    path = shutil.which(options.browser)
    if path is None:
        parser.error(f"no browser {options.browser}; Debian has it as the package chromium")
    with (
        tempfile.TemporaryDirectory(prefix="stepwell-bench-") as folder,
        contextlib.ExitStack() as s,
    ):
        place = Path(folder)
        port, page_port = free_port(), free_port()
        url, address = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{page_port}"
        serve = [sys.executable, "-m", "stepwell.cli", "serve", "--data", str(place / "data")]
        log = place / "service.log"
        service = s.enter_context(started([*serve, "--port", str(port)], ROOT, log))
        wait_for(f"{url}/readyz")
        with Client(url) as client:
            began = time.monotonic()
            trajectory = fill(client, options.runs, options.keys, options.trajectories)
            print(f"filled in {time.monotonic() - began:.0f} s", flush=True)
        print(f"its own work took {at_rest(service):.0f} s more", flush=True)
        dash = [sys.executable, "-m", "dashboard.main", "--port", str(page_port), "--url", url]
        streamlit = s.enter_context(started(dash, ROOT, place / "page.log"))
        wait_for(f"{address}/_stcore/health")
        chromium = s.enter_context(sync_playwright()).chromium
        browser = chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        s.callback(browser.close)
        page = browser.new_context(viewport={"width": 1400, "height": 1400}).new_page()
        page.set_default_timeout(DEADLINE * 1000)
        page.add_init_script(WATCH)
        rows = []
        for found in measure(page, address, trajectory, options.repeats):
            print(found, flush=True)
            rows.append(found)
            if options.pictures:
                options.pictures.mkdir(parents=True, exist_ok=True)
                page.screenshot(path=options.pictures / f"{found['page']}.png".replace(" ", "-"))
        me = psutil.Process()
        watched = {
            "streamlit": [streamlit],
            "service": [service],
            "browser": [p for p in me.children(recursive=True) if "chrom" in p.name()],
        }
        idle = {}
        for name in ("Runs", "Trajectories"):
            load(page, address + PATHS[name], 1)
            time.sleep(5.0)
            before = {what: sum(map(own, some)) for what, some in watched.items()}
            time.sleep(options.seconds)
            idle[name] = {
                what: round((sum(map(own, some)) - before[what]) * 5.0 / options.seconds, 3)
                for what, some in watched.items()
            }
            print(name, idle[name], flush=True)
    size = {k: getattr(options, k) for k in ("runs", "keys", "trajectories", "repeats")}
    load_after = round(os.getloadavg()[0], 1)
    print(write("dashboard_pages", {
        **size, "seconds": rows, "idle_cpu_seconds_per_5_s": idle, "load_after": load_after,
    }))  # fmt: skip


def at_rest(process: psutil.Process) -> float:
    """Wait until the service has compacted what it was given; returns the seconds that took."""
    began, used = time.monotonic(), cpu(process)
    while time.monotonic() - began < DEADLINE * 5:
        time.sleep(REST)
        before, used = used, cpu(process)
        if used - before < REST / 20:
            break
    return time.monotonic() - began


def own(process: psutil.Process) -> float:
    """CPU seconds of one process."""
    with contextlib.suppress(psutil.NoSuchProcess):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


if __name__ == "__main__":
    main()
