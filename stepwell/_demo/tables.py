"""What the demo shows at its end: SQL, the table of scores, and the same as JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from stepwell._demo.options import Options
from stepwell.client import Client
from stepwell.intervals import Interval


def show_sql(client: Client, dataset: str, console: Console) -> None:
    sql = """select partition, purpose, policy, count(*) as trajectories, sum(length) as steps,
       round(avg("return"), 1) as mean_return
from trajectories where dataset = $dataset
group by all order by trajectories desc limit 12"""
    result = client.sql(sql, {"dataset": dataset}, timeout=30)
    table = Table(title=f"SQL, answered in {result.elapsed_ms:.0f} ms")
    for column in result.columns:
        table.add_column(column)
    for row in result.rows:
        table.add_row(*["" if value is None else str(value) for value in row])
    console.print(sql, style="dim", highlight=False)
    console.print(table)


def table_of(options: Options, scores: dict[str, Interval], elapsed: float) -> Table:
    table = Table(
        title=f"{options.env}: mean return, {options.episodes} fixed evaluation seeds, "
        f"95% bootstrap interval"
    )
    table.add_column("who")
    table.add_column("mean return", justify="right")
    table.add_column("interval", justify="right")
    table.add_column("episodes", justify="right")
    for label, score in scores.items():
        style = "bold green" if label == "our agent" else ""
        table.add_row(
            label,
            f"{score.value:.1f}",
            f"{score.low:.1f} … {score.high:.1f}",
            str(score.n),
            style=style,
        )
    table.caption = f"training seed {options.seed}; {elapsed:.0f} s"
    return table


def report(options: Options, scores: dict[str, Interval], elapsed: float) -> dict[str, Any]:
    return {
        "env": options.env,
        "recipe": options.recipe,
        "seed": options.seed,
        "seconds": round(elapsed, 1),
        "scores": {
            label: {"mean": s.value, "low": s.low, "high": s.high, "n": s.n}
            for label, s in scores.items()
        },
    }
