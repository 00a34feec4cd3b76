"""What a run has to say reaches the service: through outages, deaths, damage and defects."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from amago_model import Agent
from stepwell._files import TEMPORARY
from stepwell.errors import InvalidData, ServiceUnreachable, from_problem
from stepwell.testing import make_spec, wait_until
from trainer import publish
from trainer.data.fields import spaces_of
from trainer.delivery import _cut_torn_line, is_final, take_folder
from trainer.errors import TrainerError
from trainer.metrics import Heartbeat, MetricLog
from trainer.publish import Publisher
from trainer.recipes import bc
from trainer.run_log import RunLog


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
    return [Agent(bc().agent, spaces_of(make_spec())) for _ in range(2)]


# ----------------------------------------------------------------------------------------- lines

LINE = '{{"key": "loss", "step": {step}, "value": 1.5, "time": 2.0}}\n'
DAMAGE = {
    "no JSON": b"\x00\x00\x00\n",
    "half a line": b'{"key": "loss", "st\n',
    "not UTF-8": b'{"key": "\xff\xfe", "step": 1, "value": 0, "time": 0}\n',
    "no object": b"[1, 2]\n",
    "empty": b"\n",
    "a key is missing": b'{"key": "loss", "step": 1}\n',
    "a key too many": b'{"key": "a", "step": 1, "value": 0, "time": 0, "more": 0}\n',
    "deep": b"[" * 100_000 + b"\n",
    "a number that is none": b'{"key": "loss", "step": "x", "value": 0, "time": 0}\n',
    "a number too large": b'{"key": "loss", "step": 1e300, "value": 0, "time": 0}\n',
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("at", [0, 3, 6])
def test_a_line_that_does_not_read_is_set_aside_and_the_rest_delivered(
    service, tmp_path, caplog, damage, at
):
    """In front, in the middle, at the end: every other point arrives, and more after it."""
    lines = [LINE.format(step=step).encode() for step in range(6)]
    lines.insert(at, damage)
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines))
    log = MetricLog(tmp_path, service, "r", every=0.01)
    log.log(6, {"loss": 1.5})
    assert log.close(30.0) and not log.trouble
    assert service.metrics == {("loss", step): 1.5 for step in range(7)}
    (kept,) = [json.loads(x) for x in (tmp_path / "metrics.refused").read_text().splitlines()]
    assert kept["line"] == damage.decode(errors="replace").rstrip("\n")
    assert "does not read" in kept["reason"]
    assert "1 of the run's metrics cannot be delivered" in caplog.text


def test_of_a_refused_group_only_the_culprit_is_set_aside(service, tmp_path):
    """A request is refused whole: it is halved until the points are found that cannot be taken."""
    store, bodies = service.log_metrics, []

    def choosy(run: str, points) -> int:
        bodies.append(len(points))
        if any(point.key == "bad" for point in points):
            raise problem(422)
        return store(run, points)

    service.log_metrics = choosy
    lines = [LINE.format(step=step) for step in range(100)]
    for at in (17, 80):
        lines[at] = lines[at].replace("loss", "bad")
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    log = MetricLog(tmp_path, service, "r", every=0.01)
    assert log.close(30.0)
    assert sorted(step for _, step in service.metrics) == sorted({*range(100)} - {17, 80})
    refused = (tmp_path / "metrics.refused").read_text().splitlines()
    assert [json.loads(json.loads(x)["line"])["step"] for x in refused] == [17, 80]
    assert len(bodies) < 40 and all("said so" in x for x in refused)


@pytest.mark.parametrize("error", [problem(s) for s in (401, 403, 404, 408, 410, 429, 500, 503)])
def test_what_may_pass_is_not_set_aside(service, tmp_path, error):
    """No rights today, no room, a service that forgot the run: asked again, and shown meanwhile."""
    store, refuse = service.log_metrics, threading.Event()
    refuse.set()

    def sometimes(run: str, points) -> int:
        if refuse.is_set():
            raise error
        return store(run, points)

    service.log_metrics = sometimes
    log = MetricLog(tmp_path, service, "r", every=0.01)
    log.log(0, {"loss": 1.0})
    wait_until(lambda: "said so" in log.trouble)
    refuse.clear()
    assert log.close(30.0) and not log.trouble
    assert service.metrics == {("loss", 0): 1.0} and not (tmp_path / "metrics.refused").exists()


def test_what_asking_again_would_not_change():
    assert [s for s in (400, 401, 404, 409, 413, 415, 422, 429, 500, 507) if is_final(problem(s))]
    assert {s for s in range(400, 600) if is_final(problem(s))} >= {400, 409, 413, 415, 422}
    assert not any(is_final(problem(s)) for s in (401, 403, 404, 408, 410, 429, 500, 503, 507))
    assert is_final(InvalidData("odd")) and not is_final(ServiceUnreachable("away"))
    assert not is_final(OSError("disk")) and not is_final(ValueError("defect"))


def test_a_torn_line_is_cut_however_long_the_file(tmp_path):
    path = tmp_path / "lines"
    for whole in (b"", b"one\n", b"x" * 200_000 + b"\n", b"\n"):
        for torn in (b"", b"half", b"y" * 150_000):
            path.write_bytes(whole + torn)
            _cut_torn_line(path)
            assert path.read_bytes() == whole
    _cut_torn_line(tmp_path / "none")


def test_refused_log_lines_are_set_aside_without_another_line_about_it(service, tmp_path):
    """Else each warning would be the next line that is refused."""

    def refuse(name: str, **fields: object) -> None:
        raise problem(422)

    service.patch_run = refuse
    log = RunLog(tmp_path, service, "r", every=0.01)
    log.write("odd")
    assert log.close(30.0)
    (refused,) = (tmp_path / "run.refused").read_text().splitlines()
    assert json.loads(refused)["line"].endswith(" odd")


# -------------------------------------------------------------------------------------- policies


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "policies"


def publish_all(service, folder: Path, agent: Agent, *versions: int) -> Publisher:
    publisher = Publisher(folder, service, "r", every=0.01)
    for version in versions:
        publisher.publish(agent, version, {"run": "r", "number": version}, {})
    return publisher


def names(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def test_undelivered_policies_outlive_the_process_and_arrive_in_order(service, agents, folder):
    """More than the files that stay: the next life sends every one, oldest first."""
    service.down = True
    publisher = publish_all(service, folder, agents[0], *range(100, 1100, 100))
    assert not publisher.close(0.05) and publisher.waiting == [*range(100, 1100, 100)]
    assert len(list(folder.glob("*.safetensors"))) == 10
    sent = []
    store = service.publish_policy

    def see(run: str, version: int, data: bytes, **about: object) -> None:
        store(run, version, data)
        sent.append((version, about))

    service.down, service.publish_policy = False, see
    again = Publisher(folder, service, "r", every=0.01)
    assert again.close(30.0) and again.unsent == 0
    assert [version for version, _ in sent] == [*range(100, 1100, 100)]
    assert sent[3][1] == {"step": 400, "metadata": {"run": "r", "number": 400}}
    assert names(folder) == {f"{version}.safetensors" for version in (800, 900, 1000)}
    assert (folder / "900.safetensors").read_bytes() == service.published[900]
    assert Publisher(folder, service, "r").close(0.0) and len(sent) == 10


@pytest.mark.parametrize("status", [400, 409, 413, 422])
def test_a_refused_policy_is_kept_aside_with_the_reason(service, agents, folder, caplog, status):
    """And holds up none behind it; nobody asks again, not the next life either."""
    store, asked = service.publish_policy, []

    def choosy(run: str, version: int, data: bytes, **about: object) -> None:
        asked.append(version)
        if version == 2:
            raise problem(status)
        store(run, version, data)

    service.publish_policy = choosy
    publisher = publish_all(service, folder, agents[0], 1, 2, 3)
    assert publisher.close(30.0) and not publisher.trouble
    assert Publisher(folder, service, "r").close(5.0)
    assert asked == [1, 2, 3] and sorted(service.published) == [1, 3]
    assert "policy r/2 cannot be delivered" in caplog.text
    assert "said so" in json.loads((folder / "refused/2.json").read_text())["reason"]
    assert (folder / "refused/2.safetensors").stat().st_size > 1000


def test_a_policy_that_the_disk_changed_is_never_sent(service, agents, folder):
    service.down = True
    publish_all(service, folder, agents[0], 1, 2, 3, 4).close(0.0)
    data = bytearray((folder / "1.safetensors").read_bytes())
    data[-7] ^= 4
    (folder / "1.safetensors").write_bytes(data)
    (folder / "2.json").write_text("[]")
    (folder / "3.safetensors").unlink()
    service.down = False
    assert Publisher(folder, service, "r", every=0.01).close(30.0)
    assert sorted(service.published) == [4]
    assert names(folder / "refused") == {
        *("1.json", "1.safetensors", "2.json", "2.safetensors"),
    }


def test_the_queue_is_bounded_and_the_newest_stay(service, agents, folder, monkeypatch, caplog):
    """An outage without end fills no disk: the oldest go, and it is said which."""
    service.down = True
    size = Publisher(folder / "one", None, "r").publish(agents[0], 1, {}, {})
    size = (folder / "one/1.safetensors").stat().st_size
    monkeypatch.setattr(publish, "MOST_WAITING", 4 * size + size // 2)
    publisher = publish_all(service, folder / "all", agents[0], *range(10, 30))
    assert not publisher.close(0.0) and publisher.waiting == [26, 27, 28, 29]
    assert caplog.text.count("goes undelivered") == 16
    assert len(names(folder / "all")) <= 2 * 4 + publish.KEPT
    service.down = False
    assert Publisher(folder / "all", service, "r", every=0.01).close(30.0)
    assert sorted(service.published) == [26, 27, 28, 29]


def test_what_waits_is_not_overwritten_by_another_life(service, agents, folder, caplog):
    """As at the service: a version never changes. The same bytes again are the same policy."""
    service.down = True
    publish_all(service, folder, agents[0], 5).close(0.0)
    first = (folder / "5.safetensors").read_bytes()
    publisher = publish_all(service, folder, agents[1], 5)
    assert "r/5 waits with other bytes already" in caplog.text
    publisher.close(0.0)
    service.down = False
    again = publish_all(service, folder, agents[0], 5)
    assert again.close(30.0) and service.published[5] == first


def test_a_full_disk_ends_the_run_with_what_to_do(service, agents, folder, monkeypatch):
    def full(path: Path):
        raise OSError(28, "No space left on device")

    publisher = Publisher(folder, service, "r")
    monkeypatch.setattr(publish, "whole_file", full)
    with pytest.raises(TrainerError, match="r/7 cannot be written.*make room"):
        publisher.publish(agents[0], 7, {}, {})
    assert publisher.close(5.0)


LIFE = """
import sys, time
from pathlib import Path
from stepwell.errors import from_problem
from trainer.publish import Publisher
from types import SimpleNamespace
sys.modules["amago_model.policy_file"] = SimpleNamespace(  # torch takes seconds to load
    save_policy=lambda agent, step, extra: b"policy %d" % step
)
class Client:
    def publish_policy(self, run, version, data, **about):
        with open(sys.argv[2], "a") as file:
            file.write(f"{version} {data.decode()}\\n")
        if version == 2:
            raise from_problem({"status": 413, "title": "too large", "code": "too_large"})
