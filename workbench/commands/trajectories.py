"""`stepwell trajectories`: list, show, protect, demote, tag, label many."""

from __future__ import annotations

import argparse

from stepwell import terminal
from stepwell.client import Client
from stepwell.errors import InvalidData
from stepwell.messages import Page, TrajectoryInfo

ABOUT = """\
List, show, tag and protect trajectories.

A trajectory is a contiguous piece of one episode, usually all of it. Protected ones are never
evicted; tags and flags are columns in SQL, and a flag says what is wrong with one."""
EXAMPLES = """\
  stepwell trajectories list hopper --order=-return --limit 10
  stepwell trajectories show 0198c0de-…
  stepwell trajectories tag 0198c0de-… clumsy good-start
  stepwell trajectories protect 0198c0de-…
  stepwell trajectories label --where "dataset = 'hopper' and length < 10" --flag too-short
  stepwell trajectories label --where "list_contains(flags, 'too-short')" --unflag too-short"""


def main(argv: list[str] | None = None) -> int:
    parser = terminal.parser("trajectories", ABOUT, EXAMPLES)
    actions = terminal.subcommands(parser)
    listing = terminal.add_action(actions, "list", list_trajectories, "trajectories of a dataset")
    terminal.add_dataset(listing)
    listing.add_argument("--partition", choices=("fifo", "protected"))
    listing.add_argument("--purpose", choices=("train", "eval"))
    for field in ("env", "policy", "run", "tag"):
        listing.add_argument(f"--{field}")
    listing.add_argument(
        "--order",
        default="-seq",
        help="seq, return, length or created_at; - before it: descending (default -seq)",
    )
    listing.add_argument("--limit", type=int, default=20, help="at most so many (default 20)")
    show = terminal.add_action(actions, "show", show_trajectory, "metadata of one trajectory")
    protect = terminal.add_action(
        actions, "protect", protect_trajectories, "move to the protected partition: never evicted"
    )
    demote = terminal.add_action(
        actions, "demote", demote_trajectories, "move back to fifo, where they may be evicted"
    )
    tag = terminal.add_action(actions, "tag", tag_trajectory, "add tags (or --remove them)")
    label = terminal.add_action(
        actions, "label", label_trajectories, "add and remove labels of all that match"
    )
    label.add_argument("id", nargs="*")
    label.add_argument("--where", help="instead of ids: a condition on the table `trajectories`")
    for field, what in (
        ("--tag", "add this tag"),
        ("--untag", "remove this tag"),
        ("--flag", "add this flag: what is wrong with them"),
        ("--unflag", "remove this flag"),
    ):
        label.add_argument(field, action="append", default=[], metavar="NAME", help=what)
    label.add_argument("--protect", action="store_true", help="move to the protected partition")
    show.add_argument("id")
    protect.add_argument("id", nargs="+")
    demote.add_argument("id", nargs="+")
    tag.add_argument("id")
    tag.add_argument("tags", nargs="+")
    tag.add_argument("--remove", action="store_true", help="remove the tags instead")
    return terminal.dispatch(parser, argv)


def list_trajectories(client: Client, args: argparse.Namespace) -> terminal.Answer:
    filters = ("partition", "env", "policy", "run", "purpose", "tag", "order", "limit")
    page = client.trajectories(args.dataset, **{name: getattr(args, name) for name in filters})
    return page, lambda: _list(page, args.dataset)


def _list(page: Page[TrajectoryInfo], dataset: str) -> None:
    terminal.print_table(
        ["id", "seq", "partition", "length", "return", "end", "policy", "tags", "state", "came"],
        [
            (
                t.id,
                t.seq,
                t.partition,
                t.length,
                t.total_reward,
                "terminated" if t.terminated else "truncated" if t.truncated else "open",
                t.policy,
                t.tags,
                t.state,
                terminal.ago(t.created_at),
            )
            for t in page.items
        ],
        empty="no trajectories match",
    )
    if page.next:
        print(f"… and more (--limit, or: stepwell sql --dataset {dataset})")


def show_trajectory(client: Client, args: argparse.Namespace) -> terminal.Answer:
    info = client.trajectory(args.id)
    fields = info.model_dump(by_alias=True)
    for moment in ("started_at", "created_at"):
        fields[moment] = terminal.moment(fields[moment])
    return info, lambda: terminal.print_fields(fields.items())


def protect_trajectories(client: Client, args: argparse.Namespace) -> terminal.Answer:
    changed = [client.patch_trajectory(i, partition="protected") for i in args.id]
    return changed, lambda: print(f"protected {len(changed)}")


def demote_trajectories(client: Client, args: argparse.Namespace) -> terminal.Answer:
    kept = [client.demote_trajectory(i) for i in args.id]
    evicted = sum(info is None for info in kept)
    more = f"; {evicted} evicted at once, as fifo is full" if evicted else ""
    return kept, lambda: print(f"demoted {len(kept)}{more}")


def tag_trajectory(client: Client, args: argparse.Namespace) -> terminal.Answer:
    tags = client.trajectory(args.id).tags
    kept = [t for t in tags if t not in args.tags]
    info = client.patch_trajectory(args.id, tags=kept if args.remove else [*kept, *args.tags])
    shown = ", ".join(map(terminal.printable, info.tags)) or "no tags"
    return info, lambda: print(f"{info.id}: {shown}")


def label_trajectories(client: Client, args: argparse.Namespace) -> terminal.Answer:
    if bool(args.id) == bool(args.where):
        raise InvalidData("label: which?", expected="ids, or --where CONDITION", got="both or none")
    if not (args.tag or args.untag or args.flag or args.unflag or args.protect):
        raise InvalidData(
            "label: nothing to do", expected="--tag, --untag, --flag, --unflag or --protect"
        )
    ids = args.id or client.matching_trajectories(args.where)
    changed = client.label_trajectories(
        ids,
        add_tags=args.tag,
        remove_tags=args.untag,
        add_flags=args.flag,
        remove_flags=args.unflag,
        protect=args.protect,
    )
    answer = {"matching": len(ids), "changed": changed}
    return answer, lambda: print(f"{changed:,} of {len(ids):,} matching changed")
