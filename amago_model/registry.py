"""Your own encoders, heads, filters, losses and agents, by name: registered by a module of yours.

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
    loss                f(agent: Agent, seen: LossInputs) -> scalar
    agent               f(config: AgentConfig, spaces)              a subclass of Agent

Actors and critics that have an argument `obs` are shown their row's observations, too: see
heads/observations.py.

Of the settings of the built-in part that it replaces, encoder, actor or critic, yours says with
`reads` which ones it reads: the others must stay at their defaults. A subclass of Actor,
CriticEnsemble or TimestepEncoder reads all of them. What any part, also a filter, a loss or an
agent, reads of settings elsewhere it names in full, as "losses.filter_beta": while it is chosen
they may be set, though nothing that is built in reads them.

Parameters that can only be given by keyword and have a number, a string or a bool as default are
settings of yours:

    @register("filter", "soft")
    def soft(advantage, *, temperature: float = 1.0):
        return (advantage / temperature).sigmoid()

    … --agent.custom.filter soft --agent.custom.settings filter.temperature=2.0

Name and settings are saved in the policy file, the code is not: whoever loads it needs the same
--plugin.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Literal, TypeVar, get_args

from amago_model.checked import declare_read
from amago_model.config import AgentConfig, CustomConfig
from amago_model.errors import ConfigError, UnregisteredError

Kind = Literal[
    "timestep_encoder", "trajectory_encoder", "actor", "critic", "filter", "loss", "agent"
]
F = TypeVar("F", bound=Callable[..., Any])
_SETTING = {"loss": "losses"}  # where it does not bear the name of the kind
_FROM_THE_AGENT = {"d_state", "n_gammas", "sampled"}  # keywords that are no settings

_registered: dict[str, dict[str, Callable[..., Any]]] = {kind: {} for kind in get_args(Kind)}
_reads: dict[tuple[str, str], Collection[str] | Literal["all"]] = {}


def register(
    kind: Kind, name: str, *, reads: Collection[str] | Literal["all"] = ()
) -> Callable[[F], F]:
    """A decorator. `reads` are settings of the built-in part, such as "d_output", and others of the
    agent in full, such as "losses.filter_beta".

    Raises `ConfigError` for an unknown kind, a name that is taken, or a setting that there is not.
    """
    if kind not in _registered:
        raise ConfigError(f"register: unknown kind {kind!r}; kinds are {', '.join(_registered)}")
    if not name:
        raise ConfigError("register: the empty name stands for what is built in; give another")
    settings = frozenset[str]() if reads == "all" else _named_in_full(kind, reads)

    def decorate(made: F) -> F:
        known = _registered[kind].setdefault(name, made)
        if (known.__module__, known.__qualname__) != (made.__module__, made.__qualname__):
            raise ConfigError(
                f"register: {kind} {name!r} is {known.__module__}.{known.__qualname__} already; "
                f"{made.__module__}.{made.__qualname__} needs another name"
            )
        _registered[kind][name] = made
        _reads[kind, name] = reads
        declare_read(f"{kind}.{name}", settings)
        return made

    return decorate


def _named_in_full(kind: Kind, reads: Collection[str]) -> frozenset[str]:
    """What these names say of the agent's other settings; those of the part itself are checked."""
    if isinstance(reads, str):
        raise ConfigError(f'register: reads={reads!r}; give "all", or a tuple: reads=({reads!r},)')
    elsewhere = [setting for setting in reads if "." in setting]
    for setting in (setting for setting in reads if "." not in setting):
        _in_full(f"{kind}.{setting}")
    return frozenset[str]().union(*map(_in_full, elsewhere))


def _in_full(path: str) -> set[str]:
    """The names with those of their classes: "losses.filter_beta" -> "LossConfig.filter_beta", and
    "critic.bins.sigma" -> "BinsConfig.sigma" with "CriticConfig.bins", which it is in."""
    *sections, setting = path.split(".")
    cls: Any = AgentConfig
    names = set()
    for depth, section in enumerate(sections):
        inner = _known(cls, section, path)
        if depth:
            names.add(f"{cls.__name__}.{section}")
        cls = inner
    _known(cls, setting, path)
    return names | {f"{cls.__name__}.{setting}"}


def _known(cls: Any, name: str, path: str) -> Any:
    """What a config class has by this name: another one, if it is a section."""
    known = {f.name: f.default_factory for f in dataclasses.fields(cls)}
    if name in known:
        found = known[name]
        return found if dataclasses.is_dataclass(found) else _Setting
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    has = f"the nearest is {near[0]!r}" if near else f"{path.rpartition('.')[0]!r} is no section"
    raise ConfigError(f"register: reads {path!r}, but there is no {name!r} there; {has}")


@dataclasses.dataclass
class _Setting:
    """Has nothing inside."""


def registered(kind: Kind, name: str) -> Callable[..., Any]:
    """What was registered. Raises `UnregisteredError` naming what there is."""
    known = _registered[kind]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        hint = f"the nearest of those is {near[0]!r}" if near else "none of that kind is registered"
        raise UnregisteredError(
            f"CustomConfig.{_SETTING.get(kind, kind)}: {name!r} is not registered ({hint}); import "
            "the module that registers it, with --plugin MODULE on a command line"
        )
    return known[name]


def own_part(custom: CustomConfig, kind: Kind, name: str) -> Callable[..., Any]:
    """What was registered, with the settings that the config has for it.

    Raises:
        UnregisteredError: nothing was, by that name.
        ConfigError: it has no such setting, or one of another type.
    """
    made = registered(kind, name)
    given = custom.settings_of(f"losses.{name}" if kind == "loss" else kind)
    if not given:
        return made
    known, where = _own_settings(made), f"CustomConfig.settings: {kind} {name!r}"
    for setting in given:
        if setting not in known:
            near = difflib.get_close_matches(setting, known, n=1, cutoff=0.0)
            hint = (
                f"the nearest of its own is {near[0]!r}"
                if near
                else "it has none, for it has no parameters by keyword alone with plain defaults"
            )
            raise ConfigError(f"{where} has no setting {setting!r}; {hint}")
    return partial(made, **{x: _value(text, known[x], where, x) for x, text in given.items()})


def _own_settings(made: Callable[..., Any]) -> dict[str, bool | int | float | str]:
    """By name, the defaults of the parameters that are settings."""
    return {
        p.name: p.default
        for p in inspect.signature(made).parameters.values()
        if p.kind is p.KEYWORD_ONLY
        and type(p.default) in (bool, int, float, str)
        and p.name not in _FROM_THE_AGENT
    }


def _value(text: str, default: bool | int | float | str, where: str, name: str) -> Any:
    """What was written, as a value of the default's type."""
    made, kind = type(default), type(default).__name__
    try:
        return {"true": True, "false": False}[text.lower()] if made is bool else made(text)
    except (KeyError, ValueError):
        raise ConfigError(
            f"{where} takes {name} as {kind}, like its default {default!r}, got {text!r}"
        ) from None


def settings_read(kind: Kind, name: str) -> Collection[str] | Literal["all"]:
    """What was said, when it was registered, of the settings that it reads."""
    return _reads[kind, name]
