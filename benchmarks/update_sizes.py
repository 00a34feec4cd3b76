"""Agents, spaces and synthetic batches that `benchmarks.update` measures, by name.

small     default heads (7 discounts, 4 critics), Transformer 256 wide, 3 layers, windows of 128
medium    the same, Transformer 512 wide, 6 layers, windows of 512
long      the same, Transformer 256 wide, 3 layers, windows of 2048
amago1    an agent without memory, 64 wide, on 32 windows of 32: one discount, 2 critics, DPG and
          BC with the binary filter
amago2    like amago1, but without DPG and with the exponential filter
amago3    like amago2, with 7 discounts, 4 critics, 3 action samples and a Beta policy

AMAGO 3.3.0 itself was timed with the settings of the last three. Their windows may extend beyond
the end of 200-step episodes, so part of each batch is padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from amago_model import (
    ActionSpace,
    ActorConfig,
    AgentConfig,
    Batch,
    BetaConfig,
    CriticConfig,
    ExpFilterConfig,
    FeedForwardConfig,
    LossConfig,
    MLPActorConfig,
    ObsSpace,
    ScalarCriticConfig,
    Spaces,
    TimestepEncoderConfig,
    TransformerConfig,
)


@dataclass(frozen=True)
class Size:
    """An agent and the shapes of its spaces and batches."""

    config: AgentConfig
    window: int
    windows_cpu: int
    windows_gpu: int
    observation: int
    action: int
    episode: int | None = None
    """Length of episodes beyond whose end windows may extend; None for windows without padding."""
    threads: int | None = None
    """Number of CPU threads; None for all."""
    amago: float | None = None
    """Updates per second of AMAGO 3.3.0 with this setting, on as many threads of a similar
    machine."""

    def spaces(self, kind: str) -> Spaces:
        """kind: discrete or continuous actions."""
        if kind == "discrete":
            action = ActionSpace(kind="discrete", n=self.action)
        else:
            n = self.action
            action = ActionSpace(kind="continuous", shape=(n,), low=(-1.0,) * n, high=(1.0,) * n)
        space = ObsSpace(shape=(self.observation,), dtype="float32")
        return Spaces(observations={"observation": space}, action=action)


def _transformer(width: int, layers: int, context: int) -> AgentConfig:
    memory = TransformerConfig(
        d_model=width, d_ff=4 * width, n_layers=layers, n_heads=8, context=context
    )
    return AgentConfig(
        timestep_encoder=TimestepEncoderConfig(d_output=width),
        trajectory_encoder=memory,
    )


def _memory_free(actor: ActorConfig, critic: CriticConfig, losses: LossConfig) -> AgentConfig:
    return AgentConfig(
        timestep_encoder=TimestepEncoderConfig(d_hidden=64, d_output=64, hide_previous=True),
        trajectory_encoder=FeedForwardConfig(d_model=64),
        actor=actor,
        critic=critic,
        losses=losses,
    )


def _amago(row: int) -> AgentConfig:
    actor, critic = MLPActorConfig(d_hidden=128), ScalarCriticConfig(d_hidden=128, n_critics=2)
    common = {"gamma": 0.98, "reward_multiplier": 0.1, "bc_weight": 1.0, "tau": 0.01}
    if row == 1:
        losses = LossConfig(auxiliary_gammas=(), dpg_weight=0.3, **common)
    elif row == 2:
        losses = LossConfig(auxiliary_gammas=(), dpg_weight=0.0, **common, filter=ExpFilterConfig())
    else:
        actor = MLPActorConfig(d_hidden=128, continuous=BetaConfig())
        critic = ScalarCriticConfig(d_hidden=128)
        losses = LossConfig(
            dpg_weight=0.0,
            n_actions_in_critic_loss=3,
            n_actions_in_actor_loss=3,
            **common,
            filter=ExpFilterConfig(),
        )
    return _memory_free(actor, critic, losses)


_PENDULUM = {
    "window": 32,
    "windows_cpu": 32,
    "windows_gpu": 32,
    "observation": 3,
    "action": 1,
    "episode": 200,
}

SIZES = {
    "small": Size(_transformer(256, 3, 128), 128, 8, 24, 17, 6),
    "medium": Size(_transformer(512, 6, 512), 512, 2, 24, 17, 6),
    "long": Size(_transformer(256, 3, 2048), 2048, 1, 8, 17, 6),
    "amago1": Size(_amago(1), **_PENDULUM, threads=1, amago=38.0),
    "amago2": Size(_amago(2), **_PENDULUM, threads=1, amago=42.0),
    "amago3": Size(_amago(3), **_PENDULUM, threads=2, amago=4.2),
}


def make_batch(size: Size, spaces: Spaces, windows: int, *, seed: int = 0) -> Batch:
    """A batch of random numbers, with padding if the size has an episode length."""
    generator = torch.Generator().manual_seed(seed)
    t = size.window
    length = torch.full((windows,), t)
    start = torch.zeros(windows, dtype=torch.int64)
    if size.episode is not None:
        start = torch.randint(0, size.episode, (windows,), generator=generator)
        length = (size.episode - start).clamp(max=t)
    column = torch.arange(t)
    mask = column < length[:, None]
    ends = start + length == (size.episode or -1)
    if spaces.action.kind == "discrete":
        action = torch.randint(0, spaces.action.n, (windows, t + 1), generator=generator)
    else:
        shape = (windows, t + 1, spaces.action.width)
        action = 2.0 * torch.rand(shape, generator=generator) - 1.0
    return Batch(
        obs={"observation": torch.randn(windows, t + 1, size.observation, generator=generator)},
        prev_action=action,
        prev_reward=torch.randn(windows, t + 1, generator=generator),
        time_idx=start[:, None] + torch.arange(t + 1),
        terminated=torch.zeros(windows, t, dtype=torch.bool),
        truncated=ends[:, None] & (column == length[:, None] - 1),
        next_obs_valid=mask,
        mask=mask,
        action_known=mask.clone(),
    )
