"""Record an environment, whoever plays it.

    stepwell serve --data ./data
    python examples/19_record_environment.py [DATASET]

Here the player always pushes to the left; it could be a person, or an agent of another library.
"""

import argparse
import tempfile

import gymnasium

from collector.record import record
from stepwell import Client

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("dataset", nargs="?", default="pendulum-by-hand", help="(default: %(default)s)")
dataset = parser.parse_args().dataset

with Client() as client, tempfile.TemporaryDirectory() as outbox:
    env = record(
        gymnasium.make("Pendulum-v1"), dataset, client, policy="always left", outbox=outbox
    )
    for seed in range(3):
        env.reset(seed=seed)
        done = False
        while not done:
            _, _, terminated, truncated, _ = env.step([-1.0])
            done = terminated or truncated
    env.close()  # sends what is still queued on disk
    page = client.trajectories(dataset)
    for item in page.items:
        print(f"{item.id}  seed {item.seed}  {item.length} steps  return {item.total_reward:.1f}")
