"""`stepwell lineage`: what data and policies were made from, and what was made from them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pyarrow.parquet as pq
from pyarrow import csv

from stepwell import terminal
from stepwell._files import whole_file
from stepwell._wording import pluralize
from stepwell.client import Client
from stepwell.errors import InvalidData, NotFound
from stepwell.messages import TrajectoryInfo
from workbench.analysis.lineage import Lineage, learned_from, read_lineage, runs_that_saw

ABOUT = """\
What a dataset, run, policy or trajectory was made from, and what was made from it.

A run learns from datasets and publishes policies; policies play trajectories into datasets."""
EXAMPLES = """\
  stepwell lineage hopper
  stepwell lineage first:500
  stepwell lineage --run first
  stepwell lineage 0198c0de-…
  stepwell lineage first --trajectories seen.parquet
  stepwell lineage hopper --dot | dot -Tsvg > hopper.svg"""


def main(argv: list[str] | None = None) -> int:
    parser = terminal.parser("lineage", ABOUT, EXAMPLES)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("name", nargs="?", help="a dataset, run, RUN:VERSION or id of a trajectory")
    what.add_argument("--dataset", metavar="NAME", help="where a run has the name, too")
    what.add_argument("--run", metavar="NAME", help="where a dataset has the name, too")
    what.add_argument("--policy", metavar="RUN:VERSION")
    parser.add_argument("--dot", action="store_true", help="print a graph for Graphviz")
    parser.add_argument("--trajectories", type=Path, metavar="FILE",
        help="of a run: write all trajectories of its snapshots, as .parquet or .csv")  # fmt: skip
    terminal.add_connection(parser)
    args = parser.parse_args(argv)
    given = args.name or args.dataset or args.run or args.policy
    name = ("dataset:" if args.dataset else "run:" if args.run else "") + given
    with terminal.connect(args) as client:
        if args.trajectories is not None:
            return _write_trajectories(client, given.removeprefix("run:"), args.trajectories)
        whole = read_lineage(client)
        key = _key(whole, name)
        if key is None:
            info = _trajectory(client, name)
            if not (args.dot or args.json):
                made = info.policy or info.collector or info.source or "unknown"
                print(f"trajectory {info.id} of {info.dataset}, made by {terminal.printable(made)}")
                print(f"  run {info.run or '–'}, env {info.env or '–'}, seed {info.seed}")
                saw = runs_that_saw(client, info.id)
                print(f"  in the data of: {terminal.printable(', '.join(saw)) or 'no run'}\n")
            key = _key(whole, info.policy) or f"dataset:{info.dataset}"
    found = whole.around(key)
    if args.dot:
        print(found.dot())
    elif args.json:
        terminal.print_json(
            {
                "nodes": [dataclasses.asdict(node) for node in found.nodes.values()],
                "edges": [dataclasses.asdict(edge) for edge in found.edges],
            }
        )
    else:
        _print(found, key)
    return 0


def _write_trajectories(client: Client, name: str, path: Path) -> int:
    writers = {".parquet": pq.write_table, ".csv": csv.write_csv}
    if path.suffix not in writers:
        raise InvalidData("--trajectories", expected="a .parquet or .csv file", got=str(path))
    # A policy's run, too; what came after the policy is among them.
    table = learned_from(client, name.replace(":", "/").partition("/")[0])
    with whole_file(path) as file:
        writers[path.suffix](table, file)
    print(f"{pluralize(len(table), 'trajectory', 'trajectories')} → {path}")
    return 0


def _trajectory(client: Client, name: str) -> TrajectoryInfo:
    try:
        return client.trajectory(name)
    except NotFound:
        raise InvalidData(
            "lineage", expected="a dataset, run, RUN:VERSION or id of a trajectory", got=name
        ) from None


def _key(whole: Lineage, name: str) -> str | None:
    if name in whole.nodes:
        return name
    run = name.replace(":", "/").rpartition("/")[0]
    keys = (f"dataset:{name}", f"run:{name}", f"run:{run}")
    known = [key for key in keys if key in whole.nodes]
    if len(known) > 1:
        raise InvalidData(
            "lineage: two things have this name", expected=" or ".join(known), got=name
        )
    return known[0] if known else None


def _print(found: Lineage, key: str) -> None:
    rows = [
        (_said(found, edge.of), edge.how, _said(found, edge.made))
        for edge in sorted(found.edges, key=lambda e: (e.made != key, e.of != key, e.of))
    ]
    terminal.print_table(["from", "how", "to"], rows, empty=f"{key}: nothing else is known")


def _said(found: Lineage, key: str) -> str:
    node = found.nodes[key]
    return f"{node.kind} {node.label} ({node.about})"
