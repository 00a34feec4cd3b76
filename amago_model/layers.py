"""Small blocks shared by encoders and heads: activations, norms, MLPs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from amago_model.config import Activation, Norm
from amago_model.config.names import SIMNORM_GROUP
from amago_model.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")


class AdaptiveActivation(nn.Module):
    """A learned rational function, (a0 + a1 x + … + a5 x^5) / (1 + |b1 x + … + b4 x^4|).

    It has no poles (Molina et al. 2020, "Padé Activation Units"). One set of coefficients applies
    to all elements. They are initialised to a least-squares fit of a leaky ReLU of slope 0.01 at
    1001 points of [-5, 5], by linear steps reweighted with the last denominator: the error is 0.06
    at 0 and 0.01 in the mean square. Slow: about twenty passes over x instead of one for ReLU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.numerator = nn.Parameter(
            torch.tensor([0.062577, 0.505, 0.906394, 0.617847, 0.163503, 0.015457])
        )
        self.denominator = nn.Parameter(torch.tensor([0.0, 1.22346, 0.0, 0.030609]))

    def forward(self, x: Tensor, constant: bool = False) -> Tensor:
        """`constant`: detach the coefficients."""
        parameters = (self.numerator, self.denominator)
        above, below = (p.detach() if constant else p for p in parameters)
        wide = x.to(torch.promote_types(x.dtype, above.dtype))
        top, bottom = above[5], below[3]
        for i in reversed(range(5)):
            top = torch.addcmul(above[i], top, wide)
        for i in reversed(range(3)):
            bottom = torch.addcmul(below[i], bottom, wide)
        return (top / (1 + (bottom * wide).abs())).to(x.dtype)


def make_activation(name: Activation) -> nn.Module:
    # In place is safe: these follow a matmul or a norm, whose backward does not need their output.
    match name:
        case "adaptive":
            return AdaptiveActivation()
        case "leaky_relu":
            return nn.LeakyReLU(0.01, inplace=True)
        case "relu":
            return nn.ReLU(inplace=True)
        case "gelu":
            return nn.GELU()
        case "mish":
            return nn.Mish()


def leaky_slope(activation: nn.Module) -> float | None:
    """The negative slope of nn.LeakyReLU, or 0 for nn.ReLU; None for other activations."""
    if type(activation) is nn.LeakyReLU:
        return activation.negative_slope
    return 0.0 if type(activation) is nn.ReLU else None


class UnitBall(nn.Module):
    """x / (|x| + 0.00001): the length is below one, and zero stays zero."""

    def __init__(self, *, detach: bool) -> None:
        """`detach`: no gradient through the length |x|."""
        super().__init__()
        self.detach = detach

    def forward(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        out: Tensor = x / ((length.detach() if self.detach else length) + 1e-5)
        return out


class HyperSphere(nn.Module):
    """sqrt(d) x / |x|: the length is sqrt(d), except for vectors close to zero."""

    def forward(self, x: Tensor) -> Tensor:
        # Equal to x over its root mean square; eps keeps the gradient at 0 finite.
        return F.rms_norm(x, x.shape[-1:], eps=1e-10)


class SimplicialNorm(nn.Module):
    """Softmax over each group of channels (Lavoie et al. 2023)."""

    def forward(self, x: Tensor) -> Tensor:
        groups = x.unflatten(-1, (-1, SIMNORM_GROUP)).softmax(dim=-1)
        # The backward of softmax needs its output, and the next activation may write in place.
        out: Tensor = groups.flatten(-2).clone()
        return out


def make_norm(name: Norm, width: int) -> nn.Module:
    match name:
        case "unitball" | "unitball_detach":
            return UnitBall(detach=name == "unitball_detach")
        case "hypersphere":
            return HyperSphere()
        case "simnorm" if width % SIMNORM_GROUP:
            raise ConfigError(
                f"norm 'simnorm': expected a width divisible by {SIMNORM_GROUP}, got {width}; "
                "choose another width or norm"
            )
        case "simnorm":
            return SimplicialNorm()
        case "none":
            return nn.Identity()
        case "layer":
            return nn.LayerNorm(width)
        case "rms":
            return nn.RMSNorm(width, eps=1e-5)


class Linear(nn.Linear):
    """nn.Linear that adds the bias last, for inputs [M, d_in] on a CPU.

    torch's kernel first writes the bias into every row and then reads the rows again, which takes a
    fifth of the time of narrow layers.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 2 or self.bias is None or not on_plain_cpu(x):
            return super().forward(x)
        return torch.mm(x, self.weight.t()).add_(self.bias)


def on_plain_cpu(x: Tensor) -> bool:
    """Whether x is on a CPU, without torch.compile and without autocast."""
    return (
        x.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
    )


def not_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """`torch.compiler.disable`, without its import of the compiler, which takes longer than all
    other imports of a process that acts."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)  # type: ignore[no-any-return]
        return function(*args, **kwargs)

    return call


def apply_flat(module: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """module(x) for x [..., D], computed as [M, D].

    For more than two dimensions a linear layer returns a view, and the backward of an in-place
    activation on a view makes several copies.
    """
    if x.ndim == 2:
        return module(x)
    out = module(x.flatten(0, -2))
    return out.view(*x.shape[:-1], out.shape[-1])


class FlatSequential(nn.Sequential):
    """nn.Sequential of layers that act on single vectors; inputs are flattened to [M, D]."""

    def forward(self, x: Tensor) -> Tensor:
        return apply_flat(super().forward, x)


def make_mlp(
    d_input: int,
    d_hidden: int,
    n_layers: int,
    d_output: int,
    *,
    activation: Activation,
    norm: Norm = "none",
    dropout: float = 0.0,
) -> FlatSequential:
    """An MLP from [..., d_input] to [..., d_output] with n_layers hidden layers."""
    blocks: list[nn.Module] = []
    for width in (d_input, *[d_hidden] * (n_layers - 1)):
        blocks.append(Linear(width, d_hidden))
        if norm != "none":
            blocks.append(make_norm(norm, d_hidden))
        blocks.append(make_activation(activation))
        if dropout > 0:
            blocks.append(nn.Dropout(dropout))
    blocks.append(Linear(d_hidden, d_output))
    return FlatSequential(*blocks)


class ResidualBlock(nn.Module):
    """x + drop(act(norm(W2 drop(act(norm(W1 x)))))); without `last`, without the outer drop and
    act."""

    def __init__(
        self,
        width: int,
        d_ff: int,
        *,
        activation: Activation,
        norm: Norm,
        dropout: float,
        last: bool = True,
    ) -> None:
        super().__init__()
        layers = [
            Linear(width, d_ff),
            make_norm(norm, d_ff),
            make_activation(activation),
            nn.Dropout(dropout),
            Linear(d_ff, width),
            make_norm(norm, width),
        ]
        if last:
            layers += [make_activation(activation), nn.Dropout(dropout)]
        self.branch = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.branch(x)
        return out


def symlog(x: Tensor) -> Tensor:
    return x.sign() * x.abs().log1p()


def symexp(x: Tensor) -> Tensor:
    return x.sign() * x.abs().expm1()
