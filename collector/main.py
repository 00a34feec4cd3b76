"""`stepwell collect` and `stepwell evaluate`: the command line, and a first look at the service.

A wrong word, a run or a dataset that is not there is said here, before torch and environments
load. What the commands do is in collect.py and evaluate.py.
"""

from __future__ import annotations

import json
import sys

from rich.console import Console

from amago_model.errors import AmagoError
from collector.config import CollectConfig, EvaluateConfig, UsageError, parse, parse_reference
from stepwell._failure import fail
from stepwell.client import Client
from stepwell.errors import NotFound, StepwellError, Undelivered

READY_SECONDS = 10.0


def main(argv: list[str] | None = None) -> int:
    """stepwell collect"""
    try:
        config = parse(CollectConfig, argv, "stepwell collect")
        _look(config)
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
        _look(config)
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


def _look(config: CollectConfig | EvaluateConfig) -> None:
    """Raises what is wrong with the names that `config` gives."""
    if isinstance(config, EvaluateConfig) and config.file is not None:
        if not config.file.is_file():
            raise UsageError(f"--file {config.file}: there is no such file")
        return
    waits = isinstance(config, CollectConfig) and config.wait_for_policy
    run = parse_reference(config.policy)[0] if config.policy else ""
    needs_dataset = isinstance(config, CollectConfig) and not config.create
    if waits and not needs_dataset or not (run or needs_dataset):
        return
    with Client(config.url, config.token) as client:
        client.wait_ready(READY_SECONDS)
        if needs_dataset:
            try:
                client.dataset(config.dataset)
            except NotFound as error:
                raise _missing(error, "without --no-create it would be made") from None
        if run and not waits:
            try:
                client.run(run)
            except NotFound as error:
                hint = "--wait-for-policy would wait for it"
                raise _missing(error, hint if isinstance(config, CollectConfig) else "") from None


def _missing(error: NotFound, hint: str) -> NotFound:
    detail = "; ".join(filter(None, (error.detail, hint)))
    return NotFound({**error.problem, "detail": detail})


if __name__ == "__main__":
    sys.exit(main())
