"""Fixtures that any test may use: the real service in its own process, and a client for it.

service        one service for the whole session: fast; use a fresh dataset name per test
fresh_service  one for this test alone: kill it, restart it, look into its directory
start_service  a function that starts further ones: start_service(env={...}, args=[...])
client         a stepwell.Client of `service`
name           a dataset name that nobody else uses

Two marks keep `make test` short. `make test-all` (--all) ignores both, and so does a test that is
asked for by name:

@pytest.mark.long       left out
@pytest.mark.sample(n)  of the cases of each function, n are run, evenly spread
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from stepwell import Client
from stepwell.testing import wait_until
from tests.forks import Fork

# Compiled modules are kept even where somebody's shell forbids it: a service that compiles all of
# itself at each of hundreds of starts takes a third longer to start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Files of tests run side by side. Where each has a thread for every core, torch's threads mostly
# spin until the others get one: up to ten times the CPU time for the same work.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A long query runs while nobody else needs the CPU. Beside busy programs it may not end in the five
# seconds that a person waits by default, so tests wait longer. Tests of deadlines name them.
Client.sql.__kwdefaults__["timeout"] = 60.0


HERE = Path(__file__).parent
LONG_FILES = {HERE, HERE / "browser", HERE / "faults"}
"""Directories whose files have few tests, of many seconds each: whole commands, pages and kills."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also the long tests: make test-all")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long files first; leave out what only `make test-all` runs."""
    # Begun last, a file of a few minutes would be waited for by all other processes of the suite.
    items.sort(key=lambda item: item.path.parent not in LONG_FILES)
    if config.getoption("--all") or any("::" in argument for argument in config.args):
        return
    left_out = [item for item in items if item.get_closest_marker("long")]
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample") and not item.get_closest_marker("long"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for each in cases.values():
        mark = each[0].get_closest_marker("sample")
        assert mark is not None
        last, most = len(each) - 1, min(len(each), mark.args[0])
        kept = {round(i * last / max(1, most - 1)) for i in range(most)}
        left_out += [item for i, item in enumerate(each) if i not in kept]
    if left_out:
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]
        config.hook.pytest_deselected(items=left_out)


START_SECONDS = 300.0
STOP_SECONDS = 120.0


class ServiceProcess:
    """A real `stepwell serve` on its own data directory and port; `restart` keeps both."""

    def __init__(
        self,
        directory: Path,
        *,
        env: Mapping[str, str] | None = None,
        args: Sequence[str] = (),
        token: str | None = None,
        command: bool = False,
    ):
        """`command`: start it by its command, where the interpreter's own start matters."""
        self.data = directory / "data"
        self.log = directory / "service.log"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.token = token
        self.args = list(args)
        self.env = dict(env or {})
        self._command = command
        self._process: Fork | subprocess.Popen[bytes] | None = None
        self._clients: list[Client] = []

    def start(self, *, wait: bool = True, env: Mapping[str, str] | None = None) -> ServiceProcess:
        """Start it; `env` counts for this start only. `wait` returns once it answers /readyz."""
        assert self._process is None, "already running"
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("STEPWELL_")}
        variables = {**inherited, "OMP_NUM_THREADS": "1", **self.env, **(env or {})}
        words = ["serve", "--data", str(self.data)]
        words += ["--host", "127.0.0.1", "--port", str(self.port), *self.args]
        if self.token is not None:
            words += ["--token", self.token]
        if self._command:
            words = [sys.executable, "-m", "stepwell.cli", *words]
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(words, stdout=log, stderr=log, env=variables)
        else:
            self._process = Fork("stepwell.cli", words, env=variables, output=self.log)
        if wait:
            self.wait_ready()
        return self

    def wait_ready(self) -> None:
        assert self._process is not None, "not started"
        process = self._process
        with Client(self.url, self.token, timeout=5.0, retry_for=0.0) as probe:
            try:
                wait_until(lambda: probe.ready() or process.poll() is not None, START_SECONDS)
                assert process.poll() is None
            except AssertionError:
                code = process.poll()
                self.kill()
                raise AssertionError(
                    f"service did not start (exit {code}):\n{self.tail()}"
                ) from None

    def client(self, **options: float) -> Client:
        """A new client, closed with the service."""
        client = Client(self.url, self.token, **options)
        self._clients.append(client)
        return client

    @property
    def pid(self) -> int:
        assert self._process is not None, "not running"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def wait_exit(self, timeout: float = STOP_SECONDS) -> int:
        """Wait until it ends by itself (a failpoint); the exit status, negative for a signal."""
        assert self._process is not None, "not running"
        status = self._process.wait(timeout)
        self._process = None
        return status

    def kill(self) -> None:
        """SIGKILL: what a crash does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> int:
        """SIGTERM and the exit status: what an operator does."""
        assert self._process is not None, "not running"
        self._process.send_signal(signal.SIGTERM)
        return self.wait_exit()

    def restart(self, *, env: Mapping[str, str] | None = None) -> ServiceProcess:
        """Up again on the same directory and port; killed first where it still runs."""
        self.kill()
        return self.start(env=env)

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self.kill()


def service_process(tmp_path_factory: pytest.TempPathFactory, **options: object) -> ServiceProcess:
    """A running service on a fresh directory."""
    return ServiceProcess(tmp_path_factory.mktemp("service"), **options).start()  # type: ignore[arg-type]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture(autouse=True, scope="session")
def _no_foreign_service() -> Iterator[None]:
    """Tests must not reach a service of the person who runs them."""
    saved = {k: os.environ.pop(k) for k in ("STEPWELL_URL", "STEPWELL_TOKEN") if k in os.environ}
    yield
    os.environ.update(saved)


@pytest.fixture(autouse=True, scope="session")
def _no_outbox_here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Collectors of tests keep their episodes out of the checkout."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STEPWELL_OUTBOX", str(tmp_path_factory.mktemp("outboxes")))
        yield


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    process = service_process(tmp_path_factory)
    yield process
    process.close()


@pytest.fixture
def start_service(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., ServiceProcess]]:
    started: list[ServiceProcess] = []

    def start(directory: Path | None = None, **options: object) -> ServiceProcess:
        directory = directory or tmp_path_factory.mktemp("service")
        process = ServiceProcess(directory, **options)  # type: ignore[arg-type]
        started.append(process)
        return process.start()

    yield start
    for process in started:
        process.close()


@pytest.fixture
def fresh_service(start_service: Callable[..., ServiceProcess]) -> ServiceProcess:
    return start_service()


@pytest.fixture
def client(service: ServiceProcess) -> Iterator[Client]:
    with Client(service.url, service.token) as client:
        yield client


@pytest.fixture
def name() -> str:
    return f"t-{uuid.uuid4().hex[:12]}"
