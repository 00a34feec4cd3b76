"""The critic head: an ensemble of action values as batched matmuls, for all discounts.

Every weight is [C, d_in, d_out]. Table critics (scalar values of discrete actions): the input is
the state, the output one value per discount and action. Other critics: the input is [state |
discount feature | action], the output one value, or logits over bins. Their first layer is split:
the product with the state, by far the widest input, is computed once per state (`project_state`)
and shared by all actions and discounts (except for a narrow state with one action and one discount,
for which one product is faster than two). The later layers have a row for each critic, action
sample, state and discount. A CPU computes them in blocks that fit in its cache.

Letters: C critics, N states, K action samples, G discounts, A action width, D state, H hidden
width. The state is [the policy's | privileged features].
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from amago_model.config import ActionSpace, CriticConfig
from amago_model.heads.bins import Bins
from amago_model.heads.critic_layers import (
    Layers,
    StateProjection,
    affine,
    first_layer,
    forward_frozen,
)
from amago_model.layers import (
    AdaptiveActivation,
    leaky_slope,
    make_activation,
    on_plain_cpu,
)


def gamma_feature(gamma: float) -> float:
    """The discount feature, an input of the critics: ln(1 + 1 / (1 - gamma))."""
    return math.log1p(1.0 / min(max(1.0 - gamma, 1e-6), 1.0))


NARROW = 128
"""States up to this width are multiplied together with a single action, in one product."""

BLOCK = 1 << 18
"""Numbers of a layer's output per block and thread on a CPU: 1 MiB in float32."""
DEVICE_BLOCK = 1 << 28
"""Numbers of a layer's output per block on other devices, without gradients: 1 GiB in float32. It
limits the memory of TD targets, and of the statistics of a batch with gradient accumulation."""


