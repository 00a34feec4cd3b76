"""Creation of environments, by name or by a function."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium
from gymnasium.vector import VectorEnv

from stepwell._plugins import describe_error, import_named
from stepwell.errors import StepwellError
from stepwell.spaces import env_name

Env = gymnasium.Env[Any, Any]
Envs = list[Env] | VectorEnv[Any, Any, Any]

VERSIONED = re.compile(r"-v\d+$")
_EXTRA = "; for Box2D, MuJoCo and mazes: pip install 'stepwell[envs]'"


class EnvError(StepwellError):
    """An environment cannot be created: it is unknown, not installed, or has wrong arguments."""

    exit_status = 2


def make(env_id: str, kwargs: Mapping[str, Any] | None = None) -> Env:
    """`gymnasium.make` with Stepwell's environments and with helpful errors.

    In "module:Name-v0", the module may also be in the current directory. Raises `EnvError`.
    """
    with _as_env_error(env_id, kwargs):
        _refuse_no_version(env_id)
        spec = gymnasium.registry.get(env_name(env_id))
        if spec is not None and spec.entry_point is None:
            raise EnvError(
                f"{env_id} has only a batched implementation, whose episodes cannot be repeated by "
                "seed: collect it with --vectorization native; stepwell run --no-evaluate"
            )
        # The passive checker warns about style on every step; Stepwell checks what it needs.
        return gymnasium.make(env_id, disable_env_checker=True, **dict(kwargs or {}))


def _refuse_no_version(env_id: str) -> None:
    """Data of "CartPole" and of "CartPole-v1" would be those of two environments."""
    name = env_name(env_id)
    if name in gymnasium.registry or VERSIONED.search(name):
        return
    known = (s for s in gymnasium.registry.values() if s.name == name.rpartition("/")[2])
    versions = [spec.version for spec in known if spec.version is not None]
    if versions:
        raise EnvError(f"{env_id} names no version; use {env_id}-v{max(versions)}")


def make_native(env_id: str, kwargs: Mapping[str, Any] | None, n: int) -> VectorEnv[Any, Any, Any]:
    """N environments by the environment's own batched implementation. Raises `EnvError`."""
    with _as_env_error(env_id, kwargs):
        _refuse_no_version(env_id)
        if env_id in gymnasium.registry and gymnasium.spec(env_id).vector_entry_point is None:
            raise EnvError(
                f"{env_id} has no batched implementation (vector_entry_point); use "
                "--vectorization async or sync"
            )
        return gymnasium.make_vec(
            env_id, num_envs=n, vectorization_mode="vector_entry_point", **dict(kwargs or {})
        )


@contextlib.contextmanager
def _as_env_error(env_id: str, kwargs: Mapping[str, Any] | None) -> Iterator[None]:
    """Import what registers the environment, and turn the errors of making it into `EnvError`."""
    importlib.import_module("collector.builtin")  # registers Stepwell's environments
    module, separator, _ = env_id.partition(":")
    if separator:
        import_named(module, f"--env {env_id}", EnvError)
    try:
        yield
    except EnvError:
        raise
    except gymnasium.error.DependencyNotInstalled as error:
        # The errors of Stepwell's environments contain the hint.
        hint = "" if "stepwell[" in str(error) else _EXTRA
        raise EnvError(f"{env_id} needs a package that is not installed: {error}{hint}") from None
    except gymnasium.error.DeprecatedEnv as error:
        works = re.findall(r"`([\w./-]+-v\d+)`", str(error))
        use = f"use {works[-1]}" if works else str(error)
        raise EnvError(f"{env_id} is deprecated in the gymnasium installed here: {use}") from None
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        raise EnvError(
            f"no environment {env_id!r}: {str(error).rstrip('.')}. Name the module that registers "
            "a custom environment with --plugin my.module, or in the id as my.module:Name-v0"
        ) from None
    except (TypeError, ValueError) as error:
        raise EnvError(f"{env_id} does not accept {dict(kwargs or {})}: {error}") from None
    except Exception as error:  # a constructor may raise anything
        raise EnvError(
            f"{env_id} cannot be made: {describe_error(error)}; stepwell --debug … shows all of it"
        ) from error


@contextlib.contextmanager
def open_envs(make_env: Callable[[], Env], n: int) -> Iterator[list[Env]]:
    """N environments of one kind. The environments in the list at the end are closed."""
    envs: list[Env] = []
    try:
        for _ in range(n):
            envs.append(make_env())
        yield envs
    finally:
        close_all(envs)


def close_all(envs: Sequence[Env]) -> None:
    """Close every environment. Report what one raises: its episodes are over and kept."""
    for env in envs:
        try:
            env.close()
        except Exception as error:  # an environment may raise anything
            print(f"an environment could not be closed: {describe_error(error)}", file=sys.stderr)


def parse_pairs(pairs: Sequence[str], what: str) -> dict[str, Any]:
    """("delay=8", "name=x") → {"delay": 8, "name": "x"}; values are parsed as JSON if possible."""
    values: dict[str, Any] = {}
    for pair in pairs:
        key, separator, text = pair.partition("=")
        if not separator or not key:
            raise EnvError(f"{what}: expected KEY=VALUE, got {pair!r}")
        try:
            values[key] = json.loads(text)
        except ValueError:
            values[key] = text
    return values