publisher = Publisher(Path(sys.argv[1]), Client(), "r", every=0.01)
for version in (1, 2, 3):
    if not publisher.has(version):
        publisher.publish(None, version, {}, {})
    publisher.close(30.0) if version == 3 else None
"""


@pytest.mark.parametrize(
    "failpoint",
    [
        *("policy.after_note", "policy.after_note:2", "policy.after_file", "policy.after_file:3"),
        *("policy.after_answer", "policy.after_answer:2"),
        *("policy.after_reason", "policy.after_refusal"),
    ],
)
def test_killed_anywhere_no_policy_is_lost(tmp_path, failpoint):
    """Each arrives with its bytes, in order, perhaps twice; the refused one is aside."""
    folder, sent = tmp_path / "policies", tmp_path / "sent"
    command = [sys.executable, "-c", LIFE, str(folder), str(sent)]
    env = {**os.environ, "STEPWELL_FAILPOINT": failpoint}
    assert subprocess.run(command, env=env, timeout=120).returncode == -9
    env.pop("STEPWELL_FAILPOINT")
    # The kill may also meet the sender while it writes why one was refused.
    (folder / "refused").mkdir(parents=True, exist_ok=True)
    (folder / "refused" / f".2.json.0{TEMPORARY}").touch()
    assert subprocess.run(command, env=env, timeout=120).returncode == 0
    lines = sent.read_text().splitlines()
    assert list(dict.fromkeys(lines)) == [f"{v} policy {v}" for v in (1, 2, 3)]
    assert 3 <= len(lines) <= 4
    assert names(folder) == {
        *("1.safetensors", "3.safetensors", "refused/2.json", "refused/2.safetensors")
    }


def test_killed_while_lines_are_set_aside_nothing_is_lost(service, tmp_path):
    """They may be aside twice; the points around them arrive."""
    lines = [LINE.format(step=0), "odd\n", LINE.format(step=1)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    code = (
        "import sys; from pathlib import Path; from trainer.metrics import MetricLog\n"
        "class Client:\n"
        "    def log_metrics(self, run, points): pass\n"
        "MetricLog(Path(sys.argv[1]), Client(), 'r', every=.01).close(60.0)\n"
    )
    env = {**os.environ, "STEPWELL_FAILPOINT": "delivery.after_refused_lines"}
    died = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=env, timeout=120)
    assert died.returncode == -9
    assert MetricLog(tmp_path, service, "r", every=0.01).close(30.0)
    assert sorted(service.metrics) == [("loss", 0), ("loss", 1)]
    refused = (tmp_path / "metrics.refused").read_text().splitlines()
    assert [json.loads(x)["line"] for x in refused] == ["odd", "odd"]


# --------------------------------------------------------------------------------------- threads


class Odd(Exception):
    """Nobody thought of this one."""


UNEXPECTED = [Odd("odd"), MemoryError("odd"), SystemExit("odd"), RecursionError("odd")]


@pytest.mark.parametrize("error", UNEXPECTED, ids=repr)
@pytest.mark.parametrize("which", ["metrics", "log", "policies", "heartbeat"])
def test_no_thread_of_a_run_dies_silently(service, agents, tmp_path, caplog, which, error):
    """It shows in the run's trouble, the thread goes on, and in the end everything arrives."""
    throw = threading.Event()
    throw.set()

    def unless_told(real):
        def call(*args, **words):
            if throw.is_set():
                raise error
            return real(*args, **words)

        return call

    for name in ("log_metrics", "patch_run", "publish_policy", "heartbeat"):
        setattr(service, name, unless_told(getattr(service, name)))
    if which == "metrics":
        part = MetricLog(tmp_path, service, "r", every=0.01)
        part.log(0, {"loss": 1.0})
    elif which == "log":
        part = RunLog(tmp_path, service, "r", every=0.01)
        part.write("a line")
    elif which == "policies":
        part = publish_all(service, tmp_path, agents[0], 1)
    else:
        part = Heartbeat(service, "w", {"run": "r"}, dict, every=0.01)
    wait_until(lambda: "odd" in part.trouble)
    wait_until(lambda: "a defect in the thread" in caplog.text)
    throw.clear()
    wait_until(lambda: not part.trouble)
    part.close()
    assert which == "heartbeat" or part.unsent == 0


