"""Children of a comparison: their locks, their logs, and how they are stopped."""

import os
import signal
import sys

import pytest

from stepwell.errors import StepwellError
from stepwell.testing import wait_until
from workbench import processes as processes
from workbench.processes import Processes, stop

WAIT = "import sys, time; print('begun', flush=True); time.sleep(600)"


@pytest.fixture
def children(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "STEPWELL", (sys.executable, "-c"))
    return Processes(tmp_path / "logs", {"STEPWELL_URL": "http://x"})


def test_a_job_is_locked_as_long_as_its_process_lives(children):
    """By the child: this parent has closed its file, as if it were gone."""
    assert not children.is_running("a")
    job = children.start("a", [WAIT])
    assert children.is_running("a") and not children.is_running("b")
    with pytest.raises(StepwellError, match="another process is at the job a"):
        children.start("a", [WAIT])
    os.kill(job.process.pid, signal.SIGKILL)
    job.process.wait()
    assert not children.is_running("a")
    assert job.reason() == "killed by SIGKILL"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import sys; print('x'); print('stepwell train: no data\\n'); sys.exit(1)", "no data"),
        ("print('at work', flush=True); import os; os._exit(3)", "exit status 3, after: at work"),
        ("raise SystemExit(1)", "exit status 1"),
        ("raise OSError('full')", "OSError: full"),
    ],
)
def test_the_reason_of_a_failure_is_the_last_line_of_its_log(children, code, reason):
    job = children.start("a", [code])
    assert job.process.wait() != 0
    assert job.reason() == reason


def test_children_share_our_session_and_not_our_ctrl_c(children):
    """Nice counts within a session only: Linux shares the machine between sessions (autogroup)."""
    job = children.start("a", [WAIT])
    assert os.getsid(job.process.pid) == os.getsid(0)
    assert os.getpgid(job.process.pid) == job.process.pid
    stop([job])


def test_children_get_the_service_and_a_log_that_grows(children):
    for _ in range(2):
        job = children.start("a", ["import os; print(os.environ['STEPWELL_URL'])"])
        assert job.process.wait() == 0
    text = job.log.read_text()
    assert text.count("http://x") == 2 and text.count("$ stepwell") == 2


def test_a_child_that_does_not_stop_is_killed(children):
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + WAIT
    jobs = [children.start("kind", [WAIT]), children.start("deaf", [deaf])]
    for job in jobs:
        wait_until(lambda job=job: "begun\n" in job.log.read_text(), 30, what="its start")
    stop(jobs, grace=0.5)
    assert [job.process.returncode for job in jobs] == [-signal.SIGTERM, -signal.SIGKILL]
