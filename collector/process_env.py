"""An environment in a process of its own: `--vectorization async`.

    this process   begin ─▶ … begin of the others … ─▶ end
    its process            reset or step           ─▶

Gymnasium's AsyncVectorEnv is not used: there infos of all environments share one array by key and
one dtype, idle ones must be stepped, and one that dies ends all. Here each is on its own, as in a
list, and one that dies is a broken environment among others.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import gymnasium

from collector.envs import Env, EnvError, make
from stepwell._plugins import describe_error, import_plugins
from stepwell.errors import StepwellError

CLOSE_SECONDS = 5.0
"""How long an environment may take to close itself, before its process is killed."""


class ProcessDied(StepwellError):
    """The process of an environment has ended."""


class ProcessEnv(gymnasium.Env[Any, Any]):
    """`make(env_id, kwargs)` in another process, which imports `plugins` first.

    The constructor does not wait: `connect` does, and raises `EnvError` if it cannot be made.
    `begin` and `end` are the halves of `reset` and `step`. Exceptions of the environment are
    RuntimeErrors with its message; `ProcessDied` if the process has ended.
    """

    def __init__(self, env_id: str, kwargs: dict[str, Any], plugins: Sequence[str] = ()) -> None:
        context = multiprocessing.get_context("forkserver")
        with _ignoring_interrupts():
            forkserver.ensure_running()
        self._env_id = env_id
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, env_id, kwargs, tuple(plugins)), daemon=True
        )
        self._process.start()
        theirs.close()

    def connect(self) -> ProcessEnv:
        """Wait until the environment is made."""
        try:
            made = cloudpickle.loads(self.end())
        except (ProcessDied, RuntimeError) as error:
            raise EnvError(str(error)) from None
        self.observation_space, self.action_space, self.metadata = made
        return self

    def begin(self, call: str, **arguments: Any) -> None:
        """Let the environment reset or step; `end` has its answer."""
        with contextlib.suppress(OSError):  # it has died, which `end` reports
            self._pipe.send((call, arguments))

    def end(self) -> Any:
        """The answer of the environment."""
        try:
            fine, answer = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(CLOSE_SECONDS)
            raise ProcessDied(
                f"the process of an environment {self._env_id} died (exit code "
                f"{self._process.exitcode})"
            ) from None
        if not fine:
            raise RuntimeError(answer)
        return answer

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        self.begin("reset", seed=seed, options=options)
        obs, info = self.end()
        return obs, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.begin("step", action=action)
        obs, reward, terminated, truncated, info = self.end()
        return obs, reward, terminated, truncated, info

    def close(self) -> None:
        """Close the environment; kill its process if it does not end."""
        with contextlib.suppress(OSError):
            self._pipe.send(("close", {}))
        self._pipe.close()
        self._process.join(CLOSE_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


@contextlib.contextmanager
def open_process_envs(
    env_id: str, kwargs: dict[str, Any], n: int, plugins: Sequence[str]
) -> Iterator[list[Env]]:
    """N environments, made at the same time. Those in the list at the end are closed."""
    envs: list[Env] = []
    try:
        started = [ProcessEnv(env_id, kwargs, plugins) for _ in range(n)]
        envs.extend(started)
        for one in started:
            one.connect()
        yield envs
    finally:
        for env in envs:
            env.close()


def _serve(pipe: Connection, env_id: str, kwargs: dict[str, Any], plugins: Sequence[str]) -> None:
    """Make the environment, and answer until the pipe closes. The other end may be gone."""
    # Ctrl-C reaches all processes of a terminal, but the collector ends its environments itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(EOFError, OSError):
        try:
            import_plugins(plugins, EnvError)
            env = make(env_id, kwargs)
            spaces = env.observation_space, env.action_space, env.metadata
            pipe.send((True, cloudpickle.dumps(spaces)))
        except Exception as error:
            pipe.send((False, str(error)))
            return
        with contextlib.closing(env):
            while (request := pipe.recv())[0] != "close":
                call, arguments = request
                try:
                    answer = partial(getattr(env, call), **arguments)()
                except Exception as error:  # an environment may raise anything
                    pipe.send((False, describe_error(error)))
                else:
                    pipe.send((True, answer))


@contextlib.contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """Processes that start now ignore Ctrl-C from their first instruction on."""
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not in the main thread: they ignore it when they serve
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
