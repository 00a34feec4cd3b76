"""Record an environment, with any policy.      python examples/record_environment.py [DATASET]"""

import sys
import tempfile

import gymnasium

from collector.record import record
from stepwell import Client

dataset = sys.argv[1] if len(sys.argv) > 1 else "pendulum-by-hand"

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
