"""The critic head: an ensemble of action values as one batched matmul, for all discounts at once.

Every weight is [C, d_in, d_out]. A table (scalar values of discrete actions): the input is the
state, the output one value for each discount and action. Otherwise: the input is [state | discount
feature | action], the output one value, or the logits of one over bins. There the first layer,
which is linear, is split: the part of the state, by far the widest, is computed once per row
(`state_part`) and shared by every action and discount asked about. What follows has a row for each
critic, action sample, state and discount; a CPU does it block by block, each of them small enough
to stay in the cache from the first layer to the last.

Letters: C critics, N rows, K action samples, G discounts, A action width, D state, H hidden width.
A state is [the agent's | what only critics may see]; the agent puts the two together.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from amago_model.bins import Bins
from amago_model.config import ActionSpace, CriticConfig
from amago_model.distributions import Categorical, Distribution
from amago_model.layers import AdaptiveActivation, make_activation


def gamma_feature(gamma: float) -> float:
    """How a continuous critic is told its discount: ln(1 + 1 / (1 - gamma))."""
    return math.log1p(1.0 / min(max(1.0 - gamma, 1e-6), 1.0))


BLOCK = 1 << 18
"""Numbers of one layer's output that each thread works on at once: 1 MiB in float32."""

Layers = list[tuple[Tensor, Tensor]]
"""Weights [C, d_in, d_out] and biases [C, 1, d_out]."""


