"""A robot's narrow token does all that a collector needs, against a real service."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from collector.collect import collect
from collector.config import CollectConfig, EvaluateConfig
from collector.envs import make
from collector.evaluate import run_evaluation
from collector.record import record
from stepwell import Client
from stepwell.errors import NotFound, Unauthorized
from stepwell.outbox import Outbox
from tests.collector.test_collect_real import ENV, policy_file

OPERATOR = "operator-secret"


@pytest.fixture
def url(start_service: Callable[..., Any]) -> str:
    return str(start_service(token=OPERATOR).url)


@pytest.fixture
def client(url: str) -> Iterator[Callable[[str | None], Client]]:
    """A client with a token."""
    with contextlib.ExitStack() as stack:
        yield lambda token: stack.enter_context(Client(url, token))


@pytest.fixture
def admin(client: Callable[[str | None], Client]) -> Client:
    return client(OPERATOR)


def collector(admin: Client, token: str, tmp_path: Path, **changed: Any) -> CollectConfig:
    values: dict[str, Any] = {
        **{"env": ENV, "dataset": "kitchen", "envs": 2, "episodes": 3, "seed": 1},
        **{"url": admin.url, "token": token, "outbox": tmp_path / "outbox"},
        **{"poll_every": 0.05, "heartbeat_every": 0.05, "run": "robot-7"},
    }
    values["random"] = "policy" not in changed
    return CollectConfig(**{**values, **changed})


def create_dataset(admin: Client, tmp_path: Path) -> None:
    """As an admin does: by collecting the first episodes."""
    first = collector(admin, OPERATOR, tmp_path, run="first", episodes=1, outbox=tmp_path / "one")
    collect(first)


def test_a_dataset_that_is_missing_is_created_by_others(
    admin: Client, client: Callable[[str | None], Client], tmp_path: Path
) -> None:
    token = admin.create_token("robot", ["ingest:kitchen"]).token or ""
    with pytest.raises(Unauthorized, match=r"no dataset 'kitchen'.*stepwell datasets create kitc"):
        collect(collector(admin, token, tmp_path))
    robot = client(token)
    with pytest.raises(NotFound, match="stepwell datasets create"):
        robot.dataset("kitchen")
    (tmp_path / "x.npz").write_bytes(b"x")
    with pytest.raises(NotFound, match=r"no dataset 'kitchen'; an admin"):
        robot.upload("kitchen", tmp_path / "x.npz", create=True)
    assert admin.datasets() == [] == admin.runs()


def test_it_collects_records_and_goes_on_after_a_restart(
    admin: Client,
    client: Callable[[str | None], Client],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The same run, outbox and worker's reports; and nothing was refused on the way."""
    create_dataset(admin, tmp_path)
    made = admin.create_token("robot", ["ingest:kitchen"])
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        assert collect(collector(admin, made.token or "", tmp_path)).episodes == 3
    robot = client(made.token)
    with record(make(ENV), "kitchen", robot, outbox=tmp_path / "by-hand") as env:
        env.reset(seed=0)
        for _ in range(3):
            env.step(env.action_space.sample())
    run = robot.run("robot-7")
    assert (run.status, run.error, run.owner) == ("finished", "", made.id)
    assert run.latest, "its metrics came with the heartbeats"
    assert [r.name for r in robot.runs()] == ["robot-7"]
    assert {w.owner for w in robot.workers()} == {made.id}
    assert [d.name for d in robot.datasets()] == ["kitchen"]
    assert admin.dataset("kitchen").fifo.trajectories == 1 + 6 + 1
    assert "refused" not in caplog.text and "403" not in caplog.text, caplog.text
    posted = [e for e in admin.audit().items if (e.who, e.action) == (made.id, "trajectories.post")]
    assert sum(e.detail["trajectories"] for e in posted) == 7


def test_playing_and_scoring_a_policy_takes_the_scope_play(
    admin: Client, client: Callable[[str | None], Client], tmp_path: Path
) -> None:
    """Without it neither the policy is read, nor a score of it believed."""
    create_dataset(admin, tmp_path)
    admin.create_run("learner", "train")
    admin.publish_policy("learner", 1, policy_file(1))
    plain = admin.create_token("robot", ["ingest:kitchen"])
    player = admin.create_token("robot", ["ingest:kitchen", "play:learn*"])
    with pytest.raises(Unauthorized, match="play:learner"):
        collect(collector(admin, plain.token or "", tmp_path, policy="learner", run="a"))
    stats = collect(collector(admin, player.token or "", tmp_path, policy="learner", run="b"))
    assert stats.episodes == 3
    words: dict[str, Any] = {"env": ENV, "episodes": 2, "url": admin.url, "dataset": "kitchen"}
    words |= {"outbox": tmp_path / "scores", "policy": "learner/1"}
    config = EvaluateConfig(token=player.token or "", **words)
    _, notes = run_evaluation(config, Console(quiet=True), quiet=True)
    assert "undelivered" not in notes
    (score,) = admin.evaluations(policy="learner/1")
    assert (score.id, score.owner) == (notes["evaluation"], player.id)
    forged = {"seeds": [1], "returns": [999.0], "lengths": [5], "env": ENV, "policy": "learner/1"}
    forged |= dict.fromkeys(("mean", "iqm", "ci_low", "ci_high"), 999.0)
    robot = client(plain.token)
    for run in (None, "learner"):
        with pytest.raises(Unauthorized):
            robot.create_evaluation(**forged, run=run)


def test_what_a_process_with_another_token_left_does_not_stay(
    admin: Client, client: Callable[[str | None], Client], tmp_path: Path
) -> None:
    """The end of a run that is another's is set aside with the reason; it blocks nothing."""
    create_dataset(admin, tmp_path)
    old, new = (admin.create_token("robot", ["ingest:kitchen"]) for _ in range(2))
    collect(collector(admin, old.token or "", tmp_path))
    with pytest.raises(Unauthorized, match="not_owner"):
        collect(collector(admin, new.token or "", tmp_path))
    robot = client(new.token)
    box = Outbox(tmp_path / "left", robot, "kitchen", admin.spec("kitchen"))
    box._put("ending", "0", b'{"run": "robot-7", "status": "failed", "error": "", "at": 0}')
    assert box.flush(60.0) is True or box.rejected == 1
    assert "was made with another token" in box.undelivered()
    box.close(0.0)
    assert admin.run("robot-7").status == "finished"
