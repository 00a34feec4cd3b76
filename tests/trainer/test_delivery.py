"""A run's metrics, log and policies reach the service: through outages, deaths and defects."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from amago_model import Agent, load_policy
from amago_model.config import Spaces
from stepwell import cli
from stepwell._files import TEMPORARY
from stepwell.errors import ServiceUnreachable, from_problem
from stepwell.heartbeat import Heartbeat
from stepwell.outbox import Outbox
from stepwell.testing import make_spec, wait_until
from trainer import publish as module
from trainer.errors import TrainerError
from trainer.publish import copy_path, publish
from trainer.recipes import recipe
from trainer.run_log import RunLog
from trainer.run_reporter import _open_outbox


def problem(status: int, code: str = "odd"):
    return from_problem({"status": status, "title": "odd", "code": code, "detail": "said so"})


@pytest.fixture
def service(fake):
    made = fake(None, [[3]])
    made.runs["r"] = {}
    return made


@pytest.fixture(scope="module")
def agents() -> list[Agent]:
    """Two, of other weights."""
    return [Agent(recipe("bc").agent, Spaces.of_spec(make_spec().to_json())) for _ in range(2)]


@pytest.fixture
def opened(service, tmp_path) -> Iterator[Callable[[], Outbox]]:
    """A function that opens the run's outbox, as each life of the run does."""
    made: list[Outbox] = []

    def open_one() -> Outbox:
        made.append(Outbox(tmp_path / "outbox", service, run="r", linger=0.01))
        return made[-1]

    yield open_one
    for outbox in made:
        outbox.close(0.0)


def publish_all(home: Path, outbox: Outbox, agent: Agent, *versions: int) -> None:
    for version in versions:
        about = {"run": "r", "number": version}
        publish(home, outbox, "r", agent, version, about, {"training": {"seed": 1}})


def copies(home: Path) -> set[str]:
    return {path.name for path in (home / "policies").iterdir()}


# --- policies -------------------------------------------------------------------------------------


def test_undelivered_policies_outlive_the_process_and_arrive_in_order(
    service, agents, opened, tmp_path
):
    """More than the copies that stay: the next life sends every one, oldest first."""
    service.down = True
    outbox = opened()
    publish_all(tmp_path, outbox, agents[0], *range(100, 1100, 100))
    assert not outbox.close(0.05) and outbox.pending == 10
    sent = []
    store = service.publish_policy

    def see(run: str, version: int, data: bytes, **about: object) -> None:
        store(run, version, data)
        sent.append((version, about))

    service.down, service.publish_policy = False, see
    assert opened().close(30.0)
    assert [version for version, _ in sent] == [*range(100, 1100, 100)]
    about = {"run": "r", "number": 400}
    assert sent[3][1] == {"step": 400, "metadata": about}
    kept = load_policy(service.published[400]).metadata
    assert (kept["step"], kept["extra"]) == (400, about | {"training": {"seed": 1}})
    assert copies(tmp_path) == {f"{version}.safetensors" for version in (800, 900, 1000)}
    assert copy_path(tmp_path, 900).read_bytes() == service.published[900]
    assert opened().close(0.0) and len(sent) == 10


@pytest.mark.parametrize("status", [400, 409, 413, 422])
def test_a_refused_policy_is_kept_aside_with_the_reason(
    service, agents, opened, tmp_path, caplog, status
):
    """It holds up none behind it; it is not sent again, by the next life neither."""
    store, asked = service.publish_policy, []

    def choosy(run: str, version: int, data: bytes, **about: object) -> None:
        asked.append(version)
        if version == 2:
            raise problem(status)
        store(run, version, data)

    service.publish_policy = choosy
    outbox = opened()
    publish_all(tmp_path, outbox, agents[0], 1, 2, 3)
    assert not outbox.close(30.0) and not outbox.trouble and not outbox.pending
    assert opened().close(5.0), "nothing waits for the next life"
    assert asked == [1, 2, 3] and sorted(service.published) == [1, 3]
    assert "rejected" in caplog.text and "said so" in caplog.text
    (kept,) = (tmp_path / "outbox/rejected").glob("*.policy")
    assert "said so" in json.loads(kept.with_suffix(".json").read_text())["detail"]
    assert kept.stat().st_size > 1000


