"""Store arrays of your own in a dataset, and query them with SQL.

    stepwell serve --data ./data
    python examples/18_own_data.py [DATASET]

Five episodes of random numbers stand for those of a robot.
"""

import argparse

import numpy as np

from stepwell import Box, Client, EnvSpec

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("dataset", nargs="?", default="robot", help="(default: %(default)s)")
dataset = parser.parse_args().dataset
rng = np.random.default_rng(0)
spec = EnvSpec.of(Box((7,)), Box((2,), low=-1.0, high=1.0), env="robot-arm")

with Client() as client:
    client.create_dataset(dataset, spec, exist_ok=True)
    for attempt in range(5):
        steps = 50 + attempt
        client.add(
            dataset,
            obs=rng.standard_normal((steps + 1, 7), "float32"),  # one more observation than actions
            actions=rng.uniform(-1, 1, (steps, 2)).astype(np.float32),
            rewards=rng.standard_normal(steps, np.float32),
            truncated=True,  # recording stopped, the task had not ended
            env="robot-arm",
            policy="teleoperated",
            success=attempt % 2 == 0,
            metrics={"grip_force": float(rng.uniform(2, 5))},
        )
    client.flush(dataset)  # now the steps are visible to SQL too
    print(client.sql("select seq, length, return, success from trajectories order by seq").rows)
    by_time = """
        select t // 10 as decade, avg(reward) from steps where not is_last
        group by decade order by decade"""
    for decade, reward in client.sql(by_time, dataset=dataset):
        print(f"steps {10 * decade:>3} …  mean reward {reward:.3f}")
