"""What the service has not taken in the end is a failure that says so, and is sent by the next."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collector.collect import collect
from collector.control import Control
from collector.main import evaluate, main
from collector.record import record
from stepwell import Client, Undelivered, cli
from stepwell._outbox_folder import entries
from stepwell.errors import ServiceUnreachable
from stepwell.outbox import Outbox
from stepwell.testing import wait_until
from tests.collector.fake_env import FakeEnv

from .test_collect_real import collecting, settings, stored


@pytest.fixture
def mute(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The outbox keeps everything: as if the service had no time for it."""
    monkeypatch.setattr(Outbox, "_send_all", lambda _: None)
    return monkeypatch


def words(service: Any, name: str, tmp_path: Path) -> list[str]:
    return [
        *("--env", "CartPole-v1", "--dataset", name, "--random", "--episodes", "3"),
        *("--url", service.url, "--run", f"run-{name}", "--outbox", str(tmp_path / "out")),
    ]


def test_a_collector_that_leaves_episodes_behind_has_failed(
    service: Any, client: Client, name: str, tmp_path: Path, mute: Any, capsys: Any
) -> None:
    """Status 1, one line with reason and place, a failed run and worker; the next one sends."""
    given = words(service, name, tmp_path)
    assert main(given) == 1
    lines = capsys.readouterr().err.splitlines()
    (line,) = [text for text in lines if text.startswith("stepwell collect: ")]
    waiting = len(entries(tmp_path / "out"))
    assert waiting == 3 and line.startswith(f"stepwell collect: 3 trajectories for dataset {name}")
    assert "there was no time to send them" in line and str(tmp_path / "out") in line
    assert "Traceback" not in "".join(lines)
    run = client.run(f"run-{name}")
    assert run.status == "failed" and run.error and run.error in line
    (worker,) = [w for w in client.workers() if w.run == run.name]
    assert worker.state == "failed" and "no time to send" in worker.last_error
    mute.undo()
    given[given.index(str(tmp_path / "out"))] = str(tmp_path / "other")
    assert main(given) == 0
    assert "took over 3 items that waited in" in capsys.readouterr().err
    assert len(stored(client, name)) == 6 and client.run(run.name).status == "finished"


def test_the_service_hears_later_how_a_run_ended(
    fresh_service: Any, name: str, tmp_path: Path
) -> None:
    """Gone when the collector ends; the next collector brings the episodes and the ending."""
    client = fresh_service.client()
    config = settings(fresh_service, name, tmp_path, random=True, drain_timeout=0.5)
    with pytest.raises(Undelivered, match="not delivered"), collecting(config):
        wait_until(lambda: client.ready() and stored_of(client, name), 120, what="episodes")
        fresh_service.kill()
        wait_until(lambda: entries(tmp_path / "outbox"), 120, what="a growing outbox")
    left = {e.id for e in entries(tmp_path / "outbox") if e.kind == "arrow"}
    (ending,) = [e for e in entries(tmp_path / "outbox") if e.kind == "ending"]
    assert json.loads(ending.path.read_text())["status"] == "failed"
    fresh_service.restart()
    assert client.run(config.run).status == "running"
    other = settings(
        fresh_service,
        name,
        tmp_path,
        random=True,
        episodes=1,
        run="other",
        outbox=tmp_path / "second",
        drain_timeout=120.0,
    )
    collect(other)
    assert left <= {i.id for i in stored(client, name)} and not entries(tmp_path / "outbox")
    run = client.run(config.run)
    assert run.status == "failed" and "not delivered" in run.error


def stored_of(client: Client, name: str) -> bool:
    return any(d.name == name and d.fifo.trajectories for d in client.datasets())


