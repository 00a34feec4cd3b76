"""Makers of small spaces, batches and agents for the tests of the agent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from amago_model import (
    ActionSpace,
    Agent,
    AgentConfig,
    Batch,
    IdentityConfig,
    ObsSpace,
    Spaces,
    TimestepEncoderConfig,
    TrajectoryEncoderConfig,
    load_policy,
    save_policy,
)
from tests.amago_model.settings import configured

SMALL_ENCODER = TimestepEncoderConfig(d_hidden=16, d_output=12)
IDENTITY = IdentityConfig()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    # The tensors are tiny: on a busy machine a second thread costs minutes of spinning.
    torch.set_num_threads(1)


@pytest.fixture
def make_spaces() -> Callable[..., Spaces]:
    def make(kind: str = "discrete", obs: int = 3) -> Spaces:
        if kind == "discrete":
            action = ActionSpace(kind="discrete", n=4, start=1)
        elif kind == "multi_binary":
            action = ActionSpace(kind="multi_binary", n=3)
        elif kind == "multi_discrete":
            action = ActionSpace(kind="multi_discrete", nvec=(2, 3))
        else:
            action = ActionSpace(kind="continuous", shape=(2,), low=(-2.0, 0.0), high=(2.0, 1.0))
        return Spaces(
            observations={"observation": ObsSpace(shape=(obs,), dtype="float32")}, action=action
        )

    return make


@pytest.fixture
def make_config() -> Callable[..., AgentConfig]:
    def make(
        trajectory_encoder: TrajectoryEncoderConfig = IDENTITY,
        *,
        losses: dict | None = None,
        critic: dict | bool | None = None,
        actor: dict | None = None,
        encoder: TimestepEncoderConfig = SMALL_ENCODER,
    ) -> AgentConfig:
        return configured(
            timestep_encoder=encoder,
            trajectory_encoder=trajectory_encoder,
            actor=({"d_hidden": 16} if "kind" not in (actor or {}) else {}) | (actor or {}),
            critic=critic is not False and {"d_hidden": 16, "n_critics": 3} | (critic or {}),
            losses={"gamma": 0.9, "auxiliary_gammas": (0.5,)} | (losses or {}),
        )

    return make


@pytest.fixture
def make_batch() -> Callable[..., Batch]:
    def make(
        spaces: Spaces, lengths: tuple[int, ...] = (6, 3, 1), size: int = 6, first: int = 5
    ) -> Batch:
        """A window per length, padded to `size` transitions; the second is cut, the third ends."""
        b, rows = len(lengths), size + 1
        if spaces.action.kind == "discrete":
            low = spaces.action.start
            prev_action = torch.randint(low, low + spaces.action.n, (b, rows))
        elif spaces.action.kind == "multi_binary":
            prev_action = torch.randint(0, 2, (b, rows, spaces.action.n))
        elif spaces.action.kind == "multi_discrete":
            parts = [torch.randint(0, n, (b, rows)) for n in spaces.action.nvec]
            prev_action = torch.stack(parts, dim=-1)
        else:
            low, high = torch.tensor(spaces.action.low), torch.tensor(spaces.action.high)
            prev_action = low + (high - low) * torch.rand(b, rows, spaces.action.width)
        t = torch.arange(size)
        mask = t < torch.tensor(lengths)[:, None]
        last = t == torch.tensor(lengths)[:, None] - 1
        which = torch.arange(b)[:, None]
        return Batch(
            obs={key: torch.randn(b, rows, *s.shape) for key, s in spaces.observations.items()},
            prev_action=prev_action,
            prev_reward=torch.randn(b, rows),
            time_idx=first + torch.arange(rows).expand(b, rows).clone(),
            terminated=last & (which == 2),
            truncated=last & (which == 1),
            next_obs_valid=mask & ~(last & (which >= 1)),
            mask=mask,
            action_known=mask.clone(),
        )

    return make


@pytest.fixture
def memory_comes_back(make_spaces, make_config, make_batch) -> Callable[[object], None]:  # type: ignore[no-untyped-def]
    """Check that every weight of a memory learns, and that a policy file gives all of it back."""

    def check(memory) -> None:  # type: ignore[no-untyped-def]
        spaces = make_spaces("discrete")
        agent = Agent(make_config(memory), spaces)
        loss, _ = agent(make_batch(spaces))
        loss.backward()
        named = agent.policy.named_parameters()
        assert not [name for name, p in named if p.requires_grad and p.grad is None]
        policy = load_policy(save_policy(agent))
        assert policy.config == agent.config
        x, time_idx = torch.randn(1, 9, 12), torch.arange(9)[None]
        agent.eval()
        torch.testing.assert_close(
            policy.encode_trajectory(x, time_idx), agent.policy.encode_trajectory(x, time_idx)
        )

    return check
