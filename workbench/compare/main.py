"""`stepwell compare`: recipes on one dataset, with several seeds, evaluated alike, in one table.

    train NAME-RECIPE-SEED · evaluate its last policy (or every one) · table · pictures

Each step is a `stepwell train` or `stepwell evaluate` of its own; the service keeps all results.
The same command continues a comparison that was stopped or killed. Users read
docs/reference/training.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from stepwell import terminal
from stepwell._exit_message import PARTIAL
from stepwell._files import whole_file
from stepwell._locks import take_lock
from stepwell._signals import stop_signals
from stepwell._wording import duration, pluralize
from stepwell.client import Client
from stepwell.errors import InvalidData, StepwellError
from workbench.analysis.comparison import (
    TAG,
    Comparison,
    Row,
    curves,
    read_comparison,
    read_data_row,
    recipe_rows,
)
from workbench.analysis.confidence_intervals import Interval
from workbench.analysis.published_scores import published_scores
from workbench.compare.pictures import curves_svg, intervals_svg
from workbench.compare.schedule import Chain, Recipe, Schedule, given_settings, seconds_left
from workbench.processes import Processes, read_train_config, stop

FIRST_EVALUATION_SEED, EPISODES = 900_000, 30
"""Fixed, and far from the seeds of any training data."""
LINE_SECONDS = 60.0
"""Seconds between two lines of progress, where the output is no terminal."""
MAX_SEEDS = 1000
OWN = ("run", "seed", "dataset", "tags", "output")
"""Settings by which a comparison finds its runs and tells them apart."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")

ABOUT = """\
Train recipes with several seeds on one dataset, evaluate all of them on the same fixed seeds, and
print one table, with the dataset's own mean (data) and random actions beside them.

mean      mean return over training seeds (each the mean of its episodes) of the last policies
IQM       interquartile mean over all episodes of all training seeds
interval  95 % bootstrap interval of the mean, in two stages: resample the training seeds, and
          within each of them the episodes. With one seed it is over its episodes only
of the IQM  its interval, by the same bootstrap
time      mean training time of a run, without start-up and pauses

The same command continues after Ctrl-C or a crash: finished runs and evaluations are not repeated,
failed ones are tried again. Further recipes, seeds or episodes may be added. A run that fails is
reported in the table, the others go on, and the exit status is 1."""
EXAMPLES = """\
  stepwell compare hopper --env Hopper-v5
  stepwell compare hopper --env Hopper-v5 --recipes offline,bc10 --seeds 0-4 --jobs 4
  stepwell compare hopper --env Hopper-v5 --name short --updates 2000 --every-policy
  stepwell compare hopper --env Hopper-v5 --name gamma --set offline.agent.losses.gamma=0.999"""


class Failed(StepwellError):
    """A command that the comparison needs has failed."""


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    folder: Path = args.output.resolve() / args.name
    folder.mkdir(parents=True, exist_ok=True)

    def in_use(pid: int) -> Exception:
        return Failed(f"comparison {args.name} is being made by process {pid} in {folder}")

    with take_lock(folder / "lock", in_use), Client(args.url, args.token, retry_for=2.0) as client:
        client.dataset(args.dataset)
        schedule = _schedule(args, client, folder)
        with stop_signals(schedule.interrupt, again=schedule.hurry):
            try:
                schedule.check()
                _work(schedule)
            except KeyboardInterrupt:
                print("\nstopped; the same command continues", flush=True)
                return 130
        return _report(args, schedule, folder)


def _schedule(args: argparse.Namespace, client: Client, folder: Path) -> Schedule:
    os.nice(args.nice)  # of this process and so of all its children
    variables = {"STEPWELL_URL": client.url}
    if args.token:
        variables["STEPWELL_TOKEN"] = args.token
    if "STEPWELL_OUTBOX" not in os.environ:
        variables["STEPWELL_OUTBOX"] = str(folder / "outbox")
    plugins = [word for module in args.plugin for word in ("--plugin", module)]
    shared = ["--dataset", args.dataset, "--output", str(folder / "runs")]
    shared += ["--tags", TAG + args.name, *plugins]
    for path in args.config:
        shared += ["--config", str(path)]
    if args.updates is not None:
        shared += ["--updates", str(args.updates)]
    evaluate = ["--env", args.env, *plugins]
    if args.env_args:
        evaluate += ["--env-args", *args.env_args]
    recipes = _recipes({name: [*shared, *args.set.get(name, ())] for name in args.recipes})
    return Schedule(
        name=args.name,
        dataset=args.dataset,
        env=args.env,
        seeds=range(args.first_seed, args.first_seed + args.episodes),
        every_policy=args.every_policy,
        evaluate_words=evaluate,
        client=client,
        processes=Processes(folder / "logs", variables),
        chains=[
            Chain(recipe, seed, f"{args.name}-{recipe.name}-{seed}")
            for seed in args.seeds
            for recipe in recipes
        ],
        jobs=args.jobs,
    )