@pytest.mark.parametrize("error", [problem(s) for s in (401, 403, 404, 408, 410, 429, 500, 503)])
def test_an_error_that_may_pass_is_retried(service, opened, error):
    """No rights today, no room, a service that forgot the run: tried again, and shown meanwhile."""
    store, refuse = service.log_metrics, threading.Event()
    refuse.set()

    def sometimes(run: str, points) -> int:
        if refuse.is_set():
            raise error
        return store(run, points)

    service.log_metrics = sometimes
    outbox = opened()
    outbox.put_metrics("r", 0, {"loss": 1.0})
    wait_until(lambda: "said so" in outbox.trouble)
    refuse.clear()
    assert outbox.flush(30.0) and not outbox.rejected
    wait_until(lambda: not outbox.trouble)
    assert service.metrics == {("loss", 0): 1.0}


def test_what_waits_is_not_overwritten_by_another_life(service, agents, opened, tmp_path):
    """As at the service: a version never changes. The same bytes again are the same policy."""
    service.down = True
    outbox = opened()
    publish_all(tmp_path, outbox, agents[0], 5)
    first = copy_path(tmp_path, 5).read_bytes()
    outbox.close(0.0)
    outbox = opened()
    publish_all(tmp_path, outbox, agents[1], 5)
    outbox.close(0.0)
    service.down = False
    assert opened().close(30.0) and service.published[5] == first


def test_a_full_disk_ends_the_run_with_what_to_do(opened, agents, tmp_path, monkeypatch):
    def full(path: Path):
        raise OSError(28, "No space left on device")

    outbox = opened()
    monkeypatch.setattr(module, "whole_file", full)
    with pytest.raises(TrainerError, match="r/7 cannot be written.*make room"):
        publish_all(tmp_path, outbox, agents[0], 7)


def test_the_newest_copies_stay_by_number_whatever_the_clock_said(opened, agents, tmp_path):
    """A clock put back makes the newest file look oldest; another's file is none of ours."""
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies/mine.safetensors").write_bytes(b"")
    outbox = opened()
    for version in range(1, 8):
        publish_all(tmp_path, outbox, agents[0], version)
        stamp = 2e9 - version
        os.utime(copy_path(tmp_path, version), (stamp, stamp))
    kept = {f"{version}.safetensors" for version in range(8 - module.KEPT, 8)}
    assert copies(tmp_path) == kept | {"mine.safetensors"}


