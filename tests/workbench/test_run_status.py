"""The screen of `stepwell run`: what it says about a part."""

from types import SimpleNamespace

from workbench.run.status import _of
from workbench.run.supervisor import Part


def _collector(*, ended):
    return Part(
        "collect-0", [], processes=None, pid=7, ended=ended, job=None if ended else object()
    )


def test_a_collector_that_has_ended_keeps_its_counts(client):
    counters = {"episodes": 1, "env_steps": 30, "steps_per_second": 5.0}
    assert _of(client, None, _collector(ended=False)) == ("running", "starting")
    assert _of(client, None, _collector(ended=True)) == ("ended", "")
    beat = {"role": "collect", "pid": 7, "counters": counters, "policy": "cue/3"}
    client.heartbeat("w", **beat)
    playing = ("running", "1 episode, 30 steps, 5/s, cue/3")
    assert _of(client, None, _collector(ended=False)) == playing
    client.heartbeat("w", **beat, state="stopped")
    assert _of(client, None, _collector(ended=False)) == ("running", "starting")
    assert _of(client, None, _collector(ended=True))[1] == "1 episode, 30 steps, cue/3"


def test_an_evaluation_without_end_is_told(client, name):
    part = Part("evaluate", [], processes=None, pid=8, job=object())
    plan = SimpleNamespace(run=name, env=name)
    assert _of(client, plan, part) == ("running", "no version scored yet")
    beat = {"role": "eval", "pid": 8, "last_error": "no episode has ended for 10,000 steps"}
    client.heartbeat(f"{name}-w", **beat)
    assert _of(client, plan, part)[1] == f"no version scored yet, {beat['last_error']}"