def test_a_worker_s_heartbeat_shows_the_trouble_of_its_threads(service):
    seen, trouble = [], ["metrics: odd"]

    def answer(worker: str, **fields: object) -> SimpleNamespace:
        seen.append(fields)
        return SimpleNamespace(command="none")

    service.heartbeat = answer
    beat = Heartbeat(service, "w", {"run": "r"}, dict, every=0.01, trouble=lambda: trouble[0])
    wait_until(lambda: seen and seen[-1]["last_error"] == "metrics: odd")
    trouble[0] = ""
    wait_until(lambda: seen[-1]["last_error"] == "")
    beat.close(state="failed", last_error="it ended")
    assert (seen[-1]["state"], seen[-1]["last_error"]) == ("failed", "it ended")


def test_changes_of_the_row_wait_for_the_service_and_never_for_the_caller(service, caplog):
    """The last one counts; one that the service refuses does not end the heartbeats."""
    service.down = True
    beat = Heartbeat(service, "w", {"run": "r"}, dict, every=0.01)
    beat.change_row(snapshots=["a"])
    beat.change_row(snapshots=["a", "b"], notes="n")
    service.down = False
    wait_until(lambda: service.runs["r"].get("snapshots") == ["a", "b"])
    real = service.patch_run

    def choosy(name: str, **fields: object) -> None:
        if fields.get("notes") == "bad":
            raise problem(422)
        real(name, **fields)

    service.patch_run = choosy
    beat.change_row(notes="bad")
    wait_until(lambda: "the run's row cannot be changed" in caplog.text)
    beat.change_row(notes="good")
    wait_until(lambda: service.runs["r"]["notes"] == "good")
    beat.close()


def test_one_process_has_a_run_s_folder(tmp_path):
    with take_folder(tmp_path, "r"):
        with pytest.raises(TrainerError, match=f"used by process {os.getpid()}"):
            take_folder(tmp_path, "r")
    take_folder(tmp_path, "r").close()
    shutil.rmtree(tmp_path)
    assert not logging.getLogger("trainer").handlers


def test_the_newest_policies_stay_by_number_whatever_the_clock_said(service, agents, folder):
    """A clock put back makes the newest file look oldest; another's file is none of ours."""
    folder.mkdir()
    (folder / "mine.safetensors").write_bytes(b"")
    for version in range(1, 8):
        publisher = Publisher(folder, service, "r", every=0.01)
        publisher.publish(agents[0], version, {}, {})
        assert publisher.close(30.0)
        stamp = 2e9 - version
        os.utime(folder / f"{version}.safetensors", (stamp, stamp))
    kept = {f"{version}.safetensors" for version in range(8 - publish.KEPT, 8)}
    assert {path.name for path in folder.glob("*.safetensors")} == kept | {"mine.safetensors"}
