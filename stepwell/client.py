"""`Client`: one method per endpoint of the service (docs/http.md), typed and safe to repeat.

    from stepwell import Client

    with Client("http://127.0.0.1:8000") as client:
        client.upload("hopper", "hopper-medium-v2.hdf5", env="Hopper-v5")
        print(client.sql("select count(*), avg(return) from trajectories").rows)

The parts lie in stepwell/_client/, one file per group of routes.
"""

from __future__ import annotations

import time
from types import TracebackType

import httpx2

from stepwell._client.datasets import Datasets
from stepwell._client.queries import Queries, SqlResult
from stepwell._client.runs import PolicyBytes, Runs
from stepwell._client.snapshots import Snapshots
from stepwell._client.workers import Workers
from stepwell.errors import ServiceError, ServiceUnreachable
from stepwell.messages import PROBLEM, Health

__all__ = ["Client", "PolicyBytes", "SqlResult"]


class Client(Datasets, Queries, Snapshots, Runs, Workers):
    """A service's client. Thread-safe; close it, or use it in a `with` block.

    `url` and `token` default to STEPWELL_URL (http://127.0.0.1:8000) and STEPWELL_TOKEN. `timeout`
    is how many seconds one answer may take. Calls that can be repeated are, for up to `retry_for`
    seconds, when the service does not answer or asks for patience. `transport` replaces the
    network (tests). Every method raises errors of `stepwell.errors` only.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        timeout: float = 30.0,
        retry_for: float = 10.0,
        transport: httpx2.BaseTransport | None = None,
    ):
        super().__init__(url, token, timeout=timeout, retry_for=retry_for, transport=transport)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self.url!r})"

    def health(self) -> Health:
        """Version, database revision, and why it is degraded if it is."""
        response = self.call("GET", "/healthz", fine=(503,))
        if response.headers.get("Content-Type", "").startswith(PROBLEM):
            self.raise_for(response)
        return self.parse(Health, response)

    def ready(self) -> bool:
        """Whether the service answers and is ready; False rather than an error."""
        try:
            return self.call("GET", "/readyz", retry=False, timeout=5.0).is_success
        except (ServiceUnreachable, ServiceError):
            return False

    def wait_ready(self, seconds: float = 30.0) -> None:
        """Wait until the service is ready. Raises `ServiceUnreachable` after `seconds`."""
        deadline = time.monotonic() + seconds
        while not self.ready():
            if time.monotonic() > deadline:
                raise ServiceUnreachable(
                    f"{self.url} was not ready within {seconds:g} s; "
                    "start a service with: stepwell serve"
                )
            time.sleep(0.05)
