"""`stepwell versions`: list, show, create, diff, delete."""

from __future__ import annotations

import argparse

from stepwell import terminal
from stepwell._wording import pluralize
from stepwell.client import Client
from stepwell.errors import InvalidData
from stepwell.messages import Spread, Version, VersionPart, split_version
from stepwell.version_card import card

ABOUT = """\
List, show, create, compare and delete versions of datasets.

A version is a named selection of a dataset's trajectories that never changes: DATASET@VERSION can
be cited, trained on and exported, and means the same trajectories for ever."""
EXAMPLES = """\
  stepwell versions create hopper@v1 --licence CC-BY-4.0 --description "all of medium"
  stepwell versions create hopper@v2 --parent v1 --where "return > 2000"
  stepwell versions list hopper
  stepwell versions show hopper@v2 --card
  stepwell versions diff hopper@v1 hopper@v2
  stepwell train offline --dataset hopper@v2"""


def main(argv: list[str] | None = None) -> int:
    parser = terminal.parser("versions", ABOUT, EXAMPLES)
    actions = terminal.subcommands(parser)
    listing = terminal.add_action(
        actions, "list", list_versions, "versions of all datasets, or one"
    )
    listing.add_argument("dataset", nargs="?")
    create = terminal.add_action(actions, "create", create_version, "freeze a selection for ever")
    show = terminal.add_action(actions, "show", show_version, "one version: content and statistics")
    show.add_argument("--card", action="store_true", help="its card, in Markdown")
    diff = terminal.add_action(actions, "diff", diff_versions, "what one has and the other has not")
    diff.add_argument("before", metavar="DATASET@BEFORE")
    diff.add_argument("after", metavar="DATASET@AFTER")
    delete = terminal.add_action(
        actions, "delete", delete_version, "delete a version; its trajectories stay protected"
    )
    delete.add_argument("--yes", action="store_true", help="confirm")
    for sub in (create, show, delete):
        sub.add_argument("version", metavar="DATASET@VERSION")
    create.add_argument(
        "--where", metavar="SQL", help="condition over trajectories (default: all of the dataset)"
    )
    create.add_argument("--description", default="")
    create.add_argument("--licence", default="", help="of the data, such as CC-BY-4.0")
    create.add_argument("--parent", metavar="VERSION", help="the version that it was made from")
    create.add_argument(
        "--include-eval", action="store_true", help="also evaluation episodes (purpose 'eval')"
    )
    return terminal.dispatch(parser, argv)


def list_versions(client: Client, args: argparse.Namespace) -> terminal.Answer:
    names = [args.dataset] if args.dataset else [d.name for d in client.datasets()]
    found = [version for name in names for version in client.versions(name)]
    return found, lambda: terminal.print_table(
        ["version", "from", "trajectories", "steps", "mean return", "licence", "digest", "created"],
        [
            (
                v.version,
                v.parent,
                v.statistics.trajectories,
                v.statistics.steps,
                v.statistics.returns and v.statistics.returns.mean,
                v.licence,
                v.digest[:12],
                terminal.ago(v.created_at),
            )
            for v in found
        ],
        empty="no version yet; make one with: stepwell versions create DATASET@VERSION",
    )


def create_version(client: Client, args: argparse.Namespace) -> terminal.Answer:
    dataset, name = split_version(args.version)
    if not name:
        raise InvalidData(
            "a version has a name", expected="DATASET@VERSION, such as hopper@v1", got=args.version
        )
    made = client.create_version(
        dataset,
        name,
        where=args.where,
        description=args.description,
        licence=args.licence,
        parent=args.parent,
        include_eval=args.include_eval,
    )
    return _answer(made)


def show_version(client: Client, args: argparse.Namespace) -> terminal.Answer:
    version = client.version(args.version)
    if not args.card:
        return _answer(version)
    lines = card(version).splitlines()
    return version, lambda: print("\n".join(map(terminal.printable, lines)))


def diff_versions(client: Client, args: argparse.Namespace) -> terminal.Answer:
    found = client.diff_versions(args.before, args.after)
    parts = {"kept": found.kept, "added": found.added, "removed": found.removed}

    def show() -> None:
        terminal.print_table(
            ["", "trajectories", "steps", "mean return", "mean length"],
            [(name, *_numbers(part)) for name, part in parts.items()],
        )
        for name, part in parts.items():
            if part.statistics.trajectories:
                print(f"{name}: {part.sql}")

    return found, show


def _numbers(part: VersionPart) -> tuple[object, ...]:
    found = part.statistics
    means = (None if s is None else s.mean for s in (found.returns, found.lengths))
    return found.trajectories, found.steps, *means


def delete_version(client: Client, args: argparse.Namespace) -> terminal.Answer:
    if not args.yes:
        version = client.version(args.version)
        count = pluralize(version.statistics.trajectories, "trajectory", "trajectories")
        raise InvalidData(
            f"this deletes the version {version.version}, whose name is not given again (its"
            f" {count} stay); add --yes to do it"
        )
    client.delete_version(args.version)
    return {"deleted": args.version}, lambda: print(f"deleted {args.version}")


def _answer(version: Version) -> terminal.Answer:
    found = version.statistics
    lost = [("lost", f"{version.missing} of its trajectories")] if version.missing else []
    return version, lambda: terminal.print_fields(
        [
            ("version", version.version),
            ("description", version.description),
            ("licence", version.licence or "not stated"),
            ("trajectories", f"{found.trajectories:,}"),
            ("steps", f"{found.steps:,}"),
            *lost,
            ("return", _spread(found.returns)),
            ("length", _spread(found.lengths)),
            ("environments", ", ".join(found.envs)),
            ("made from", version.parent or "the dataset"),
            ("where", version.where or "all"),
            ("digest", version.digest),
            ("created", f"{terminal.moment(version.created_at)} by {version.created_by}"),
            ("in SQL", version.select),
        ]
    )


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    return (
        f"mean {spread.mean:.6g}, median {spread.median:.6g}, {spread.min:.6g} … {spread.max:.6g}"
    )
