"""Command lines of `stepwell collect` and `stepwell evaluate`. Invalid arguments are reported
before torch and environments are loaded. The commands are in collect.py and evaluate.py."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console

from amago_model.errors import AmagoError
from collector.config import CollectConfig, EvaluateConfig, parse
from stepwell._exit_message import PARTIAL, fail
from stepwell._signals import interrupt, stop_signals
from stepwell.errors import StepwellError, Undelivered

if TYPE_CHECKING:
    from collector.evaluation_result import PairedComparison


def main(argv: list[str] | None = None) -> int:
    """stepwell collect"""
    words = list(sys.argv[1:] if argv is None else argv)
    words = ["--no-sample" if word == "--greedy" else word for word in words]
    try:
        config = parse(CollectConfig, words, "stepwell collect")
        from collector.collect import collect

        stats = collect(config, console=Console(stderr=True))
    except (StepwellError, AmagoError) as error:
        return fail("stepwell collect", error)
    except KeyboardInterrupt:
        return 130
    if not stats.broken.total:
        return 0
    return PARTIAL if stats.kept else 1


def evaluate(argv: list[str] | None = None) -> int:
    """stepwell evaluate"""
    out, console = Console(), Console(stderr=True)
    words = list(sys.argv[1:] if argv is None else argv)
    comparison: PairedComparison | None = None
    as_json = "--json" in words  # the output format is not a setting of the evaluation
    try:
        words = [word for word in words if word != "--json"]
        if words and not words[0].startswith("-"):
            words.insert(0, "--policy")
        config = parse(EvaluateConfig, words, "stepwell evaluate")
        if not config.env:
            from collector.evaluate import with_environment

            config = with_environment(config)
            console.print(f"environment: {config.env} {' '.join(config.env_args)}", highlight=False)
        with stop_signals(interrupt):
            if config.every_version:
                return _evaluate_versions(config, out, console, as_json)
            from collector.evaluate import run_evaluation
            from collector.evaluation_result import compare_paired

            result, notes = run_evaluation(config, console, quiet=as_json)
            if config.against:
                changes = {"policy": config.against, "file": None, "random": False, "run": ""}
                changes["scripted"] = ""
                other, more = run_evaluation(
                    config.replace(**changes, against=""), console, quiet=as_json
                )
                comparison = compare_paired(result, other)
                notes = {k: v for k, v in more.items() if k in ("undelivered", "broken")} | notes
    except (StepwellError, AmagoError) as error:
        return fail("stepwell evaluate", error)
    except KeyboardInterrupt:
        console.print("stopped; no score of unfinished episodes", highlight=False)
        return 130
    if as_json:
        paired = {"paired": asdict(comparison)} if comparison else {}
        print(json.dumps({**result.to_json(), **notes, **paired}, indent=2))
    else:
        out.print(result.table())
        if comparison is not None:
            out.print(comparison.line(), highlight=False, markup=False, soft_wrap=True)
        for name, value in notes.items():
            if name != "undelivered":
                out.print(f"{name}: {value}", highlight=False)
    if undelivered := notes.get("undelivered"):
        return fail("stepwell evaluate", Undelivered(undelivered))
    return PARTIAL if "broken" in notes else 0


def _evaluate_versions(
    config: EvaluateConfig, out: Console, console: Console, as_json: bool
) -> int:
    from collector.evaluate_versions import evaluate_versions, table_of

    scores, best, broken = evaluate_versions(config, console, quiet=as_json)
    if as_json:
        print(json.dumps([score.model_dump() for score in scores], indent=2))
    else:
        out.print(table_of(scores, best, f"{config.policy} in {config.env}"))
    return PARTIAL if broken else 0


if __name__ == "__main__":
    sys.exit(main())
