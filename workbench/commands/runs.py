"""`stepwell runs`: list, show, title, metrics, log, policies, export, delete."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

from stepwell import terminal
from stepwell.client import Client
from stepwell.errors import InvalidData
from stepwell.messages import Series
from workbench.commands import runs_export

MOST_COLUMNS = 6

ABOUT = """\
List and show runs, with their metrics, logs and policies; copy them to other tools.

A run is one execution of a trainer, collector or evaluation, addressed by its name everywhere. The
name never changes, because trajectories, policies and evaluations refer to it; its title can."""
EXAMPLES = """\
  stepwell runs list --kind train
  stepwell runs list --where "agent.discount = 0.99 and eval/return > 200"
  stepwell runs show demo
  stepwell runs title demo "Larger batches, first try"
  stepwell runs metrics demo --keys loss/total,value/q_mean
  stepwell runs log demo | tail
  stepwell runs export demo --to tensorboard:tb
  stepwell runs export demo --to wandb:my-project --follow"""


def main(argv: list[str] | None = None) -> int:
    parser = terminal.parser("runs", ABOUT, EXAMPLES)
    actions = terminal.subcommands(parser)
    listing = terminal.add_action(actions, "list", list_runs, "all runs, newest first")
    listing.add_argument("--kind", choices=("train", "collect", "eval"))
    listing.add_argument("--status", choices=("running", "finished", "failed", "stopped"))
    listing.add_argument(
        "--where", help='settings and metrics: "agent.discount = 0.99 and eval/return > 200"'
    )
    show = terminal.add_action(actions, "show", show_run, "one run: state, config, newest metrics")
    title = terminal.add_action(actions, "title", title_run, "set what is shown beside its name")
    metrics = terminal.add_action(actions, "metrics", show_metrics, "its metrics over time")
    metrics.add_argument("--keys", help="comma-separated; default: all")
    metrics.add_argument("--points", type=int, default=500, help="per series (default 500)")
    log = terminal.add_action(actions, "log", show_log, "its log")
    policies = terminal.add_action(actions, "policies", list_policies, "policies it has published")
    export = terminal.add_action(
        actions,
        "export",
        runs_export.export_runs,
        "copy runs to TensorBoard, W&B or MLflow; a repeat copies what is new",
    )
    runs_export.add_options(export)
    delete = terminal.add_action(
        actions, "delete", delete_run, "delete a run with its metrics and policies"
    )
    delete.add_argument("--yes", action="store_true", help="really")
    for sub in (show, title, metrics, log, policies, delete):
        sub.add_argument("name")
    title.add_argument("title", help='one line of at most 200 characters; "" takes the title back')
    return terminal.dispatch(parser, argv)


def list_runs(client: Client, args: argparse.Namespace) -> terminal.Answer:
    runs = client.runs(args.kind, args.status, where=args.where)
    titled = ["title"] if any(r.title for r in runs) else []
    return runs, lambda: terminal.print_table(
        [
            "run",
            *titled,
            "kind",
            "status",
            "alarms",
            "policies",
            "host",
            "started",
            "heartbeat",
            "tags",
        ],
        [
            (
                r.name,
                *([r.title or ""] if titled else []),
                r.kind,
                "finished, with errors" if r.status == "finished" and r.error else r.status,
                r.alarm_summary,
                r.policies,
                r.host,
                terminal.ago(r.created_at),
                terminal.ago(r.heartbeat_at),
                r.tags,
            )
            for r in runs
        ],
        empty="no runs yet",
    )


def show_run(client: Client, args: argparse.Namespace) -> terminal.Answer:
    run = client.run(args.name)
    fields = run.model_dump()
    config, latest, _ = fields.pop("config"), fields.pop("latest"), fields.pop("alarms")
    for moment in ("created_at", "heartbeat_at", "finished_at"):
        fields[moment] = terminal.ago(fields[moment])
    alarms = [(f"alarm {a.key}", f"{a.message} (since update {a.update})") for a in run.alarms]
    newest = [(f"latest {key}", value) for key, value in sorted(latest.items())]
    return run, lambda: terminal.print_fields([*fields.items(), *alarms, *_config(config), *newest])


def _config(config: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the settings; if their origins are known (trainers), only those not at default."""
    origins = config.get("origins")
    if not isinstance(origins, dict):
        return [("config", json.dumps(config, sort_keys=True))]
    rows = []
    for key, origin in sorted(origins.items()):
        if origin != "default":
            value: Any = config
            for part in key.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            rows.append((f"config {key}", f"{json.dumps(value)}  ({origin})"))
    return rows


def title_run(client: Client, args: argparse.Namespace) -> terminal.Answer:
    run = client.patch_run(args.name, title=args.title)
    return run, lambda: print(f"{run.name}: {run.title or 'no title'}")


def show_metrics(client: Client, args: argparse.Namespace) -> terminal.Answer:
    keys = [key for key in args.keys.split(",") if key] if args.keys else None
    series = client.metrics(args.name, keys, args.points)
    if keys is None and len(series) > MOST_COLUMNS:
        return series, lambda: _summary(args.name, series)
    steps = sorted({step for s in series.values() for step in s.steps})
    columns = {key: dict(zip(s.steps, s.values, strict=True)) for key, s in series.items()}
    return series, lambda: terminal.print_table(
        ["step", *columns],
        [(step, *(values.get(step) for values in columns.values())) for step in steps],
        empty="no metrics yet",
    )


def _summary(name: str, series: Mapping[str, Series]) -> None:
    """Print a line per series, for more series than fit side by side in a terminal."""
    terminal.print_table(
        ["key", "points", "first", "last", "lowest", "highest"],
        [
            (
                key,
                len(s.values),
                *((s.values[0], s.values[-1]) if s.values else (None, None)),
                min((v for v in s.values if v is not None), default=None),
                max((v for v in s.values if v is not None), default=None),
            )
            for key, s in sorted(series.items())
        ],
    )
    print(f"over time: stepwell runs metrics {name} --keys {','.join(sorted(series)[:2])}")


def show_log(client: Client, args: argparse.Namespace) -> terminal.Answer:
    text = client.run_log(args.name)
    if not text:
        print("stepwell: this run has sent no log lines", file=sys.stderr)
    lines = [terminal.printable(line) + "\n" for line in text.splitlines()]
    return {"run": args.name, "log": text}, lambda: sys.stdout.writelines(lines)


def list_policies(client: Client, args: argparse.Namespace) -> terminal.Answer:
    policies = client.policies(args.name)
    return policies, lambda: terminal.print_table(
        ["version", "step", "aliases", "size", "published", "sha256"],
        [
            (
                p.version,
                p.step,
                p.aliases,
                terminal.size(p.bytes),
                terminal.ago(p.created_at),
                p.sha256[:12],
            )
            for p in policies
        ],
        empty="no policies yet",
    )


def delete_run(client: Client, args: argparse.Namespace) -> terminal.Answer:
    if not args.yes:
        raise InvalidData(
            f"this deletes run {args.name} with its metrics and policies; confirm with --yes"
        )
    client.delete_run(args.name)
    return {"removed": args.name}, lambda: print(f"removed {args.name}")
