"""The actor head: state vector to one action distribution for each discount."""

from __future__ import annotations

from torch import Tensor, nn

from amago_model.config import ActionSpace, ActorConfig
from amago_model.distributions import Categorical, Distribution, TanhGaussian
from amago_model.layers import make_mlp


class Actor(nn.Module):
    """One MLP whose output holds the parameters of all G distributions."""

    def __init__(
        self, config: ActorConfig, action: ActionSpace, *, d_state: int, n_gammas: int
    ) -> None:
        super().__init__()
        self.config, self.action = config, action
        self.n_gammas = n_gammas
        parameters = action.n if action.kind == "discrete" else 2 * action.width
        self.mlp = make_mlp(
            d_state,
            config.d_hidden,
            config.n_layers,
            n_gammas * parameters,
            activation=config.activation,
            dropout=config.dropout,
        )

    def forward(self, state: Tensor, legal: Tensor | None = None) -> Distribution:
        """state [..., D], legal [..., n] bool -> a distribution of batch shape [..., G]."""
        return self.distribution(self.mlp(state).unflatten(-1, (self.n_gammas, -1)), legal)

    def acting(self, state: Tensor, legal: Tensor | None = None) -> Distribution:
        """As forward, but only the last discount, which acts: batch shape [...]."""
        x = self.mlp(state).unflatten(-1, (self.n_gammas, -1))[..., -1:, :]
        both = self.distribution(x, legal)
        if isinstance(both, Categorical):
            return Categorical(both.probs.squeeze(-2))
        return TanhGaussian(both.loc.squeeze(-2), both.scale.squeeze(-2), both.clip)

    def distribution(self, x: Tensor, legal: Tensor | None) -> Distribution:
        c = self.config
        if self.action.kind == "discrete":
            if legal is not None:
                legal = legal.unsqueeze(-2)
            return Categorical.from_logits(x, low=c.prob_low, high=c.prob_high, legal=legal)
        return TanhGaussian.from_parameters(
            x, std_low=c.std_low, std_high=c.std_high, clip=c.log_prob_clip
        )
