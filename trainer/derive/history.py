"""Does one observation show the state? Measured on the first episodes of a run.

Two small networks predict the change of the observation and the reward of a step: one sees this
observation and action, the other also what was before. If the second predicts much better, in
episodes that neither was fitted to, a policy needs a memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from amago_model.config import ActionSpace, Spaces
from stepwell.client import Client
from stepwell.spaces import Array
from trainer.config import TrainConfig
from trainer.data.returns import Floats
from trainer.data.snapshot import sql_condition

LAGS = 4
"""Earlier steps that the second network sees, beside the first observation of the episode."""
FITS = 600
"""Updates of each network."""
BATCH = 512
HELD_OUT = 0.25
"""Share of the episodes on which predictions are compared."""
FEWEST = 200
"""Steps on which predictions are compared, at least; fewer say nothing."""
CLEARLY = 1 / 3
"""History must leave at most this share of what is unexplained without it: an earlier observation
also helps a little where a network has not learned all that this one shows."""
STEPS = 3_000
"""Steps that are read."""
WIDEST = 200
"""Observations of more numbers, such as images, are not compared."""
MUCH_BETTER = 0.2
"""Share of the variance of a number that history explains in addition, at least."""


@dataclass(frozen=True, slots=True)
class Episode:
    """One episode: what a policy sees, does and gets."""

    observations: Floats
    """[T+1, D]; choices as one-hots."""
    actions: Floats
    """[T, A]; choices as one-hots."""
    rewards: Floats
    """[T]."""


def gain_of_history(episodes: Sequence[Episode], seed: int = 0) -> float:
    """How much more of the variance of a reward, or of the change of an observed number, is
    explained with the steps before: 0 to 1, the largest over these numbers. 0 if the episodes are
    too few to tell, or if so much is explained without history that less than MUCH_BETTER is left.
    """
    order = np.random.default_rng(seed).permutation(len(episodes))
    held = max(1, int(HELD_OUT * len(episodes)))
    test, fit = [episodes[i] for i in order[:held]], [episodes[i] for i in order[held:]]
    if not fit or sum(len(e.rewards) for e in test) < FEWEST:
        return 0.0
    x_test, history_test, y_test = _table(test)
    x, history, y = _table(fit)
    mean, std = y.mean(dim=0), y.std(dim=0)
    changes = std > 1e-6
    if not bool(changes.any()):
        return 0.0
    y, y_test = ((part - mean)[:, changes] / std[changes] for part in (y, y_test))
    alone = _explained(x, y, x_test, y_test, seed, enough=1.0 - MUCH_BETTER)
    if bool((alone > 1.0 - MUCH_BETTER).all()):
        return 0.0
    both = _explained(
        torch.cat([x, history], dim=1), y, torch.cat([x_test, history_test], dim=1), y_test, seed
    )
    gain = torch.where(1.0 - both < CLEARLY * (1.0 - alone), both - alone, 0.0)
    return float(gain.max())


def _table(episodes: Sequence[Episode]) -> tuple[Tensor, Tensor, Tensor]:
    """Of all steps: this observation and action, what was before, and what follows."""
    now, before, after = [], [], []
    for e in episodes:
        obs, steps = e.observations, len(e.rewards)
        now.append(np.concatenate([obs[:-1], e.actions], axis=1))
        rows = np.concatenate([obs[:-1], e.actions, e.rewards[:, None]], axis=1)
        padded = np.concatenate([np.zeros((LAGS, rows.shape[1])), rows])
        lags = [padded[LAGS - k : LAGS - k + steps] for k in range(1, LAGS + 1)]
        before.append(np.concatenate([*lags, np.repeat(obs[:1], steps, axis=0)], axis=1))
        after.append(np.concatenate([np.diff(obs, axis=0), e.rewards[:, None]], axis=1))
    tables = (np.concatenate(part).astype(np.float32) for part in (now, before, after))
    first, second, third = map(torch.from_numpy, tables)
    return first, second, third


def _explained(
    x: Tensor, y: Tensor, x_test: Tensor, y_test: Tensor, seed: int, enough: float = 2.0
) -> Tensor:
    """[targets] the share of the variance that a network explains in the test set. It is fitted
    until it explains more than `enough` of all targets."""
    variance = y_test.var(dim=0).clamp(min=1e-6)
    mean, std = x.mean(dim=0), x.std(dim=0).clamp(min=1e-6)
    x, x_test = (x - mean) / std, ((x_test - mean) / std).clamp(-10.0, 10.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = torch.nn.Sequential(
            torch.nn.Linear(x.shape[1], 128),
            torch.nn.SiLU(),
            torch.nn.Linear(128, 128),
            torch.nn.SiLU(),
            torch.nn.Linear(128, y.shape[1]),
        )
        optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3, weight_decay=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, FITS)
        best = torch.full((y.shape[1],), torch.inf)
        for update in range(1, FITS + 1):
            rows = torch.randint(len(x), (min(BATCH, len(x)),))
            loss = torch.nn.functional.mse_loss(network(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            if update % (FITS // 20) == 0:
                with torch.no_grad():
                    best = torch.minimum(best, (network(x_test) - y_test).square().mean(dim=0))
                if bool((1.0 - best / variance > enough).all()):
                    break
    return (1.0 - best / variance).clamp(min=0.0)


# --- the episodes of a dataset --------------------------------------------------------------------


def read_gain_of_history(client: Client, config: TrainConfig, spaces: Spaces) -> float | None:
    """`gain_of_history` of the episodes that a config selects; None for observations that are not
    compared: images, texts, and others with many numbers."""
    seen = {k: s for k, s in spaces.observations.items() if s.role in ("policy", "mask")}
    if sum(s.features for s in seen.values()) > WIDEST or any(s.vocabulary for s in seen.values()):
        return None
    rows = client.sql(
        f"select id from trajectories where {sql_condition(config)} and state = 'sealed' "
        "order by hash(id), id limit 1000",
        timeout=60.0,
    ).rows
    episodes: list[Episode] = []
    for (trajectory_id,) in rows:
        found = client.steps(trajectory_id)
        if found.final_obs_valid:
            columns = [_columns(found.obs[k], s.n, s.starts) for k, s in seen.items()]
            actions = [_columns(a, *_choices(spaces.action)) for a in found.actions.values()]
            episodes.append(
                Episode(
                    np.concatenate(columns, axis=1),
                    np.concatenate(actions, axis=1),
                    found.rewards.astype(np.float64),
                )
            )
        if sum(len(e.rewards) for e in episodes) >= STEPS:
            break
    return gain_of_history(episodes)


def _choices(space: ActionSpace) -> tuple[int | None, tuple[int, ...]]:
    """The number of choices of a single one, and the first."""
    return (space.n, (space.start,)) if space.kind == "discrete" else (None, ())


def _columns(array: Array, n: int | None, starts: tuple[int, ...]) -> Floats:
    """[rows, numbers]; of choices, one-hots."""
    flat = array.reshape(len(array), -1)
    if n is None:
        return flat.astype(np.float64)
    choices = flat.astype(np.int64) - np.asarray(starts or (0,), np.int64)
    return np.eye(n)[choices].reshape(len(flat), -1)
