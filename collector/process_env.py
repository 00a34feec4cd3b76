"""An environment in a process of its own: `--vectorization async`.

    this process   begin ─▶ … begin of the others … ─▶ end
    its process            reset or step           ─▶

Gymnasium's AsyncVectorEnv is not used: there infos of all environments share one array by key and
one dtype, idle ones must be stepped, and one that dies ends all. Here each is on its own, as in a
list, and one that dies is a broken environment among others.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import gymnasium

from collector.envs import Env, EnvError, close_all, make
from stepwell._compat import OWN_GROUP
from stepwell._parent import PARENT, end_with_parent
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
        self._env_id = env_id
        self._pipe, theirs = Pipe()
        with theirs:
            # A process group of its own: Ctrl-C in a terminal does not reach it, and the collector
            # ends it. It stays in the collector's session, so it has no share of the machine of its
            # own. multiprocessing.Process would import the program's main module again.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "collector.process_env", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, PARENT: str(os.getpid())},
                **OWN_GROUP,
            )
        self.begin("make", env_id, kwargs, tuple(plugins))

    def connect(self) -> ProcessEnv:
        """Wait until the environment is made."""
        try:
            made = cloudpickle.loads(self.end())
        except (ProcessDied, RuntimeError) as error:
            self.close()
            raise EnvError(str(error)) from None
        self.observation_space, self.action_space, self.metadata = made
        return self

    def begin(self, call: str, *args: Any, **kwargs: Any) -> None:
        """Let the environment reset or step; `end` has its answer."""
        with contextlib.suppress(OSError):  # it has died, which `end` reports
            self._pipe.send((call, args, kwargs))

    def end(self) -> Any:
        """The answer of the environment."""
        try:
            fine, answer = self._pipe.recv()
        except (EOFError, OSError):
            code = self._wait()
            raise ProcessDied(
                f"the process of an environment {self._env_id} died (exit code {code})"
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
        self.begin("step", action)
        obs, reward, terminated, truncated, info = self.end()
        return obs, reward, terminated, truncated, info

    def close(self) -> None:
        """Close the environment; kill its process if it does not end."""
        with contextlib.suppress(OSError):
            self._pipe.send(("close", (), {}))
        self._pipe.close()
        self._wait()

    def _wait(self) -> int:
        """Wait for the end of the process, and kill it if it does not come."""
        try:
            return self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def begin(env: Env, call: str, *args: Any, **kwargs: Any) -> None:
    """Begin a call that `end` ends, if `env` can do so beside others."""
    if isinstance(env, ProcessEnv):
        env.begin(call, *args, **kwargs)


def end(env: Env, call: str, *args: Any, **kwargs: Any) -> Any:
    """The answer to the call that `begin` began, or that is made now."""
    return env.end() if isinstance(env, ProcessEnv) else getattr(env, call)(*args, **kwargs)


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
        close_all(envs)


def serve(pipe: Connection) -> None:
    """Make an environment, and answer until the pipe closes. The other end may be gone."""
    with contextlib.suppress(EOFError, OSError), contextlib.ExitStack() as stack:
        env: Env | None = None
        while (request := pipe.recv())[0] != "close":
            call, args, kwargs = request
            try:
                if env is None:
                    env_id, settings, plugins = args
                    import_plugins(plugins, EnvError)
                    env = stack.enter_context(contextlib.closing(make(env_id, settings)))
                    spaces = env.observation_space, env.action_space, env.metadata
                    pipe.send((True, cloudpickle.dumps(spaces)))
                else:
                    pipe.send((True, getattr(env, call)(*args, **kwargs)))
            except (EOFError, BrokenPipeError, ConnectionError):
                raise
            except StepwellError as error:
                pipe.send((False, str(error)))
            except Exception as error:  # an environment may raise anything, and report anything
                pipe.send((False, describe_error(error)))


if __name__ == "__main__":
    # A hanging environment does not see its pipe close, nor would it see SIGTERM.
    end_with_parent(signal.SIGKILL)
    serve(Connection(int(sys.argv[1])))
