"""`stepwell flush`: seal now what was acknowledged, so that SQL `steps` shows it."""

from __future__ import annotations

from stepwell import terminal
from stepwell._wording import pluralize


def main(argv: list[str] | None = None) -> int:
    parser = terminal.parser(
        "flush",
        "Seal a dataset's newest trajectories into shards now, so that SQL `steps` contains them. "
        "Without this command it happens within seconds.",
        "  stepwell flush hopper",
    )
    terminal.add_dataset(parser)
    terminal.add_connection(parser)
    args = parser.parse_args(argv)
    with terminal.connect(args) as client:
        result = client.flush(args.dataset)
    if args.json:
        terminal.print_json(result)
    else:
        sealed = pluralize(result.sealed, "trajectory", "trajectories")
        print(f"sealed {sealed} into {pluralize(result.shards, 'shard')}")
    return 0
