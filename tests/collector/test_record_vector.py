"""record() of a vector environment: the episodes of each sub-environment, in any autoreset mode."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from collector.record import record
from stepwell import Client
from tests.collector.fake_env import FakeEnv

LENGTHS = ((3, 1), (2, 4))


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_each_sub_environment_has_its_episodes(
    client: Client, name: str, tmp_path: Path, mode: AutoresetMode
) -> None:
    made = [partial(FakeEnv, lengths, copies=True) for lengths in LENGTHS]
    vector = SyncVectorEnv(made, autoreset_mode=mode)
    env = record(vector, name, client, policy="script", env_id="Fake-v0", outbox=tmp_path)
    env.reset(seed=7)
    over = np.zeros(2, np.bool_)
    for time in range(8):
        if mode is AutoresetMode.DISABLED and over.any():
            env.reset(options={"reset_mask": over})
        _, _, terminated, truncated, _ = env.step(np.array([time % 5, (time + 1) % 5]))
        over = terminated | truncated
    env.close()
    env.close()  # does nothing
    client.flush(name)
    found = client.trajectories(name, order="seq", limit=100).items
    for number, lengths in enumerate(LENGTHS):
        # FakeEnv's reward is 1000 times the number of the episode, plus the time.
        mine = []
        for info in found:
            steps = client.steps(info.id)
            if steps.obs["observation"][0, 2] == lengths[int(steps.obs["observation"][0, 0]) % 2]:
                mine.append((info, steps))
        whole = [(i, s) for i, s in mine if "interrupted" not in i.tags]
        assert [i.length for i, _ in whole] == [lengths[k % 2] for k in range(len(whole))]
        for episode, (info, steps) in enumerate(whole):
            assert steps.obs["observation"][:, 0].tolist() == [episode] * (info.length + 1)
            assert steps.obs["observation"][:, 1].tolist() == list(range(info.length + 1))
            assert steps.rewards.tolist() == [1000 * episode + t for t in range(info.length)]
            assert (info.terminated, info.truncated) == (episode % 2 == 0, episode % 2 == 1)
            assert info.seed == (7 + number if episode == 0 else None)
        assert len(mine) - len(whole) <= 1  # the one that ran when it was closed
    assert {i.policy for i in found} == {"script"}


def test_a_failure_keeps_all_running_episodes(client: Client, name: str, tmp_path: Path) -> None:
    made = [partial(FakeEnv, (9,)), partial(FakeEnv, (9,), broken_at=(0, 2))]
    env = record(SyncVectorEnv(made), name, client, env_id="Fake-v0", outbox=tmp_path)
    env.reset()
    with pytest.raises(RuntimeError, match="asked to fail"):
        for _ in range(4):
            env.step(np.zeros(2, np.int64))
    env.close()
    found = client.trajectories(name, limit=100).items
    assert [(i.length, i.truncated, i.tags) for i in found] == [(2, True, ["broken"])] * 2