def _recipes(words: dict[str, list[str]]) -> list[Recipe]:
    """Each recipe with its resolved settings. Raises `InvalidData` for what `train` refuses."""

    def one(name: str) -> Recipe:
        try:
            answer = read_train_config([name, *words[name]])
        except InvalidData as error:
            raise InvalidData(f"recipe {name}: {error}") from None
        config = answer["config"]
        settings = given_settings(config, answer["origins"])
        every = int(config["schedule"]["publish_every"])
        rate = answer.get("updates_per_second")
        return Recipe(name, words[name], int(config["updates"]), every, settings, rate)

    with ThreadPoolExecutor() as threads:
        return list(threads.map(one, words))


def _work(schedule: Schedule) -> None:
    """Do what is left to do, with progress."""
    left = [chain for chain in schedule.chains if schedule.next_job(chain) is not None]
    _try_environment(schedule, again=bool(left))
    if not left:
        return
    print(announcement(schedule, left), flush=True)
    console = Console(highlight=False)
    columns = (BarColumn(20), TextColumn("{task.description}"))
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=1.0)
        shown = time.monotonic()

        def tick() -> None:
            nonlocal shown
            share, text = progress(schedule)
            bar.update(task, completed=share, description=text)
            if not console.is_terminal and time.monotonic() - shown > LINE_SECONDS:
                shown = time.monotonic()
                print(text, flush=True)

        def say(line: str) -> None:
            console.print(line, markup=False, soft_wrap=True)

        schedule.tick, schedule.say = tick, say
        schedule.run()


def announcement(schedule: Schedule, left: Sequence[Chain]) -> str:
    """How long it will take: by rates of earlier runs of this comparison, else by those of the
    recipes' table. The line of progress goes on with this machine's own."""
    sizes = sorted({chain.recipe.updates for chain in left})
    updates = " to ".join(f"{size:,}" for size in (sizes[:1] + sizes[1:][-1:]))
    text = f"{pluralize(len(left), 'run')} of {updates} updates, {schedule.jobs} at a time"
    seconds = _seconds_left(schedule)
    if seconds is None:
        return f"{text}; how long they take is said after the first updates"
    seen = any(chain.rate for chain in schedule.chains)
    typical = "at typical speeds (docs/reference/training.md)"
    by = "at the speed of its runs so far" if seen else typical
    return f"{text}: about {duration(seconds)} {by}; --updates and --seeds make it shorter"


def _try_environment(schedule: Schedule, *, again: bool) -> None:
    """Evaluate random actions: their row of the table, and proof that the environment can be made
    here and fits the dataset. Where they have been evaluated: if `again`, one episode that is not
    kept. Raises `Failed`."""
    run = f"{schedule.name}-random"
    words = schedule.evaluate(run, "--random")

    def wait(over: Callable[[], bool]) -> None:
        while not over():
            if schedule.interrupted:
                raise KeyboardInterrupt
            time.sleep(0.1)

    wait(lambda: not schedule.processes.is_running(run))
    comparison = read_comparison(schedule.client, schedule.name, schedule.seeds, schedule.env)
    if "random" in comparison.evaluations:
        if not again:
            return
        words += ["--episodes", "1", "--no-upload"]
    job = schedule.processes.start(run, words)
    try:
        wait(lambda: job.process.poll() is not None)
    finally:
        stop([job])
    if "--no-upload" not in words:
        schedule.evaluation_seconds.append(job.seconds)  # the first guess
    if job.process.returncode not in (0, PARTIAL):
        raise Failed(f"{schedule.env} cannot be played here: {job.reason()}")


def progress(schedule: Schedule) -> tuple[float, str]:
    """The share of updates that is done, and a line about all runs."""
    chains = schedule.chains
    total = sum(chain.recipe.updates for chain in chains)
    done = sum(
        chain.recipe.updates if chain.done or chain.problem else chain.trained for chain in chains
    )
    ended = sum(chain.done or bool(chain.problem) for chain in chains)
    text = f"{ended} of {pluralize(len(chains), 'run')} done"
    for chain in chains:
        if chain.job is not None:
            trains = chain.doing == chain.run
            share = f"{100 * chain.trained / max(1, chain.recipe.updates):.0f}%"
            text += f", {chain.run} {share if trains else 'evaluates'}"
    left = _seconds_left(schedule)
    return done / max(1, total), text + (f"; about {duration(left)} left" if left else "")


