"""What collecting and evaluating have in common before and after playing: names, datasets, runs.

Not for playing itself (rollout.py), nor for telling how it goes (worker.py).
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from amago_model.errors import AmagoError
from collector.config import CollectConfig, EnvironmentConfig, EvaluateConfig
from collector.envs import Env, EnvError, Interface, interface_of, make, parse_pairs
from stepwell._outbox_folder import note_ending
from stepwell._plugins import import_plugins
from stepwell.client import Client
from stepwell.errors import Busy, NotFound, ServiceUnreachable, StepwellError
from stepwell.messages import Capacity


def slug(text: str, limit: int = 40) -> str:
    """A piece of a name: lower case letters, digits, dots, dashes."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")[:limit].strip("-.") or "x"


def fresh(*parts: str) -> str:
    """A name that nobody else has."""
    return "-".join((*parts, secrets.token_hex(3)))


def worker_name() -> str:
    return fresh("collect", slug(socket.gethostname(), 24), str(os.getpid()))


def prepare(config: EnvironmentConfig) -> None:
    """Once per process: device, plug-ins and threads."""
    torch.set_num_threads(config.threads)
    try:
        torch.empty(0, device=config.device)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        reason = str(error).split("\n")[0]
        raise EnvError(
            f"--device {config.device}: {reason}; expected a device that torch has here, as cpu"
        ) from None
    import_plugins(config.plugin, EnvError)


def make_env(config: EnvironmentConfig) -> Env:
    return make(config.env, parse_pairs(config.env_args, "--env-args"))


def interface_for(config: EnvironmentConfig, env: Env, infos: Sequence[str] = ()) -> Interface:
    roles = {key: str(role) for key, role in parse_pairs(config.roles, "--roles").items()}
    wide = config.keep_float64
    return interface_of(env, config.env, roles=roles, infos=infos, keep_float64=wide)


def open_dataset(
    client: Client,
    name: str,
    interface: Interface,
    *,
    create: bool = True,
    capacity: Capacity | None = None,
    description: str = "",
) -> Interface:
    """The interface that records under the spec of dataset `name`, which is made if need be."""
    try:
        spec = client.spec(name)
    except NotFound:
        if not create:
            raise
        client.create_dataset(
            name,
            interface.spec,
            capacity=capacity,
            description=description or f"collected in {interface.env_id}",
            exist_ok=True,  # another collector may have been faster
        )
        spec = client.spec(name)
    return interface.for_dataset(spec, name)


def resolved(config: CollectConfig | EvaluateConfig, **changed: Any) -> dict[str, Any]:
    """The complete config as JSON for the run's row. A token is nobody's business."""
    values = {**asdict(config), **changed}
    values.pop("token")
    return {k: str(v) if isinstance(v, Path) else v for k, v in values.items()}


def open_run(client: Client, name: str, kind: str, config: dict[str, Any], seed: int) -> None:
    client.create_run(
        name,
        kind,
        config=config,
        seed=seed,
        git_commit=_git_commit(),
        host=socket.gethostname(),
        command=" ".join(sys.argv)[:4096],
        exist_ok=True,
    )


def reason_of(error: BaseException) -> str:
    """What a run's row says of the error that ended it."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted before it had ended"
    if isinstance(error, StepwellError | AmagoError):
        return str(error)
    return f"a defect ({type(error).__name__}): {error}"


def close_run(
    client: Client, name: str, status: str, error: str = "", outbox: Path | None = None
) -> None:
    """Say how a run ended. If nobody is there to hear it, a note in the folder `outbox` says it to
    whoever sends the rest."""
    error = error[:20_000]
    try:
        if client.ready():  # one attempt: whoever ends waits for nobody
            client.patch_run(name, status=status, error=error)
            return
    except (ServiceUnreachable, Busy):
        pass
    except StepwellError:
        return
    if outbox is not None:
        with contextlib.suppress(OSError):
            note_ending(outbox, name, status, error)


def _git_commit() -> str:
    """Commit of the code that runs, or "" outside a checkout."""
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
