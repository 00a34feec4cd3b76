"""Random actions at first, then the policy; and which versions an evaluator takes."""

import numpy as np
import pytest

from collector.evaluate_versions import spaced
from collector.policy_actor import ActorInputs
from collector.warm_up import WarmUpActor
from stepwell import Discrete
from stepwell.testing import make_spec


class Constant:
    """Plays one action, and remembers which rows it was reset for."""

    def __init__(self, name: str, action: int):
        self.name, self.action, self.resets = name, action, []

    def reset(self, env_index, seed):
        self.resets.append((env_index, seed))

    def policy_id(self, env_index):
        return self.name

    def act(self, inputs):
        return {k: np.full_like(a, self.action) for k, a in inputs.prev_action.items()}


def test_an_episode_keeps_the_actor_that_it_began_with():
    spec = make_spec(discrete=4)
    inputs = ActorInputs.zeros(spec, 3)
    (key,) = spec.actions
    assert isinstance(spec.actions[key], Discrete)
    warm = True
    random, policy = Constant("random", 1), Constant("run/0", 2)
    actor = WarmUpActor(random, policy, 3, lambda: warm)
    for row in (0, 1):
        actor.reset(row, row)
    inputs.playing[:2] = True
    assert list(actor.act(inputs)[key][:2]) == [1, 1]
    warm = False
    actor.reset(1, 9)
    actor.reset(2, 10)
    inputs.playing[:] = True
    assert list(actor.act(inputs)[key]) == [1, 2, 2]
    assert [actor.policy_id(row) for row in range(3)] == ["random", "run/0", "run/0"]
    inputs.playing[0] = False  # its episode has ended
    assert list(actor.act(inputs)[key][1:]) == [2, 2]
    assert random.resets == [(0, 0), (1, 1)] and policy.resets == [(1, 9), (2, 10)]


@pytest.mark.parametrize(
    ("versions", "every", "ended", "kept"),
    [
        ([], 10, True, []),
        ([30, 20, 10, 0], 0, False, [30, 20, 10, 0]),
        ([40, 30, 20, 10, 0], 20, False, [40, 20, 0]),
        ([30, 20, 10, 0], 20, False, [20, 0]),
        ([30, 20, 10, 0], 20, True, [30, 20, 0]),
        ([7], 100, True, [7]),
    ],
)
def test_versions_at_least_so_many_updates_apart(versions, every, ended, kept):
    """Those chosen once stay chosen when more versions come."""
    assert spaced(versions, every, ended=ended) == kept
