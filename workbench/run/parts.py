"""The commands that make up `stepwell run`, as a person would type them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.processes import Processes
from workbench.run.supervisor import Part

WAIT_SECONDS = 3600
"""How long the trainer waits for the service and the first episode."""
REFRESH_EVERY = 20
"""Updates between two looks for new episodes, where the recipe has none of its own."""
UPDATES_PER_STEP = 0.1
"""The ratio, where neither recipe nor user has one."""
WARM_UP_STEPS = 2000
"""Random steps, where the recipe derives its settings from data and the user names no number."""
EXPLORING_UPDATES, QUIET_EPISODES = 2_000, 0.33
"""Updates over which the recipe `online` explores less and less, and the share of episodes in which
it does not."""
NICE = 5
"""Of collectors and evaluator: the trainer, which everything waits for, goes first."""
EVALUATIONS, OFTEN = 10, 20
"""Evaluated versions of a run, besides the first and the last; and of as many updates of the recipe
`online`, whose networks learn sooner."""
FIRST_EVALUATION_SEED = 900_000
"""Far from the seeds of training episodes."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run, from the command line."""

    env: str
    env_args: Sequence[str]
    recipe: str
    run: str
    dataset: str
    folder: Path
    seed: int
    envs: int
    collectors: int
    train: bool
    evaluate: bool
    episodes: int
    growing: Sequence[str]
    """`growing_data` of the recipe."""
    warm_up_steps: int | None
    plugins: Sequence[str]
    more: Mapping[str, Sequence[str]]
    """Words of the user for each kind of part, which come last, so they win."""


def growing_data(
    config: Mapping[str, Any],
    *,
    collectors: int,
    updates_per_step: float | None,
    warm_up_steps: int | None,
    min_size: int | None,
) -> list[str]:
    """What a trainer needs for data that grow, where `config`, the recipe's, has none of its own:
    a wait for the first episodes, looks for new ones, and a ratio. Settings are derived when all
    steps of the warm-up are there, unless `min_size` says when the first update is made. Nothing
    if no collector is started, and no ratio asked for: then the data are those that there are."""
    if not collectors and updates_per_step is None:
        return []
    data = config["data"]
    words: list[str] = []
    if not data["wait_for_data"]:
        words += ["--data.wait-for-data", str(WAIT_SECONDS)]
    if not data["refresh_every"]:
        words += ["--data.refresh-every", str(REFRESH_EVERY)]
    if updates_per_step is None and data["ratio"] is None:
        updates_per_step = UPDATES_PER_STEP
    if updates_per_step is not None:
        words += ["--data.ratio.updates-per-step", str(updates_per_step)]
    if min_size is None and config["derive"] != "off":
        min_size = warm_up_steps or default_warm_up(config)
    if min_size is not None:
        words += ["--data.ratio.min-size", str(min_size)]
    return words


def default_warm_up(config: Mapping[str, Any]) -> int:
    """Random steps of a run whose user names no number."""
    if config["derive"] == "off":
        return 0
    ratio = config["data"]["ratio"]
    return WARM_UP_STEPS if ratio is None else int(ratio["min_size"])


def selected_data(dataset: str, words: Sequence[str]) -> list[str]:
    """The trainer's dataset; none where the user's words select a mixture or a snapshot."""
    given = {word.partition("=")[0] for word in words}
    return [] if given & {"--sources", "--snapshot"} else ["--dataset", dataset]


def train_words(plan: Plan) -> list[str]:
    """`stepwell train`."""
    words = ["train", plan.recipe, "--run", plan.run]
    words += selected_data(plan.dataset, plan.more["train"])
    words += ["--output", str(plan.folder / "runs"), "--seed", str(plan.seed)]
    return [*words, *_plugins(plan), *plan.growing, *plan.more["train"]]


def collect_words(plan: Plan, number: int, config: Mapping[str, Any]) -> list[str]:
    """`stepwell collect`, the collector of this number."""
    words = ["collect", *_environment(plan), "--dataset", plan.dataset, "--policy", plan.run]
    words += ["--wait-for-policy", "--envs", str(plan.envs), "--poll-every", "1"]
    words += ["--nice", str(NICE)]
    if plan.train:  # else others may collect, too: random seeds, so that all episodes differ
        words += ["--seed", str(plan.seed * 1000 + number)]
    steps = plan.warm_up_steps
    if steps is None:
        steps = default_warm_up(config)
    if steps:
        words += ["--warm-up-steps", str(-(-steps // max(1, plan.collectors)))]
    words += _exploration(plan.more["collect"], config)
    return [*words, *_plugins(plan), *plan.more["collect"]]


def _exploration(more: Sequence[str], config: Mapping[str, Any]) -> list[str]:
    """Epsilon-greedy over the first half of the updates, unless the user's words explore
    otherwise. Where the number of updates is derived, collectors began with random steps."""
    if config["derive"] in ("shape", "all") or any(
        word.startswith(("--epsilon.", "--config")) for word in more
    ):
        return []
    if config["derive"] == "online":
        kind = ["--epsilon.kind", "repeat", "--epsilon.clock", "policy"]
        kind += ["--epsilon.quiet-episodes", str(QUIET_EPISODES)]
        return [*kind, "--epsilon.steps", str(EXPLORING_UPDATES)]
    steps = max(1, config["updates"] // 2)
    return ["--epsilon.kind", "greedy", "--epsilon.clock", "policy", "--epsilon.steps", str(steps)]


def evaluate_words(plan: Plan, config: Mapping[str, Any]) -> list[str]:
    """`stepwell evaluate`, which scores about a dozen versions while the run goes on, more of the
    recipe `online`. Where the number of updates is derived offline, so are the versions: five."""
    words = ["evaluate", *_environment(plan), "--policy", plan.run, "--follow"]
    derive = config["derive"]
    versions = OFTEN if derive == "online" else EVALUATIONS
    every = config["updates"] // versions if derive in ("off", "online") else 0
    words += ["--every", str(every)]
    words += ["--episodes", str(plan.episodes), "--seeds", str(FIRST_EVALUATION_SEED)]
    words += ["--nice", str(NICE)]
    return [*words, *_plugins(plan), *plan.more["evaluate"]]


def parts(plan: Plan, config: Mapping[str, Any], processes: Processes) -> list[Part]:
    """All parts but the service; `config` is the trainer's."""
    words = {"train": train_words(plan)} if plan.train else {}
    for number in range(plan.collectors):
        words[f"collect-{number}"] = collect_words(plan, number, config)
    if plan.evaluate:
        words["evaluate"] = evaluate_words(plan, config)
    found = [Part(name, its, processes) for name, its in words.items()]
    for part in found:
        if part.name == "evaluate" and plan.train:
            part.follows = "train"
    return found


def _environment(plan: Plan) -> list[str]:
    return ["--env", plan.env, *(["--env-args", *plan.env_args] if plan.env_args else [])]


def _plugins(plan: Plan) -> list[str]:
    return ["--plugin", *plan.plugins] if plan.plugins else []