def _seconds_left(schedule: Schedule) -> float | None:
    times = schedule.evaluation_seconds
    evaluation = sum(times) / len(times) if times else 0.0
    return seconds_left(schedule.chains, schedule.jobs, evaluation, schedule.every_policy)


# --- the result -----------------------------------------------------------------------------------


def _report(args: argparse.Namespace, schedule: Schedule, folder: Path) -> int:
    client, chains = schedule.client, schedule.chains
    comparison = read_comparison(client, args.name, schedule.seeds, args.env)
    rows = _rows(comparison, chains)
    rows.append(read_data_row(client, comparison))
    points = curves(comparison) if args.every_policy else []
    published = published_scores(args.dataset)
    seeds = f"evaluation seeds {schedule.seeds[0]} … {schedule.seeds[-1]}"
    print(f"\ncomparison {args.name}: {args.dataset} in {args.env}, {seeds}")
    print_rows(rows, comparison.reference)
    _print_published(args.dataset, published)
    picture = args.picture or folder / "comparison.svg"
    title = f"{args.dataset} in {args.env}"
    _write(picture, intervals_svg(rows, title))
    written = [picture]
    if points:
        written.append(picture.with_name(f"{picture.stem}-curves.svg"))
        _write(written[-1], curves_svg(points, rows, title))
    print(f"\npictures: {', '.join(map(str, written))}")
    if args.json:
        report = {
            "comparison": args.name,
            "dataset": args.dataset,
            "env": args.env,
            "evaluation_seeds": list(schedule.seeds),
            "reference": comparison.reference,
            "rows": [asdict(row) for row in rows],
            "curves": [asdict(point) for point in points],
            "published": {"CORL": published} if published else {},
        }
        _write(args.json, json.dumps(report, indent=2))
    asked = {chain.recipe.name for chain in chains}
    return 1 if any(row.problems for row in rows if row.recipe in asked) else 0


def _rows(comparison: Comparison, chains: Sequence[Chain]) -> list[Row]:
    """The recipes in the order given, then `random`. A run that failed before the service knew of
    it is reported all the same."""
    problems = {chain.run: chain.problem for chain in chains if chain.problem}
    known = {run.name for run in comparison.runs}
    rows = {row.recipe: row for row in recipe_rows(comparison, problems)}
    for chain in chains:
        row = rows.setdefault(chain.recipe.name, Row(chain.recipe.name))
        if chain.problem and chain.run not in known:
            row.problems.append(f"seed {chain.seed}: {chain.problem}")
    given = list(dict.fromkeys(chain.recipe.name for chain in chains))
    others = [name for name in rows if name not in given and name != "random"]
    return [rows[name] for name in (*given, *others, "random") if name in rows]


def print_rows(rows: Sequence[Row], reference: str | None) -> None:
    columns: dict[str, Any] = {
        "recipe": lambda row: row.recipe,
        "seeds": lambda row: row.seeds or None,
        "mean": lambda row: _number(row.mean),
        "95 % interval": lambda row: _range(row.interval),
        "IQM": lambda row: _number(row.iqm),
        "of the IQM": lambda row: _range(row.iqm_interval),
        "normalised": lambda row: None if row.normalised is None else round(row.normalised, 1),
        "episodes": lambda row: row.episodes or None,
        "updates": lambda row: row.updates,
        "time": lambda row: None if row.seconds is None else duration(row.seconds),
        "alarms": lambda row: len(row.alarms) or None,
        "failed": lambda row: len(row.problems) or None,
    }
    kept = {
        name: cell
        for name, cell in columns.items()
        if name not in ("normalised", "alarms", "failed")
        or any(cell(row) is not None for row in rows)
    }
    terminal.print_table(list(kept), [[cell(row) for cell in kept.values()] for row in rows])
    for row in rows:
        for what, lines in (("alarms", row.alarms), ("failed", row.problems)):
            for line in lines:
                print(terminal.printable(f"{what}: {row.recipe}, {line}"))
    if reference is not None:
        print(f"normalised: 0 random, 100 expert, by D4RL's reference scores of {reference}")


def _print_published(dataset: str, published: dict[str, float]) -> None:
    if not published:
        return
    print(f"\npublished for {dataset} by CORL: normalised, last checkpoint, mean of 4 seeds, in")
    print("D4RL's own environment, whose physics may be another version's")
    terminal.print_table(list(published), [list(published.values())])


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write(text.encode())


def _range(interval: Interval | None) -> str | None:
    if interval is None or interval.n < 2:  # one episode shows no spread
        return None
    return f"{interval.low:.5g} … {interval.high:.5g}"


