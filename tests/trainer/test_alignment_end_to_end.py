"""From an environment's step to a learner's batch, through the real service: nothing slips.

FakeEnv's every number says where it belongs: obs [episode, t, length], reward 1000 · episode + t,
action = what a script chose from (episode, t). So each cell of a batch is checked by arithmetic,
without asking any of our code where it came from.
"""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from typing import Any

import gymnasium
import numpy as np
import pytest

from collector.interface import interface_of
from collector.rollout import Rollout
from stepwell.outbox import Outbox
from tests.collector.fake_env import FakeEnv
from tests.collector.scripted_actor import ScriptedActor
from trainer.config import DataConfig, SourceConfig, TrainConfig
from trainer.data.cache import Cache
from trainer.data.fields import fields_of
from trainer.data.loader import Loader, open_view
from trainer.data.sampler import WindowSampler
from trainer.data.snapshot import create_snapshot, load_manifest

LENGTHS = (3, 1, 4, 12, 7, 25)
EPISODES = 18
PIECE = 10
BORDERS = (10, 17, 20)
"""Where later pieces begin; the second environment's second piece has 7 steps."""
START = 2  # the actions' first number


KINDS = ("piece", "terminated", "truncated", "short", "not good")


def chosen(episode: int, t: int) -> int:
    return START + (3 * episode + t) % 5


def good(episode: int, t: int) -> bool:
    """Whether there is something to learn from a step."""
    return (episode + t * t) % 3 > 0


class Shifted(FakeEnv):
    """FakeEnv whose actions count from START, and whose steps say whether they are good."""

    def __init__(self) -> None:
        super().__init__(LENGTHS)
        self.action_space = gymnasium.spaces.Discrete(5, start=START)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = super().step(action)
        said = good(int(reward) // 1000, int(reward) % 1000)
        return obs, reward, terminated, truncated, {**info, "good": said}


def play(client, name: str, folder, kind: str) -> None:
    """EPISODES episodes, in pieces of at most PIECE steps, by the collector's own parts."""
    envs: Any = [Shifted(), Shifted()]
    if kind != "envs":
        mode = gymnasium.vector.AutoresetMode[kind]
        envs = gymnasium.vector.SyncVectorEnv([Shifted, Shifted], autoreset_mode=mode)
    interface = interface_of(envs[0] if kind == "envs" else envs, "Fake-v0", infos=("good",))
    client.create_dataset(name, interface.spec)
    outbox = Outbox(folder / "outbox", client, name, interface.spec)
    actor = ScriptedActor(
        interface, "script", lambda obs, t: np.int64(chosen(int(obs["observation"][0]), t))
    )

    rollout = Rollout(
        envs,
        actor,
        interface,
        make_env=Shifted,
        seeds=iter(range(EPISODES)),
        sink=lambda trajectory, _: outbox.put(trajectory),
        max_steps=PIECE,
    )
    while not rollout.done:
        rollout.step()
    assert outbox.close(30.0)


def check(batch, kind: str) -> Counter:
    """Every cell, from what its own row says it is; how often each special case was seen."""
    seen: Counter = Counter()
    obs = batch.obs["observation"].numpy()
    for i in range(len(batch.mask)):
        n = int(batch.mask[i].sum())
        assert batch.mask[i, :n].all() and not batch.mask[i, n:].any()
        episode, first, length = (int(x) for x in obs[i, 0])
        for row in range(n + 1):
            t = first + row
            known = row < n or bool(batch.next_obs_valid[i, row - 1])
            if known:
                assert obs[i, row].tolist() == [episode, t, length]
            assert int(batch.time_idx[i, row]) == t
            before = int(batch.prev_action[i, row]), float(batch.prev_reward[i, row])
            if t > 0 and row == 0 and t in BORDERS and before == (START - 1, 0.0):
                # A piece's first row: what came before was recorded in another piece.
                seen["piece"] += 1
            elif t > 0:
                assert t != PIECE or row > 0, "every first piece ends there"
                assert before == (chosen(episode, t - 1), 1000 * episode + t - 1)
        for step in range(n):
            ends = first + step + 1 == length
            assert bool(batch.terminated[i, step]) == (ends and episode % 2 == 0)
            assert bool(batch.truncated[i, step]) == (ends and episode % 2 == 1)
            assert bool(batch.next_obs_valid[i, step]) or (ends and kind == "SAME_STEP")
            assert bool(batch.action_known[i, step])
            assert bool(batch.actor_mask[i, step]) == good(episode, first + step)
            seen["not good"] += not good(episode, first + step)
            seen["terminated" if episode % 2 == 0 else "truncated"] += ends
        rest = slice(n, None)
        for flag in ("terminated", "truncated", "next_obs_valid", "action_known"):
            assert not getattr(batch, flag)[i, rest].any()
        seen["short"] += n < batch.mask.shape[1]
    return seen


@pytest.mark.parametrize("kind", ["envs", "DISABLED", "NEXT_STEP", "SAME_STEP"])
def test_every_cell_is_where_the_environment_put_it(client, name, tmp_path, kind):
    """Each way of resetting, each padded mode, a mixture: obs, previous step, endings, time,
    and which steps to learn from."""
    play(client, name, tmp_path, kind)
    sources = tuple(
        SourceConfig(
            select=f"SELECT id FROM trajectories WHERE dataset = '{name}' AND {condition}",
            share=share,
        )
        for condition, share in (("length < 5", 0.25), ("length >= 5", 0.75))
    )
    snapshot = create_snapshot(client, TrainConfig(sources=sources), "test")
    manifest = load_manifest(client, snapshot, tmp_path)
    fields = fields_of(manifest.spec, DataConfig(actor_mask="good"))
    cache = Cache(tmp_path / "cache", 1e9, client)
    assert cache.ensure(manifest, fields) == {}
    seen: Counter = Counter()
    for padding in ("none", "both", "left", "right", "center"):
        data = DataConfig(batch=16, window=6, padding=padding, draw="windows")
        sampler = WindowSampler(manifest, data, 0)
        with closing(Loader([open_view(cache, fields, sampler)], data)) as loader:
            for _ in range(8):
                loaded = next(loader)
                seen += check(loaded.batch, kind)
                assert int((loaded.windows.component == 0).sum()) == 4
    assert all(seen[what] > 5 for what in KINDS), seen
