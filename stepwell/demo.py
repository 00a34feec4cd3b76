"""`stepwell demo`: the platform's main job, end to end, on this machine.

It starts processes and talks HTTP, nothing else: service, dashboard, three trainers, a collector,
an evaluator, each the command that a person would type. What they print goes to DIR/logs/.

    generate (or --dataset) → upload → train learn-only ×3 → evaluate → collect → SQL → table
"""

from __future__ import annotations

import json
import signal
import sys
import time

from rich.console import Console

from stepwell._demo.acts import (
    FIRST_EVALUATION_SEED,
    data_mean,
    evaluate,
    free_prefix,
    generate,
    progress_bars,
    train,
    upload,
    wait_collector,
)
from stepwell._demo.options import EVALUATION_SEEDS, GENERATORS, RECIPES, Options, parse
from stepwell._demo.processes import DemoError, Processes, environment, free_port
from stepwell._demo.tables import report, show_sql, table_of
from stepwell.client import Client
from stepwell.errors import StepwellError
from stepwell.intervals import Interval

__all__ = [
    "EVALUATION_SEEDS",
    "FIRST_EVALUATION_SEED",
    "GENERATORS",
    "RECIPES",
    "DemoError",
    "Options",
    "Processes",
    "main",
]


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    console = Console()
    options.data.mkdir(parents=True, exist_ok=True)
    logs = options.data / "logs"
    logs.mkdir(exist_ok=True)
    processes = Processes(logs, environment())
    # SIGTERM takes the same way out as Ctrl-C.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, processes.interrupt)
    try:
        return _run(options, processes, console)
    except KeyboardInterrupt:
        console.print("\nstopping …")
        return 130
    except StepwellError as error:
        console.print(f"[red]the demo failed:[/] {error}", markup=True, highlight=False)
        return 1
    finally:
        # A second Ctrl-C must not leave a child behind.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        processes.stop_all()


def _run(options: Options, processes: Processes, console: Console) -> int:
    began = time.monotonic()
    me = [sys.executable, "-m", "stepwell.cli"]

    # --- act one: a service, a dashboard, a dataset ------------------------------------------
    port = free_port(options.port)
    url = f"http://127.0.0.1:{port}"
    processes.env["STEPWELL_URL"] = url
    console.print(f"[bold]stepwell demo[/] on {options.env}; everything lies in {options.data}")
    processes.start(
        "service", *me, "serve", "--data", str(options.data / "data"), "--port", str(port)
    )
    dashboard_url = None
    if options.dashboard:
        dashboard_port = free_port()
        dashboard_url = f"http://127.0.0.1:{dashboard_port}"
        processes.start("dashboard", *me, "dash", "--port", str(dashboard_port))
    with Client(url) as client, progress_bars(console) as progress:
        client.wait_ready(60)
        path = options.dataset or generate(options, processes, progress)
        dataset = upload(client, path, options.env, progress)

        # --- act two: three learners that never see an environment; one collector that waits ---
        prefix = free_prefix(client)
        agent = f"{prefix}-agent"
        processes.start(
            "collector",
            *(*me, "collect", "--env", options.env, "--dataset", dataset, "--policy", agent),
            *("--wait-for-policy", "--episodes", str(options.collect_episodes), "--envs", "2"),
            *("--run", f"{prefix}-collect", "--seed", str(100_000 + options.seed)),
            *("--outbox", str(options.data / "outbox")),
        )
        runs = {
            "behaviour cloning": (f"{prefix}-bc", "bc"),
            "10% BC": (f"{prefix}-bc10", "bc10"),
            "our agent": (agent, options.recipe),
        }
        for label, (run, recipe) in runs.items():
            train(client, options, processes, progress, label, run, recipe, dataset)

        # --- act three: fixed seeds, greedy; the scores are trajectories in the dataset --------
        scores: dict[str, Interval] = {"data mean": data_mean(client, dataset)}
        for label, (run, _) in runs.items():
            scores[label] = evaluate(client, options, processes, progress, label, run, dataset)
        wait_collector(processes, progress)
        processes.check()

        # --- the end: what SQL says, and the table --------------------------------------------
        show_sql(client, dataset, console)
    elapsed = time.monotonic() - began
    console.print(table_of(options, scores, elapsed))
    if options.json:
        options.json.write_text(json.dumps(report(options, scores, elapsed), indent=2))
    if not options.stay:
        console.print(
            f"Look around in it: stepwell serve --data {options.data / 'data'}, then stepwell dash"
        )
        return 0
    console.print(f"service    {url}    (its data: {options.data / 'data'})")
    if dashboard_url:
        console.print(f"dashboard  {dashboard_url}")
    console.print("Ctrl-C stops everything.")
    while True:
        processes.check()
        time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main())
