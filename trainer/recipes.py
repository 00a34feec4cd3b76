"""Ready-made runs: each function returns a complete config. `--config` and flags change it further.

default                  the published agent's own settings
offline                  small and fast, for any vector dataset; a place to begin
pendulum_stitch          the demo: memory-free, one discount, DPG + filtered cloning
lunarlander_continuous   the same, for its longer episodes
published_v3             the same with every deviation from AMAGO v3.3.0 switched back
multitask                AMAGO-2's agent: critics that classify returns, sampled actions
bc, bc10                 imitate all of the data; the best tenth of it
recall, tmaze            memory tasks, with the Transformer
mazerunner               goals in a maze that stays the same, hindsight relabeling
crafter                  instructions in an open world, hindsight relabeling of rare deeds
pixels                   images beside anything else, memory-free
ablation_…               each of these small ones without one part of the method: ablations.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from amago_model import presets
from amago_model.config import (
    ActorConfig,
    AgentConfig,
    CriticConfig,
    FeedForwardConfig,
    ImageConfig,
    LossConfig,
    TimestepEncoderConfig,
    TokenConfig,
    TrajectoryEncoderConfig,
    TransformerConfig,
)
from trainer.ablations import ABLATIONS, ablated
from trainer.config import (
    DataConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
    flatten,
    to_json,
)
from trainer.errors import SettingError
from trainer.unused import checked

BEST_TENTH = (
    '"return" >= (SELECT quantile_cont("return", 0.9) FROM trajectories '
    "WHERE dataset = '{dataset}' AND purpose = 'train')"
)


def default() -> TrainConfig:
    """AMAGO's defaults: Transformer of context 256, seven discounts, four critics."""
    return TrainConfig(recipe="default", updates=100_000)


def published_v3() -> TrainConfig:
    """AMAGO v3.3.0's formula wherever the two differ; docs/parity.md lists what stays ours.

    A draft: also what only other choices have a use for, so that it is there if they are made.
    """
    return replace(
        default(),
        recipe="published_v3",
        agent=presets.published_draft(),
        optimizer=OptimizerConfig(warmup_from_zero=True),
    )


def multitask() -> TrainConfig:
    """The multi-task agent of AMAGO-2: rewards of very different scales, no DPG."""
    return replace(default(), recipe="multitask", agent=presets.multitask())


def pendulum_stitch() -> TrainConfig:
    """The demo's agent: -150 to -163 over three training seeds, where the data's mean is -849."""
    return TrainConfig(
        recipe="pendulum_stitch",
        updates=1500,
        agent=_memory_free(gamma=0.98, reward_multiplier=0.1),
        data=DataConfig(batch=32, window=32, padding="right"),
        # Without the decay the last policy swings between -150 and -1100 from update to update.
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup=100, decay="cosine"),
        schedule=ScheduleConfig(log_every=25, publish_every=500, checkpoint_every=500),
    )


def offline() -> TrainConfig:
    """The demo's agent with a longer discount and run: a place to begin on a new dataset."""
    return replace(
        pendulum_stitch(),
        recipe="offline",
        updates=10_000,
        agent=_memory_free(gamma=0.99, reward_multiplier=0.1),
        schedule=ScheduleConfig(log_every=50, publish_every=1000, checkpoint_every=1000),
    )


def lunarlander_continuous() -> TrainConfig:
    """The demo's second dataset: 274 to 278 on four training seeds of five, 203 on one, where the
    data's mean is 26; with losses.dpg_detach_state 251 to 281 over ten.

    Five-step targets carry values back through 300 steps; one-step ones end lower, and differ more
    from seed to seed (docs/method.md). A policy that cannot become a spike (std of .1 or more in
    normalised actions) is kept from overfitting the noise.
    """
    base = _memory_free(gamma=0.99, reward_multiplier=0.02)
    agent = replace(
        base,
        actor=replace(base.actor, std_low=0.1, std_high=1.0),
        losses=replace(base.losses, dpg_weight=0.1, n_step=5),
    )
    return replace(
        pendulum_stitch(),
        recipe="lunarlander_continuous",
        updates=2000,
        agent=agent,
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup=200, decay="cosine"),
        schedule=ScheduleConfig(log_every=50, publish_every=1000, checkpoint_every=1000),
    )


def bc() -> TrainConfig:
    """Imitate every action of the data; there is no critic."""
    base = pendulum_stitch()
    losses = LossConfig(
        gamma=0.98,
        auxiliary_gammas=(),
        dpg_weight=0.0,
        bc_weight=1.0,
        behavior_cloning=True,
    )
    agent = replace(base.agent, critic=CriticConfig(), losses=losses)
    return replace(base, recipe="bc", updates=1000, agent=agent)


def bc10() -> TrainConfig:
    """Imitate the tenth of the trajectories with the highest return."""
    return replace(bc(), recipe="bc10", where=BEST_TENTH)


def recall() -> TrainConfig:
    """A cue at the start, a question at the end: a small Transformer over whole episodes."""
    return TrainConfig(
        recipe="recall",
        updates=800,
        agent=_with_memory(context=16, gamma=0.9),
        data=DataConfig(batch=32, window=15),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup=50, decay="cosine"),
        schedule=ScheduleConfig(log_every=25, publish_every=400, checkpoint_every=400),
    )


def tmaze() -> TrainConfig:
    """The passive T-Maze: what was seen first decides the last turn, a corridor later."""
    return replace(
        recall(),
        recipe="tmaze",
        updates=1500,
        agent=_with_memory(context=256, gamma=0.98),
        data=DataConfig(batch=16, window=128),
    )