class CriticEnsemble(nn.Module):
    """C independent MLPs. With `frozen=True` weights are constants: gradients reach only inputs."""

    def __init__(
        self,
        config: CriticConfig,
        action: ActionSpace,
        gammas: tuple[float, ...],
        *,
        d_state: int,
        sampled: bool = False,
    ) -> None:
        """`sampled`: discrete actions come as samples, so they are an input and not a table."""
        super().__init__()
        self.config, self.action = config, action
        self.table = action.kind == "discrete" and config.kind == "scalar" and not sampled
        self.n_gammas, self.d_state = len(gammas), d_state
        self.bins: Bins | None = None
        if config.kind != "scalar":
            self.bins = Bins(config.bins, gaussian=config.kind == "hlgauss")
        d_input = d_state if self.table else d_state + 1 + action.width
        d_output = 1 if self.bins is None else config.bins.n_bins
        if self.table:
            d_output = len(gammas) * action.n
        widths = [d_input, *[config.d_hidden] * config.n_layers, d_output]
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for fan_in, fan_out in zip(widths, widths[1:], strict=False):
            # Weights of variance 1 / fan_in, three times nn.Linear's: critics that start small
            # learn late (pendulum-stitch is at -200 by 500 to 1000 updates, not 1000 to 1500).
            bound = fan_in**-0.5
            weight = torch.empty(config.n_critics, fan_in, fan_out)
            bias = torch.empty(config.n_critics, 1, fan_out).uniform_(-bound, bound)
            weight.uniform_(-bound * 3**0.5, bound * 3**0.5)
            self.weights.append(nn.Parameter(weight))
            self.biases.append(nn.Parameter(bias))
        if self.bins is not None and (initial := self.bins.initial_bias()) is not None:
            with torch.no_grad():
                cast(Tensor, self.biases[-1]).copy_(
                    initial.expand_as(cast(Tensor, self.biases[-1]))
                )
        self.activation = make_activation(config.activation)
        self.register_buffer("gamma_features", torch.tensor([[gamma_feature(g)] for g in gammas]))

    gamma_features: Tensor

    def _layers(self, frozen: bool = False) -> Layers:
        pairs = zip(self.weights, self.biases, strict=True)
        if frozen:
            return [(weight.detach(), bias.detach()) for weight, bias in pairs]
        return [(cast(Tensor, weight), cast(Tensor, bias)) for weight, bias in pairs]

    def _hidden(self, layers: Layers, x: Tensor) -> Tensor:
        if isinstance(self.activation, AdaptiveActivation):
            x = self.activation(x, constant=not layers[0][0].requires_grad)
        else:
            x = self.activation(x)
        return F.dropout(x, self.config.dropout, self.training)

    def state_part(self, state: Tensor) -> Tensor:
        """state [N, D] -> [C, N, H]: the first layer before its activation, without the action."""
        weight, bias = self._layers()[0]
        rows = state.expand(weight.shape[0], -1, -1)
        return _affine(rows, weight[:, : self.d_state], bias)

    def _upper_layers(self, layers: Layers, x: Tensor) -> Tensor:
        """[C, M, H] after the first activation -> [C, M, output]."""
        for weight, bias in layers[1:-1]:
            x = self._hidden(layers, _affine(x, weight, bias))
        weight, bias = layers[-1]
        return _affine(x, weight, bias)

    def action_values(self, state: Tensor) -> Tensor:
        """A table: state [N, D] -> [C, N, G, A], the value of every action."""
        layers = self._layers()
        out = self._upper_layers(layers, self._hidden(layers, self.state_part(state)))
        return out.unflatten(-1, (self.n_gammas, self.action.n))

    def values(self, state_part: Tensor, action: Tensor, *, frozen: bool = False) -> Tensor:
        """[C, N, H] and encoded actions [K, N, G, A] -> [C, K, N, G]."""
        return self.scalar(self.outputs(state_part, action, frozen=frozen))

    def scalar(self, outputs: Tensor) -> Tensor:
        """[..., 1] or [..., bins] -> [...]: what an output says in one number."""
        return outputs.squeeze(-1) if self.bins is None else self.bins.expected(outputs)

    def outputs(self, state_part: Tensor, action: Tensor, *, frozen: bool = False) -> Tensor:
        """As `values`, but before that is one number: [C, K, N, G, 1 or bins]."""
        return self._answers(self._layers(frozen), state_part, self._told(action))

    def chosen_values(self, state_part: Tensor, action: Tensor, chosen: Tensor) -> Tensor:
        """As `values`, without gradients, where only the critics `chosen` [M, N, G] are asked about
        each state and discount; the answers of the others are zeros."""
        c, (k, n, g, a) = len(state_part), action.shape
        wanted = torch.zeros(c, n * g, dtype=torch.bool, device=action.device)
        wanted.scatter_(0, chosen.flatten(1), True)
        told = self._told(action).reshape(k, n * g, 1, 1 + a)
        values = told.new_zeros(c, k, n * g)  # under autocast answers may be halves
        with torch.no_grad():
            for i in range(c):
                entry = wanted[i].nonzero().squeeze(1)
                layers = [(weight[i : i + 1], bias[i : i + 1]) for weight, bias in self._layers()]
                out = self._answers(layers, state_part[i : i + 1, entry // g], told[:, entry])
                values[i, :, entry] = self.scalar(out)[0, ..., 0].to(values.dtype)
        return values.unflatten(-1, (n, g))

    def _told(self, action: Tensor) -> Tensor:
        """What the first layer sees beside the state: [K, N, G, A] -> [K, N, G, 1 + A]."""
        if self.action.kind == "continuous":
            # Nothing to be gained beyond. Ones and zeros are let through: a clamp has no gradient.
            action = action.clamp(-0.999, 0.999)
        gammas = self.gamma_features.expand(*action.shape[:-1], 1)
        return torch.cat((gammas, action), dim=-1)

    def _answers(self, layers: Layers, state_part: Tensor, told: Tensor) -> Tensor:
        """[C, N, H], [K, N, G, 1 + A] -> [C, K, N, G, output]."""
        c, n, h = state_part.shape
        if told.device.type != "cpu" or torch.compiler.is_compiling():
            return self._block(layers, state_part, told)
        at_once = BLOCK * torch.get_num_threads()
        states = max(1, at_once // (c * h * told.shape[0] * told.shape[2]))
        if states >= n:
            return self._block(layers, state_part, told)
        blocks = zip(state_part.split(states, 1), told.split(states, 1), strict=True)
        return torch.cat([self._block(layers, *block) for block in blocks], dim=2)

    def _block(self, layers: Layers, state_part: Tensor, told: Tensor) -> Tensor:
        k, n, g, width = told.shape
        c = len(state_part)
        rows = told.reshape(1, -1, width).expand(c, -1, -1)
        x = torch.bmm(rows, layers[0][0][:, self.d_state :]).view(c, k, n, g, state_part.shape[-1])
        shared = state_part[:, None, :, None]
        # Not in place where a gradient passes: x is a view.
        x = self._hidden(layers, x + shared if torch.is_grad_enabled() else x.add_(shared))
        out = self._upper_layers(layers, x.flatten(1, 3))
        return out.view(c, k, n, g, out.shape[-1])


def _affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x [C, M, d_in] @ weight [C, d_in, d_out] + bias [C, 1, d_out]."""
    # Not baddbmm, which first writes the bias into every row and then reads it again.
    return torch.bmm(x, weight).add_(bias)


def policy_value(
    critic: CriticEnsemble,
    part: Tensor,
    policy: Distribution,
    noise: Tensor,
    *,
    frozen: bool = False,
    chosen: Tensor | None = None,
) -> Tensor:
    """[C, N, G]: the mean over the policy's samples, or over all its actions with their odds.

    `chosen` [M, N, G]: other critics than these need not answer, and there are no gradients.
    """
    odds: Tensor | None = None
    if isinstance(policy, Categorical):
        n = policy.probs.shape[-1]
        action = torch.eye(n, device=part.device)[:, None, None, :]
        action = action.expand(n, *policy.probs.shape)
        odds = policy.probs.movedim(-1, 0)
    else:
        action = policy.rsample(noise)
    if chosen is None:
        values = critic.values(part, action, frozen=frozen)
    else:
        values = critic.chosen_values(part, action, chosen)
    return values.mean(1) if odds is None else (values * odds).sum(1)
