"""Merge recipe, files and flags into one config, and record the source of each value.

    stepwell train RECIPE --config A.toml --config B.toml --agent.losses.gamma 0.98 --run mine

Later sources override earlier ones: recipe, files in order, flags. See stepwell/_settings.py.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from amago_model.presets import DEVIATIONS
from stepwell import _settings
from stepwell._plugins import import_plugins
from stepwell._settings import Resolved
from trainer.config import TrainConfig
from trainer.derive.derived import is_free
from trainer.errors import SettingError
from trainer.recipes import RECIPES, recipe, speeds

DESCRIPTION = """Train an agent on a dataset of the service; it sees no environment.

RECIPE comes first, one of:
{recipes}
or one of the ablations of docs/reference/method.md, each a recipe without one part of the method.
--config FILE.toml may be given several times; later ones win, and flags win over files.
--print-config prints the resulting settings and the origin of each as JSON, without training;
--verbose prints those that are not the default, and trains.
Values are those of the recipe {name}; --derive replaces some by what suits the dataset.

  stepwell train pendulum_stitch --dataset pendulum --run first --updates 500
  accelerate launch -m trainer.main offline --dataset hopper --run big"""

COMMON = """
run dataset where snapshot derive memory seed updates resume output plugin processes threads device
precision compile data.batch data.window data.padding data.draw data.relabel data.refresh_every
data.cache data.cache_gb optimizer.learning_rate optimizer.warmup optimizer.decay
optimizer.grad_clip optimizer.accumulate schedule.log_every schedule.publish_every
schedule.checkpoint_every agent.algorithm agent.timestep_encoder.n_layers
agent.timestep_encoder.d_hidden agent.timestep_encoder.d_output agent.timestep_encoder.images.kind
agent.trajectory_encoder.kind agent.trajectory_encoder.d_model agent.trajectory_encoder.n_layers
agent.trajectory_encoder.n_heads agent.trajectory_encoder.context agent.trajectory_encoder.d_hidden
agent.actor.d_hidden agent.actor.continuous.kind agent.critic.kind agent.critic.n_critics
agent.critic.d_hidden agent.losses.gamma agent.losses.auxiliary_gammas
agent.losses.reward_multiplier agent.losses.n_step agent.losses.dpg_weight agent.losses.bc_weight
agent.losses.filter.kind agent.losses.tau
""".split()
"""The settings that --help lists."""

CRITIC_SETTINGS = """
gamma auxiliary_gammas reward_multiplier n_step td_lambda target_low target_high value_expectile
target_reduction bc_target_penalty critic_weight n_actions_in_critic_loss targets_before_step
lagged_critics use_target_actor tau
""".split()
"""The settings of agent.losses that only critics read."""

RECIPE_FIRST = "the recipe is chosen by the first word, as in: stepwell train offline --run my-run"


def resolve(argv: Sequence[str]) -> Resolved[TrainConfig]:
    """Parse a command line into a config.

    Raises `SettingError`; --help, --help-all and --schema print and exit.
    """
    words = list(argv)
    name = words.pop(0) if words and not words[0].startswith("-") else "default"
    resolved = _settings.read(
        TrainConfig,
        words,
        prog="stepwell train RECIPE",
        about=DESCRIPTION.format(
            name=name, recipes=textwrap.indent(textwrap.fill(", ".join(RECIPES), 94), "  ")
        ),
        common=COMMON,
        base=recipe(name),
        origin=f"recipe {name}",
        more_schema=lambda: {"recipes": {name: described(name) for name in RECIPES}},
    )
    if resolved.origins["recipe"] not in ("default", f"recipe {name}"):
        # Otherwise the run would be recorded under one recipe's name with another's settings.
        raise SettingError(f"recipe: {RECIPE_FIRST}")
    if name == "published_v3":
        resolved = _published(resolved)
    import_plugins(resolved.config.plugin, SettingError)
    return resolved


def described(name: str) -> dict[str, Any]:
    """What a form needs of a recipe: its purpose, the values that differ from the defaults, and its
    speed on the machine of docs/reference/training.md, if it was measured."""
    values = _settings.differences(recipe(name))
    values.pop("recipe", None)
    return {"about": RECIPES[name].about, "values": values, **speeds().get(name, {})}


def without_effect(resolved: Resolved[TrainConfig]) -> list[str]:
    """The critics' settings that a file or flag names although the agent has no critics."""
    if resolved.config.agent.critic is not None:
        return []
    paths = (f"agent.losses.{name}" for name in CRITIC_SETTINGS)
    return [path for path in paths if not is_free(path, resolved.origins)]


def _published(resolved: Resolved[TrainConfig]) -> Resolved[TrainConfig]:
    """Add the settings that exist only for the kinds that a file or flag selected."""
    changes = {
        path: deviation.published
        for short, deviation in DEVIATIONS.items()
        if resolved.origins.get(path := f"agent.{short}") == "default"
    }
    origins = resolved.origins | dict.fromkeys(changes, "recipe published_v3")
    return replace(resolved, config=_settings.override(resolved.config, changes), origins=origins)
