"""The comparison with nothing set: which tasks, which peers, and what never reached counts."""

from __future__ import annotations

from benchmarks.learn_checks import Check
from benchmarks.nothing_set import PEERS, TASKS, can_play, seconds_of, shown


def test_the_halves_are_as_large_and_each_has_tasks_with_memory() -> None:
    halves = {half: [t for t in TASKS if t.half == half] for half in ("chosen", "unseen")}
    assert [len(tasks) for tasks in halves.values()] == [8, 8]
    assert [sum(t.memory for t in tasks) for tasks in halves.values()] == [2, 2]


def test_a_peer_plays_what_its_algorithm_is_for() -> None:
    able = {t.env: [name for name in PEERS if can_play(name, t)] for t in TASKS}
    assert able["CartPole-v1"] == ["ppo", "dqn"] and able["Pendulum-v1"] == ["ppo", "sac"]
    assert able["stepwell/TMazePassive-v0"] == []


def test_never_counts_as_the_whole_time() -> None:
    runs = [{"reached": {"seconds": 20.0}}, {"reached": None}, {"reached": None}]
    assert seconds_of(runs, 600.0) == 600.0 and seconds_of(runs[:1], 600.0) == 20.0
    assert shown(runs) == "20, never, never"


def test_nothing_is_set() -> None:
    assert Check("k", "t", 1.0, 1.0, (), ("A-v0",), plain=True).common == []
