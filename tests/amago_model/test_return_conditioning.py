"""Return conditioning: what the policy sees in training and in acting, and that it acts on it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from amago_model import (
    ActionSpace,
    Agent,
    AgentConfig,
    Batch,
    BatchError,
    ConfigError,
    ObsSpace,
    Spaces,
    load_policy,
    save_policy,
)
from amago_model.data.batch import encode_action
from tests.amago_model.cases import CLONING, MEMORIES, batch_of, spaces_of
from tests.amago_model.settings import configured

BOX = ActionSpace(kind="continuous", shape=(2,), low=(-1.0, -1.0), high=(1.0, 1.0))


def spaces_with(action: ActionSpace) -> Spaces:
    return Spaces(
        observations={"observation": ObsSpace(shape=(2,), dtype="float32")}, action=action
    )


def config_of(memory: str = "identity", target: float | None = 4.0, scale: float = 0.5):  # type: ignore[no-untyped-def]
    return configured(
        timestep_encoder={"n_layers": 1, "d_hidden": 8, "d_output": 8},
        trajectory_encoder=MEMORIES[memory],
        actor={"d_hidden": 16, "n_layers": 1},
        return_conditioning={"target_return": target, "scale": scale},
        **CLONING | {"losses": CLONING["losses"] | {"auxiliary_gammas": (), "bc_weight": 1.0}},
    )


def slow_loss(agent: Agent, batch: Batch, returns: list[list[float]]) -> float:
    """Cross-entropy of the known actions in float64, timestep by timestep, without memory."""
    policy, total, count = agent.policy, 0.0, 0
    norm = policy.timestep_encoder.input_norm.moments
    conditioning, space = agent.config.return_conditioning, agent.spaces.action
    assert conditioning is not None
    for i in range(len(batch.mask)):
        for t in range(batch.mask.shape[1]):
            if not (batch.mask[i, t] and batch.action_known[i, t]):
                continue
            seen, last = [0.0] * (2 + 1 + space.n), 0.0
            if t == 0 or batch.next_obs_valid[i, t - 1]:
                reward, action = 0.0, [0.0] * space.n
                if batch.time_idx[i, t] > 0:
                    reward = float(batch.prev_reward[i, t])
                    if t == 0 or batch.action_known[i, t - 1]:
                        action = encode_action(space, batch.prev_action[i, t]).tolist()
                last = conditioning.scale * returns[i][t]
                seen = [*batch.obs["observation"][i, t].tolist(), reward, *action]
            numbers = zip(seen, norm.mean.tolist(), norm.variance.tolist(), strict=True)
            seen = [(x - mean) / (variance + 1e-5) ** 0.5 for x, mean, variance in numbers]
            x = torch.tensor([*seen, last], dtype=torch.float64)[None]
            state = policy.timestep_encoder.out_norm(policy.timestep_encoder.mlp(x))
            chances = policy.actor(state[None], None).probs.flatten()
            total -= chances[int(batch.action[i, t]) - space.start].log().item()
            count += 1
    return total / count


def test_the_loss_equals_slow_loops_in_float64() -> None:
    """The return-to-go is the last input, times the scale, and is not normalised."""
    spaces = spaces_of("discrete")
    agent = Agent(config_of(scale=0.3), spaces).double().eval()
    agent.policy.timestep_encoder.input_norm.moments.mean.uniform_(-1, 1)
    agent.policy.timestep_encoder.input_norm.moments.variance.uniform_(0.5, 4)
    batch = batch_of(spaces, [4, 2, 0, 3], 4)
    returns = torch.randn(4, 5)
    loss, _ = agent(dataclasses.replace(batch, return_to_go=returns))
    loss = loss.detach()
    assert float(loss) == pytest.approx(slow_loss(agent, batch, returns.tolist()), rel=1e-9)
    moved = agent(dataclasses.replace(batch, return_to_go=returns + 1))[0].detach()
    assert float(loss) != pytest.approx(float(moved), rel=1e-6)


@pytest.mark.parametrize("memory", MEMORIES)
def test_acting_sees_what_was_learned(memory: str) -> None:
    """The target minus the rewards so far, from each start of an episode on: three environments
    with episodes of different lengths side by side."""
    spaces = spaces_with(BOX)
    agent = Agent(config_of(memory), spaces).eval()
    policy = load_policy(save_policy(agent))
    begins, steps = ({0, 5}, {0}, {0, 2, 3}), 9
    obs, reward = torch.randn(3, steps, 2), torch.randn(3, steps)
    action, time = torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64)
    hidden, acted, done = policy.initial_hidden(3), [], []
    for t in range(steps):
        begin = torch.tensor([t in b for b in begins])
        hidden, time = policy.reset_hidden(hidden, begin), torch.where(begin, 0, time + 1)
        previous = reward[:, t - 1] if t else torch.full((3,), torch.nan)
        action, hidden = policy.act(
            {"observation": obs[:, t]}, action, previous, time, hidden, False
        )
        acted.append(action)
        done.append(hidden[1])
    for i, starts in enumerate(begins):
        for first, end in zip(sorted(starts), [*sorted(starts)[1:], steps], strict=True):
            left = [4.0]
            for t in range(first, end - 1):
                left.append(left[-1] - float(reward[i, t]))
            torch.testing.assert_close(torch.stack(done)[first:end, i], torch.tensor(left))
            previous = [torch.zeros(2), *[acted[t][i] for t in range(first, end - 1)]]
            rows = policy.encode_timesteps(
                {"observation": obs[None, i, first:end]},
                torch.stack(previous)[None],
                torch.cat((torch.zeros(1), reward[i, first : end - 1]))[None],
                torch.arange(end - first)[None],
                return_to_go=torch.tensor(left)[None],
            )
            state = policy.encode_trajectory(rows, torch.arange(end - first)[None])[0]
            want = policy.actor.acting(state, None).greedy()
            torch.testing.assert_close(torch.stack(acted)[first:end, i], want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("memory", ["feed_forward", "gru", "transformer"])
def test_padding_is_not_seen(memory: str) -> None:
    """Packed or padded, whatever stands in the padding: the same loss and gradient."""
    spaces = spaces_with(BOX)
    agent = Agent(config_of(memory), spaces)
    mask = torch.arange(6) < torch.tensor([6, 2, 4])[:, None]
    batch = Batch(
        obs={"observation": torch.randn(3, 7, 2)},
        prev_action=torch.rand(3, 7, 2),
        prev_reward=torch.randn(3, 7),
        time_idx=torch.arange(7).expand(3, -1),
        terminated=torch.zeros_like(mask),
        truncated=torch.zeros_like(mask),
        next_obs_valid=mask,
        mask=mask,
        action_known=mask,
        return_to_go=torch.randn(3, 7),
    )
    assert batch.return_to_go is not None
    found = []
    outside = torch.cat((torch.zeros(3, 1, dtype=torch.bool), ~mask), dim=1)
    dirty = batch.return_to_go.masked_fill(outside, torch.nan)
    parts = [batch.windows(0, 1), batch.windows(1, 3)]
    agent.eval()
    for one in (batch, dataclasses.replace(batch, return_to_go=dirty), batch.padded(9)):
        agent.zero_grad()
        loss = agent(one)[0]
        loss.backward()
        found.append([loss, *[p.grad.clone() for p in agent.trainable_parameters()]])
    counts = {name: float(n) for name, n in agent.loss_counts(batch).items()}
    whole = sum(float(agent(part, counts=counts)[0].detach()) for part in parts)
    assert whole == pytest.approx(float(found[0][0].detach()), rel=1e-5)
    for other in found[1:]:
        torch.testing.assert_close(found[0], other)


@pytest.mark.parametrize("memory", ["identity", "transformer"])
def test_a_policy_earns_what_it_is_asked_for(memory: str) -> None:
    """A bandit with three arms: cloning alone imitates their mixture, a target return chooses."""
    spaces = spaces_with(ActionSpace(kind="discrete", n=3))
    agent = Agent(config_of(memory, target=2.0), spaces)
    optimizer = torch.optim.AdamW(agent.trainable_parameters(), lr=1e-2)
    pays = torch.tensor([0.0, 2.0, 1.0])

    def episodes() -> Batch:
        """Two pulls each."""
        action = torch.randint(0, 3, (32, 2))
        reward, yes = pays[action], torch.ones(32, 2, dtype=torch.bool)
        zero = torch.zeros(32, 1)
        return Batch(
            obs={"observation": torch.zeros(32, 3, 2)},
            prev_action=torch.cat((zero.long(), action), dim=1),
            prev_reward=torch.cat((zero, reward), dim=1),
            time_idx=torch.arange(3).expand(32, -1),
            terminated=torch.tensor([False, True]).expand(32, -1),
            truncated=~yes,
            next_obs_valid=torch.tensor([True, False]).expand(32, -1),
            mask=yes,
            action_known=yes,
            return_to_go=torch.cat((reward.sum(1, keepdim=True), reward[:, 1:], zero), dim=1),
        )

    for _ in range(250):
        loss, _ = agent(episodes(), detailed=False)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    policy = agent.policy.eval()

    def earned(target: float) -> Tensor:
        policy.target_return, n = target, 200
        hidden, total = policy.initial_hidden(n), torch.zeros(n)
        action, reward = torch.zeros(n, dtype=torch.int64), torch.zeros(n)
        for t in range(2):
            now = {"observation": torch.zeros(n, 2)}, action, reward, torch.full((n,), t)
            action, hidden = policy.act(*now, hidden)
            reward = pays[action]
            total += reward
        return total

    for target in (0.0, 1.0, 2.0, 3.0, 4.0):
        assert float((earned(target) == target).float().mean()) > 0.9, target


def test_what_is_missing_or_does_not_fit_has_an_error() -> None:
    spaces = spaces_of("discrete")
    agent = Agent(config_of(target=None), spaces)
    batch = batch_of(spaces, [3, 2], 3)
    with pytest.raises(BatchError, match=r"return_to_go: expected \[B, L\] with .* got none"):
        agent(batch)
    with pytest.raises(
        BatchError, match=r"Batch.return_to_go: expected shape \[2, 4\], got \[2, 3\]"
    ):
        agent(dataclasses.replace(batch, return_to_go=torch.zeros(2, 3)))
    now = {"observation": torch.zeros(1, 2)}, torch.zeros(1).long(), torch.zeros(1)
    policy = agent.policy
    with pytest.raises(ConfigError, match="target_return: expected a return to aim at"):
        policy.act(*now, torch.zeros(1).long(), policy.initial_hidden(1))
    with pytest.raises(ConfigError, match="return_conditioning: critics would read their target"):
        configured(return_conditioning={"target_return": 1.0})
    assert AgentConfig().return_conditioning is None


def test_a_policy_file_keeps_the_target_and_the_scale() -> None:
    agent = Agent(config_of(target=-7.5, scale=0.25), spaces_of("discrete"))
    policy = load_policy(save_policy(agent))
    assert policy.target_return == -7.5 and policy.config == agent.config
