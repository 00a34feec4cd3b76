"""`stepwell flush`: seal now what was acknowledged, so that SQL `steps` shows it."""

from __future__ import annotations

from stepwell.commands import common


def main(argv: list[str] | None = None) -> int:
    parser = common.parser(
        "flush",
        "Seal a dataset's newest trajectories into shards now, so that SQL `steps` contains them. "
        "Without this command it happens within seconds.",
        "  stepwell flush hopper",
    )
    parser.add_argument("dataset")
    common.add_connection(parser)
    args = parser.parse_args(argv)
    with common.connect(args) as client:
        result = client.flush(args.dataset)
    if args.json:
        common.print_json(result)
    else:
        print(f"sealed {result.sealed} trajectories into {result.shards} shards")
    return 0
