"""The calibration of fitted Q evaluation: its scores, and that it resumes."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from benchmarks import fitted_q
from trainer.offline_evaluation.estimate import RunEstimates
from trainer.offline_evaluation.fitted_q import Estimate


def test_scores_by_hand() -> None:
    assert fitted_q.ranks([3.0, 1.0, 3.0, 2.0]).tolist() == [2.5, 0.0, 2.5, 1.0]
    assert fitted_q.spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1.0)
    assert fitted_q.spearman([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(0.8)  # 1 - 6*2/(4*15)
    assert fitted_q.spearman([1, 1], [1, 2]) is None
    assert fitted_q.regret([0.0, 10.0, 7.0], 2) == pytest.approx(0.3)
    assert fitted_q.regret([1.0, 1.0], 0) is None


def test_a_second_call_repeats_nothing_and_a_new_evaluation_counts(tmp_path, monkeypatch) -> None:
    true = {1: 5.0, 2: 9.0, 3: 1.0}
    evaluations = {
        v: SimpleNamespace(id=f"ev_{v}", env="E", mean=r, ci_low=r - 1, ci_high=r + 1)
        for v, r in true.items()
    }
    run = SimpleNamespace(name="one", config={"recipe": "bc"})
    comparison = SimpleNamespace(
        runs=[run], dataset="d", versions=lambda name: evaluations if name == "one" else {}
    )
    asked: list[list[int]] = []

    def estimate_run(client, run, versions, **options):
        assert options["store"] is False
        asked.append(versions)
        found = {v: Estimate(float(v), v - 0.5, v + 0.5) for v in versions}
        return RunEstimates(run.name, 0.9, "sn", 4, 100, 0.5, found)

    def write(name, result):
        (tmp_path / f"{name}.json").write_text(json.dumps(result))

    monkeypatch.setattr(fitted_q, "read_comparison", lambda client, name: comparison)
    monkeypatch.setattr(fitted_q, "estimate_run", estimate_run)
    monkeypatch.setattr(fitted_q, "write", write)
    path = tmp_path / "fitted_q.json"
    for _ in range(2):
        fitted_q.measure(None, ["c"], 3, 1000, path)
    assert asked == [[1, 2, 3]]
    scores = json.loads(path.read_text())["runs"]["one"]
    assert scores["spearman"] == pytest.approx(-0.5) and scores["regret"] == scores["last"] == 1.0
    assert scores["best"] == 1.0  # the newest, as its interval is the highest
    evaluations[2] = SimpleNamespace(id="ev_new", env="E", mean=0.0, ci_low=0.0, ci_high=0.0)
    fitted_q.measure(None, ["c"], 3, 1000, path)
    assert asked[1:] == [[2]]
    fitted_q.measure(None, ["c"], 4, 1000, path)  # too few versions
    assert len(asked) == 2
