"""No thread of the service dies silently: whatever is thrown at one, it goes on and says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from server.index.mirror import Mirror
from stepwell.codec import encode
from stepwell.testing import make_spec, make_trajectory, wait_until

SPEC = make_spec()
UNEXPECTED = [KeyError("odd"), MemoryError("odd"), SystemExit("odd")]


class Thrown:
    """Raises as long as it is on, then does what it stands for."""

    def __init__(self, real: Callable[..., Any], error: BaseException):
        self.real, self.error, self.on, self.hits = real, error, True, 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self.on:
            self.hits += 1
            raise self.error
        return self.real(*args, **options)


def body(seed: int) -> bytes:
    return encode([make_trajectory(SPEC, length=3, seed=seed)], SPEC)


@pytest.mark.parametrize("error", UNEXPECTED, ids=repr)
def test_the_committer_answers_and_goes_on(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    live = start()
    live.create(spec=SPEC)
    committer = live.service.ingest.committer
    thrown = Thrown(committer._handle, error)
    monkeypatch.setattr(committer, "_handle", thrown)
    response = live.send(body(1))
    assert (response.status_code, response.json()["code"]) == (500, "internal_error")
    wait_until(lambda: "committer" in committer.loop.trouble)
    assert committer.loop.alive and "committer" in live.http.get("/readyz").json()["detail"]
    thrown.on = False
    assert live.send(body(1)).status_code == 200
    wait_until(lambda: not committer.loop.trouble)
    assert live.http.get("/readyz").json()["status"] == "ok"


@pytest.mark.parametrize("error", [*UNEXPECTED, OSError(28, "odd")], ids=repr)
def test_the_sealer_goes_on(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    live = start(seal_idle=0.05)
    live.create(spec=SPEC)
    sealer = live.service.ingest.sealer
    thrown = Thrown(sealer._take, error)
    monkeypatch.setattr(sealer, "_take", thrown)
    assert live.send(body(1)).status_code == 200
    wait_until(lambda: "sealer" in sealer.loop.trouble and thrown.hits > 1)
    assert "sealer" in live.http.get("/readyz").json()["detail"]
    thrown.on = False
    wait_until(lambda: any(live.data.glob("shards/*/*.parquet")), what="it was sealed")
    wait_until(lambda: not sealer.loop.trouble)


@pytest.mark.parametrize("error", UNEXPECTED, ids=repr)
@pytest.mark.parametrize("where", ["round", "_look_at_index"])
def test_the_maintenance_loop_goes_on(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, where: str, error: BaseException
) -> None:
    from server.maintenance.loop import MaintenanceLoop

    thrown = Thrown(lambda *_: None, error)
    monkeypatch.setattr(MaintenanceLoop, where, lambda self: thrown(self))
    live = start(maintenance_interval=0.05)
    wait_until(lambda: "maintenance" in live.service.maintenance.trouble and thrown.hits > 1)
    assert "maintenance" in live.http.get("/readyz").json()["detail"]
    thrown.on = False
    wait_until(lambda: not live.service.maintenance.trouble)


@pytest.mark.parametrize("error", UNEXPECTED, ids=repr)
def test_a_job_that_ends_oddly_has_failed(start: Callable[..., Any], error: BaseException) -> None:
    """It does not seem to run for ever."""
    jobs = start().service.jobs

    def work(*_: Any) -> dict[str, Any]:
        raise error

    job = jobs.submit("odd", work, {})
    assert wait_until(lambda: jobs.get(job.id).error).code == "internal_error"
    assert jobs.get(job.id).state == "failed"


@pytest.mark.parametrize("error", UNEXPECTED, ids=repr)
def test_filling_the_mirror_ahead_goes_on(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """And ends where it is filled; a service that is closed meanwhile closes."""
    thrown = Thrown(Mirror._refresh, error)
    monkeypatch.setattr(Mirror, "_refresh", lambda self, wanted: thrown(self, wanted))
    live = start()
    mirror = live.service.mirror
    wait_until(lambda: "mirror" in mirror.trouble and thrown.hits > 1)
    assert "mirror" in live.http.get("/readyz").json()["detail"]
    thrown.on = False
    wait_until(lambda: not mirror.trouble, what="it is filled")
    assert live.http.get("/readyz").json()["status"] == "ok"
    thrown.on = True
    start()  # the one before is closed, this one cannot be filled
    start()
