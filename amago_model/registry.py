"""Your own encoders, heads, filters and agents, by name: registered by a module of yours.

    from amago_model.registry import register

    @register("filter", "soft")
    def soft(advantage):                 # [N, G] -> weights [N, G]
        return advantage.sigmoid()

    stepwell train offline --plugin my_module --agent.custom.filter soft --dataset hopper

What each kind is called with, and what it must offer, is that of the class it replaces:

    timestep_encoder    f(config: AgentConfig, spaces)              TimestepEncoder
    trajectory_encoder  f(config: AgentConfig, d_input)             GRUTrajectoryEncoder
    actor               f(config: ActorConfig, action, *, d_state, n_gammas)          Actor
    critic              f(config: CriticConfig, action, gammas, *, d_state, sampled)  CriticEnsemble
    filter              f(advantage) -> weight
    agent               f(config: AgentConfig, spaces)              a subclass of Agent

The name is saved in the policy file, the code is not: whoever loads it needs the same --plugin.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args

from amago_model.errors import ConfigError, UnregisteredError

Kind = Literal["timestep_encoder", "trajectory_encoder", "actor", "critic", "filter", "agent"]
F = TypeVar("F", bound=Callable[..., Any])

_registered: dict[str, dict[str, Callable[..., Any]]] = {kind: {} for kind in get_args(Kind)}


def register(kind: Kind, name: str) -> Callable[[F], F]:
    """A decorator. Raises `ConfigError` for an unknown kind, or a name that is taken."""
    if kind not in _registered:
        raise ConfigError(f"register: unknown kind {kind!r}; kinds are {', '.join(_registered)}")
    if not name:
        raise ConfigError("register: the empty name stands for what is built in; give another")

    def decorate(made: F) -> F:
        known = _registered[kind].setdefault(name, made)
        if (known.__module__, known.__qualname__) != (made.__module__, made.__qualname__):
            raise ConfigError(
                f"register: {kind} {name!r} is {known.__module__}.{known.__qualname__} already; "
                f"{made.__module__}.{made.__qualname__} needs another name"
            )
        _registered[kind][name] = made
        return made

    return decorate


def registered(kind: Kind, name: str) -> Callable[..., Any]:
    """What was registered. Raises `UnregisteredError` naming what there is."""
    known = _registered[kind]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        hint = f"the nearest of those is {near[0]!r}" if near else "none of that kind is registered"
        raise UnregisteredError(
            f"CustomConfig.{kind}: {name!r} is not registered ({hint}); import the module that "
            "registers it, with --plugin MODULE on a command line"
        )
    return known[name]
