"""Shared code of the commands: connecting to the service, printing tables and JSON.

Text from the service is untrusted: control characters are made visible and rich's markup is not
interpreted, so that no description can control a terminal.
"""

from __future__ import annotations

import argparse
import base64
import decimal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import orjson
import pyarrow as pa
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stepwell.client import Client

# Shorter than for a collector, because a user is waiting.
RETRY_FOR = 2.0
PIPE_WIDTH = 200


class Parser(argparse.ArgumentParser):
    """Points to --help when it refuses something."""

    def error(self, message: str) -> NoReturn:
        super().error(f"{message}\nsee: {self.prog} --help")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, rest = super().parse_known_args(args, namespace)
        if hasattr(found, "dataset_option"):
            given = [name for name in (found.dataset, found.dataset_option) if name]
            if len(given) != 1:
                self.error("expected one dataset, as the first word or as --dataset")
            found.dataset = given[0]
            del found.dataset_option
        return found, rest


def add_dataset(parser: argparse.ArgumentParser, **options: Any) -> None:
    """A dataset as the first word; `--dataset`, as workers have it, will do, too."""
    parser.add_argument("dataset", nargs="?", **options)
    parser.add_argument("--dataset", dest="dataset_option", help=argparse.SUPPRESS)


def parser(command: str, description: str, examples: str = "") -> argparse.ArgumentParser:
    return Parser(
        prog=f"stepwell {command}",
        description=description,
        epilog=f"examples:\n{examples}" if examples else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def subcommands(parser: argparse.ArgumentParser) -> Any:
    return parser.add_subparsers(title="actions", required=True, metavar="<action>")


Answer = tuple[Any, Callable[[], object]]
"""What --json prints, and what prints it for people."""
Action = Callable[[Client, argparse.Namespace], Answer | int]
"""Returns an answer, or the exit status after printing for itself."""


def add_action(actions: Any, name: str, call: Action, summary: str) -> argparse.ArgumentParser:
    """One action with the options that every action has."""
    sub: argparse.ArgumentParser = actions.add_parser(
        name, help=summary, description=summary, allow_abbrev=False
    )
    sub.set_defaults(call=call)
    add_connection(sub)
    return sub


def add_connection(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the service")
    group.add_argument("--url", help="its address (default: STEPWELL_URL, http://127.0.0.1:8000)")
    group.add_argument("--token", help="default: STEPWELL_TOKEN")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def connect(args: argparse.Namespace) -> Client:
    return Client(args.url, args.token, retry_for=RETRY_FOR)


def dispatch(parser: argparse.ArgumentParser, argv: list[str] | None) -> int:
    """Parse, run the chosen action with a client, and print its answer; the exit status. Without an
    action, `list` is meant where there is one."""
    words = sys.argv[1:] if argv is None else list(argv)
    named = bool(words) and (not words[0].startswith("-") or words[0] in ("-h", "--help"))
    if not named and any("list" in (action.choices or ()) for action in parser._actions):
        words.insert(0, "list")
    args = parser.parse_args(words)
    with connect(args) as client:
        answer: Answer | int = args.call(client, args)
    if isinstance(answer, int):
        return answer
    value, show = answer
    if args.json:
        print_json(value)
    else:
        show()
    return 0


# --- printing ---------------------------------------------------------------------------------


def print_json(value: Any) -> None:
    """Messages, lists of them, or plain values, as JSON on stdout."""
    sys.stdout.write(json_text(value, orjson.OPT_INDENT_2) + "\n")


def json_text(value: Any, options: int = 0) -> str:
    """JSON of the same values; NaN and infinity become null."""
    return orjson.dumps(value, option=options | orjson.OPT_NON_STR_KEYS, default=_plain).decode()


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    empty: str = "",
    exact: bool = False,
) -> None:
    """Rows under headings; numbers to the right, `exact` with all their digits. `empty` is printed
    where there are none."""
    rows = list(rows)
    if not rows and empty:
        print(empty)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, name in enumerate(columns):
        values = [row[index] for row in rows if row[index] is not None]
        numbers = bool(values) and all(isinstance(v, int | float) for v in values)
        table.add_column(Text(printable(name)), justify="right" if numbers else "left")
    for row in rows:
        table.add_row(*[Text(cell(value, exact)) for value in row])
    console().print(table)


def print_fields(pairs: Iterable[tuple[str, Any]]) -> None:
    """One thing, a line per field."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs:
        table.add_row(Text(name), Text(cell(value)))
    console().print(table)


def console() -> Console:
    """Stdout; wide where it is a pipe, so that tables are not cut."""
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)


def cell(value: Any, exact: bool = False) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and exact:
        return repr(value).removesuffix(".0")  # the shortest text that is read as this number
    if isinstance(value, float):
        # Times, counts and ids as floats: with six digits all of a day would look the same.
        return f"{value:.15g}" if 1e5 <= abs(value) < 1e15 else f"{value:.6g}"
    if isinstance(value, pa.MonthDayNano):
        return _interval(value)
    if isinstance(value, list | tuple):
        return ", ".join(cell(v, exact) for v in value)
    return printable(str(value))


def printable(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def moment(seconds: float | None) -> str:
    """A Unix time as local date and time."""
    if seconds is None:
        return "-"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def ago(moment: float | None) -> str:
    """How long ago a Unix time was."""
    if moment is None:
        return "-"
    seconds = max(0.0, time.time() - moment)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True)
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode()
    if isinstance(value, decimal.Decimal) and value.is_finite():
        return orjson.Fragment(format(value, "f"))  # all its digits
    if isinstance(value, pa.MonthDayNano):
        return _interval(value)
    return str(value)


def _interval(value: Any) -> str:
    """The text by which DuckDB shows an interval, and reads it."""
    sign = -1 if value.months < 0 else 1
    years, months = (sign * n for n in divmod(abs(value.months), 12))
    counts = ((years, "year"), (months, "month"), (value.days, "day"))
    words = [f"{n} {unit}" + "s" * (abs(n) != 1) for n, unit in counts if n]
    if value.nanoseconds or not words:
        seconds, rest = divmod(abs(value.nanoseconds) // 1000, 1_000_000)
        clock = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
        fraction = f".{rest:06}".rstrip("0") if rest else ""
        words.append("-" * (value.nanoseconds < 0) + clock + fraction)
    return " ".join(words)


def value_of(text: str) -> str | int | float | bool:
    """A number, true or false as such; anything else is text."""
    try:
        value = orjson.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, str | int | float) else text
