"""Small agents in float64 of every kind, and windows with everything that can be missing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import torch

from amago_model import (
    ActionSpace,
    Agent,
    Batch,
    FeedForwardConfig,
    GRUConfig,
    IdentityConfig,
    MambaConfig,
    ObsSpace,
    Spaces,
    TimestepEncoderConfig,
    TransformerConfig,
    make_agent,
)
from tests.amago_model.settings import configured

NARROW = {"n_bins": 7, "min_return": -30.0, "max_return": 40.0}
MEMORIES = {
    "identity": IdentityConfig(),
    "feed_forward": FeedForwardConfig(d_model=4),
    "gru": GRUConfig(d_hidden=5, d_output=4, n_layers=1),
    "mamba": MambaConfig(d_model=4, d_state=2, n_layers=1),
    "transformer": TransformerConfig(
        d_model=4, n_heads=2, d_ff=4, n_layers=1, dropout_ff=0.0, dropout_emb=0.0
    ),
}


def spaces_of(kind: str, *, legal: bool = False, privileged: bool = False) -> Spaces:
    action = {
        "discrete": ActionSpace(kind="discrete", n=3, start=1),
        "multi_binary": ActionSpace(kind="multi_binary", n=2),
        "multi_discrete": ActionSpace(kind="multi_discrete", nvec=(2, 3)),
        "continuous": ActionSpace(kind="continuous", shape=(2,), low=(-2.0, 0.0), high=(2.0, 1.0)),
    }[kind]
    obs = {"observation": ObsSpace(shape=(2,), dtype="float32")}
    if legal and kind in ("discrete", "multi_discrete"):
        obs["legal"] = ObsSpace(shape=(action.width,), dtype="int8", role="mask")
    if privileged:
        obs["truth"] = ObsSpace(shape=(1,), dtype="float32", role="critic")
    return Spaces(observations=obs, action=action)


def agent_of(
    spaces: Spaces,
    *,
    memory: str = "identity",
    algorithm: str = "agent",
    actor: dict[str, Any] | None = None,
    critic: dict[str, Any] | Literal[False] | None = None,
    losses: dict[str, Any] | None = None,
    return_conditioning: dict[str, Any] | Literal[False] = False,
    ema_decay: float = 0.0,
) -> Agent:
    """In float64, with statistics and target networks that have already gone their own ways."""
    defaults = {"gamma": 0.9, "auxiliary_gammas": (0.5,), "dpg_weight": 0.6, "bc_weight": 0.7}
    small = {"n_critics": 3, "d_hidden": 4, "n_layers": 1, "popart": {"beta": 0.1}}
    config = configured(
        algorithm=algorithm,
        timestep_encoder=TimestepEncoderConfig(n_layers=1, d_hidden=5, d_output=4),
        trajectory_encoder=MEMORIES[memory],
        actor={"d_hidden": 4, "n_layers": 1} | (actor or {}),
        critic=critic is not False and small | (critic or {}),
        return_conditioning=return_conditioning,
        losses=defaults | (losses or {}),
        ema_decay=ema_decay,
    )
    agent = make_agent(config, spaces).double()
    with torch.no_grad():
        for p in agent.parameters():
            p.add_(0.1 * torch.randn(p.shape))
        if agent.critics is not None:
            agent.critics.popart.moments.mean.copy_(torch.tensor([2.0, -1.0]))
            agent.critics.popart.moments.variance.copy_(torch.tensor([9.0, 40.0]))
            agent.critics.popart.moments.updates.fill_(7.0)
            agent.critics.popart.w.copy_(torch.tensor([0.7, 1.3]))
            agent.critics.popart.b.copy_(torch.tensor([-0.2, 0.4]))
    return agent


def batch_of(spaces: Spaces, lengths: list[int], size: int, *, masks: bool = False) -> Batch:
    """Windows of any lengths with endings, missing observations and unknown actions anywhere; with
    `masks` also transitions from which actor, critics, or both may not learn."""
    b, rows, action = len(lengths), size + 1, spaces.action
    if action.kind == "continuous":
        low, high = torch.tensor(action.low), torch.tensor(action.high)
        prev_action = low + (high - low) * torch.rand(b, rows, 2)
    else:
        top = {"discrete": (3,), "multi_binary": (2, 2), "multi_discrete": (2, 3)}[action.kind]
        parts = [torch.randint(0, n, (b, rows)) for n in top]
        prev_action = torch.stack(parts, -1) if len(top) > 1 else parts[0] + action.start
    mask = torch.arange(size) < torch.tensor(lengths)[:, None]
    obs = {key: torch.randn(b, rows, *space.shape) for key, space in spaces.observations.items()}
    if "legal" in obs:
        obs["legal"] = (obs["legal"] > -0.5).to(torch.int8)
    terminated = mask & (torch.rand(b, size) < 0.2)
    return Batch(
        obs=obs,
        prev_action=prev_action,
        # Values of float32 in float64: what networks see of them is float32.
        prev_reward=torch.randn(b, rows).double(),
        time_idx=torch.randint(0, 2, (b, 1)) + torch.arange(rows),
        terminated=terminated,
        truncated=mask & ~terminated & (torch.rand(b, size) < 0.2),
        next_obs_valid=mask & (torch.rand(b, size) < 0.85),
        mask=mask,
        action_known=mask & (torch.rand(b, size) < 0.85),
        actor_mask=mask & (torch.rand(b, size) < 0.6) if masks else None,
        critic_mask=mask & (torch.rand(b, size) < 0.6) if masks else None,
    )


Case = dict[str, Any]
# Where the policy's samples are the data's action, the advantage is 0 and its sign mere rounding.
CLEAR = {"filter": {"threshold": 0.01}}
CLONING: Case = {
    "critic": False,
    "losses": {"filter": {"kind": "behavior_cloning"}, "dpg_weight": 0.0},
}
CASES: dict[str, Case] = {
    "discrete": {},
    "discrete, mean of critics": {"losses": {"dpg_weight": 0.0}},
    "discrete, legal actions": {"legal": True, "actor": {"prob_low": 0.2, "prob_high": 0.6}},
    "discrete, softened": {"critic": {"soften_data_actions": True}},
    "discrete, no popart": {"critic": {"popart": None}},
    "discrete, values move with the statistics": {
        "critic": {"popart": {"beta": 0.1, "preserve_outputs": False}}
    },
    "discrete, all critics": {"critic": {"n_critics_target": 3}},
    "discrete, with replacement": {"critic": {"subset_replacement": True}},
    "discrete, with replacement, all": {
        "critic": {"subset_replacement": True, "n_critics_target": 3}
    },
    "discrete, two-hot": {"critic": {"kind": "twohot", **NARROW}},
    "discrete, HL-Gauss": {"critic": {"kind": "hlgauss", **NARROW}},
    "discrete, linear bins": {"critic": {"kind": "twohot", **NARROW, "symlog": False}},
    "n-step": {"losses": {"n_step": 3}},
    "lambda": {"losses": {"td_lambda": 0.7}},
    "bounded targets": {"losses": {"target_low": -0.3, "target_high": 0.4}},
    "one bound": {"losses": {"target_high": 0.1}},
    "online actor": {"losses": {"use_target_actor": False}},
    "privileged critics": {"privileged": True},
    "exponential": {"losses": {"filter": {"kind": "exp", "beta": 2.0}}},
    "leaky": {
        "losses": {
            "filter": {
                "kind": "leaky_relu",
                "threshold": 0.05,
                "beta": 0.5,
                "slope": 0.3,
                "at_zero": 0.2,
            }
        }
    },
    "leaky without step": {"losses": {"filter": {"kind": "leaky_relu", "add_step": False}}},
    "binary, threshold": {"losses": {"filter": {"threshold": 0.1}}},
    "binary, normalised": {"losses": {"filter": {"batch_norm": True}}},
    "exponential, normalised": {"losses": {"filter": {"kind": "exp", "batch_norm": True}}},
    "leaky, normalised": {"losses": {"filter": {"kind": "leaky_relu", "batch_norm": True}}},
    "raw advantage": {"losses": {"filter": {"kind": "exp", "advantage": "raw"}}},
    "raw, normalised": {
        "losses": {"filter": {"kind": "exp", "advantage": "raw", "batch_norm": True}}
    },
    "advantage of three actions": {"losses": {"filter": {"n_step": 3}}},
    "advantage of three actions, classified": {
        "critic": {"kind": "twohot", **NARROW},
        "losses": {"filter": {"kind": "exp", "n_step": 3, "batch_norm": True}},
    },
    "raw advantage of three actions": {
        "losses": {"filter": {"kind": "exp", "advantage": "raw", "n_step": 3}}
    },
    "raw advantage of three actions, classified": {
        "critic": {"kind": "hlgauss", **NARROW},
        "losses": {"filter": {"kind": "exp", "advantage": "raw", "n_step": 3}},
    },
    "advantage of more actions than a window has": {
        "kind": "continuous",
        "masks": True,
        "losses": {"filter": {"kind": "exp", "n_step": 50}, "value_expectile": 0.8},
    },
    "no filter": {"losses": {"filter": {"kind": "behavior_cloning"}}},
    "cloning alone": CLONING,
    "DPG alone": {"losses": {"bc_weight": 0.0}},
    "continuous": {"kind": "continuous"},
    "DPG detached": {"losses": {"dpg_detach_state": True}},
    "DPG detached, alone": {
        "kind": "continuous",
        "privileged": True,
        "losses": {"dpg_detach_state": True, "bc_weight": 0.0},
    },
    "DPG detached, choices": {
        "kind": "multi_discrete",
        "masks": True,
        "losses": {"dpg_detach_state": True} | CLEAR,
    },
    "privileged critics, continuous": {"kind": "continuous", "privileged": True},
    "loss masks": {"masks": True, "losses": {"n_step": 3}},
    "loss masks, continuous": {
        "kind": "continuous",
        "masks": True,
        "losses": {"td_lambda": 0.7, "filter": {"kind": "exp", "batch_norm": True}},
    },
    "loss masks, classified": {"masks": True, "critic": {"kind": "twohot", **NARROW}},
    "return conditioning": {"return_conditioning": {"scale": 0.3}, **CLONING},
    "return conditioning, continuous": {
        "kind": "continuous",
        "masks": True,
        "return_conditioning": {"scale": 2.0},
        **CLONING,
    },
    "loss masks, cloning alone": {
        "masks": True,
        **CLONING,
    },
    "continuous, samples": {
        "kind": "continuous",
        "losses": {"n_actions_in_critic_loss": 2, "n_actions_in_actor_loss": 3},
    },
    "continuous, two-hot": {"kind": "continuous", "critic": {"kind": "twohot", **NARROW}},
    "continuous, raw two-hot": {
        "kind": "continuous",
        "critic": {"kind": "twohot", **NARROW},
        "losses": {"filter": {"kind": "exp", "advantage": "raw"}},
    },
    "beta": {
        "kind": "continuous",
        "actor": {"continuous": {"kind": "beta", "low": 1.1, "high": 3.0}},
    },
    "mixture": {
        "kind": "continuous",
        "actor": {"continuous": {"kind": "gmm", "modes": 2, "std_low": 0.1, "std_high": 0.9}},
        "losses": {"dpg_weight": 0.0},
    },
    "switches": {"kind": "multi_binary", "losses": CLEAR},
    "choices": {"kind": "multi_discrete", "legal": True, "losses": CLEAR},
    "multitask, discrete": {
        "algorithm": "multitask",
        "critic": {"kind": "twohot", **NARROW},
        "losses": {"n_actions_in_actor_loss": 3, "dpg_weight": 0.0} | CLEAR,
    },
    "multitask, DPG": {"algorithm": "multitask", "legal": True, "losses": CLEAR},
    "multitask, DPG detached": {
        "algorithm": "multitask",
        "losses": {"dpg_detach_state": True} | CLEAR,
    },
    "multitask, softened": {
        "algorithm": "multitask",
        "critic": {"soften_data_actions": True, "kind": "hlgauss", **NARROW},
    },
    "lagged critics": {"losses": {"lagged_critics": True, "filter": {"kind": "exp"}}},
    "lagged critics, continuous": {
        "kind": "continuous",
        "privileged": True,
        "losses": {"lagged_critics": True, "n_actions_in_actor_loss": 2, "filter": {"kind": "exp"}},
    },
    "lagged critics, DPG detached": {
        "kind": "continuous",
        "losses": {"lagged_critics": True, "dpg_detach_state": True},
    },
    "lagged critics, classified": {
        "kind": "continuous",
        "critic": {"kind": "twohot", **NARROW},
        "losses": {"lagged_critics": True, "filter": {"kind": "exp"}},
    },
    "lagged critics, normalised": {
        "kind": "continuous",
        "losses": {"lagged_critics": True, "filter": {"kind": "exp", "batch_norm": True}},
    },
    "no gradient below": {
        "legal": True,
        "actor": {"prob_low": 0.3, "prob_high": 0.6, "prob_low_gradient": False},
    },
    "no gradient below, choices": {
        "kind": "multi_discrete",
        "actor": {"prob_low": 0.45, "prob_low_gradient": False},
        "losses": CLEAR,
    },
    "HL-Gauss, renormalised": {
        "critic": {
            "kind": "hlgauss",
            "n_bins": 7,
            "min_return": -3.0,
            "max_return": 4.0,
            "renormalize": True,
        }
    },
    "continuous, HL-Gauss": {
        "kind": "continuous",
        "critic": {"kind": "hlgauss", **NARROW},
    },
}


EXPECTILE: Case = {"value_expectile": 0.8, "dpg_weight": 0.0, "use_target_actor": False}
EXP: Case = {"filter": {"kind": "exp", "beta": 3.0, "largest": 1.5}}
CASES |= {
    "IQL, discrete": {"losses": EXPECTILE | EXP | {"target_reduction": "min"}},
    "IQL, continuous": {
        "kind": "continuous",
        "privileged": True,
        "masks": True,
        "losses": EXPECTILE | EXP | {"target_reduction": "min"},
    },
    "IQL, mean of critics, n-step": {"losses": EXPECTILE | EXP | {"n_step": 2}},
    "IQL, no popart, low expectile": {
        "critic": {"popart": None, "n_critics_target": 3},
        "losses": EXPECTILE | EXP | {"value_expectile": 0.2},
    },
    "IQL, raw advantage, normalised": {
        "critic": {"soften_data_actions": True},
        "losses": EXPECTILE | {"filter": {"kind": "exp", "advantage": "raw", "batch_norm": True}},
    },
    "IQL, choices": {"kind": "multi_discrete", "legal": True, "losses": EXPECTILE | CLEAR},
    "IQL, sampled": {"algorithm": "multitask", "losses": EXPECTILE | CLEAR},
    "IQL and DPG": {
        "kind": "continuous",
        "losses": {"value_expectile": 0.7, "target_reduction": "mean", "lagged_critics": True},
    },
    "CRR": {
        "kind": "continuous",
        "losses": EXP | {"dpg_weight": 0.0, "n_actions_in_actor_loss": 4},
    },
    "TD3+BC": {
        "kind": "continuous",
        "actor": {"continuous": {"kind": "deterministic", "target_noise_clip": 0.3}},
        "losses": {"dpg_normalization": "mean_abs_q", "filter": {"kind": "behavior_cloning"}},
    },
    "TD3+BC, no popart, masks": {
        "kind": "continuous",
        "masks": True,
        "actor": {"continuous": {"kind": "deterministic"}},
        "critic": {"popart": None},
        "losses": {"dpg_normalization": "mean_abs_q", "n_actions_in_critic_loss": 2},
    },
    "mean absolute Q, discrete": {"losses": {"dpg_normalization": "mean_abs_q"}},
    "mean absolute Q, classified": {
        "critic": {"kind": "twohot", **NARROW},
        "losses": {"dpg_normalization": "mean_abs_q"},
    },
    "ReBRAC": {
        "kind": "continuous",
        "actor": {"continuous": {"kind": "deterministic", "target_noise": 0.5}},
        "critic": {"layer_norm": True, "n_layers": 2},
        "losses": {
            "dpg_normalization": "mean_abs_q",
            "bc_target_penalty": 0.6,
            "n_actions_in_critic_loss": 2,
            "filter": {"kind": "behavior_cloning"},
        },
    },
    "layer norm, discrete": {"critic": {"layer_norm": True, "n_layers": 2}},
    "layer norm, IQL": {"critic": {"layer_norm": True}, "losses": EXPECTILE},
    "Gaussian": {"kind": "continuous", "actor": {"continuous": {"kind": "gaussian"}}},
    "Gaussian, IQL": {
        "kind": "continuous",
        "masks": True,
        "actor": {"continuous": {"kind": "gaussian", "std_high": 2.0}},
        "losses": EXPECTILE | EXP | {"target_reduction": "min"},
    },
    "AWAC": {
        "kind": "continuous",
        "losses": EXP | {"dpg_weight": 0.0, "target_reduction": "min", "use_target_actor": False},
    },
}


def make(case: Case) -> tuple[Agent, Callable[[list[int], int], Batch]]:
    case = dict(case)
    masks = case.pop("masks", False)
    spaces = spaces_of(
        case.pop("kind", "discrete"),
        legal=case.pop("legal", False),
        privileged=case.pop("privileged", False),
    )
    agent = agent_of(spaces, **case)

    def windows(lengths: list[int], size: int) -> Batch:
        batch = batch_of(spaces, lengths, size, masks=masks)
        if agent.config.return_conditioning is None:
            return batch
        return dataclasses.replace(batch, return_to_go=torch.randn(len(lengths), size + 1))

    return agent, windows
