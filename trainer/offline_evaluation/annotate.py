"""`stepwell annotate DATASET --policy RUN:VERSION`: what a policy's critics think of each step.

    trajectories without annotations of this name ── a snapshot ── whole trajectories
    ── Q, V, advantage, weight (amago_model.get_values) ── the service, some at a time

What was sent stays, so the same command continues a stopped one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepwell import terminal
from stepwell._progress import CommandProgress
from stepwell._sql import literal
from stepwell._wording import pluralize
from stepwell.client import Client
from stepwell.errors import BadRequest
from stepwell.messages import split_version
from trainer.config import DataConfig, TrainConfig, default_cache
from trainer.errors import SettingError
from trainer.offline_evaluation import policy_commands

if TYPE_CHECKING:
    from amago_model.agent import Agent
    from trainer.offline_evaluation.policy_transitions import RunData

STEPS_AT_ONCE = 50_000
"""Steps of one request; a longer trajectory has one of its own."""
SEED = 0
"""Seed of the policy's sampled actions, whose mean value is V."""

ABOUT = """\
Value each step of a dataset with the critics of a published policy, and keep the values beside the
data, as the SQL table `annotations`: Q of the action taken, V of the policy's actions, the
advantage, and the weight that it gives the step in behaviour cloning. The dashboard shows them with
an episode.

Trajectories that have annotations of this name are left out: the same command continues a stopped
one, and annotates what has arrived since."""
EXAMPLES = """\
  stepwell annotate hopper --policy first:best
  stepwell annotate hopper@v2 --policy first:2000 --where "return > 100" --name critic
  stepwell annotate hopper --delete critic"""


def main(argv: list[str] | None = None) -> int:
    """Annotate; returns the exit status."""
    return policy_commands.run("annotate", _run, _parse(argv))


def _run(client: Client, args: argparse.Namespace) -> int:
    dataset, _ = split_version(args.dataset)
    if args.delete:
        client.delete_annotations(dataset, args.delete)
        print(f"deleted: the annotations {args.delete} of {dataset}")
        return 0
    with CommandProgress(quiet=args.json) as bar:
        task = bar.add_task(f"annotate {args.dataset}", total=1.0)
        found = annotate(
            client,
            args.dataset,
            args.policy,
            name=args.name,
            where=args.where,
            include_eval=args.include_eval,
            cache=args.cache,
            device=args.device,
            on_progress=lambda share: bar.update(task, completed=share),
        )
    if args.json:
        terminal.print_json(found)
    elif not found["trajectories"]:
        print(f"nothing to do: all that is selected has annotations of the name {found['name']}")
    else:
        print(
            f"annotated {pluralize(found['trajectories'], 'trajectory', 'trajectories')} of "
            f"{args.dataset}, {pluralize(found['steps'], 'step')}, as {found['name']}\n"
            f'stepwell sql "select trajectory, avg(advantage) from annotations where name = '
            f'{literal(found["name"])} group by trajectory order by 2 desc limit 10"'
        )
    return 0