def _number(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


# --- the command line -----------------------------------------------------------------------------


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = terminal.parser("compare", ABOUT, EXAMPLES)
    add = parser.add_argument
    terminal.add_dataset(
        parser, help="dataset to train on; its episodes of evaluations are kept there, too"
    )
    add("--env", required=True, help="gymnasium id of the environment that evaluates")
    add("--recipes", default="offline,bc,bc10", help="comma-separated (default: %(default)s)")
    add("--seeds", default="0-2", help="training seeds, as 0-4 or 0,3,7 (default: %(default)s)")
    add("--name", default="", help="of the comparison; runs are NAME-RECIPE-SEED with the tag "
        "comparison:NAME (default: compare-DATASET)")  # fmt: skip
    add("--updates", type=int, help="updates of every run (default: the recipe's)")
    add("--config", type=Path, action="append", default=[], metavar="FILE",
        help="settings for all recipes, as for stepwell train; repeatable")  # fmt: skip
    add("--set", action="append", default=[], metavar="RECIPE.KEY=VALUE",
        help="a setting of one recipe; repeatable")  # fmt: skip
    add("--episodes", type=int, default=EPISODES, help="of each evaluation (default: %(default)s)")
    add("--first-seed", type=int, default=FIRST_EVALUATION_SEED,
        help="reset seed of the first evaluation episode (default: %(default)s)")  # fmt: skip
    add("--every-policy", action="store_true",
        help="evaluate every published policy: learning curves over updates")  # fmt: skip
    add("--jobs", type=int, default=1, metavar="N",
        help="processes at once (default: %(default)s)")  # fmt: skip
    add("--nice", type=int, default=10, metavar="N",
        help="niceness, so that other work comes first (default: %(default)s)")  # fmt: skip
    add("--output", type=Path, default=Path("comparisons"),
        help="folder of NAME/: logs, checkpoints, pictures (default: %(default)s)")  # fmt: skip
    add("--picture", type=Path, metavar="FILE.svg", help="(default: OUTPUT/NAME/comparison.svg)")
    add("--json", type=Path, metavar="FILE", help="also write the table to this file")
    add("--plugin", action="append", default=[], metavar="MODULE",
        help="module to import first in trainers and evaluations; repeatable")  # fmt: skip
    add("--env-args", nargs="+", default=[], metavar="KEY=VALUE", help="of the environment")
    add("--url", help="of the service (default: STEPWELL_URL, http://127.0.0.1:8000)")
    add("--token", help="(default: STEPWELL_TOKEN)")
    args = parser.parse_args(argv)
    args.recipes = list(dict.fromkeys(name for name in args.recipes.split(",") if name))
    args.name = args.name or f"compare-{args.dataset}"
    if not args.recipes:
        parser.error("--recipes: expected names such as offline,bc")
    if not NAME.fullmatch(args.name):
        parser.error(f"--name: expected letters, digits, '.', '_' and '-', got {args.name!r}")
    for option in ("episodes", "jobs"):
        if getattr(args, option) < 1:
            parser.error(f"--{option}: expected at least 1, got {getattr(args, option)}")
    if args.first_seed < 0:
        parser.error(f"--first-seed: expected at least 0, got {args.first_seed}")
    for path in args.config:
        if not path.is_file():
            parser.error(f"--config: no such file: {path}")
    try:
        args.seeds = seeds_of(args.seeds)
        args.set = _settings(args.set, args.recipes)
    except ValueError as error:
        parser.error(str(error))
    return args


def seeds_of(text: str) -> list[int]:
    """ "0-2,7" -> [0, 1, 2, 7], at most MAX_SEEDS. Raises ValueError."""
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"--seeds: expected numbers as in 0-4 or 0,3,7, got {text!r}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last - first >= MAX_SEEDS - len(seeds):
            raise ValueError(f"--seeds: expected at most {MAX_SEEDS} training seeds, got {text!r}")
        seeds += range(first, last + 1)
    return list(dict.fromkeys(seeds))


def _settings(words: Sequence[str], recipes: Sequence[str]) -> dict[str, list[str]]:
    """RECIPE.KEY=VALUE -> {recipe: [--KEY=VALUE, …]}. Raises ValueError."""
    found: dict[str, list[str]] = {}
    for word in words:
        recipe, dot, setting = word.partition(".")
        if not dot or "=" not in setting or recipe not in recipes:
            raise ValueError(
                f"--set: expected RECIPE.KEY=VALUE of {', '.join(recipes)}, got {word!r}"
            )
        if setting.partition("=")[0] in OWN:
            raise ValueError(
                f"--set: {', '.join(OWN)} of its runs are the comparison's own, got {word!r}; "
                "see --seeds, --name and --output"
            )
        found.setdefault(recipe, []).append(f"--{setting}")
    return found


if __name__ == "__main__":
    sys.exit(main())
