"""Small blocks shared by encoders and heads: activations, norms, MLPs."""

from __future__ import annotations

from torch import Tensor, nn

from amago_model.config import Activation, Norm


def make_activation(name: Activation) -> nn.Module:
    # In place: these follow a matmul or a norm, neither of which needs its output for its gradient.
    match name:
        case "leaky_relu":
            return nn.LeakyReLU(0.01, inplace=True)
        case "relu":
            return nn.ReLU(inplace=True)
        case "gelu":
            return nn.GELU()
        case "mish":
            return nn.Mish()


def make_norm(name: Norm, width: int) -> nn.Module:
    match name:
        case "none":
            return nn.Identity()
        case "layer":
            return nn.LayerNorm(width)
        case "rms":
            return nn.RMSNorm(width, eps=1e-5)


def make_mlp(
    d_input: int,
    d_hidden: int,
    n_layers: int,
    d_output: int,
    *,
    activation: Activation,
    norm: Norm = "none",
    dropout: float = 0.0,
) -> nn.Sequential:
    """[..., d_input] to [..., d_output] through n_layers hidden layers and a linear one."""
    blocks: list[nn.Module] = []
    for width in (d_input, *[d_hidden] * (n_layers - 1)):
        blocks.append(nn.Linear(width, d_hidden))
        if norm != "none":
            blocks.append(make_norm(norm, d_hidden))
        blocks.append(make_activation(activation))
        if dropout > 0:
            blocks.append(nn.Dropout(dropout))
    blocks.append(nn.Linear(d_hidden, d_output))
    return nn.Sequential(*blocks)


class ResidualBlock(nn.Module):
    """x + drop(act(norm(W2 drop(act(norm(W1 x))))))."""

    def __init__(
        self, width: int, d_ff: int, *, activation: Activation, norm: Norm, dropout: float
    ) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Linear(width, d_ff),
            make_norm(norm, d_ff),
            make_activation(activation),
            nn.Dropout(dropout),
            nn.Linear(d_ff, width),
            make_norm(norm, width),
            make_activation(activation),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)
