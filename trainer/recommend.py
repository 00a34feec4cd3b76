"""`stepwell recommend DATASET`: the settings that `stepwell train offline` derives, and why."""

from __future__ import annotations

import argparse
import json
import shlex
import sys

from amago_model.errors import AmagoError
from stepwell import terminal
from stepwell._exit_message import fail
from stepwell._wording import pluralize
from stepwell.errors import StepwellError
from trainer.derive.dataset_profile import read_profile
from trainer.derive.derived import apply_settings
from trainer.derive.rules import derive_settings
from trainer.options import resolve
from trainer.recipes import own_settings


def main(argv: list[str] | None = None) -> int:
    """Print the derived settings of a dataset; returns the exit status."""
    args = _parse(argv)
    words = ["offline", "--dataset", args.dataset, "--where", args.where, "--memory", args.memory]
    try:
        resolved = resolve(words)
        config = resolved.config
        with terminal.connect(args) as client:
            profile = read_profile(client, config)
        own = own_settings(config.recipe)
        derived = derive_settings(profile, config, resolved.origins, own, _say)
        _, settings = apply_settings(config, resolved.origins, own, derived, _say)
    except (StepwellError, AmagoError) as error:
        return fail("stepwell recommend", error)
    if args.json:
        terminal.print_json({d.key: {"value": d.value, "reason": d.reason} for d in settings})
    elif args.toml:
        if args.where:
            print(f"where = {_toml(args.where)}")
        for d in settings:
            print(f"# {d.reason}\n{d.key} = {_toml(d.value)}")
    else:
        low, mean, high = profile.returns
        print(
            f"{profile.dataset} ({profile.env or 'no environment named'}): "
            f"{pluralize(profile.trajectories, 'trajectory', 'trajectories')}, "
            f"{pluralize(profile.steps, 'step')}, "
            f"returns {low:.4g} to {high:.4g} (5th to 95th percentile; mean {mean:.4g}), "
            f"{profile.terminated:.0%} of the trajectories terminate\n"
        )
        terminal.print_table(
            ["setting", "value", "reason"], [(d.key, str(d.value), d.reason) for d in settings]
        )
        same = ["stepwell", "train", "offline", "--dataset", args.dataset]
        same += ["--where", args.where] if args.where else []
        same += ["--memory", args.memory] if args.memory != "auto" else []
        print(f"\ntrain with them: {shlex.join(same)} --run NAME")
    return 0


def _say(warning: str) -> None:
    print(f"stepwell: {warning}", file=sys.stderr)


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = terminal.parser(
        "recommend",
        "Print the settings that `stepwell train offline` derives from a dataset, with the reason "
        "for each. Nothing is trained. Every setting can be overridden by a flag or file.",
        "  stepwell recommend hopper\n"
        "  stepwell recommend tmaze --memory transformer\n"
        "  stepwell recommend hopper --toml > hopper.toml",
    )
    add = parser.add_argument
    terminal.add_dataset(parser, metavar="DATASET")
    add("--where", default="", help="SQL condition over trajectories, e.g. '\"return\" > 50'")
    add("--memory", default="auto", choices=("auto", "none", "transformer", "gru"),
        help="the agent's memory (default: auto, by the dataset's tag)")  # fmt: skip
    add("--toml", action="store_true", help="print a file for --config")
    terminal.add_connection(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
