"""The critic head: an ensemble of action values as one batched matmul, for all discounts at once.

Every weight is [C, d_in, d_out]. A table (scalar values of discrete actions): the input is the
state, the output one value for each discount and action. Otherwise: the input is [state | discount
feature | action], the output one value, or the logits of one over bins. There the first layer,
which is linear, is split: the part of the state, by far the widest, is computed once per row
(`state_part`) and shared by every action and discount asked about.

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
from amago_model.layers import make_activation


def gamma_feature(gamma: float) -> float:
    """How a continuous critic is told its discount: ln(1 + 1 / (1 - gamma))."""
    return math.log1p(1.0 / min(max(1.0 - gamma, 1e-6), 1.0))


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

    def _layer(self, i: int, frozen: bool) -> tuple[Tensor, Tensor]:
        weight, bias = cast(Tensor, self.weights[i]), cast(Tensor, self.biases[i])
        return (weight.detach(), bias.detach()) if frozen else (weight, bias)

    def _hidden(self, x: Tensor) -> Tensor:
        return F.dropout(self.activation(x), self.config.dropout, self.training)

    def state_part(self, state: Tensor) -> Tensor:
        """state [N, D] -> [C, N, H]: the first layer before its activation, without the action."""
        weight, bias = self._layer(0, frozen=False)
        rows = state.expand(weight.shape[0], -1, -1)
        return torch.baddbmm(bias, rows, weight[:, : self.d_state])

    def _upper_layers(self, x: Tensor, frozen: bool) -> Tensor:
        """[C, M, H] before the first activation -> [C, M, output]."""
        for i in range(1, len(self.weights)):
            weight, bias = self._layer(i, frozen)
            x = torch.baddbmm(bias, self._hidden(x), weight)
        return x

    def action_values(self, state: Tensor) -> Tensor:
        """A table: state [N, D] -> [C, N, G, A], the value of every action."""
        out = self._upper_layers(self.state_part(state), frozen=False)
        return out.unflatten(-1, (self.n_gammas, self.action.n))

    def values(self, state_part: Tensor, action: Tensor, *, frozen: bool = False) -> Tensor:
        """[C, N, H] and encoded actions [K, N, G, A] -> [C, K, N, G]."""
        return self.scalar(self.outputs(state_part, action, frozen=frozen))

    def scalar(self, outputs: Tensor) -> Tensor:
        """[..., 1] or [..., bins] -> [...]: what an output says in one number."""
        return outputs.squeeze(-1) if self.bins is None else self.bins.expected(outputs)

    def outputs(self, state_part: Tensor, action: Tensor, *, frozen: bool = False) -> Tensor:
        """As `values`, but before that is one number: [C, K, N, G, 1 or bins]."""
        k, n, g, a = action.shape
        weight, _ = self._layer(0, frozen)
        gammas = self.gamma_features.expand(k, n, g, 1)
        if self.action.kind == "continuous":
            # Nothing to be gained beyond. Ones and zeros are let through: a clamp has no gradient.
            action = action.clamp(-0.999, 0.999)
        told = torch.cat((gammas, action), dim=-1).reshape(-1, 1 + a)
        part = state_part[:, None, :, None, :].expand(-1, k, -1, g, -1).flatten(1, 3)
        rows = told.expand(part.shape[0], -1, -1)
        x = torch.baddbmm(part, rows, weight[:, self.d_state :])  # [C, K*N*G, H]
        return self._upper_layers(x, frozen).reshape(part.shape[0], k, n, g, -1)
