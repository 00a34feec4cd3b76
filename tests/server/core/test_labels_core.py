"""Labels of many trajectories: all change, or none."""

from __future__ import annotations

from typing import Any

import pytest

from stepwell.testing import make_trajectory
from tests.server.core.conftest import SPEC

PATH = "/v1/trajectories/labels"


@pytest.fixture
def ids(live: Any) -> list[str]:
    live.create()
    sent = [make_trajectory(SPEC, length=3, seed=i, tags=("old",)) for i in range(3)]
    live.post(sent)
    return [t.id for t in sent]


def _labels(live: Any) -> list[tuple[list[str], list[str], str]]:
    return [(i["tags"], i["flags"], i["partition"]) for i in live.listing(order="seq")]


def test_labels_are_added_and_taken_back(live: Any, ids: list[str]) -> None:
    body = {"ids": ids[:2], "add_tags": ["a", "old"], "remove_tags": ["old"], "add_flags": ["bad"]}
    assert live.http.post(PATH, json=body).json() == {"changed": 2}
    assert _labels(live)[:2] == 2 * [(["a", "old"], ["bad"], "fifo")]
    assert _labels(live)[2] == (["old"], [], "fifo")
    assert live.http.post(PATH, json={"ids": ids, "remove_flags": ["bad"]}).json() == {"changed": 2}
    assert [flags for _, flags, _ in _labels(live)] == [[], [], []]


def test_protected_ones_count_in_their_partition(live: Any, ids: list[str]) -> None:
    twice = {"ids": [ids[0], ids[0]], "protect": True}
    assert live.http.post(PATH, json=twice).json() == {"changed": 1}
    assert live.http.post(PATH, json=twice).json() == {"changed": 0}
    found = live.dataset()
    assert (found["protected"]["trajectories"], found["fifo"]["trajectories"]) == (1, 2)
    assert found["protected"]["steps"] == 3


def test_one_that_is_not_there_changes_none(live: Any, ids: list[str]) -> None:
    response = live.http.post(PATH, json={"ids": [*ids, "nobody"], "add_tags": ["a"]})
    assert (response.status_code, response.json()["code"]) == (404, "not_found")
    assert "nobody" in response.json()["detail"]
    assert all(tags == ["old"] for tags, _, _ in _labels(live))
    for bad in ({"ids": []}, {"ids": 10_001 * ["x"]}, {"ids": ids, "add_tags": [""]}):
        assert live.http.post(PATH, json=bad).status_code == 422