LIFE = """
import sys
from pathlib import Path
from types import ModuleType
for name in ("amago_model.agent", "amago_model.policy_file"):  # torch takes seconds to load
    sys.modules[name] = ModuleType(name)
sys.modules["amago_model.agent"].Agent = object
sys.modules["amago_model.policy_file"].save_policy = lambda _, step, extra: b"policy %d" % step
from stepwell._files import remove_unfinished
from stepwell.errors import from_problem
from stepwell.outbox import Outbox
from trainer.publish import copy_path, publish
class Client:
    url = ""
    def with_options(self, **_):
        return self
    def publish_policy(self, run, version, data, **about):
        with open(sys.argv[2], "a") as file:
            file.write(f"{version} {data.decode()}\\n")
        if version == 2:
            raise from_problem({"status": 413, "title": "too large", "code": "too_large"})
home = Path(sys.argv[1])
outbox = Outbox(home / "outbox", Client(), run="r", linger=0.01)
remove_unfinished(home, home / "policies")
for version in (1, 2, 3):
    if not copy_path(home, version).exists():
        publish(home, outbox, "r", None, version, {}, {})
outbox.close(30.0)
sys.exit(outbox.pending)
"""


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "failpoint",
    [
        *("outbox.before_rename", "outbox.before_rename:2", "outbox.after_put:3"),
        *("policy.after_put", "policy.after_put:2", "policy.after_copy", "policy.after_copy:3"),
        *("outbox.after_answer", "outbox.after_answer:2", "outbox.after_unlink"),
        *("outbox.after_reason", "outbox.after_reject"),
    ],
)
def test_killed_anywhere_no_policy_is_lost(tmp_path, failpoint):
    """Each arrives with its bytes, in order, perhaps repeatedly; the refused one is aside."""
    home, sent = tmp_path / "run", tmp_path / "sent"
    command = [sys.executable, "-c", LIFE, str(home), str(sent)]
    env = {**os.environ, "STEPWELL_FAILPOINT": failpoint}
    assert subprocess.run(command, env=env, timeout=240).returncode == -9
    env.pop("STEPWELL_FAILPOINT")
    # The kill may also meet the sender while it writes why one was refused.
    rejected = home / "outbox/rejected"
    (rejected / f".2.json.0{TEMPORARY}").touch()
    assert subprocess.run(command, env=env, timeout=240).returncode == 0
    lines = sent.read_text().splitlines()
    assert list(dict.fromkeys(lines)) == [f"{v} policy {v}" for v in (1, 2, 3)]
    assert 3 <= len(lines) <= 5
    assert copies(home) == {f"{version}.safetensors" for version in (1, 2, 3)}
    assert [p.suffix for p in sorted(rejected.iterdir())] == [".json", ".policy"]
    assert not list(home.glob("outbox/*.policy"))


# --- the queue of a run ---------------------------------------------------------------------------


def test_one_process_has_a_run_s_folder(service, tmp_path):
    with _open_outbox(tmp_path, service, "r"):
        with pytest.raises(TrainerError, match=f"used by process {os.getpid()}; wait for it"):
            _open_outbox(tmp_path, service, "r")
    _open_outbox(tmp_path, service, "r").close(0.0)


def test_what_an_ended_run_keeps_is_sent_by_a_command(
    fresh_service, agents, tmp_path, capsys, monkeypatch
):
    """Metrics, log lines, policies and how it ended, of a run that ended during an outage."""
    monkeypatch.setenv("COLUMNS", "300")
    client = fresh_service.client()
    away = client.with_options()

    def down(*_: object, **__: object) -> None:
        raise ServiceUnreachable("away")

    for name in ("log_metrics", "publish_policy", "patch_run", "run_log", "ready"):
        setattr(away, name, down)
    client.create_run("kept", "train")
    home = tmp_path / "kept"
    outbox = _open_outbox(home, away, "kept")
    outbox.put_metrics("kept", 3, {"loss": 0.5})
    RunLog(home, outbox, "kept").write("it was dark")
    publish(home, outbox, "kept", agents[0], 3, {"run": "kept"}, {})
    outbox.end_run("kept", "finished")
    given = ["outbox", "send", str(home), "--url", client.url, "--timeout", "60"]
    assert cli.main(given) == 1
    said = capsys.readouterr().err
    assert "1 end of a run, 1 step of metrics, 1 log entry, 1 policy itself" in said
    assert not outbox.close(0.0)
    assert cli.main(["outbox", "list", str(tmp_path)]) == 0
    assert "run kept" in capsys.readouterr().out
    assert cli.main(given) == 0
    assert capsys.readouterr().out == "sent 4 items of 1 outbox\n"
    assert client.metrics("kept", ["loss"])["loss"].values == [0.5]
    assert "it was dark" in client.run_log("kept")
    assert client.download_policy("kept").data == copy_path(home, 3).read_bytes()
    assert client.run("kept").status == "finished"


# --- threads --------------------------------------------------------------------------------------


class Odd(Exception):
    """Nobody thought of this one."""


UNEXPECTED = [Odd("odd"), MemoryError("odd"), SystemExit("odd"), RecursionError("odd")]


