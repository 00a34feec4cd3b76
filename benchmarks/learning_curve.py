"""Learning curves on the demo's data: Stepwell's recipe, AMAGO's published formulas, BC.

    python -m benchmarks.learning_curve [--seeds 0 1 2] [--episodes 20] [--draw-only]

Starts a service and imports pendulum-stitch. Trains each method with each seed by `stepwell train`
and evaluates each published policy by `stepwell evaluate`, always with the same evaluation seeds.
The scores are queried with SQL. All methods have the same data, network, learning rate and number
of updates. "AMAGO" is Stepwell's agent with the recipe published_v3, which sets every configurable
formula as published (docs/reference/parity.md); AMAGO's own code is not run. Writes
benchmarks/results/learning_curve.json and docs/images/learning_curve.svg.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import altair as alt

from benchmarks.report import RESULTS, ROOT, write
from stepwell import Client
from stepwell._ports import free_port

PICTURE = ROOT / "docs" / "images" / "learning_curve.svg"
UPDATES, EVERY = 1500, 150
SAME = """
--agent.timestep-encoder.d-hidden 64 --agent.timestep-encoder.d-output 64
--agent.timestep-encoder.hide-previous
--agent.trajectory-encoder.kind feed_forward --agent.trajectory-encoder.d-model 64
--agent.actor.d-hidden 128 --agent.critic.d-hidden 128
--agent.losses.gamma 0.98 --agent.losses.auxiliary-gammas --agent.losses.reward-multiplier 0.1
--data.batch 32 --data.window 32 --data.padding right
--optimizer.learning-rate 1e-3 --optimizer.warmup 100 --optimizer.decay cosine
""".split()
"""Settings of pendulum_stitch besides the method: network, discount, windows, learning rate."""
METHODS = {
    "Stepwell": ["pendulum_stitch", "--updates", str(UPDATES)],
    "AMAGO, published formulas": ["published_v3", "--updates", str(UPDATES), *SAME],
    "behaviour cloning": ["bc", "--derive", "off", "--updates", str(UPDATES)],
}
FIRST_SEED = 900_000  # reset seed of the first evaluation episode; not used by the data
QUERY = """
select policy, avg("return") from trajectories where purpose = 'eval' group by policy
"""


def measure(seeds: list[int], episodes: int, keep: Path | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="stepwell-bench-") as temporary:
        folder = (keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        url = f"http://127.0.0.1:{free_port()}"
        environment = {**os.environ, "STEPWELL_URL": url, "STEPWELL_OUTBOX": str(folder / "outbox")}

        def stepwell(*words: str) -> None:
            command = [sys.executable, "-m", "stepwell.cli", *words]
            subprocess.run(command, check=True, env=environment, cwd=folder)

        serve = [sys.executable, "-m", "stepwell.cli", "serve", "--data", str(folder / "data")]
        port = url.rpartition(":")[2]
        service = subprocess.Popen([*serve, "--port", port], env=environment, cwd=folder)
        try:
            client = Client(url)
            client.wait_ready()
            data = folder / "pendulum.hdf5"
            generate = [sys.executable, "-m", "collector.builtin", "pendulum-stitch", str(data)]
            subprocess.run(generate, check=True)
            client.upload("pendulum", data, format="d4rl", env="Pendulum-v1")
            curves: dict[str, dict[str, Any]] = {}
            for method, words in METHODS.items():
                for seed in seeds:
                    run = f"{method.split(',')[0].replace(' ', '-').lower()}-{seed}"
                    stepwell(
                        "train", *words, "--run", run, "--dataset", "pendulum", "--seed", str(seed),
                        "--schedule.publish-every", str(EVERY),
                    )  # fmt: skip
                    policies = {f"{run}/{p.version}": p.step for p in client.policies(run)}
                    for policy in policies:
                        stepwell(
                            "evaluate", "--policy", policy, "--env", "Pendulum-v1",
                            "--episodes", str(episodes), "--seeds", str(FIRST_SEED),
                        )  # fmt: skip
                    scores = dict(client.sql(QUERY).rows)
                    curve = sorted((policies[p], round(scores[p], 1)) for p in policies)
                    curves.setdefault(method, {})[str(seed)] = curve
            mean = client.sql("select avg(\"return\") from trajectories where purpose = 'train'")
            return {"episodes": episodes, "data_mean": mean.one(), "curves": curves}
        finally:
            service.terminate()
            service.wait()


def draw(result: dict[str, Any], path: Path = PICTURE) -> None:
    """Draw a line per method, the mean over training seeds, with a band from their lowest to
    their highest."""
    rows = [
        {"method": method, "seed": seed, "update": update, "mean return": score}
        for method, seeds in result["curves"].items()
        for seed, curve in seeds.items()
        for update, score in curve
    ]
    base = alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X("update:Q"),
        color=alt.Color(
            "method:N", sort=list(METHODS), legend=alt.Legend(title=None, orient="bottom")
        ),
    )
    band = base.mark_area(opacity=0.2).encode(
        y=alt.Y("min(mean return):Q", title="mean return"), y2="max(mean return):Q"
    )
    line = base.mark_line(point=True).encode(y="mean(mean return):Q")
    data = alt.Chart(alt.Data(values=[{"y": result["data_mean"], "label": "mean of the data"}]))
    rule = data.mark_rule(strokeDash=[4, 4], color="gray").encode(y="y:Q")
    label = data.mark_text(align="left", dx=4, dy=-6, color="gray").encode(
        y="y:Q", x=alt.value(0), text="label:N"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    (band + line + rule + label).properties(width=520, height=260).save(str(path))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--data", type=Path, help="folder for the service's data, which is kept")
    parser.add_argument("--draw-only", action="store_true", help="draw the stored result")
    args = parser.parse_args()
    if not args.draw_only:
        write("learning_curve", measure(args.seeds, args.episodes, args.data))
    draw(json.loads((RESULTS / "learning_curve.json").read_text()))
    print(f"wrote {PICTURE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
