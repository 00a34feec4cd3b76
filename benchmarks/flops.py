"""FLOPs of the matmuls of one update, computed from its settings.

    [batch, rows, inner] @ [batch, inner, columns], repeated `times` times:
    2 x times x batch x rows x inner x columns FLOPs

Activations, norms, losses and the optimiser are limited by memory traffic and are not counted. A
backward pass has one matmul for the gradient of the weights, if they are trained, and one for the
gradient of the inputs, if it is needed. Attention is counted without the savings of the causal
mask, as in torch's FLOP counter, with which the test compares. Imports only amago_model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from amago_model import AgentConfig, Spaces
from amago_model.heads.critic import NARROW


@dataclass(frozen=True)
class Matmul:
    """`times` matmuls of [batch, rows, inner] and [batch, inner, columns]."""

    part: str
    batch: int
    rows: int
    inner: int
    columns: int
    times: float = 1.0

    @property
    def flops(self) -> float:
        return 2.0 * self.times * self.batch * self.rows * self.inner * self.columns

    @property
    def bytes(self) -> float:
        """Memory traffic if operands and result, in float32, are each moved once."""
        numbers = self.rows * self.inner + self.inner * self.columns + self.rows * self.columns
        return 4.0 * self.times * self.batch * numbers


def update_flops(config: AgentConfig, spaces: Spaces, windows: int, window: int, **how: int) -> int:
    """FLOPs of one update; see `update_matmuls`."""
    return round(sum(x.flops for x in update_matmuls(config, spaces, windows, window, **how)))


def update_matmuls(
    config: AgentConfig,
    spaces: Spaces,
    windows: int,
    window: int,
    *,
    transitions: int | None = None,
    rows: int | None = None,
    plain: bool = True,
) -> list[Matmul]:
    """Every matmul of one update.

    Args:
        windows, window: B windows of T transitions.
        transitions: number of transitions that the heads compute, if they skip padding; default
            B x T.
        rows: number of rows that the row-wise layers of the encoders compute, if they skip padding;
            default B x (T + 1). Attention is always counted over whole windows.
        plain: the update runs uncompiled on a CPU. Then each target critic is evaluated only for
            the transitions for which it was drawn, and in DPG a critic has a gradient only where
            its value is the lowest.

    Raises:
        ValueError: the config has a part whose matmuls are not counted here.
    """
    n = windows * window if transitions is None else transitions
    found = _encoders(config, spaces, windows, window + 1, rows or windows * (window + 1))
    found += _actor(config, spaces, n)
    if config.critic is not None:
        found += _critics(config, spaces, n, plain)
    return [x for x in found if x.times]


def _linear(part: str, rows: int, d_in: int, d_out: int, *, passes: int, batch: int = 1) -> Matmul:
    """passes: 1 forward only, 2 with the gradient of inputs or weights, 3 with both gradients."""
    return Matmul(part, batch, rows, d_in, d_out, passes)


def _encoders(c: AgentConfig, spaces: Spaces, windows: int, length: int, rows: int) -> list[Matmul]:
    t = c.timestep_encoder
    if any(len(s.shape) > 1 for s in spaces.observations.values()):
        raise ValueError("only flat observations are counted")
    d = sum(spaces.observations[k].features for k in spaces.keys("policy"))
    widths = [d + 1 + spaces.action.width + t.show_reset, *[t.d_hidden] * t.n_layers, t.d_output]
    found = [
        _linear("timestep encoder", rows, a, b, passes=3 if i else 2)
        for i, (a, b) in enumerate(zip(widths, widths[1:], strict=False))
    ]
    kind = c.trajectory_encoder.kind
    if kind == "feed_forward":
        f = c.trajectory_encoder
        pairs = [(t.d_output, f.d_model), (f.d_model, f.d_model)]
        d_ff = f.d_ff or 4 * f.d_model
        pairs += [(f.d_model, d_ff), (d_ff, f.d_model)] * f.n_layers
    elif kind == "transformer":
        m = c.trajectory_encoder
        layer = [(m.d_model, 3 * m.d_model), (m.d_model, m.d_model)]
        layer += [(m.d_model, m.d_ff), (m.d_ff, m.d_model)]
        pairs = [(t.d_output, m.d_model), *layer * m.n_layers]
        # Forward: scores, weighted sum of values. Backward: five matmuls, one of which recomputes
        # the scores.
        heads, width = windows * m.n_heads, m.d_model // m.n_heads
        found.append(Matmul("attention", heads, length, width, length, 7 * m.n_layers))
    elif kind == "identity":
        pairs = []
    else:
        raise ValueError(f"the matmuls of trajectory encoder {kind!r} are not counted")
    return found + [_linear("memory", rows, a, b, passes=3) for a, b in pairs]


def _actor(c: AgentConfig, spaces: Spaces, n: int) -> list[Matmul]:
    a, loss = c.actor, c.losses
    if a.kind != "mlp" or a.continuous.kind in ("gmm", "deterministic"):
        raise ValueError("only MLP actors with two parameters per action are counted")
    d = state_width(c)
    parameters = 2 if spaces.action.kind == "continuous" else 1
    out = len(loss.gammas) * spaces.action.width * parameters
    widths = [d, *[a.d_hidden] * a.n_layers, out]
    pairs = list(zip(widths, widths[1:], strict=False))
    found: list[Matmul] = []
    if c.critic is not None:
        found += [_linear("target actor", n, i, o, passes=1) for i, o in pairs]
    learns = loss.bc_weight > 0 or not loss.dpg_detach_state
    found += [_linear("actor", n, i, o, passes=3 if learns else 1) for i, o in pairs]
    if loss.dpg_detach_state:
        found += [
            _linear("actor of DPG", n, i, o, passes=2 + (k > 0)) for k, (i, o) in enumerate(pairs)
        ]
    return found


def _critics(c: AgentConfig, spaces: Spaces, n: int, plain: bool) -> list[Matmul]:
    q, loss, g = c.critic, c.losses, len(c.losses.gammas)
    extra = sum(spaces.observations[k].features for k in spaces.keys("critic"))
    d, h, a, e = state_width(c) + extra, q.d_hidden, spaces.action.width, q.n_critics
    out = 1 if q.kind == "scalar" else q.n_bins
    discrete = spaces.action.kind == "discrete" and c.algorithm == "agent"
    hidden = [(h, h)] * (q.n_layers - 1)
    if discrete and q.kind == "scalar":  # table critics: one pass gives all actions' values
        pairs = [(d, h), *hidden, (h, g * a)]
        learn = [_linear("critics", n, i, o, passes=3, batch=e) for i, o in pairs]
        return learn + [replace(x, part="target critics", times=1) for x in learn]
    k_c, k_a = (a, a) if discrete else (loss.n_actions_in_critic_loss, loss.n_actions_in_actor_loss)
    drawn = q.n_critics_target < e and not q.subset_replacement and plain
    evaluated = q.n_critics_target if drawn else e

    w = 2 + a  # inputs of the first layer besides the state: discount, action, constant 1

    def unsplit(k: int) -> bool:
        return k * g == 1 and d <= NARROW

    def all_layers(part: str, k: int, critics: int, passes: int, first: Matmul) -> list[Matmul]:
        rest = [*hidden, (h, out)]
        rows = k * n * g
        upper = [_linear(part, rows, i, o, passes=passes, batch=critics) for i, o in rest]
        return [first, *upper]

    def forward_only(part: str, k: int, critics: int) -> list[Matmul]:
        width = d + w if unsplit(k) else w
        first = _linear(part, k * n * g, width, h, passes=1, batch=critics)
        return all_layers(part, k, critics, 1, first)

    found, data = [], "critics of the data"
    if not unsplit(k_c) or drawn:
        found.append(_linear("target critics", n, d, h, passes=1, batch=e))
    if drawn and unsplit(k_c):
        first = _linear("target critics", n, w, h, passes=1, batch=evaluated)
        found += all_layers("target critics", k_c, evaluated, 1, first)
    else:
        found += forward_only("target critics", k_c, evaluated)
    if unsplit(1):
        found += all_layers(data, 1, e, 3, _linear(data, n, d + w, h, passes=3, batch=e))
        if not unsplit(k_a):
            found.append(_linear("critics of the policy", n, d, h, passes=1, batch=e))
    else:
        found.append(_linear(data, n, d, h, passes=3, batch=e))
        found += all_layers(data, 1, e, 3, _linear(data, n * g, w, h, passes=2, batch=e))
    found += forward_only("critics of the policy", k_a, e)
    if loss.dpg_weight > 0:
        dpg, back = "critics of DPG", 1 if plain else e
        width = d + w if unsplit(k_a) and not plain else w
        first = _linear(dpg, k_a * n * g, width, h, passes=1, batch=back)
        found += all_layers(dpg, k_a, back, 1, first)
    return found


def state_width(c: AgentConfig) -> int:
    """Width of the state vector."""
    t = c.trajectory_encoder
    return c.timestep_encoder.d_output if t.kind == "identity" else int(t.d_model)
