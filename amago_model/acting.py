"""What is needed to act, and nothing else: encoders and actor. A policy file holds one of these."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from amago_model.config import AgentConfig, Spaces
from amago_model.data.batch import decode_action, previous_features
from amago_model.data.packing import Packing, pack, takes_packing
from amago_model.data.transitions import Shown
from amago_model.encoders.timestep import make_timestep_encoder
from amago_model.encoders.trajectory import Hidden, make_trajectory_encoder
from amago_model.heads.actor import Actor
from amago_model.heads.observations import keys_for_actor
from amago_model.registry import own_part


class ActingPolicy(nn.Module):
    """Encoders and actor: from what is known on arrival at a row to an action.

    The acting loop, for N environments side by side:

        hidden = policy.initial_hidden(N, "cpu")
        action, reward, time_idx = zeros, zeros, zeros          # ignored where time_idx is 0
        while True:
            action, hidden = policy.act(obs, action, reward, time_idx, hidden, sample=True)
            obs, reward, done = step the environments; time_idx += 1
            hidden = policy.reset_hidden(hidden, done); time_idx[done] = 0; obs[done] = first one
    """

    def __init__(self, config: AgentConfig, spaces: Spaces) -> None:
        super().__init__()
        self.config, self.spaces = config, spaces
        self.metadata: dict[str, Any] = {}
        """What the policy file said beside config and spaces; see policy_file.py."""
        custom = config.custom
        if custom.timestep_encoder:
            make_rows = own_part(custom, "timestep_encoder", custom.timestep_encoder)
            self.timestep_encoder = make_rows(config, spaces)
        else:
            self.timestep_encoder = make_timestep_encoder(config.timestep_encoder, spaces)
        if custom.trajectory_encoder:
            make_memory = own_part(custom, "trajectory_encoder", custom.trajectory_encoder)
            self.trajectory_encoder = make_memory(config, self.timestep_encoder.d_output)
        else:
            self.trajectory_encoder = make_trajectory_encoder(
                config.trajectory_encoder, self.timestep_encoder.d_output
            )
        make_actor = own_part(custom, "actor", custom.actor) if custom.actor else Actor
        self.actor = make_actor(
            config.actor,
            spaces.action,
            d_state=self.d_state,
            n_gammas=len(config.losses.gammas),
        )
        self.actor_keys = keys_for_actor(self.actor, spaces)
        masks = spaces.keys("mask")
        self.legal_key = masks[0] if masks else None

    @property
    def d_state(self) -> int:
        """D: width of the state vector."""
        return int(self.trajectory_encoder.d_output)

    def _shown(self, obs: dict[str, Tensor]) -> Shown:
        return {"obs": {key: obs[key] for key in self.actor_keys}} if self.actor_keys else {}

    def legal(self, obs: dict[str, Tensor]) -> Tensor | None:
        """[..., n] bool: the actions allowed, if the environment says so."""
        return None if self.legal_key is None else obs[self.legal_key] > 0

    def rows(
        self,
        obs: dict[str, Tensor],
        prev_action: Tensor,
        prev_reward: Tensor,
        time_idx: Tensor,
        *,
        valid: Tensor | None = None,
        previous_known: Tensor | None = None,
        packing: Packing | None = None,
    ) -> Tensor:
        """Row vectors [B, L, d] from rows [B, L, ...]: the one way in, for learning and acting.

        With a packing [1, M, d]: the rows that exist, for `states` with the same packing.
        """
        previous = previous_features(
            self.spaces,
            prev_action,
            prev_reward,
            time_idx,
            known=previous_known,
            show_reset=self.config.timestep_encoder.show_reset,
        )
        if packing is not None and takes_packing(self.timestep_encoder):
            out: Tensor = self.timestep_encoder(obs, previous, valid, packing=packing)
            return out
        rows = self.timestep_encoder(obs, previous, valid)
        return rows if packing is None else packing.rows(rows)

    def states(self, rows: Tensor, time_idx: Tensor, packing: Packing | None = None) -> Tensor:
        """State vectors [B, L, D] of whole windows, from `rows` and time_idx [B, L].

        With a packing [1, M, D], those of rows that exist.
        """
        memory = self.trajectory_encoder
        out: Tensor
        if packing is None:
            out = memory(rows, time_idx)
        elif takes_packing(memory):
            out = memory(rows, packing.rows(time_idx), packing=packing)
        else:
            out = packing.rows(memory(packing.windows(rows), time_idx))
        return out

    def packing(self, mask: Tensor) -> Packing | None:
        """The rows to compute of windows whose transitions exist in mask [B, T]; None: all of them.

        On a CPU those that exist, where an encoder can leave the others out (see
        trajectory_encoders.py). On a GPU the processor must wait for their number, which is worth
        it only where attention has a kernel for rows laid end to end. A compiler wants the same
        number of rows every time: all of them.
        """
        if torch.compiler.is_compiling():
            return None
        gains = mask.device.type == "cpu" and (
            takes_packing(self.timestep_encoder) or takes_packing(self.trajectory_encoder)
        )
        if mask.is_cuda and hasattr(self.trajectory_encoder, "gains_by_packing"):
            gains = self.trajectory_encoder.gains_by_packing(mask.device)
        return pack(mask) if gains else None

    def kernels(self, device: torch.device | str, dtype: torch.dtype) -> dict[str, str]:
        """By what the memory computes whole windows there, in this type: {"attention": "sdpa"}.

        Empty for memories that have no choice. Raises ConfigError where what is asked cannot run.
        """
        choose = getattr(self.trajectory_encoder, "kernels", None)
        return {} if choose is None else choose(torch.device(device), dtype)

    def initial_hidden(self, n: int, device: torch.device | str = "cpu") -> Hidden:
        """The memory of n episodes that are about to begin."""
        return self.trajectory_encoder.initial_hidden(n, device)

    def reset_hidden(self, hidden: Hidden, done: Tensor) -> Hidden:
        """Forget, in the rows where done [n] bool is True. Use only the hidden state it returns."""
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
        """One action for each of N environments.

        Args:
            obs: by key [N, *shape]; keys without the role policy or mask are ignored.
            prev_action: [N] int64 or [N, *shape] float32, in the environment's units.
            prev_reward: [N] float32. It and prev_action are ignored where time_idx is 0.
            time_idx: [N] int64, steps since the episode began.
            hidden: from initial_hidden or the last call; written into, so keep only the new one.
            sample: draw from the policy; False takes its most likely (continuous: median) action.
            generator: source of the randomness, on the tensors' device.

        Returns:
            (action, hidden): action [N] int64 or [N, *shape] float32, in the environment's units.
        """
        if self.training:  # dropout and moving statistics have no place in acting
            self.eval()
            try:
                return self.act(obs, prev_action, prev_reward, time_idx, hidden, sample, generator)
            finally:
                self.train()
        time = time_idx.unsqueeze(1)
        rows = self.rows(
            {key: value.unsqueeze(1) for key, value in obs.items()},
            prev_action.unsqueeze(1),
            prev_reward.unsqueeze(1),
            time,
        )
        state, hidden = self.trajectory_encoder.step(rows, time, hidden)
        policy = self.actor.acting(state.squeeze(1), self.legal(obs), **self._shown(obs))
        x = policy.sample(generator) if sample else policy.greedy()
        return decode_action(self.spaces.action, x), hidden
