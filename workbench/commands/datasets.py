"""`stepwell datasets`: list, show, create, set-capacity, ratio, delete."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from stepwell import terminal
from stepwell._wording import pluralize
from stepwell.client import Client
from stepwell.errors import InvalidData, InvalidSpace
from stepwell.messages import Capacity, Consumer, Dataset, PartitionStats
from stepwell.spaces import EnvSpec, space_to_json

ABOUT = """\
List, show, create, limit and delete datasets.

A dataset holds trajectories of one layout (an EnvSpec) in two partitions: fifo, a replay buffer
whose oldest trajectories are evicted when it is full, and protected, which is never evicted."""
EXAMPLES = """\
  stepwell datasets list
  stepwell datasets show hopper
  stepwell datasets create my-data --spec spec.json --max-trajectories 10000
  stepwell datasets set-capacity my-data --max-steps 5000000
  stepwell datasets ratio my-data
  stepwell datasets ratio my-data my-run --samples-per-insert 2 --buffer 4000
  stepwell datasets delete my-data --yes"""


def main(argv: list[str] | None = None) -> int:
    parser = terminal.parser("datasets", ABOUT, EXAMPLES)
    actions = terminal.subcommands(parser)
    terminal.add_action(actions, "list", list_datasets, "all datasets")
    show = terminal.add_action(actions, "show", show_dataset, "one dataset: layout and numbers")
    create = terminal.add_action(actions, "create", create_dataset, "register a dataset")
    create.add_argument(
        "--spec",
        required=True,
        type=Path,
        help="JSON file with its EnvSpec (docs/reference/own_data.md)",
    )
    create.add_argument("--description", default="")
    create.add_argument("--exist-ok", action="store_true", help="no error if it exists")
    limit = terminal.add_action(
        actions,
        "set-capacity",
        set_capacity,
        "set the limits of the fifo partition (without options: no limit)",
    )
    ratio = terminal.add_action(
        actions,
        "ratio",
        ratios,
        "how much each trainer samples per inserted step, or change that of one",
    )
    delete = terminal.add_action(actions, "delete", delete_dataset, "remove a dataset")
    delete.add_argument("--yes", action="store_true", help="confirm")
    delete.add_argument("--protected", action="store_true",
        help="also its protected trajectories, such as imported ones")  # fmt: skip
    for sub in (show, create, limit, ratio, delete):
        sub.add_argument("name")
    ratio.add_argument("run", nargs="?", help="the trainer's run, to change its ratio")
    ratio.add_argument("--samples-per-insert", type=float, metavar="X", help="windows per step")
    ratio.add_argument("--updates-per-step", type=float, metavar="X",
        help="instead: updates per collected step, with the batch of the run")  # fmt: skip
    ratio.add_argument("--min-samples-per-insert", type=float, metavar="X",
        help="collectors wait only below this ratio; without it, for a run that has one, a new "
        "ratio replaces both")  # fmt: skip
    ratio.add_argument("--buffer", type=float, metavar="N", help="windows; at least max(1, X)")
    ratio.add_argument("--min-size", type=int, metavar="N", help="steps before the first window")
    for sub in (create, limit):
        for field in ("trajectories", "steps", "bytes"):
            sub.add_argument(f"--max-{field}", type=int, metavar="N")
    return terminal.dispatch(parser, argv)


def list_datasets(client: Client, _: argparse.Namespace) -> terminal.Answer:
    datasets = client.datasets()
    return datasets, lambda: terminal.print_table(
        [
            *("dataset", "env", "trajectories", "steps", "protected", "eval"),
            *("mean return", "size", "last"),
        ],
        [
            (
                d.name,
                d.spec.get("env", ""),
                d.fifo.trajectories + d.protected.trajectories,
                d.fifo.steps + d.protected.steps,
                d.protected.trajectories,
                d.eval.trajectories,
                d.return_mean,
                terminal.size(d.stored_bytes),
                terminal.ago(d.last_ingest_at),
            )
            for d in datasets
        ],
        empty="no datasets yet; make one with: stepwell import FILE --dataset NAME",
    )


def show_dataset(client: Client, args: argparse.Namespace) -> terminal.Answer:
    return _answer(client.dataset(args.name))


def create_dataset(client: Client, args: argparse.Namespace) -> terminal.Answer:
    try:
        spec = EnvSpec.from_json(json.loads(args.spec.read_text()))
    except OSError as error:
        raise InvalidData(f"cannot read {args.spec}: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise InvalidData(f"{args.spec} is not JSON: {error}") from None
    except InvalidSpace as error:
        raise InvalidData(f"{args.spec}: {error}") from None
    dataset = client.create_dataset(
        args.name,
        spec,
        capacity=_capacity(args),
        description=args.description,
        exist_ok=args.exist_ok,
    )
    return _answer(dataset)


def set_capacity(client: Client, args: argparse.Namespace) -> terminal.Answer:
    return _answer(client.patch_dataset(args.name, capacity=_capacity(args)))


def ratios(client: Client, args: argparse.Namespace) -> terminal.Answer:
    names = ("samples_per_insert", "min_samples_per_insert", "buffer", "min_size")
    changes = {name: value for name in names if (value := getattr(args, name)) is not None}
    if (changes or args.updates_per_step is not None) and not args.run:
        raise InvalidData(f"whose ratio? give the run: stepwell datasets ratio {args.name} RUN …")
    if args.updates_per_step is not None:
        if args.samples_per_insert is not None:
            raise InvalidData("--updates-per-step: set this or --samples-per-insert, not both")
        changes["samples_per_insert"] = args.updates_per_step * _batch(client, args.run)
    found = _consumers(client, args)
    if changes and found:
        if (ratio := changes.get("samples_per_insert")) and found[0].ratio.min_samples_per_insert:
            changes.setdefault("min_samples_per_insert", ratio)  # this ratio, and no range
        client.set_ratio(args.name, args.run, **changes)
        found = _consumers(client, args)
    if args.run and not found:
        raise InvalidData(
            f"run {args.run} keeps no ratio with {args.name}; a trainer does with "
            "--data.ratio.updates-per-step X"
        )
    return found, lambda: terminal.print_table(
        ["run", "samples per insert", "buffer", "min size", "samples", "inserted", "waits"],
        [
            (
                *(c.name, _range(c), c.ratio.buffer, c.ratio.min_size),
                *(c.samples, c.inserted, _who_waits(c)),
            )
            for c in found
        ],
        empty="no trainer keeps a ratio with this dataset",
    )


def _consumers(client: Client, args: argparse.Namespace) -> list[Consumer]:
    return [c for c in client.consumers(args.name) if args.run in (None, c.name)]


def _range(consumer: Consumer) -> str:
    low, high = consumer.ratio.least, consumer.ratio.samples_per_insert
    return f"{high:g}" if low == high else f"{low:g} … {high:g}"


def _batch(client: Client, run: str) -> int:
    """Windows per update of a run. Raises `InvalidData` if its config does not say it."""
    batch = client.run(run).config.get("data", {}).get("batch")
    if not isinstance(batch, int):
        raise InvalidData(
            f"--updates-per-step: the config of run {run} has no data.batch",
            expected="--samples-per-insert",
        )
    return batch


def _who_waits(consumer: Consumer) -> str:
    if not consumer.alive:
        return "nobody: the trainer does not report"
    if not consumer.may_insert:
        return "collectors"
    return "nobody" if consumer.may_sample else "the trainer"


def delete_dataset(client: Client, args: argparse.Namespace) -> terminal.Answer:
    if not args.yes:
        dataset = client.dataset(args.name)
        count = dataset.fifo.trajectories + dataset.protected.trajectories
        trajectories = pluralize(count, "trajectory", "trajectories")
        raise InvalidData(f"this removes {args.name} and its {trajectories}; add --yes to do it")
    client.delete_dataset(args.name, protected=args.protected)
    return {"removed": args.name}, lambda: print(f"removed {args.name}")


def _capacity(args: argparse.Namespace) -> Capacity:
    limits = {
        field: value
        for field in ("trajectories", "steps", "bytes")
        if (value := getattr(args, f"max_{field}")) is not None
    }
    if any(value < 1 for value in limits.values()):
        raise InvalidData("a limit is a positive number", got=str(limits))
    return Capacity(**limits)


def _answer(dataset: Dataset) -> terminal.Answer:
    spec = EnvSpec.from_json(dataset.spec)
    limits = dataset.capacity.model_dump(exclude_none=True)
    spaces = [
        *((f"obs {k} ({spec.role(k)})", s) for k, s in spec.observations.items()),
        *((f"action {k}", s) for k, s in spec.actions.items()),
        *((f"info {k}", s) for k, s in spec.infos.items()),
    ]
    return dataset, lambda: terminal.print_fields(
        [
            ("name", dataset.name),
            ("env", spec.env),
            ("description", dataset.description),
            ("tags", dataset.tags),
            *((name, _space(space_to_json(space))) for name, space in spaces),
            ("fifo", _stats(dataset.fifo)),
            ("fifo limits", ", ".join(f"{k} ≤ {v}" for k, v in limits.items()) or "none"),
            ("protected", _stats(dataset.protected)),
            ("eval", _stats(dataset.eval)),
            ("evicted", dataset.evicted),
            ("not yet sealed", dataset.unsealed),
            ("shards", f"{dataset.shards} ({terminal.size(dataset.stored_bytes)})"),
            (
                "return",
                "-"
                if dataset.return_mean is None
                else f"mean {dataset.return_mean:.6g}, "
                f"{dataset.return_min:.6g} … {dataset.return_max:.6g}",
            ),
            ("mean length", dataset.length_mean),
            ("last trajectory", terminal.ago(dataset.last_ingest_at)),
        ]
    )


def _space(data: dict[str, object]) -> str:
    kind = data.pop("type")
    return f"{kind} " + " ".join(f"{k}={v}" for k, v in data.items())


def _stats(stats: PartitionStats) -> str:
    trajectories = pluralize(stats.trajectories, "trajectory", "trajectories")
    return f"{trajectories}, {pluralize(stats.steps, 'step')}, {terminal.size(stats.bytes)}"
