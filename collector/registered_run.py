"""A run at the service: its dataset, the outbox of its episodes, and its end status.

Code shared by `collect` and `evaluate` before and after playing; rollout.py plays the episodes.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from amago_model.errors import AmagoError
from amago_model.runtime.devices import why_no_device
from collector.config import CollectConfig, EnvironmentConfig, EvaluateConfig
from collector.envs import Env, EnvError, Envs, make, make_native, open_envs, parse_pairs
from collector.interface import Interface, interface_of
from collector.outbox_slots import open_outbox
from collector.process_env import ProcessEnv, open_process_envs
from stepwell._git import git_commit
from stepwell._plugins import import_plugins
from stepwell.client import Client
from stepwell.errors import NotFound, StepwellError, Unauthorized
from stepwell.heartbeat import Heartbeat
from stepwell.messages import PARTIALLY_OBSERVABLE, Capacity
from stepwell.outbox import Outbox


def slug(text: str, limit: int = 40) -> str:
    """Convert text to a part of a name: lower-case letters, digits, dots, dashes."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")[:limit].strip("-.") or "x"


def unique_name(*parts: str) -> str:
    return "-".join((*parts, secrets.token_hex(3)))


def prepare(config: EnvironmentConfig) -> None:
    """Set up priority, threads, device and plug-ins, once per process. Raises `EnvError`."""
    if config.nice and hasattr(os, "nice"):  # not on Windows
        os.nice(max(0, config.nice - os.nice(0)))  # the same if called again
    torch.set_num_threads(config.threads)
    if why := why_no_device(config.device):
        raise EnvError(f"--device {why}")
    import_plugins(config.plugin, EnvError)


def configured_env(config: EnvironmentConfig) -> Env:
    env_args = parse_pairs(config.env_args, "--env-args")
    if config.vectorization == "async":
        return ProcessEnv(config.env, env_args, config.plugin).connect()
    return make(config.env, env_args)


@contextlib.contextmanager
def open_configured_envs(config: EnvironmentConfig, n: int) -> Iterator[Envs]:
    """N environments, closed at the end. Raises `EnvError`."""
    env_args = parse_pairs(config.env_args, "--env-args")
    if config.vectorization == "sync":
        with open_envs(lambda: configured_env(config), n) as envs:
            yield envs
    elif config.vectorization == "async":
        with open_process_envs(config.env, env_args, n, config.plugin) as envs:
            yield envs
    else:
        with contextlib.closing(make_native(config.env, env_args, n)) as vector:
            yield vector


def configured_interface(
    config: EnvironmentConfig, envs: Envs, infos: Sequence[str] = ()
) -> Interface:
    env = envs[0] if isinstance(envs, list) else envs
    roles = {key: str(role) for key, role in parse_pairs(config.roles, "--roles").items()}
    return interface_of(env, config.env, roles=roles, infos=infos, keep_float64=config.keep_float64)


def open_dataset(
    client: Client,
    name: str,
    interface: Interface,
    *,
    create: bool = True,
    capacity: Capacity | None = None,
    description: str = "",
) -> Interface:
    """The interface that records with the spec of dataset `name`, which is created if missing."""
    try:
        spec = client.spec(name)
    except NotFound as error:
        if not create:
            detail = f"{error.detail}; without --no-create it would be made"
            raise NotFound({**error.problem, "detail": detail}) from None
        try:
            client.create_dataset(
                name,
                interface.spec,
                capacity=capacity,
                description=description or f"collected in {interface.env_id}",
                tags=[PARTIALLY_OBSERVABLE] if interface.partially_observable else [],
                exist_ok=True,  # another collector may have been faster
            )
        except Unauthorized as refusal:
            detail = f"there is no dataset {name!r}, and {refusal.detail}".replace("NAME", name)
            raise Unauthorized({**refusal.problem, "detail": detail}) from None
        spec = client.spec(name)
    return interface.for_dataset(spec, name)


@dataclass(slots=True)
class Run:
    """A run of a collector or evaluation. Set `status` and `problem` before it ends."""

    client: Client
    name: str
    kind: str
    outbox: Outbox
    worker: str
    """Name of this process at the service."""
    status: str = "finished"
    """End status if no exception is raised."""
    problem: str = ""
    """A failure that did not raise an exception."""
    broken: str = ""
    """What became of the episodes whose environment failed; kept with the run."""
    undelivered: str = ""
    """After the end: the data that the service did not receive, and why. Empty if it has all."""
    _heartbeat: Heartbeat | None = None

    def start_heartbeat(
        self,
        status: Callable[[], Mapping[str, Any]],
        on_command: Callable[[str], object] | None = None,
        every: float = 2.0,
    ) -> None:
        """Send heartbeats until the run is closed; arguments as for
        `stepwell.heartbeat.Heartbeat`."""
        self._heartbeat = Heartbeat(
            self.client,
            self.worker,
            role=self.kind,
            run=self.name,
            status=status,
            on_command=on_command,
            every=every,
        )

    @property
    def command(self) -> str:
        """The newest command of the service, or "none"."""
        return self._heartbeat.command if self._heartbeat is not None else "none"

    def close(self, error: BaseException | None = None) -> None:
        """Report how the run ended, immediately or after the data queued in the outbox."""
        self.undelivered = "; ".join(filter(None, (self.outbox.undelivered(), self.problem)))
        reason = "\n".join(filter(None, (self.broken, reason_of(error), self.undelivered)))
        if error is not None:
            self.status = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
        if self.undelivered:
            self.status = "failed"
        if self._heartbeat is not None:
            failed = {"state": "failed", "last_error": reason}
            self._heartbeat.close(**failed if self.status == "failed" else {"state": "stopped"})
        self.outbox.end_run(self.name, self.status, reason)


@contextlib.contextmanager
def open_run(
    client: Client,
    name: str,
    kind: str,
    config: CollectConfig | EvaluateConfig,
    interface: Interface,
    *,
    dataset: str,
    seed: int,
    say: Callable[[str], object],
    **outbox: Any,
) -> Iterator[Run]:
    """A run with an outbox for its episodes (`outbox`: options of `open_outbox`).

    At the end of the block, the end status is reported. `say` prints the data taken over from
    earlier collectors and, if the block raises, the data that was not sent.
    """
    with contextlib.ExitStack() as stack:
        box = open_outbox(
            client, dataset, interface.spec, directory=config.outbox, say=say, **outbox
        )
        stack.callback(box.close, 0.0)
        client.create_run(
            name,
            kind,
            config=resolved(config, run=name, dataset=dataset, seed=seed),
            seed=seed,
            git_commit=git_commit(),
            host=socket.gethostname(),
            command=" ".join(sys.argv)[:4096],
            tags=list(config.tags) if kind == "eval" else [],
            exist_ok=True,
        )
        worker = unique_name(kind, slug(socket.gethostname(), 24), str(os.getpid()))
        run = Run(client, name, kind, box, worker)
        try:
            yield run
        except BaseException as error:
            run.close(error)
            if run.undelivered:
                say(run.undelivered)
            raise
        run.close()


def reason_of(error: BaseException | None) -> str:
    """The text of an error for the run's database row."""
    if error is None:
        return ""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted before it had ended"
    if isinstance(error, StepwellError | AmagoError):
        return str(error)
    return f"a defect ({type(error).__name__}): {error}"


def resolved(config: CollectConfig | EvaluateConfig, **chosen: Any) -> dict[str, Any]:
    """The complete config as JSON, with the values chosen here and without the secret token."""
    values = config.to_dict()
    values |= {name: value for name, value in chosen.items() if name in values}
    del values["token"]
    return values
