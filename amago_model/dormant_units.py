"""Dormant units: hidden units of actor and critics that are almost always zero.

A unit is dormant if its mean absolute activation over a batch is at most 0.025 of the mean over its
layer (Sokar et al. 2023, "The Dormant Neuron Phenomenon in Deep Reinforcement Learning"). A network
with many dormant units has lost capacity: a sign of too large steps or of diverging targets.
Letters: C critics, N transitions, H hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from amago_model.agent import Agent
from amago_model.data.batch import Batch
from amago_model.heads.critic import CriticEnsemble
from amago_model.layers import AdaptiveActivation

DORMANT = 0.025
_ACTIVATIONS = (AdaptiveActivation, nn.LeakyReLU, nn.ReLU, nn.GELU, nn.Mish)


@torch.no_grad()
def dormant_units(agent: Agent, batch: Batch) -> dict[str, Tensor]:
    """The shares of dormant units of the actor and the critics, on the batch's device.

    Custom critics are left out. Call it in evaluation mode. It draws random numbers if batch.noise
    is None.
    """
    tr, found = agent.encode(batch), dict[str, Tensor]()
    with _recorded(agent.policy.actor) as layers:
        agent.policy.actor(tr.state_t, tr.legal_t, **tr.actor_inputs_t)
    if layers:
        found["dormant/actor"] = _share([layer.flatten(0, -2).mean(0)[None] for layer in layers])
    critic = None if agent.critics is None else agent.critics.online
    if type(critic) is not CriticEnsemble:
        return found
    with _recorded(critic) as layers:
        if critic.table:
            critic.action_values(tr.critic_state_t)
        else:
            n_gammas = critic.n_gammas
            action = tr.encoded_action[None, :, None, :].expand(1, -1, n_gammas, -1)
            critic.outputs(critic.project_state(tr.critic_state_t), action)
    # A CPU computes the transitions in blocks; each block has an entry for each layer.
    n_layers = critic.config.n_layers
    sums = [layer.flatten(1, -2).sum(1) for layer in layers]
    each = [torch.stack(sums[i::n_layers]).sum(0) for i in range(n_layers)]
    return found | {"dormant/critic": _share(each)}


def _share(layers: list[Tensor]) -> Tensor:
    """The share of dormant units, from mean activations [networks, H] of each layer."""
    dormant = [layer <= DORMANT * layer.mean(-1, keepdim=True) for layer in layers]
    return torch.cat([units.flatten() for units in dormant]).to(torch.float32).mean()


@contextmanager
def _recorded(module: nn.Module) -> Iterator[list[Tensor]]:
    """A list of the absolute outputs of all activations inside, in the order of computation."""
    seen: list[Tensor] = []
    hooks = [
        part.register_forward_hook(lambda _module, _inputs, out: seen.append(out.abs()))
        for part in module.modules()
        if isinstance(part, _ACTIVATIONS)
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