def annotate(
    client: Client,
    dataset: str,
    policy: str,
    *,
    name: str | None = None,
    where: str = "",
    include_eval: bool = False,
    cache: Path | None = None,
    device: str = "cpu",
    on_progress: Callable[[float], None] = lambda _: None,
) -> dict[str, Any]:
    """Annotate the trajectories of a dataset, or of a version of it, that have no annotations of
    this name.

    Args:
        policy: RUN, RUN:VERSION or RUN:ALIAS (a "/" will do, too).
        name: of the annotations; None: the policy, RUN/VERSION.
        where: SQL condition over `trajectories`.
        include_eval: also trajectories of purpose 'eval'.
        cache: folder of this node's columns; None: that of training.

    Returns: name, policy, and the numbers of trajectories and steps annotated now.

    Raises:
        PolicyFileError: the policy has no critics.
        SettingError: the policy takes other actions than the dataset has.
        Conflict: the name is another policy's.
        StepwellError, AmagoError: data or policy cannot be read.
    """
    from amago_model.policy_file import load_agent
    from trainer.data.snapshot import LeaseKeeper, create_snapshot
    from trainer.offline_evaluation.policy_transitions import open_selection

    run, _, which = policy.replace(":", "/", 1).partition("/")
    downloaded = client.download_policy(run, which or "latest")
    assert downloaded is not None
    agent = load_agent(downloaded.data, device)
    policy = f"{run}/{downloaded.version}"
    plain, _ = split_version(dataset)
    result: dict[str, Any] = {"name": name or policy, "policy": policy}
    result |= {"trajectories": 0, "steps": 0}

    data = DataConfig(include_eval=include_eval, cache=cache or default_cache())
    everything = TrainConfig(dataset=dataset, where=where, data=data)
    known = f"SELECT trajectory FROM annotations WHERE name = {literal(result['name'])}"
    missing = f"id NOT IN ({known})"
    config = TrainConfig(
        dataset=dataset, where=f"({where}) AND {missing}" if where else missing, data=data
    )
    leases = LeaseKeeper(client, f"annotate/{plain}")
    try:
        selected = open_selection(client, config, leases, f"annotate/{plain}")
        _check_actions(agent, selected, policy, plain)
        waiting: list[dict[str, Any]] = []
        for values in _values(agent, selected):
            steps = sum(len(one["q"]) for one in waiting)
            if waiting and steps + len(values["q"]) > STEPS_AT_ONCE:
                _send(client, plain, waiting, result)
                on_progress(result["steps"] / selected.steps)
                waiting = []
            waiting.append(values)
        _send(client, plain, waiting, result)
    except BadRequest as error:
        if error.code != "empty_selection":
            raise
        create_snapshot(client, everything, f"annotate/{plain}")  # raises if that is empty, too
    finally:
        leases.close()
    on_progress(1.0)
    return result


def _values(agent: Agent, data: RunData) -> Iterator[dict[str, Any]]:
    """For each trajectory, its TrajectoryValues: those of the discount that the policy acts for."""
    import torch

    from amago_model.values import get_values

    device = agent.gammas.device
    devices = [device] if device.type == "cuda" else []
    for rows, batch in data.batches():
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(SEED)
            found = get_values(agent, batch.to(device))
        known = found.mask.cpu()
        columns = {
            name: getattr(found, name)[..., -1].float().cpu()
            for name in ("q", "v", "advantage", "weight")
        }
        ids = data.view.manifest.trajectory_ids(rows)
        for i, (trajectory, length) in enumerate(zip(ids, data.lengths(rows), strict=True)):
            values = {
                name: [x if k else None for x, k in zip(*both, strict=True)]
                for name, column in columns.items()
                for both in [(column[i, :length].tolist(), known[i, :length].tolist())]
            }
            yield {"trajectory": trajectory, **values}


def _send(
    client: Client, dataset: str, values: list[dict[str, Any]], result: dict[str, Any]
) -> None:
    sent = client.annotate(dataset, result["name"], result["policy"], values)
    result["trajectories"] += sent.stored
    result["steps"] += sum(len(one["q"]) for one in values)


def _check_actions(agent: Agent, data: RunData, policy: str, dataset: str) -> None:
    if agent.spaces.action != data.spaces.action:
        raise SettingError(
            f"policy {policy} takes other actions than dataset {dataset} has: expected "
            f"{agent.spaces.action}, got {data.spaces.action}; take a policy that was trained on "
            "such data"
        )


# --- the command line -----------------------------------------------------------------------------


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = terminal.parser("annotate", ABOUT, EXAMPLES)
    add = parser.add_argument
    terminal.add_dataset(
        parser, metavar="DATASET", help="a dataset, or a version of it (NAME@VERSION)"
    )
    add("--policy", default="", metavar="RUN[:VERSION]",
        help="a published policy, by version or alias (default: latest)")  # fmt: skip
    add("--where", default="", metavar="SQL", help="condition over `trajectories`")
    add("--name", default=None, help="of the annotations (default: the policy, RUN/VERSION)")
    add("--include-eval", action="store_true", help="also evaluation episodes")
    add("--device", default="cpu", help="of the networks (default: %(default)s)")
    add("--delete", default="", metavar="NAME",
        help="delete the annotations of that name instead; needs the scope admin")  # fmt: skip
    policy_commands.add_options(parser)
    args = parser.parse_args(argv)
    if bool(args.policy) == bool(args.delete):
        parser.error("expected --policy RUN[:VERSION], or --delete NAME")
    return args


if __name__ == "__main__":
    sys.exit(main())
