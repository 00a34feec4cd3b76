"""An environment of your own, to learn in by one command:

    stepwell run examples.own_environment:Thermostat-v0
    python examples/own_environment.py

The second command shows the best policy, in plain Python.
"""

import argparse

import gymnasium
import numpy as np


class Thermostat(gymnasium.Env):
    """Hold a room at 0 degrees: heat or cool by up to 1 degree, against a draught."""

    observation_space = gymnasium.spaces.Box(-10.0, 10.0, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        self.room = self.np_random.uniform(-5.0, 5.0, 1).astype(np.float32)
        return self.room, {}

    def step(self, action):
        self.room = np.clip(self.room + action + self.np_random.normal(0, 0.1, 1), -10, 10)
        return self.room.astype(np.float32), -float(abs(self.room[0])), False, False, {}


gymnasium.register("Thermostat-v0", Thermostat, max_episode_steps=50)

if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    env = gymnasium.make("Thermostat-v0")
    obs, _ = env.reset(seed=0)
    total, done = 0.0, False
    while not done:  # the best policy
        obs, reward, terminated, done, _ = env.step(np.clip(-obs, -1.0, 1.0))
        total += reward
    print(f"return of the best policy {total:.1f}")