def test_what_the_service_refused_is_not_delivered_either(
    service: Any, client: Client, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished run means that all of it is there."""
    settle = Outbox._settle

    def refuse(outbox: Outbox, group: Any, items: Any) -> None:
        problem = {"status": 422, "detail": "too odd"}
        outbox._reject(group[0], problem)
        settle(outbox, group[1:], items[1:])

    monkeypatch.setattr(Outbox, "_settle", refuse)
    config = settings(service, name, tmp_path, random=True, episodes=3)
    with pytest.raises(Undelivered, match=r"refused by the service \(too odd\): see"):
        collect(config, control=Control())
    assert client.run(config.run).status == "failed"


def test_episodes_above_the_limit_of_a_body_are_kept_named_and_sent_later(
    start_service: Callable[..., Any], name: str, tmp_path: Path, capsys: Any
) -> None:
    """Status 1 and what helps. With a higher limit they arrive, each once."""
    service = start_service(env={"STEPWELL_MAX_BODY": "1000"})
    given = words(service, name, tmp_path)
    assert main(given) == 1
    (line,) = [t for t in capsys.readouterr().err.splitlines() if t.startswith("stepwell collect:")]
    assert "3 trajectories refused by the service" in line
    assert "max_steps" in line and "STEPWELL_MAX_BODY" in line
    kept = entries(tmp_path / "out" / "rejected")
    assert len(kept) == 3 and str(tmp_path / "out" / "rejected") in line
    with service.client() as client:
        assert client.run(f"run-{name}").status == "failed" and not stored(client, name)
    service.env = {}
    service.restart()
    assert cli.main(["outbox", "send", "--retry-rejected", str(tmp_path / "out")]) == 0
    with service.client() as client:
        assert {t.id for t in stored(client, name)} == {e.id for e in kept}


def test_an_evaluation_that_leaves_episodes_behind_has_failed(
    service: Any, client: Client, name: str, tmp_path: Path, mute: Any, capsys: Any
) -> None:
    """The score is printed, and recorded; the next evaluation sends the episodes."""
    given = [*words(service, name, tmp_path), "--drain-timeout", "0.1"]
    assert evaluate([*given, "--json"]) == 1
    printed = capsys.readouterr()
    answer = json.loads(printed.out)
    assert len(answer["returns"]) == 3 and "not delivered" in answer["undelivered"]
    assert printed.err == f"stepwell evaluate: {answer['undelivered']}\n"
    assert client.run(f"run-{name}").status == "failed"
    assert client.evaluations(run=f"run-{name}")[0].id == answer["evaluation"]
    mute.undo()
    given[-1] = "120"
    assert evaluate(given) == 0
    assert client.dataset(name).eval.trajectories == 6
    assert client.run(f"run-{name}").status == "finished"


def test_a_score_that_could_not_be_recorded_is_told(
    service: Any, client: Client, name: str, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    def away(*_: object, **__: object) -> None:
        raise ServiceUnreachable("nobody there")

    monkeypatch.setattr(Client, "create_evaluation", away)
    assert evaluate(words(service, name, tmp_path)) == 1
    printed = capsys.readouterr()
    assert "mean return" in printed.out
    assert printed.err == "stepwell evaluate: the score was not recorded: nobody there\n"
    assert client.run(f"run-{name}").status == "failed"


def test_a_recording_that_leaves_episodes_behind_says_so(
    client: Client, name: str, tmp_path: Path, mute: Any
) -> None:
    def play() -> Any:
        env = record(FakeEnv((3,)), name, client, env_id="Fake-v0", outbox=tmp_path / "out")
        env.reset()
        env.step(np.int64(1))
        return env

    env = play()
    with pytest.raises(Undelivered, match="1 trajectory .* not delivered"):
        env.close(0.1)
    env.close(0.1)  # all is closed already
    mute.undo()
    play().close(120.0)
    assert len(stored(client, name)) == 2


@pytest.mark.parametrize("program", [main, evaluate])
def test_a_run_that_is_not_there_is_told_before_anything_loads(
    service: Any, client: Client, name: str, tmp_path: Path, capsys: Any, program: Any
) -> None:
    """With the nearest name, and no class name. That torch has not loaded: test_architecture."""
    client.create_run(f"learner-{name}", "train")
    given = words(service, name, tmp_path)
    given[given.index("--random") : given.index("--random") + 1] = ["--policy", f"lerner-{name}"]
    assert program(given) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"there is no run 'lerner-{name}'; did you mean 'learner-{name}'?" in line


def test_a_dataset_that_is_not_there_is_told_where_none_may_be_made(
    service: Any, client: Client, name: str, tmp_path: Path, capsys: Any
) -> None:
    from stepwell.testing import make_spec

    client.create_dataset(f"{name}-real", make_spec())
    assert main([*words(service, f"{name}-rael", tmp_path), "--no-create"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"did you mean '{name}-real'?; without --no-create" in line


def test_a_file_that_is_not_there_is_a_wrong_word(capsys: Any) -> None:
    assert evaluate(["--env", "CartPole-v1", "--file", "nowhere.safetensors"]) == 2
    assert "--file nowhere.safetensors: No such file or directory" in capsys.readouterr().err
