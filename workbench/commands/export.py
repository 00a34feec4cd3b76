"""`stepwell export`: a dataset, or a selection of it, as files that other tools read."""

from __future__ import annotations

import functools
import shutil
import sys
from collections.abc import Callable, Generator, Iterable
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from stepwell import terminal
from stepwell._progress import CommandProgress
from stepwell._wording import pluralize
from stepwell.errors import InvalidData
from stepwell.trajectory import Trajectory, new_id
from workbench.export import flat, lerobot, minari, parquet
from workbench.export.selection import Selection, read, select

ABOUT = """\
Write a dataset, or a selection of it, as files that other tools read.

The target appears when it is complete; an existing one is never replaced. What the format cannot
hold is printed. Memory stays small, whatever the dataset's size."""
EXAMPLES = """\
  stepwell export hopper --format parquet hopper/
  stepwell export hopper --where "return > 1000" --format d4rl good.hdf5
  stepwell export hopper --purpose eval --format minari hopper-eval/
  stepwell export push@v1 --format lerobot --fps 50 push/

What each format holds: docs/reference/formats.md."""
Write = Callable[[Path, Selection, Iterable[Trajectory]], None]
WRITERS: dict[str, Write] = {
    "npz": flat.write_npz,
    "d4rl": flat.write_d4rl,
    "parquet": parquet.write,
    "minari": minari.write,
    "lerobot": lerobot.write,
}


def main(argv: list[str] | None = None) -> int:
    parser = terminal.parser("export", ABOUT, EXAMPLES)
    words = sys.argv[1:] if argv is None else argv
    option = any(word.partition("=")[0] == "--dataset" for word in words)
    parser.add_argument("--dataset" if option else "dataset", metavar="DATASET[@VERSION]")
    parser.add_argument(
        "out", type=Path, help="file (npz, d4rl) or folder (parquet, minari, lerobot)"
    )
    parser.add_argument("--format", choices=WRITERS, required=True)
    parser.add_argument(
        "--where",
        metavar="SQL",
        help="condition over the table trajectories (docs/reference/sql.md)",
    )
    parser.add_argument(
        "--purpose",
        choices=("train", "eval", "all"),
        default="train",
        help="default: train; evaluation episodes are left out",
    )
    parser.add_argument(
        "--fps",
        type=int,
        metavar="N",
        help=f"of lerobot: steps a second, which timestamps need (default {lerobot.FPS})",
    )
    terminal.add_connection(parser)
    args = parser.parse_args(argv)
    out: Path = args.out
    write = WRITERS[args.format]
    if args.fps is not None:
        if args.format != "lerobot":
            raise InvalidData(
                f"{args.format} has no timestamps", expected="--format lerobot, or no --fps"
            )
        if args.fps < 1:
            raise InvalidData("--fps counts steps a second", expected="≥ 1", got=str(args.fps))
        write = functools.partial(lerobot.write, fps=args.fps)
    _refuse_existing(out)
    bar = CommandProgress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        quiet=args.json,
    )
    with terminal.connect(args) as client, bar:
        chosen = select(client, args.dataset, args.where, args.purpose)
        task = bar.add_task("trajectories", total=chosen.trajectories)
        trajectories = _counted(read(client, chosen), lambda: bar.advance(task))
        _write(write, out, chosen, trajectories)
    lost = chosen.losses.lines()
    if args.json:
        terminal.print_json(
            {
                "dataset": args.dataset,
                "format": args.format,
                "out": str(out),
                "snapshot": chosen.snapshot,
                "trajectories": chosen.trajectories,
                "steps": chosen.steps,
                "lost": lost,
            }
        )
        return 0
    for line in lost:
        print(
            f"stepwell: note: {args.format} does not hold {terminal.printable(line)}",
            file=sys.stderr,
        )
    trajectories_ = pluralize(chosen.trajectories, "trajectory", "trajectories")
    print(f"{args.dataset} → {out}: {trajectories_}, {pluralize(chosen.steps, 'step')}")
    return 0


def _write(write: Write, out: Path, chosen: Selection, trajectories: Generator[Trajectory]) -> None:
    """Under a temporary name beside `out`, then renamed: `out` is complete or absent."""
    temporary = out.with_name(f".{out.name}.{new_id()[-8:]}.part")
    try:
        write(temporary, chosen, trajectories)
        _refuse_existing(out)
        temporary.rename(out)
    except OSError as error:
        raise InvalidData(f"cannot write {out}: {error.strerror or error}") from None
    finally:
        trajectories.close()
        if temporary.is_dir():
            shutil.rmtree(temporary)
        else:
            temporary.unlink(missing_ok=True)


def _refuse_existing(out: Path) -> None:
    if out.exists() or out.is_symlink():
        raise InvalidData(f"{out} exists", expected="a new name, or remove it first")
    if not out.parent.is_dir():
        raise InvalidData(f"the folder {out.parent} does not exist", expected="an existing folder")


def _counted(
    trajectories: Generator[Trajectory], count: Callable[[], None]
) -> Generator[Trajectory]:
    for trajectory in trajectories:
        yield trajectory
        count()
