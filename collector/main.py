"""`stepwell collect` and `stepwell evaluate`: the command line. A wrong word is reported before
torch and environments load. What the commands do is in collect.py and evaluate.py."""

from __future__ import annotations

import json
import sys

from rich.console import Console

from amago_model.errors import AmagoError
from collector.config import CollectConfig, EvaluateConfig, parse
from stepwell._failure import fail
from stepwell.errors import StepwellError, Undelivered


def main(argv: list[str] | None = None) -> int:
    """stepwell collect"""
    try:
        config = parse(CollectConfig, argv, "stepwell collect")
        from collector.collect import collect

        stats = collect(config, console=Console(stderr=True))
    except (StepwellError, AmagoError) as error:
        return fail("stepwell collect", error)
    except KeyboardInterrupt:
        return 130
    return 0 if stats.steps or not stats.broken else 1


def evaluate(argv: list[str] | None = None) -> int:
    """stepwell evaluate"""
    out, console = Console(), Console(stderr=True)
    try:
        config = parse(EvaluateConfig, argv, "stepwell evaluate")
        from collector.evaluate import run_evaluation

        result, notes = run_evaluation(config, console)
    except (StepwellError, AmagoError) as error:
        return fail("stepwell evaluate", error)
    except KeyboardInterrupt:
        console.print("stopped; nothing was scored", highlight=False)
        return 130
    if config.json:
        print(json.dumps({**result.to_json(), **notes}, indent=2))
    else:
        out.print(result.table())
        for name, value in notes.items():
            if name != "undelivered":
                out.print(f"{name}: {value}", highlight=False)
    if undelivered := notes.get("undelivered"):
        return fail("stepwell evaluate", Undelivered(undelivered))
    return 0


if __name__ == "__main__":
    sys.exit(main())
