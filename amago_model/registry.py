"""Custom encoders, heads, filters, losses and agents, registered by name.

    from amago_model.registry import register

    @register("filter", "soft")
    def soft(advantage):                 # [N, G] -> weights [N, G]
        return advantage.sigmoid()

    stepwell train offline --plugin my_module --agent.custom.filter soft --dataset hopper

Each kind gets the arguments, and needs the interface, of the class that it replaces:

    timestep_encoder    f(config: AgentConfig, spaces)              TimestepEncoder
    trajectory_encoder  f(config: AgentConfig, d_input)             GRUTrajectoryEncoder
    actor               f(config: ActorConfig, action, *, d_state, n_gammas)          Actor
    critic              f(config: CriticConfig, action, gammas, *, d_state, sampled)  CriticEnsemble
    filter              f(advantage) -> weight
    loss                f(agent: Agent, inputs: LossInputs) -> scalar
    agent               f(config: AgentConfig, spaces)              a subclass of Agent

Actors and critics with an argument `obs` also get the observations: see heads/observations.py.

Keyword-only parameters whose default is a number, a string or a bool are settings:

    @register("filter", "soft")
    def soft(advantage, *, temperature: float = 1.0):
        return (advantage / temperature).sigmoid()

    … --agent.custom.filter soft --agent.custom.settings filter.temperature=2.0

A policy file contains the name and the settings, but not the code: loading it needs the same
--plugin.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeVar, get_args

from amago_model.config import CustomConfig
from amago_model.errors import ConfigError, UnregisteredError

Kind = Literal[
    "timestep_encoder", "trajectory_encoder", "actor", "critic", "filter", "loss", "agent"
]
F = TypeVar("F", bound=Callable[..., Any])
_SETTING = {"loss": "losses"}  # setting of a kind, if its name differs
_FROM_AGENT = {"d_state", "n_gammas", "sampled"}  # keywords that the agent passes: not settings

_registered: dict[str, dict[str, Callable[..., Any]]] = {kind: {} for kind in get_args(Kind)}


def register(kind: Kind, name: str) -> Callable[[F], F]:
    """Decorator that registers a class or function under a name.

    Raises:
        ConfigError: the kind is unknown, or the name is empty or already registered.
    """
    if kind not in _registered:
        raise ConfigError(f"register: unknown kind {kind!r}; kinds are {', '.join(_registered)}")
    if not name:
        raise ConfigError("register: the empty name means the built-in module; choose another name")

    def decorate(made: F) -> F:
        known = _registered[kind].setdefault(name, made)
        if (known.__module__, known.__qualname__) != (made.__module__, made.__qualname__):
            raise ConfigError(
                f"register: {kind} {name!r} is already {known.__module__}.{known.__qualname__}; "
                f"register {made.__module__}.{made.__qualname__} under another name"
            )
        _registered[kind][name] = made
        return made

    return decorate


def registered(kind: Kind, name: str) -> Callable[..., Any]:
    """The registered class or function.

    Raises:
        UnregisteredError: the name is not registered; the message suggests the nearest name.
    """
    known = _registered[kind]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        hint = f"the nearest name is {near[0]!r}" if near else f"no {kind} is registered"
        raise UnregisteredError(
            f"CustomConfig.{_SETTING.get(kind, kind)}: {name!r} is not registered ({hint}); import "
            "the module that registers it, with --plugin MODULE on a command line"
        )
    return known[name]


def custom_module(custom: CustomConfig, kind: Kind, name: str) -> Callable[..., Any]:
    """A registered class or function, with its settings from the config bound as keywords.

    Raises:
        UnregisteredError: the name is not registered.
        ConfigError: a setting is unknown or has a wrong type.
    """
    made = registered(kind, name)
    given = custom.settings_of(f"losses.{name}" if kind == "loss" else kind)
    if not given:
        return made
    known, where = _settings_of(made), f"CustomConfig.settings: {kind} {name!r}"
    for setting in given:
        if setting not in known:
            near = difflib.get_close_matches(setting, known, n=1, cutoff=0.0)
            hint = (
                f"the nearest is {near[0]!r}"
                if near
                else "it has none: no keyword-only parameter has a number, string or bool default"
            )
            raise ConfigError(f"{where} has no setting {setting!r}; {hint}")
    return partial(made, **{x: _value(text, known[x], where, x) for x, text in given.items()})


def _settings_of(made: Callable[..., Any]) -> dict[str, bool | int | float | str]:
    """The parameters that are settings: {name: default}."""
    return {
        p.name: p.default
        for p in inspect.signature(made).parameters.values()
        if p.kind is p.KEYWORD_ONLY
        and type(p.default) in (bool, int, float, str)
        and p.name not in _FROM_AGENT
    }


def _value(text: str, default: bool | int | float | str, where: str, name: str) -> Any:
    """Parse the text as the type of the default."""
    made, kind = type(default), type(default).__name__
    try:
        return {"true": True, "false": False}[text.lower()] if made is bool else made(text)
    except (KeyError, ValueError):
        raise ConfigError(
            f"{where}: {name}: expected {kind}, like its default {default!r}, got {text!r}"
        ) from None
