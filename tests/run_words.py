"""The words of `stepwell run`, given to every part without starting one."""

from pathlib import Path
from typing import Any

from collector.config import CollectConfig, EvaluateConfig, parse
from trainer.options import resolve
from workbench.run import command_line
from workbench.run.parts import (
    Plan,
    collect_words,
    evaluate_words,
    growing_data,
    selected_data,
    train_words,
)


def settings(*words: str) -> tuple[Any, Any]:
    """The options of `stepwell run WORDS`, and the trainer's config; those of the other parts are
    checked."""
    args, sections = command_line.parse(words)
    growing = growing_data(
        resolve([args.recipe]).config.to_dict(),
        collectors=args.collectors,
        updates_per_step=args.updates_per_step,
        warm_up_steps=args.warm_up_steps,
        min_size=args.min_size,
    )
    plan = Plan(
        **{name: getattr(args, name) for name in ("env", "env_args", "recipe", "run", "seed")},
        **{name: getattr(args, name) for name in ("envs", "collectors", "train", "evaluate")},
        dataset=args.dataset or args.run,
        folder=Path("x"),
        episodes=args.episodes,
        growing=growing,
        warm_up_steps=args.warm_up_steps,
        plugins=args.plugin,
        more=sections,
    )
    config = resolve(train_words(plan)[1:]).config
    parse(CollectConfig, collect_words(plan, 0, config.to_dict())[1:], "stepwell collect")
    parse(EvaluateConfig, evaluate_words(plan, config.to_dict())[1:], "stepwell evaluate")
    assert bool(config.sources) != bool(selected_data(plan.dataset, sections["train"]))
    return args, config
