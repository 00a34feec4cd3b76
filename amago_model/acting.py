"""The networks used in acting: encoders and actor. A policy file contains these weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from amago_model.config import AgentConfig, Spaces
from amago_model.data.batch import Batch, decode_action, previous_features
from amago_model.data.packing import Packing, make_packing, supports_packing
from amago_model.encoders.timestep import make_timestep_encoder
from amago_model.encoders.trajectory import Hidden, make_trajectory_encoder
from amago_model.errors import BatchError, ConfigError
from amago_model.heads.actor import Actor
from amago_model.heads.observations import actor_observation_keys
from amago_model.registry import custom_module


class ActingPolicy(nn.Module):
    """Encoders and actor: maps the inputs of a timestep to an action.

    The acting loop for N parallel environments:

        hidden = policy.initial_hidden(N, "cpu")
        action, reward, time_idx = zeros, zeros, zeros          # ignored where time_idx is 0
        while True:
            action, hidden = policy.act(obs, action, reward, time_idx, hidden, sample=True)
            obs, reward, done = step the environments; time_idx += 1
            hidden = policy.reset_hidden(hidden, done); time_idx[done] = 0; obs[done] = first one

    The hidden state is that of the memory. With AgentConfig.return_conditioning or
    timestep_encoder.differences it is a tuple: that of the memory, then the return-to-go [N], then
    the numbers observed last [N, F], each if configured. `act` sets the return-to-go to
    `target_return` where time_idx is 0, and subtracts prev_reward elsewhere.
    """

    def __init__(self, config: AgentConfig, spaces: Spaces) -> None:
        super().__init__()
        self.config, self.spaces = config, spaces
        self.fixed_shapes = False
        """Never pack batches, so that all shapes follow from the batch's: for CUDA graphs."""
        self.metadata: dict[str, Any] = {}
        """Metadata of the policy file besides config and spaces; see policy_file.py."""
        custom, memory = config.custom, config.trajectory_encoder
        conditioning = config.return_conditioning
        self.target_return = None if conditioning is None else conditioning.target_return
        """Return-to-go at the start of an episode. It may be changed between calls of `act`."""
        if custom.timestep_encoder:
            make_encoder = custom_module(custom, "timestep_encoder", custom.timestep_encoder)
            self.timestep_encoder = make_encoder(config, spaces)
        else:
            self.timestep_encoder = make_timestep_encoder(
                config.timestep_encoder, spaces, return_conditioned=conditioning is not None
            )
        width = self.timestep_encoder.d_output
        if custom.trajectory_encoder:
            make_memory = custom_module(custom, "trajectory_encoder", custom.trajectory_encoder)
            self.trajectory_encoder = make_memory(config, width)
        else:
            self.trajectory_encoder = make_trajectory_encoder(memory, width)
        make_actor = custom_module(custom, "actor", custom.actor) if custom.actor else Actor
        self.actor = make_actor(
            config.actor,
            spaces.action,
            d_state=self.d_state,
            n_gammas=len(config.losses.gammas),
        )
        self.actor_keys = actor_observation_keys(self.actor, spaces)
        masks = spaces.keys("mask")
        self.legal_key = masks[0] if masks else None

    @property
    def d_state(self) -> int:
        """D: width of the state vector."""
        return int(self.trajectory_encoder.d_output)

    def legal_actions(self, obs: dict[str, Tensor]) -> Tensor | None:
        """[..., n] bool: the legal actions; None without an observation of the role 'mask'."""
        return None if self.legal_key is None else obs[self.legal_key] > 0

    def encode_timesteps(
        self,
        obs: dict[str, Tensor],
        prev_action: Tensor,
        prev_reward: Tensor,
        time_idx: Tensor,
        *,
        valid: Tensor | None = None,
        previous_known: Tensor | None = None,
        return_to_go: Tensor | None = None,
        packing: Packing | None = None,
        before: Tensor | None = None,
    ) -> Tensor:
        """Timestep vectors [B, L, d] of inputs [B, L, ...]; used in training and acting.

        With a packing, the output is [1, M, d]: the timesteps that exist. `before` [B, numbers]:
        the numbers observed in the timestep before, for differences.

        Raises:
            BatchError: return_to_go is missing, but the config has return_conditioning.
        """
        previous = previous_features(
            self.spaces,
            prev_action,
            prev_reward,
            time_idx,
            known=previous_known,
            show_reset=self.config.timestep_encoder.show_reset,
        )
        if (conditioning := self.config.return_conditioning) is not None:
            if return_to_go is None:
                raise BatchError(
                    "Batch.return_to_go: expected [B, L] with AgentConfig.return_conditioning, got "
                    "none; the trainer's data loader computes it"
                )
            shown = return_to_go.to(torch.float32) * conditioning.scale
            previous = torch.cat((previous, shown.unsqueeze(-1)), dim=-1)
        given = {}
        if self._sees_differences:
            change = self.timestep_encoder.differences(obs, time_idx, valid, before)
            given = {"differences": change}
        if packing is not None and supports_packing(self.timestep_encoder):
            out: Tensor = self.timestep_encoder(obs, previous, valid, packing=packing, **given)
            return out
        timesteps = self.timestep_encoder(obs, previous, valid, **given)
        return timesteps if packing is None else packing.pack(timesteps)

    def encode_trajectory(
        self, timesteps: Tensor, time_idx: Tensor, packing: Packing | None = None
    ) -> Tensor:
        """State vectors [B, L, D] of windows, from timestep vectors and time_idx [B, L].

        With a packing, input and output are packed: [1, M, d] to [1, M, D].
        """
        memory = self.trajectory_encoder
        out: Tensor
        if packing is None:
            out = memory(timesteps, time_idx)
        elif supports_packing(memory):
            out = memory(timesteps, packing.pack(time_idx), packing=packing)
        else:
            out = packing.pack(memory(packing.unpack(timesteps), time_idx))
        return out

    def encode_windows(self, batch: Batch) -> tuple[Tensor, Packing | None]:
        """State vectors of a batch, and the packing: [B, L, D] and None, or [1, M, D] if packed.

        On a CPU a batch is packed if an encoder can skip padding (encoders/trajectory.py). On a GPU
        packing needs a synchronisation, so it is used only if attention has a kernel for packed
        windows. With torch.compile batches are never packed, because shapes must be constant.
        """
        packing = self.choose_packing(batch.mask)
        timesteps = self.encode_timesteps(**batch.encoder_inputs(), packing=packing)
        return self.encode_trajectory(timesteps, batch.time_idx, packing), packing

    def choose_packing(self, mask: Tensor) -> Packing | None:
        if torch.compiler.is_compiling() or self.fixed_shapes:
            return None
        return make_packing(mask) if self.skips_padding(mask.device) else None

    def skips_padding(self, device: torch.device) -> bool:
        """Whether packed windows are faster on this device."""
        if device.type == "cpu":
            encoders = self.timestep_encoder, self.trajectory_encoder
            return any(supports_packing(encoder) for encoder in encoders)
        if device.type == "cuda" and hasattr(self.trajectory_encoder, "prefers_packing"):
            return bool(self.trajectory_encoder.prefers_packing(device))
        return False

    def kernels(self, device: torch.device | str, dtype: torch.dtype) -> dict[str, str]:
        """The kernels that the memory uses for windows, such as {"attention": "sdpa"}.

        Empty for memories with only one implementation.

        Raises:
            ConfigError: the configured kernel cannot run.
        """
        choose = getattr(self.trajectory_encoder, "kernels", None)
        return {} if choose is None else choose(torch.device(device), dtype)

    def initial_hidden(self, n: int, device: torch.device | str = "cpu") -> Hidden:
        """The hidden state at the start of n episodes."""
        memory = self.trajectory_encoder.initial_hidden(n, device)
        more = []
        if self._conditioned:
            more.append(torch.zeros(n, device=device))
        if self._sees_differences:
            more.append(torch.zeros(n, self.timestep_encoder.d_differences, device=device))
        return (memory, *more) if more else memory

    def reset_hidden(self, hidden: Hidden, done: Tensor) -> Hidden:
        """Reset the hidden state where done [n] bool is True. Use only the returned state."""
        if self._conditioned or self._sees_differences:
            memory, *more = hidden  # what follows is ignored where time_idx is 0
            return self.trajectory_encoder.reset_hidden(memory, done), *more
        return self.trajectory_encoder.reset_hidden(hidden, done)

    @torch.no_grad()
    def act(
        self,
        obs: dict[str, Tensor],
        prev_action: Tensor,
        prev_reward: Tensor,
        time_idx: Tensor,
        hidden: Hidden,
        sample: bool = True,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Hidden]:
        """Choose one action for each of N environments.

        Args:
            obs: by key [N, *shape]; keys without the role policy or mask are ignored.
            prev_action: [N] int64 or [N, *shape] float32, in the environment's units.
            prev_reward: [N] float32. It and prev_action are ignored where time_idx is 0.
            time_idx: [N] int64, steps since the start of the episode.
            hidden: from initial_hidden or the last call; modified in place, so use only the
                returned one afterwards.
            sample: sample from the policy; if False, take its greedy action.
            generator: random generator on the device of the tensors; None: torch's global one.

        Returns:
            (action, hidden): action [N] int64 or [N, *shape] float32, in the environment's units.

        Raises:
            ConfigError: the policy is return-conditioned, but has no target return.
        """
        if self.training:  # no dropout, no updates of statistics
            self.eval()
            try:
                return self.act(obs, prev_action, prev_reward, time_idx, hidden, sample, generator)
            finally:
                self.train()
        time, memory = time_idx.unsqueeze(1), hidden
        return_to_go = before = None
        kept: list[Tensor] = []
        if self._conditioned or self._sees_differences:
            memory, *kept = hidden
        window = {key: value.unsqueeze(1) for key, value in obs.items()}
        more: list[Tensor] = []
        if self._conditioned:
            left = torch.where(time_idx == 0, self._target(), kept.pop(0) - prev_reward)
            return_to_go = left.unsqueeze(1)
            more.append(left)
        if self._sees_differences:
            before = kept.pop(0)
            more.append(self.timestep_encoder.observations.numbers(window).squeeze(1))
        timestep = self.encode_timesteps(
            window,
            prev_action.unsqueeze(1),
            prev_reward.unsqueeze(1),
            time,
            return_to_go=return_to_go,
            before=before,
        )
        state, memory = self.trajectory_encoder.step(timestep, time, memory)
        given = {"obs": {key: obs[key] for key in self.actor_keys}} if self.actor_keys else {}
        policy = self.actor.acting(state.squeeze(1), self.legal_actions(obs), **given)
        x = policy.sample(generator) if sample else policy.greedy()
        action = decode_action(self.spaces.action, x)
        return action, (memory, *more) if more else memory

    @property
    def _conditioned(self) -> bool:
        return self.config.return_conditioning is not None

    @property
    def _sees_differences(self) -> bool:
        return bool(getattr(self.timestep_encoder, "d_differences", 0))

    def _target(self) -> float:
        if self.target_return is None:
            raise ConfigError(
                "AgentConfig.return_conditioning.target_return: expected a return to aim at, got "
                "none; set it in the config, or as the policy's attribute target_return"
            )
        return self.target_return
