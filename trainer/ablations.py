"""What each part of the method buys: a small recipe with exactly one part taken out, or put in.

    stepwell train ablation_no_filter --dataset pendulum --run without

A row names the recipe it starts from and every setting that differs. docs/method.md has the same
table with what was measured; benchmarks/ablations.py measures it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.config import TrainConfig, replace


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """One part of the method, taken out of a recipe or put into it."""

    name: str
    """Name of the recipe that this makes."""
    base: str
    """Name of the recipe that it starts from."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """What differs: dotted path of a setting to its value."""
    about: str
    """What is missing, or added, in one sentence."""


LOSSES, CRITIC, ACTOR = "agent.losses", "agent.critic", "agent.actor"
ROWS, MEMORIES = "agent.timestep_encoder", "agent.trajectory_encoder"
MEMORY = f"{MEMORIES}.transformer"
NO_TRANSFORMER = {
    f"{MEMORY}.d_model": 256,
    f"{MEMORY}.n_heads": 8,
    f"{MEMORY}.d_ff": 1024,
    f"{MEMORY}.n_layers": 3,
}
"""What the T-Maze's recipe sets of its Transformer, back at defaults: another memory has no use."""

ABLATIONS: dict[str, Ablation] = {
    row.name: row
    for row in (
        # --- the update, on pendulum-stitch -------------------------------------------------------
        Ablation(
            name="ablation_no_dpg",
            base="pendulum_stitch",
            changes={f"{LOSSES}.dpg_weight": 0.0},
            about="The actor only imitates what the filter leaves; targets are means over critics.",
        ),
        Ablation(
            name="ablation_dpg_detached",
            base="pendulum_stitch",
            changes={f"{LOSSES}.dpg_detach_state": True},
            about="DPG trains the actor alone, not the encoders.",
        ),
        Ablation(
            name="ablation_no_cloning",
            base="pendulum_stitch",
            changes={f"{LOSSES}.bc_weight": 0.0},
            about="The actor learns by DPG alone; nothing holds it near the data.",
        ),
        Ablation(
            name="ablation_no_filter",
            base="pendulum_stitch",
            changes={f"{LOSSES}.behavior_cloning": True},
            about="Every action of the data is imitated, good or bad.",
        ),
        Ablation(
            name="ablation_exp_filter",
            base="pendulum_stitch",
            changes={f"{LOSSES}.filter": "exp"},
            about="Actions are imitated by the exponential of their advantage.",
        ),
        Ablation(
            name="ablation_no_popart",
            base="pendulum_stitch",
            changes={f"{CRITIC}.popart": False},
            about="Critics regress returns as they are, not normalised.",
        ),
        Ablation(
            name="ablation_one_critic",
            base="pendulum_stitch",
            changes={f"{CRITIC}.n_critics": 1, f"{CRITIC}.n_critics_target": 1},
            about="No ensemble.",
        ),
        Ablation(
            name="ablation_no_minimum",
            base="pendulum_stitch",
            changes={f"{CRITIC}.n_critics_target": 1},
            about="A target rests on one critic of the ensemble, drawn at random.",
        ),
        Ablation(
            name="ablation_no_target_networks",
            base="pendulum_stitch",
            changes={f"{LOSSES}.tau": 1.0},
            about="Targets come from the learned weights themselves.",
        ),
        Ablation(
            name="ablation_no_target_actor",
            base="pendulum_stitch",
            changes={f"{LOSSES}.use_target_actor": False},
            about="Next actions in targets come from the learned actor, not its target network.",
        ),
        Ablation(
            name="ablation_many_discounts",
            base="pendulum_stitch",
            changes={f"{LOSSES}.auxiliary_gammas": (0.1, 0.9, 0.95)},
            about="Three shorter discounts are learned beside the one that acts.",
        ),
        Ablation(
            name="ablation_twohot_critic",
            base="pendulum_stitch",
            changes={f"{CRITIC}.kind": "twohot"},
            about="Critics classify returns over bins, by two-hot labels.",
        ),
        Ablation(
            name="ablation_hlgauss_critic",
            base="pendulum_stitch",
            changes={f"{CRITIC}.kind": "hlgauss"},
            about="Critics classify returns over bins, by Gaussian labels.",
        ),
        Ablation(
            name="ablation_lambda_returns",
            base="pendulum_stitch",
            changes={f"{LOSSES}.td_lambda": 0.8},
            about="Targets mix returns of all lengths.",
        ),
        Ablation(
            name="ablation_no_input_norm",
            base="pendulum_stitch",
            changes={f"{ROWS}.normalize_inputs": False},
            about="Observations enter as they are.",
        ),
        Ablation(
            name="ablation_shown_previous",
            base="pendulum_stitch",
            changes={f"{ROWS}.hide_previous": False},
            about="The previous action and reward are shown where the observation says all.",
        ),
        Ablation(
            name="ablation_no_decay",
            base="pendulum_stitch",
            changes={"optimizer.decay": "none"},
            about="The step size stays as it is to the last update.",
        ),
        Ablation(
            name="ablation_leaky_filter",
            base="pendulum_stitch",
            changes={f"{LOSSES}.filter": "leaky_relu"},
            about="Actions are imitated by a bent line through their advantage.",
        ),
        Ablation(
            name="ablation_normalized_filter",
            base="pendulum_stitch",
            changes={f"{LOSSES}.filter": "exp", f"{LOSSES}.filter_batch_norm": True},
            about="The exponential filter, of advantages of mean 0 and deviation 1 in each batch.",
        ),
        Ablation(
            name="ablation_bounded_targets",
            base="pendulum_stitch",
            changes={f"{LOSSES}.target_low": -815.0, f"{LOSSES}.target_high": 0.0},
            about="Targets are clipped to what returns of Pendulum can be.",
        ),
        Ablation(
            name="ablation_whole_windows",
            base="pendulum_stitch",
            changes={"data.padding": "none"},
            about="No window hangs over the end of a trajectory.",
        ),
        # --- the heads ----------------------------------------------------------------------------
        Ablation(
            name="ablation_beta",
            base="pendulum_stitch",
            changes={f"{ACTOR}.continuous": "beta"},
            about="Actions come from Beta distributions.",
        ),
        Ablation(
            name="ablation_flat_bounds",
            base="pendulum_stitch",
            changes={f"{ACTOR}.continuous": "beta", f"{ACTOR}.bound_gradient": False},
            about="Beta distributions, of which those far out have no gradient, as published.",
        ),
        Ablation(
            name="ablation_mixture",
            base="pendulum_stitch",
            changes={f"{ACTOR}.continuous": "gmm", f"{LOSSES}.dpg_weight": 0.0},
            about="Actions come from mixtures of Gaussians, which have no gradient for DPG.",
        ),
        Ablation(
            name="ablation_residual_actor",
            base="pendulum_stitch",
            changes={f"{ACTOR}.kind": "residual", f"{ACTOR}.d_hidden": 256},
            about="The actor is made of residual blocks.",
        ),
        Ablation(
            name="ablation_free_deviation",
            base="lunarlander_continuous",
            changes={f"{ACTOR}.std_low": math.exp(-5), f"{ACTOR}.std_high": math.exp(2)},
            about="The deviation of actions has the published bounds.",
        ),
        Ablation(
            name="ablation_no_floor",
            base="tmaze",
            changes={f"{ACTOR}.prob_low": 0.0, f"{ACTOR}.prob_high": 1.0},
            about="Probabilities of actions are not clipped.",
        ),
        Ablation(
            name="ablation_sampled_actions",
            base="tmaze",
            changes={"agent.algorithm": "multitask"},
            about="Critics meet the policy's actions as samples.",
        ),
        # --- the update, on a longer task ---------------------------------------------------------
        Ablation(
            name="ablation_one_step",
            base="lunarlander_continuous",
            changes={f"{LOSSES}.n_step": 1},
            about="Targets bootstrap after one step.",
        ),
        Ablation(
            name="ablation_dpg_detached_lunarlander",
            base="lunarlander_continuous",
            changes={f"{LOSSES}.dpg_detach_state": True},
            about="DPG trains the actor alone, not the encoders.",
        ),
        # --- the update, on the T-Maze, whose recipe does without DPG -----------------------------
        Ablation(
            name="ablation_tmaze_dpg",
            base="tmaze",
            changes={f"{LOSSES}.dpg_weight": 0.3},
            about="The actor learns by DPG, too, and the memory learns from it.",
        ),
        Ablation(
            name="ablation_tmaze_dpg_detached",
            base="tmaze",
            changes={f"{LOSSES}.dpg_weight": 0.3, f"{LOSSES}.dpg_detach_state": True},
            about="The same, but the memory does not learn from DPG.",
        ),
        # --- the memory, on the T-Maze ------------------------------------------------------------
        Ablation(
            name="ablation_no_memory",
            base="tmaze",
            changes={f"{MEMORY}.context": 1},
            about="Each row attends to itself alone; as many parameters.",
        ),
        Ablation(
            name="ablation_no_rewards",
            base="tmaze",
            # Without a critic the others have no use, and must be at their defaults.
            changes={
                f"{LOSSES}.behavior_cloning": True,
                f"{LOSSES}.reward_multiplier": 10.0,
                f"{LOSSES}.tau": 0.003,
                f"{CRITIC}.n_critics": 4,
                f"{CRITIC}.d_hidden": 256,
            },
            about="Memory that only imitates: no critic, no reward.",
        ),
        Ablation(
            name="ablation_no_position",
            base="tmaze",
            changes={f"{MEMORY}.position": "none"},
            about="Episode time does not enter.",
        ),
        Ablation(
            name="ablation_rotary",
            base="tmaze",
            changes={f"{MEMORY}.position": "rotary"},
            about="Episode time enters by turning queries and keys.",
        ),
        Ablation(
            name="ablation_no_sigma_reparam",
            base="tmaze",
            changes={f"{MEMORY}.sigma_reparam": False},
            about="Plain weight matrices in the Transformer.",
        ),
        Ablation(
            name="ablation_no_normformer",
            base="tmaze",
            changes={f"{MEMORY}.normformer_norms": False},
            about="Without the norms after attention and inside the feed-forward part.",
        ),
        Ablation(
            name="ablation_no_head_scaling",
            base="tmaze",
            changes={f"{MEMORY}.head_scaling": False},
            about="Attention heads are not scaled.",
        ),
        Ablation(
            name="ablation_no_dropout",
            base="tmaze",
            changes={f"{MEMORY}.dropout_ff": 0.0, f"{MEMORY}.dropout_emb": 0.0},
            about="No dropout in the Transformer.",
        ),
        Ablation(
            name="ablation_hidden_previous",
            base="tmaze",
            changes={f"{ROWS}.hide_previous": True},
            about="The memory sees observations alone.",
        ),
        Ablation(
            name="ablation_feedforward",
            base="tmaze",
            changes={f"{MEMORIES}.kind": "feedforward", **NO_TRANSFORMER},
            about="A memory-free encoder, of the published width.",
        ),
        Ablation(
            name="ablation_gru",
            base="tmaze",
            changes={f"{MEMORIES}.kind": "gru", **NO_TRANSFORMER},
            about="A recurrent memory, of the published width.",
        ),
        Ablation(
            name="ablation_mamba",
            base="tmaze",
            changes={
                f"{MEMORIES}.kind": "mamba",
                f"{MEMORIES}.mamba.d_model": 64,
                **NO_TRANSFORMER,
            },
            about="A state-space memory.",
        ),
        Ablation(
            name="ablation_learned_positions",
            base="tmaze",
            changes={f"{MEMORY}.position": "learnable", f"{MEMORY}.max_time": 128},
            about="Positions come from a table.",
        ),
        Ablation(
            name="ablation_short_context",
            base="tmaze",
            changes={f"{MEMORY}.context": 8},
            about="Each row attends to the last 8, which end long before the cue.",
        ),
        Ablation(
            name="ablation_sinks",
            base="tmaze",
            changes={f"{MEMORY}.context": 8, f"{MEMORY}.n_sinks": 1},
            about="The same, but the first row stays visible.",
        ),
        Ablation(
            name="ablation_logit_clip",
            base="tmaze",
            changes={f"{MEMORY}.logit_clip": 10.0, f"{MEMORY}.attention": "math"},
            about="Attention scores are limited.",
        ),
        Ablation(
            name="ablation_qk_norm",
            base="tmaze",
            changes={f"{MEMORY}.qk_norm": "layer"},
            about="Queries and keys are normalised.",
        ),
        # --- the rows, on FindBlock ---------------------------------------------------------------
        Ablation(
            name="ablation_no_image",
            base="pixels",
            changes={f"{ROWS}.hide_keys": ("image",)},
            about="What is made of the image is zero; as many parameters.",
        ),
        Ablation(
            name="ablation_no_tokens",
            base="pixels",
            changes={f"{ROWS}.hide_keys": ("mission",)},
            about="What is made of the instruction is zero; as many parameters.",
        ),
        Ablation(
            name="ablation_impala",
            base="pixels",
            changes={f"{ROWS}.images.kind": "impala"},
            about="IMPALA's network reads the image.",
        ),
        Ablation(
            name="ablation_shifts",
            base="pixels",
            changes={f"{ROWS}.images.augment": 0.75, f"{ROWS}.images.augment_shift": 1},
            about="Images are shifted at random, by at most a pixel.",
        ),
        # --- the data, on MazeRunner --------------------------------------------------------------
        Ablation(
            name="ablation_no_relabeling",
            base="mazerunner",
            changes={"data.relabel": ()},
            about="Trajectories are learned from as they were, with the goals that they missed.",
        ),
        Ablation(
            name="ablation_embedded_goals",
            base="mazerunner",
            changes={f"{ROWS}.vector_keys": (), f"{ROWS}.goals.keys": ("goals",)},
            about="Goals have an embedding of their own.",
        ),
        Ablation(
            name="ablation_drawn_trajectories",
            base="mazerunner",
            changes={"data.draw": "trajectories"},
            about="Every trajectory comes as often, however short.",
        ),
    )
}


def ablated(base: TrainConfig, ablation: Ablation) -> TrainConfig:
    """The base recipe's config with the ablation's settings. Raises `SettingError`, `ConfigError`
    where a setting does not exist or contradicts another."""
    nested: dict[str, Any] = {"recipe": ablation.name}
    for path, value in ablation.changes.items():
        *sections, leaf = path.split(".")
        table = nested
        for section in sections:
            table = table.setdefault(section, {})
        table[leaf] = value
    config: TrainConfig = replace(base, nested)
    return config