class CriticEnsemble(nn.Module):
    """C independent MLPs. `frozen=True` detaches the weights: only inputs have gradients."""

    def __init__(
        self,
        config: CriticConfig,
        action: ActionSpace,
        gammas: tuple[float, ...],
        *,
        d_state: int,
        sampled: bool = False,
    ) -> None:
        """`sampled`: discrete actions are sampled, so they are an input as one-hots."""
        super().__init__()
        self.config, self.action = config, action
        self.table = action.kind == "discrete" and config.kind == "scalar" and not sampled
        self.n_gammas, self.d_state = len(gammas), d_state
        self.bins: Bins | None = None
        if config.kind != "scalar":
            self.bins = Bins(config)
        d_input = d_state if self.table else d_state + 1 + action.width
        d_output = 1 if self.bins is None else self.bins.config.n_bins
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
        with torch.no_grad():
            self.weights[-1].mul_(config.init_scale)
            self.biases[-1].mul_(config.init_scale)
        if self.bins is not None and (initial := self.bins.initial_bias()) is not None:
            with torch.no_grad():
                cast(Tensor, self.biases[-1]).copy_(
                    initial.expand_as(cast(Tensor, self.biases[-1]))
                )
        self.activation = make_activation(config.activation)
        self.register_buffer("gamma_features", torch.tensor([[gamma_feature(g)] for g in gammas]))
        self.register_buffer("one", torch.ones(1, 1), persistent=False)

    gamma_features: Tensor
    one: Tensor

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
        if self.config.layer_norm:
            x = F.layer_norm(x, x.shape[-1:])
        return F.dropout(x, self.config.dropout, self.training)

    def project_state(self, state: Tensor) -> StateProjection:
        """state [N, D] -> its product with the first layer, shared by all actions and discounts."""
        weight, _ = self._layers()[0]
        return StateProjection(state, weight[:, : self.d_state])

    def _upper_layers(self, layers: Layers, x: Tensor) -> Tensor:
        """[C, M, H] after the first activation -> [C, M, output]."""
        for weight, bias in layers[1:-1]:
            x = self._hidden(layers, affine(x, weight, bias))
        weight, bias = layers[-1]
        return affine(x, weight, bias)

    def action_values(self, state: Tensor) -> Tensor:
        """Table critics only: state [N, D] -> [C, N, G, A], the values of all actions."""
        layers = self._layers()
        x = affine(state.expand(len(layers[0][0]), -1, -1), *layers[0])
        out = self._upper_layers(layers, self._hidden(layers, x))
        result: Tensor = out.unflatten(-1, (self.n_gammas, self.action.n))
        return result

    def values(
        self, projection: StateProjection, action: Tensor, *, frozen: bool = False
    ) -> Tensor:
        """N states and encoded actions [K, N, G, A] -> [C, K, N, G]."""
        return self.scalar(self.outputs(projection, action, frozen=frozen))

    def scalar(self, outputs: Tensor) -> Tensor:
        """Outputs [..., 1] or [..., bins] -> values [...]."""
        return outputs.squeeze(-1) if self.bins is None else self.bins.expected(outputs)

    def outputs(
        self, projection: StateProjection, action: Tensor, *, frozen: bool = False
    ) -> Tensor:
        """Like `values`, but raw outputs: [C, K, N, G, 1 or bins]."""
        layers, inputs = self._layers(frozen), self._inputs(action)
        weight, bias = layers[0]
        if inputs.shape[0] * inputs.shape[2] == 1 and self.d_state <= NARROW:
            first = torch.cat((weight, bias), dim=1)
            return self._forward(first, layers, projection.state.unsqueeze(0), inputs)
        return self._forward(self._input_weight(layers), layers, projection.product, inputs)

    def subset_values(self, projection: StateProjection, action: Tensor, subset: Tensor) -> Tensor:
        """Like `values`, without gradients and only for the critics `subset` [M, N, G] of each
        state and discount; the values of other critics are zeros."""
        part, (k, n, g, a) = projection.product, action.shape
        c = len(part)
        wanted = torch.zeros(c, n * g, dtype=torch.bool, device=action.device)
        wanted.scatter_(0, subset.flatten(1), True)
        inputs = self._inputs(action).reshape(k, n * g, 1, 2 + a)
        values = inputs.new_zeros(c, k, n * g)  # autocast may make the outputs 16-bit
        with torch.no_grad():
            for i in range(c):
                entry = wanted[i].nonzero().squeeze(1)
                layers = [(weight[i : i + 1], bias[i : i + 1]) for weight, bias in self._layers()]
                first = self._input_weight(layers)
                out = self._forward(first, layers, part[i : i + 1, entry // g], inputs[:, entry])
                values[i, :, entry] = self.scalar(out)[0, ..., 0].to(values.dtype)
        result: Tensor = values.unflatten(-1, (n, g))
        return result

    def _input_weight(self, layers: Layers) -> Tensor:
        """The first layer's weight and bias for all inputs except the state: [C, 2 + A, H]."""
        weight, bias = layers[0]
        return torch.cat((weight[:, self.d_state :], bias), dim=1)

    def _inputs(self, action: Tensor) -> Tensor:
        """The first layer's inputs except the state: [K, N, G, A] -> [K, N, G, 2 + A]. The last is
        a one, so the product includes the bias."""
        if self.action.kind == "continuous":
            # No gradient at the bounds. Not for one-hots, whose gradient a clamp would stop.
            action = action.clamp(-0.999, 0.999)
        gammas, one = (x.expand(*action.shape[:-1], 1) for x in (self.gamma_features, self.one))
        return torch.cat((gammas, action, one), dim=-1)

    def _forward(self, first: Tensor, layers: Layers, state: Tensor, inputs: Tensor) -> Tensor:
        """inputs [K, N, G, 2 + A] and states, see `first_layer` -> [C, K, N, G, output]."""
        c, _, h = first.shape
        k, n, g, _ = inputs.shape
        on_cpu = inputs.device.type == "cpu"
        if torch.compiler.is_compiling() or (torch.is_grad_enabled() and not on_cpu):
            return self._block(first, layers, state, inputs)
        at_once = BLOCK * torch.get_num_threads() if on_cpu else DEVICE_BLOCK
        states = max(1, at_once // (c * h * k * g))
        if states >= n:
            return self._block(first, layers, state, inputs)
        blocks = zip(state.split(states, 1), inputs.split(states, 1), strict=True)
        return torch.cat([self._block(first, layers, *block) for block in blocks], dim=2)

    def _block(self, first: Tensor, layers: Layers, state: Tensor, inputs: Tensor) -> Tensor:
        if (slope := self._frozen_slope(layers, inputs)) is not None:
            out = forward_frozen(inputs, state, first, layers[1:], slope)
        else:
            x = self._hidden(layers, first_layer(inputs, first, state)).flatten(1, -2)
            out = self._upper_layers(layers, x)
        return out.view(len(first), *inputs.shape[:3], out.shape[-1])

    def _frozen_slope(self, layers: Layers, inputs: Tensor) -> float | None:
        """Slope of the activation, if `forward_frozen` can compute these layers."""
        constant = (
            torch.is_grad_enabled() and inputs.requires_grad and not layers[0][0].requires_grad
        )
        dropout = self.training and self.config.dropout > 0
        # A subclass may change the layers.
        plain = not dropout and not self.config.layer_norm and on_plain_cpu(inputs)
        if type(self) is not CriticEnsemble or not constant or not plain:
            return None
        return leaky_slope(self.activation)
