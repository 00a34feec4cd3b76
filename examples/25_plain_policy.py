"""A policy in plain Python plays in eight environments at once, and is recorded.

    stepwell serve --data ./data
    python examples/25_plain_policy.py [DATASET]

The trained policy of a run would be `stepwell.load_policy("run/best")`.
"""

import argparse
import tempfile

import gymnasium
import numpy as np

from collector.record import record
from stepwell import Client

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("dataset", nargs="?", default="cartpole-by-rule", help="(default: %(default)s)")
dataset = parser.parse_args().dataset

with Client() as client, tempfile.TemporaryDirectory() as outbox:
    envs = record(
        gymnasium.make_vec("CartPole-v1", num_envs=8, vectorization_mode="sync"),
        dataset,
        client,
        policy="lean",
        outbox=outbox,
    )
    obs, _ = envs.reset(seed=0)
    for _ in range(600):
        angle, angular_velocity = obs[:, 2], obs[:, 3]
        obs, *_ = envs.step((angle + angular_velocity > 0).astype(np.int64))
    envs.close()  # sends what is still queued on disk; unfinished episodes are tagged
    query = 'SELECT count(*), avg("return") FROM trajectories WHERE dataset = ? AND terminated'
    client.flush(dataset)
    (episodes, mean), *_ = client.sql(query, [dataset]).rows
    print(f"{episodes} episodes that fell" + (f", mean return {mean:.1f}" if episodes else ""))
