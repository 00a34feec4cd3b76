"""A learner of your own on data selected by SQL.

    stepwell serve --data ./data
    python examples/18_own_data.py
    python examples/24_own_learner.py [DATASET]

Behaviour cloning of the better half of a dataset, with a small torch network. The dataset has one
observation of numbers, called `observation`, and continuous actions.
"""

import argparse
from itertools import islice

import torch
from torch import nn
from torch.utils.data import DataLoader

from stepwell.torch import Windows

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("dataset", nargs="?", default="robot", help="(default: %(default)s)")
dataset = parser.parse_args().dataset
torch.manual_seed(0)

median = f"select median(\"return\") from trajectories where dataset = '{dataset}'"
windows = Windows(dataset, length=16, where=f'"return" >= ({median})')
obs_size, action_size = (
    space.shape[0]
    for space in (windows.spec.observations["observation"], windows.spec.actions["action"])
)
network = nn.Sequential(nn.Linear(obs_size, 64), nn.Tanh(), nn.Linear(64, action_size))
optimiser = torch.optim.AdamW(network.parameters(), lr=1e-3)
for step, batch in enumerate(islice(DataLoader(windows, batch_size=32), 50)):
    guess = network(batch["obs"][:, :-1])
    error = (guess - batch["actions"]).square().mean(-1)
    loss = (error * batch["mask"]).sum() / batch["mask"].sum()  # without padding
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    if step % 10 == 0:
        print(f"update {step:>3}  loss {loss.item():.4f}")
