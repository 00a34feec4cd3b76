"""A learner of your own on data selected by SQL.

    stepwell serve --data ./data
    python examples/18_own_data.py
    python examples/24_own_learner.py [DATASET]

Behaviour cloning of the better half of a dataset, with a small torch network. The dataset has one
observation of numbers, called `observation`, and continuous actions.
"""

import argparse

import torch
from torch import nn

from stepwell import Client
from trainer.data import stream

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("dataset", nargs="?", default="robot", help="(default: %(default)s)")
dataset = parser.parse_args().dataset
torch.manual_seed(0)
select = f"""
select id from trajectories where dataset = '{dataset}' and return >=
  (select median(return) from trajectories where dataset = '{dataset}')
"""

with Client() as client:
    spec = client.dataset(dataset).spec
    obs_size = spec["observations"]["observation"]["shape"][0]
    action_size = spec["actions"]["action"]["shape"][0]
    network = nn.Sequential(nn.Linear(obs_size, 64), nn.Tanh(), nn.Linear(64, action_size))
    optimiser = torch.optim.AdamW(network.parameters(), lr=1e-3)
    for step, batch in enumerate(stream(select, window=16, batch=32, batches=50, client=client)):
        guess = network(batch.obs["observation"][:, :-1].float())
        error = (guess - batch.action).square().mean(-1)
        loss = (error * batch.mask).sum() / batch.mask.sum()  # without padding
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 10 == 0:
            print(f"update {step:>3}  loss {loss.item():.4f}")