def pixels() -> TrainConfig:
    """Images, instructions and numbers, memory-free: finds every block of FindBlock."""
    agent = _memory_free(gamma=0.5, reward_multiplier=1.0)
    encoder = TimestepEncoderConfig(
        d_hidden=128, d_output=128, hide_previous=True, images=ImageConfig(d_output=64)
    )
    return TrainConfig(
        recipe="pixels",
        updates=600,
        agent=replace(
            agent, timestep_encoder=encoder, losses=replace(agent.losses, dpg_weight=0.0)
        ),
        data=DataConfig(batch=32, window=5, padding="right"),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup=50, decay="cosine"),
        schedule=ScheduleConfig(log_every=25, publish_every=300, checkpoint_every=300),
    )


def mazerunner() -> TrainConfig:
    """Goals in one small maze, from random play; docs/relabeling.md says what relabeling buys."""
    base = _memory_free(gamma=0.9, reward_multiplier=1.0)
    agent = replace(
        base,
        trajectory_encoder=TrajectoryEncoderConfig(kind="identity"),
        # Goals are places, to be told near from far: no tokens, though whole numbers.
        timestep_encoder=replace(base.timestep_encoder, n_layers=1, vector_keys=("goals",)),
        actor=ActorConfig(d_hidden=64),
        critic=CriticConfig(n_critics=2, d_hidden=64),
        # Few updates: values must come back through a whole maze.
        losses=replace(base.losses, n_step=3, tau=0.05),
    )
    return TrainConfig(
        recipe="mazerunner",
        updates=1000,
        agent=agent,
        data=DataConfig(
            batch=16,
            window=32,
            padding="right",
            draw="steps",
            relabel=("mazerunner:strategy=some",),
        ),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup=20, decay="cosine"),
        schedule=ScheduleConfig(log_every=25, publish_every=500, checkpoint_every=500),
    )


def crafter() -> TrainConfig:
    """Instructions in an open world, memory-free: the tiles around as one-hots, goals as words."""
    base = mazerunner()
    encoder = replace(
        base.agent.timestep_encoder,
        d_hidden=128,
        d_output=128,
        # Read as a sequence of 63 tokens the map would lose its places.
        vector_keys=("map",),
        tokens=TokenConfig(keys=("goals",)),
    )
    return replace(
        base,
        recipe="crafter",
        updates=2000,
        agent=replace(
            base.agent,
            timestep_encoder=encoder,
            losses=replace(base.agent.losses, gamma=0.95),
        ),
        data=replace(base.data, relabel=("crafter:strategy=some",)),
        optimizer=replace(base.optimizer, learning_rate=1e-3),
    )


def _with_memory(*, context: int, gamma: float) -> AgentConfig:
    return AgentConfig(
        timestep_encoder=TimestepEncoderConfig(d_hidden=32, d_output=32),
        trajectory_encoder=TrajectoryEncoderConfig(
            kind="transformer",
            transformer=TransformerConfig(
                d_model=32, n_heads=4, d_ff=64, n_layers=1, context=context
            ),
        ),
        actor=ActorConfig(d_hidden=64),
        critic=CriticConfig(n_critics=2, d_hidden=64),
        losses=LossConfig(
            gamma=gamma,
            auxiliary_gammas=(),
            reward_multiplier=1.0,
            # Cloning alone failed on none of 11 seeds; with DPG see docs/method.md.
            dpg_weight=0.0,
            bc_weight=1.0,
            tau=0.01,
        ),
    )


def _memory_free(*, gamma: float, reward_multiplier: float) -> AgentConfig:
    return AgentConfig(
        timestep_encoder=TimestepEncoderConfig(
            n_layers=2, d_hidden=64, d_output=64, hide_previous=True
        ),
        trajectory_encoder=TrajectoryEncoderConfig(
            kind="feedforward", feedforward=FeedForwardConfig(d_model=64)
        ),
        actor=ActorConfig(d_hidden=128),
        critic=CriticConfig(n_critics=2, n_critics_target=2, d_hidden=128),
        losses=LossConfig(
            gamma=gamma,
            auxiliary_gammas=(),
            reward_multiplier=reward_multiplier,
            dpg_weight=0.3,
            bc_weight=1.0,
            filter="binary",
            tau=0.01,
        ),
    )


RECIPES: dict[str, Callable[[], TrainConfig]] = {
    f.__name__: f
    for f in (
        default,
        published_v3,
        multitask,
        offline,
        pendulum_stitch,
        lunarlander_continuous,
        bc,
        bc10,
        recall,
        tmaze,
        mazerunner,
        crafter,
        pixels,
    )
}


def recipe(name: str) -> TrainConfig:
    """The config of a recipe or an ablation. Raises `SettingError` naming the nearest one."""
    config = draft(name)
    return checked(config, dict.fromkeys(flatten(to_json(config)), f"recipe {name}"))


def draft(name: str) -> TrainConfig:
    """The same as it stands before files and flags: with what may only be used after these."""
    import difflib

    if ablation := ABLATIONS.get(name):
        return ablated(RECIPES[ablation.base](), ablation)
    if name not in RECIPES:
        near = difflib.get_close_matches(name, (*RECIPES, *ABLATIONS), n=1, cutoff=0.0)[0]
        raise SettingError(
            f"unknown recipe {name!r}; the nearest known one is {near!r} (of {', '.join(RECIPES)}, "
            "and the ablations of docs/method.md)"
        )
    return RECIPES[name]()
