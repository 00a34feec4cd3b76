"""Ratios of samples to inserted steps: who waits for whom, changed while both run, for one that is
gone nobody waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.registry import consumers
from stepwell.testing import make_trajectory
from tests.server.core.conftest import SPEC, Live

RATIO = {
    "samples_per_insert": 0.5,
    "buffer": 20.0,
    "min_size": 100,
    "min_samples_per_insert": None,
}


def put(live: Live, samples: int, ratio: dict[str, float] | None = None, name: str = "r") -> Any:
    body = {"samples": samples} | ({"ratio": ratio} if ratio else {})
    return live.http.put(f"/v1/datasets/d/consumers/{name}", json=body).raise_for_status().json()


def insert(live: Live, *lengths: int, purpose: str = "train", **params: str) -> None:
    made = [make_trajectory(SPEC, length=n, purpose=purpose) for n in lengths]
    assert {status for status, _ in live.post(made, **params)} == {"stored"}


def until(answer: dict[str, Any]) -> tuple[int, int]:
    return answer["samples_until"], answer["inserts_until"]


def test_each_side_may_be_ahead_by_the_buffer(live: Live) -> None:
    """As Reverb's SampleToInsertRatio: d = 0.5 (inserts - 100) - samples, from -20 to 20."""
    live.create()
    assert until(put(live, 0, RATIO)) == (0, 140)
    insert(live, 60)
    assert not put(live, 0)["may_sample"], "60 of 100 steps"
    insert(live, 30, 10, partition="protected")
    insert(live, 500, purpose="eval")
    answer = put(live, 0)
    assert answer["inserted"] == 100 and until(answer) == (20, 140)
    assert answer["may_sample"] and answer["may_insert"]
    answer = put(live, 20)
    assert not answer["may_sample"] and until(answer) == (20, 180)
    insert(live, 80)
    answer = put(live, 20)
    assert answer["may_sample"] and not answer["may_insert"] and until(answer) == (60, 180)
    assert put(live, 21)["may_insert"]


def test_eviction_takes_no_insert_back(live: Live) -> None:
    live.create(capacity={"steps": 50})
    put(live, 0, RATIO)
    insert(live, 50)
    insert(live, 50)
    assert live.dataset()["fifo"]["steps"] == 50
    assert put(live, 0)["inserted"] == 100 and put(live, 0)["may_sample"]


def test_what_was_there_before_makes_nobody_wait(live: Live) -> None:
    """A run that begins on 5,000 steps neither draws 2,500 windows at once nor stops collectors."""
    live.create()
    insert(live, 5000)
    answer = put(live, 0, RATIO)
    assert until(answer) == (20, 5040) and answer["may_sample"] and answer["may_insert"]
    assert until(put(live, 900, RATIO, name="resumed")) == (920, 5040), "the index was rebuilt"


def test_a_run_that_begins_again_under_its_name_begins_again(live: Live) -> None:
    live.create()
    insert(live, 200)
    put(live, 0, RATIO)
    put(live, 20)
    assert until(put(live, 10)) == (20, 260), "resumed from an older checkpoint: as before"
    assert until(put(live, 0, RATIO)) == (20, 240)


def test_a_ratio_changed_on_the_way_holds_from_there_on(live: Live) -> None:
    live.create()
    insert(live, 300)
    put(live, 0, RATIO)
    put(live, 15)
    path = "/v1/datasets/d/consumers/r"
    answer = live.http.patch(path, json={"samples_per_insert": 2.0, "buffer": 8}).json()
    assert answer["ratio"] == {**RATIO, "samples_per_insert": 2.0, "buffer": 8.0}
    assert until(answer) == (23, 304)
    assert until(put(live, 15)) == (23, 304), "it stays"
    assert until(put(live, 15, answer["ratio"])) == (23, 304), "the same again changes nothing"
    assert until(live.http.patch(path, json={"min_size": 400}).json()) == (0, 404)


def test_between_two_ratios_nobody_waits(live: Live) -> None:
    """Collectors go on until the lower one; from a change on, both count anew."""
    live.create()
    put(live, 0, RATIO | {"min_samples_per_insert": 0.1})
    insert(live, 250)
    assert until(put(live, 0)) == (95, 300), "0.5 x 150 + 20; 100 + 20 / 0.1"
    answer = put(live, 30)
    assert until(answer) == (95, 600) and answer["may_sample"] and answer["may_insert"]
    path = "/v1/datasets/d/consumers/r"
    answer = live.http.patch(path, json={"min_samples_per_insert": 0.2}).json()
    assert until(answer) == (50, 350), "neither side is ahead: 30 + 20; 250 + 20 / 0.2"


