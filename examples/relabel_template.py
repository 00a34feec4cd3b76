"""A template of a custom relabeler, to copy.

    stepwell serve --data ./data
    python examples/relabel_template.py [DATASET]

A robot gets a place as its goal and rarely reaches it. Hindsight relabeling replaces the goal by a
place that the robot did reach. This program records a few random walks and prints their return
before and after relabeling. Copied to a module, the relabeler is used in training by:

    stepwell train offline --dataset walks --plugin my_module --data.relabel reach:within=0.1
"""

import argparse
from collections.abc import Iterator

import numpy as np

from stepwell import Box, Client, EnvSpec, Trajectory
from trainer.data import stream
from trainer.data.relabel import Episode, Relabeler, register


@register("reach")
class Reach(Relabeler):
    """Replaces the goal of some samples by the robot's place at a later step."""

    # Parameters, set by reach:within=0.2,share=0.8
    within: float = 0.1
    """Distance at which a goal counts as reached."""
    share: float = 0.5
    """Fraction of samples that are relabeled."""

    def __call__(self, episode: Episode, rng: np.random.Generator) -> Episode:
        # 1. Return episodes that cannot be relabeled unchanged. Use rng for all random numbers.
        if not episode.complete or rng.random() >= self.share:
            return episode
        # 2. Choose a place reached after a step as the goal: rows 1 … T, never row 0.
        place = episode.obs["place"]
        row = int(rng.integers(1, len(episode) + 1))
        # 3. Set the goal in every row and the reward in every step, as the environment would.
        #    Make new arrays; those of the episode are read-only.
        goal = np.broadcast_to(place[row], episode.obs["goal"].shape)
        reached = np.linalg.norm(place[1:] - place[row], axis=1) <= self.within
        relabeled = episode.replace(
            obs={"goal": goal},
            reward=reached.astype(np.float32),
            goals_replaced=1,  # for the metric relabel/goals_replaced
        )
        # 4. Terminate the episode where the environment would: when the goal is first reached.
        return relabeled.terminated_at(int(reached.argmax()) + 1)


def walks(spec: EnvSpec, count: int) -> Iterator[Trajectory]:
    """Random walks of 30 steps in the plane; the goal is far away."""
    for seed in range(count):
        rng = np.random.default_rng(seed)
        action = rng.uniform(-1, 1, (30, 2)).astype(np.float32)
        place = np.concatenate((np.zeros((1, 2)), 0.1 * action.cumsum(axis=0)))
        goal = np.broadcast_to(np.float32([5.0, 5.0]), (31, 2))
        obs = {"place": place, "where": place, "goal": goal}
        yield Trajectory.from_arrays(
            obs=obs, actions=action, rewards=np.zeros(30), truncated=True, spec=spec
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dataset", nargs="?", default="walks", help="(default: %(default)s)")
    dataset = parser.parse_args().dataset
    spec = EnvSpec.of(
        {"where": Box((2,)), "goal": Box((2,)), "place": Box((2,))},
        Box((2,), low=-1.0, high=1.0),
        roles={"place": "relabel"},  # stored for the relabeler, not an input of the agent
        env="walk",
    )
    with Client() as client:
        client.create_dataset(dataset, spec, exist_ok=True)
        client.post(dataset, list(walks(spec, 20)), spec=spec, wait_sealed=True)
        select = f"select id from trajectories where dataset = '{dataset}'"
        for relabel in ((), ("reach:share=1.0",)):
            (batch,) = stream(
                select, window=30, batch=32, batches=1, relabel=relabel, client=client
            )
            mean = float(batch.reward[batch.mask].sum()) / len(batch.mask)
            print(f"{'relabeled' if relabel else 'as recorded':12} mean return {mean:.2f}")
