"""Parts of `stepwell run`: what breaks is started again, what cannot work is given up."""

import os
import signal
import subprocess
import sys

import pytest

from stepwell._parent import PARENT
from stepwell.testing import wait_until
from workbench import processes as processes
from workbench.processes import Processes
from workbench.run import supervisor as module
from workbench.run.supervisor import Part, PartFailed, Supervisor

WAIT = "import time; print('begun', flush=True); time.sleep(600)"


@pytest.fixture
def supervisor(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "STEPWELL", (sys.executable, "-c"))
    monkeypatch.setattr(module, "DELAY", 0.01)
    said = []
    supervisor = Supervisor(said.append)
    supervisor.said = said
    children = Processes(tmp_path / "logs", {})
    supervisor.part = lambda name, code: Part(name, [code], children)
    yield supervisor
    supervisor.stop(list(supervisor.parts), 0.1)


def test_a_killed_part_is_started_again_and_an_ended_one_is_not(supervisor):
    supervisor.add(supervisor.part("a", WAIT))
    supervisor.add(supervisor.part("b", "pass"))
    first = supervisor.parts["a"].job.process
    first.kill()

    def restarted():
        supervisor.tick()
        return supervisor.parts["a"].starts == 2 and supervisor.parts["b"].ended

    wait_until(restarted)
    assert supervisor.said == ["a broke (killed by SIGKILL); starting it again in 0.01 s"]
    assert supervisor.parts["b"].starts == 1
    supervisor.stop(["a"])
    assert supervisor.parts["a"].state == "ended"


def test_a_part_that_breaks_again_and_again_is_given_up(supervisor):
    supervisor.add(supervisor.part("a", "raise OSError('no room')"))

    def tick():
        supervisor.tick()

    with pytest.raises(PartFailed, match=r"a: OSError: no room \(its log: .*a.log\)"):
        wait_until(tick)
    assert supervisor.parts["a"].starts == module.ATTEMPTS


def test_an_evaluator_that_is_given_up_ends_nothing_else(supervisor):
    supervisor.add(supervisor.part("train", WAIT))
    supervisor.add(supervisor.part("evaluate", "raise OSError('no env')"))

    def given_up():
        supervisor.tick()
        return supervisor.parts["evaluate"].given_up

    wait_until(given_up)
    assert supervisor.parts["evaluate"].state == "broken"
    assert supervisor.parts["train"].state == "running"
    assert "OSError: no env" in supervisor.said[-1] and "without scores" in supervisor.said[-1]


def test_a_trainer_without_collectors_is_told(supervisor):
    """They were stopped from outside: data may come from elsewhere, or never."""
    supervisor.add(supervisor.part("train", WAIT))
    for number in range(2):
        supervisor.add(supervisor.part(f"collect-{number}", "pass"))

    def ended():
        supervisor.tick()
        return all(supervisor.parts[f"collect-{i}"].ended for i in range(2))

    wait_until(ended)
    assert len(supervisor.said) == 1 and "no collector is left" in supervisor.said[0]


def test_a_part_that_lived_long_gets_all_attempts_again(supervisor, monkeypatch):
    monkeypatch.setattr(module, "SOON", 0.0)
    supervisor.add(supervisor.part("a", "raise OSError('no room')"))

    def often():
        supervisor.tick()
        return supervisor.parts["a"].starts > module.ATTEMPTS

    wait_until(often)


def test_while_the_service_is_away_nothing_is_given_up(supervisor):
    supervisor.service_answers = lambda: False
    supervisor.add(supervisor.part("a", "raise OSError('no service')"))

    def often():
        supervisor.tick()
        return supervisor.parts["a"].starts > 2 * module.ATTEMPTS

    wait_until(often)
    assert supervisor.parts["a"].broke_soon == 0


def test_what_follows_another_part_is_not_done_before_it(supervisor):
    """An evaluator that finds the run of a restarting trainer "stopped" is needed again."""
    supervisor.add(supervisor.part("train", WAIT))
    follower = supervisor.part("evaluate", "pass")
    follower.follows = "train"
    supervisor.add(follower)
    wait_until(lambda: supervisor.tick() or follower.starts >= 3)
    assert not follower.ended and not supervisor.said
    supervisor.stop(["train"])
    wait_until(lambda: supervisor.tick() or follower.ended)


def test_a_stopped_evaluation_is_not_started_again(supervisor):
    supervisor.add(supervisor.part("evaluate", "import sys; sys.exit(130)"))
    wait_until(lambda: supervisor.tick() or supervisor.parts["evaluate"].ended)
    assert supervisor.parts["evaluate"].starts == 1


def test_all_are_killed_at_once(supervisor):
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + WAIT
    supervisor.add(supervisor.part("a", deaf))
    process = supervisor.parts["a"].job.process
    supervisor.kill()
    assert process.wait(240) == -signal.SIGKILL


def test_a_wrong_command_line_is_given_up_at_once(supervisor):
    supervisor.add(supervisor.part("a", "import sys; print('no such thing'); sys.exit(2)"))
    with pytest.raises(PartFailed, match="a: no such thing"):
        wait_until(supervisor.tick)
    assert supervisor.parts["a"].starts == 1


def test_a_part_of_an_earlier_run_is_waited_for(supervisor, monkeypatch):
    """It is there for too long here: another `stepwell run`, which is alive."""
    supervisor.add(supervisor.part("a", WAIT))
    monkeypatch.setattr(module, "STOP_GRACE", 0.1)
    with pytest.raises(PartFailed, match="a of another `stepwell run` still runs"):
        supervisor.add(supervisor.part("a", WAIT))


def test_a_process_ends_with_its_parent(tmp_path):
    """The parent is killed, so it cannot tell its child."""
    child = (
        "from stepwell._parent import end_with_parent; import os, time; end_with_parent(); "
        "print(os.getpid(), 'PARENT' in str(os.environ), flush=True); time.sleep(600)"
    )
    parent = (
        "import os, subprocess, sys, time; "
        f"subprocess.Popen([sys.executable, '-c', {child!r}], "
        f"env={{**os.environ, {PARENT!r}: str(os.getpid())}}); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid, kept = process.stdout.readline().split()
    assert kept == "False"  # its own children do not end with their grandparent
    process.kill()
    process.wait()
    process.stdout.close()
    wait_until(lambda: not _alive(int(pid)), 30, what="the end of the child")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_signals_are_named(supervisor):
    supervisor.add(supervisor.part("a", WAIT))
    supervisor.parts["a"].job.process.send_signal(signal.SIGTERM)
    wait_until(lambda: supervisor.tick() or supervisor.said)
    assert "killed by SIGTERM" in supervisor.said[0]