@pytest.mark.parametrize("error", UNEXPECTED, ids=repr)
@pytest.mark.parametrize("which", ["metrics", "log", "policies", "heartbeat"])
def test_no_thread_of_a_run_dies_silently(service, agents, opened, tmp_path, caplog, which, error):
    """It shows in the run's trouble, the thread goes on, and in the end everything arrives."""
    throw = threading.Event()
    throw.set()

    def unless_told(real):
        def call(*args, **words):
            if throw.is_set():
                raise error
            return real(*args, **words)

        return call

    for name in ("log_metrics", "patch_run", "run_log", "publish_policy", "heartbeat"):
        setattr(service, name, unless_told(getattr(service, name)))
    part: Outbox | Heartbeat = opened()
    if which == "metrics":
        part.put_metrics("r", 0, {"loss": 1.0})
    elif which == "log":
        RunLog(tmp_path, part, "r").write("a line")
    elif which == "policies":
        publish_all(tmp_path, part, agents[0], 1)
    else:
        part = Heartbeat(service, "w", role="train", run="r", status=dict, every=0.01)
    wait_until(lambda: "odd" in part.trouble)
    wait_until(lambda: "a defect in the thread" in caplog.text)
    throw.clear()
    wait_until(lambda: not part.trouble)
    part.close()
    assert which == "heartbeat" or part.pending == 0


def test_a_worker_s_heartbeat_shows_the_trouble_of_its_threads(service):
    seen, trouble = [], ["metrics: odd"]

    def answer(worker: str, **fields: object) -> SimpleNamespace:
        seen.append(fields)
        return SimpleNamespace(command="none")

    service.heartbeat = answer
    beat = Heartbeat(
        *(service, "w"),
        role="train",
        run="r",
        status=lambda: {"last_error": trouble[0]},
        every=0.01,
    )
    wait_until(lambda: seen and seen[-1]["last_error"] == "metrics: odd")
    trouble[0] = ""
    wait_until(lambda: seen[-1]["last_error"] == "")
    beat.close(state="failed", last_error="it ended")
    assert (seen[-1]["state"], seen[-1]["last_error"]) == ("failed", "it ended")
    assert seen[-1]["pid"] == os.getpid() and seen[-1]["host"]


def test_changes_of_the_row_wait_for_the_service_and_never_for_the_caller(service, caplog):
    """The last one counts; one that the service refuses does not end the heartbeats."""
    service.down = True
    beat = Heartbeat(service, "w", role="train", run="r", status=dict, every=0.01)
    beat.change_run(snapshots=["a"])
    beat.change_run(snapshots=["a", "b"], notes="n")
    service.down = False
    wait_until(lambda: service.runs["r"].get("snapshots") == ["a", "b"])
    real = service.patch_run

    def choosy(name: str, **fields: object) -> None:
        if fields.get("notes") == "bad":
            raise problem(422)
        real(name, **fields)

    service.patch_run = choosy
    beat.change_run(notes="bad")
    wait_until(lambda: "the run's row cannot be changed" in caplog.text)
    beat.change_run(notes="good")
    wait_until(lambda: service.runs["r"]["notes"] == "good")
    beat.close()
    assert not logging.getLogger("trainer").handlers


def test_a_defect_in_the_numbers_does_not_silence_the_worker(service, caplog):
    seen: list[dict[str, object]] = []

    def answer(worker: str, **fields: object) -> SimpleNamespace:
        seen.append(fields)
        return SimpleNamespace(command="none")

    def status() -> dict[str, object]:
        raise Odd("odd")

    service.heartbeat = answer
    beat = Heartbeat(service, "w", role="collect", run="r", status=status, every=0.01)
    wait_until(lambda: len(seen) > 2)
    beat.close(state="failed")
    assert "a defect in the numbers of the heartbeat: odd" in str(seen[0]["last_error"])
    assert caplog.text.count("a defect in the numbers") == 1