def test_extreme_ratios_have_answers(live: Live) -> None:
    live.create()
    slow = {"samples_per_insert": 1e-9, "buffer": 1e15, "min_size": 2**53}
    assert until(put(live, 2**53, slow)) == (0, 2**53)
    fast = {"samples_per_insert": 1e9, "buffer": 1e15, "min_size": 1}
    insert(live, 100)
    assert put(live, 2**53, fast)["samples_until"] == 2**53


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"buffer": 0.5}, "buffer: expected at least max(1, samples_per_insert) = 1, got 0.5"),
        ({"samples_per_insert": 30.0}, "max(1, samples_per_insert) = 30, got 20"),
        ({"min_samples_per_insert": 0.6}, "at most samples_per_insert = 0.5, got 0.6"),
        ({"samples_per_insert": 0.0}, "greater than or equal to 0.000000001"),
        ({"samples_per_insert": 2e-310}, "greater than or equal to 0.000000001"),
        ({"min_size": 0}, "greater than or equal to 1"),
        ({"size": 1}, "Extra inputs"),
    ],
)
def test_a_ratio_that_cannot_be_kept_is_refused_by_name(
    live: Live, change: dict[str, float], said: str
) -> None:
    live.create()
    put(live, 0, RATIO)
    path = "/v1/datasets/d/consumers/r"
    for response in (
        live.http.patch(path, json=change),
        live.http.put(path, json={"samples": 0, "ratio": RATIO | change}),
    ):
        assert response.status_code == 422 and said in response.json()["detail"], response.text
    assert put(live, 0)["ratio"] == RATIO


def test_names_that_are_not_there_are_not_found(live: Live) -> None:
    live.create()
    for method, body in (("put", {"samples": 1}), ("patch", {"buffer": 30})):
        response = getattr(live.http, method)("/v1/datasets/d/consumers/r", json=body)
        assert (response.status_code, response.json()["code"]) == (404, "not_found")
    assert live.http.delete("/v1/datasets/d/consumers/r").status_code == 404
    assert live.http.get("/v1/datasets/e/consumers").status_code == 404


def test_the_list_has_all_until_they_are_deleted(live: Live) -> None:
    live.create()
    live.create("e")
    for name in ("b", "a", "c"):
        put(live, 3, RATIO, name=name)
    page = live.http.get("/v1/datasets/d/consumers?limit=2").json()
    rest = live.http.get(f"/v1/datasets/d/consumers?cursor={page['next']}").json()
    assert [c["name"] for c in page["items"] + rest["items"]] == ["a", "b", "c"]
    assert live.http.delete("/v1/datasets/d/consumers/b").status_code == 204
    assert len(live.http.get("/v1/datasets/d/consumers").json()["items"]) == 2
    assert live.http.get("/v1/datasets/e/consumers").json()["items"] == []
    assert live.http.delete("/v1/datasets/d").status_code == 204


def test_one_that_is_silent_is_not_alive(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    live.create()
    assert put(live, 0, RATIO)["alive"]
    monkeypatch.setattr(consumers, "ALIVE_SECONDS", 0.0)
    assert not live.http.get("/v1/datasets/d/consumers").json()["items"][0]["alive"]


def test_a_restart_forgets_neither_ratio_nor_inserts(start: Callable[..., Live]) -> None:
    live = start()
    live.create()
    put(live, 0, RATIO)
    insert(live, 120)
    before = put(live, 7)
    after = put(start(), 7)
    assert {k: v for k, v in after.items() if k != "updated_at"} == {
        k: v for k, v in before.items() if k != "updated_at"
    }


@settings(max_examples=40, deadline=None)
@given(
    per_insert=st.floats(0.01, 50),
    batch=st.integers(1, 64),
    spare=st.floats(1, 4),
    share=st.none() | st.floats(0.01, 1),
    min_size=st.integers(1, 300),
    before=st.integers(0, 500),
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=8),
)
def test_both_sides_never_wait_for_each_other(
    per_insert: float,
    batch: int,
    spare: float,
    share: float | None,
    min_size: int,
    before: int,
    lengths: list[int],
) -> None:
    """A trainer of whole batches and collectors of whole episodes, as greedy as they may be: one of
    them can always go on, and the ratio, or that of collectors, is kept to the buffer and what is
    done at once."""
    buffer = max(1.0, per_insert, batch) * spare
    least = per_insert * (share or 1.0)
    samples, inserted = 0, before
    base = inserted - min(inserted, min_size)
    row = {"samples_per_insert": per_insert, "buffer": buffer, "min_size": min_size, "base": base}
    row |= {"min_samples_per_insert": share and least, "min_base": base}
    for turn in range(60):
        found = consumers.limits(row, samples, inserted)
        may_draw, may_begin = samples + batch <= found[0], inserted < found[1]
        assert may_draw or may_begin
        steps = inserted - base - min_size
        most = buffer + least * (max(lengths) + 1)
        assert -buffer - 1 <= per_insert * steps - samples or inserted < min_size
        assert least * steps - samples <= most or inserted < min_size
        if may_draw and (turn % 3 or not may_begin):
            samples += batch
        elif may_begin:
            inserted += lengths[turn % len(lengths)]
