"""Runs: created once, kept alive, resumed, listed, deleted with what hangs on them."""

import time

import pytest
from starlette.testclient import TestClient

from server.registry import runs


def make(app: TestClient, name: str, **fields: object) -> dict:
    answer = app.post("/v1/runs", json={"name": name, "kind": "train", **fields})
    assert answer.status_code == 201, answer.text
    return answer.json()


def test_a_run_keeps_everything_it_was_created_with(app: TestClient) -> None:
    """The row must suffice to say what was run, on which data, from which commit."""
    described = {
        "config": {"agent": {"gamma": 0.98, "heads": [1, 2]}, "lr": 1e-3},
        "seed": 7,
        "git_commit": "abc123",
        "host": "box",
        "snapshots": ["sn_1"],
        "tags": ["demo"],
        "command": "stepwell train pendulum_stitch",
    }
    make(app, "a", **described)
    got = app.get("/v1/runs/a").json()
    assert {k: got[k] for k in described} == described
    assert (got["status"], got["alive"], got["policies"], got["latest"]) == ("running", True, 0, {})


def test_a_name_is_taken_once(app: TestClient) -> None:
    """Two trainers under one name would mix their curves."""
    make(app, "a")
    answer = app.post("/v1/runs", json={"name": "a", "kind": "train"})
    assert (answer.status_code, answer.json()["code"]) == (409, "conflict")


def test_resuming_takes_the_run_up_again(app: TestClient) -> None:
    """A restarted trainer continues its row: running, no error, the old facts kept."""
    make(app, "a", config={"x": 1}, snapshots=["sn_1"], seed=3, tags=["t"])
    app.patch("/v1/runs/a", json={"status": "failed", "error": "boom", "tags": ["t", "by hand"]})
    body = {"name": "a", "kind": "train", "exist_ok": True, "snapshots": ["sn_2"], "tags": ["t"]}
    answer = app.post("/v1/runs", json=body)
    assert answer.status_code == 200
    got = answer.json()
    assert (got["status"], got["error"], got.get("finished_at")) == ("running", "", None)
    assert (got["config"], got["seed"], got["snapshots"]) == ({"x": 1}, 3, ["sn_1", "sn_2"])
    assert got["tags"] == ["t", "by hand"]


def test_a_run_is_not_resumed_as_another_kind(app: TestClient) -> None:
    make(app, "a")
    answer = app.post("/v1/runs", json={"name": "a", "kind": "collect", "exist_ok": True})
    assert answer.status_code == 409
    assert (answer.json()["expected"], answer.json()["got"]) == ("train", "collect")


def test_an_unknown_parent_is_refused_and_nothing_is_stored(app: TestClient) -> None:
    answer = app.post("/v1/runs", json={"name": "a", "kind": "train", "parent": "ghost"})
    assert answer.status_code == 404
    assert app.get("/v1/runs").json()["items"] == []


def test_an_empty_patch_is_a_heartbeat(app: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is alive while it is heard of, and not for ever after."""
    first = make(app, "a")["heartbeat_at"]
    assert app.patch("/v1/runs/a", json={}).json()["heartbeat_at"] > first
    monkeypatch.setattr(runs, "ALIVE_SECONDS", 0.0)
    got = app.get("/v1/runs/a").json()
    assert (got["status"], got["alive"]) == ("running", False)


def test_finishing_sets_the_end_and_running_again_takes_it_back(app: TestClient) -> None:
    make(app, "a")
    before = time.time()
    done = app.patch("/v1/runs/a", json={"status": "finished"}).json()
    assert done["finished_at"] >= before
    assert done["alive"] is False
    again = app.patch("/v1/runs/a", json={"status": "running"}).json()
    assert again.get("finished_at") is None


def test_a_title_is_set_found_and_taken_back_while_the_name_stays(app: TestClient) -> None:
    assert make(app, "a").get("title") is None
    make(app, "b")
    title = "Größere Batches, erster Versuch"
    got = app.patch("/v1/runs/a", json={"title": f"  {title} "}).json()
    assert (got["name"], got["title"]) == ("a", title)
    # Heartbeats, other changes and a resume leave it alone.
    app.patch("/v1/runs/a", json={})
    app.patch("/v1/runs/a", json={"notes": "n", "title": None})
    app.post("/v1/runs", json={"name": "a", "kind": "train", "exist_ok": True})
    assert app.get("/v1/runs/a").json()["title"] == title
    found = app.get("/v1/runs", params={"search": "BATCHES", "brief": True}).json()
    assert [r["name"] for r in found["items"]] == ["a"]
    answer = app.post("/v1/query", json={"sql": "SELECT name, title FROM runs ORDER BY name"})
    assert answer.json()["rows"] == [["a", title], ["b", None]]
    for wrong in ("x" * 201, "two\nlines", "\x1b[2J", "a\u2028b", 7):
        answer = app.patch("/v1/runs/a", json={"title": wrong})
        assert answer.status_code == 422, wrong
    assert app.patch("/v1/runs/a", json={"title": " "}).json().get("title") is None


def test_alarms_replace_those_before_and_outlive_a_resume(app: TestClient) -> None:
    make(app, "a")
    assert app.get("/v1/runs/a").json()["alarms"] == []
    alarm = {"key": "q_above_data", "message": "Q has reached 17", "update": 400, "value": 16.0}
    got = app.patch("/v1/runs/a", json={"alarms": [alarm, alarm | {"key": "td_error"}]}).json()
    assert [a["key"] for a in got["alarms"]] == ["q_above_data", "td_error"]
    assert app.patch("/v1/runs/a", json={"alarms": [alarm]}).json()["alarms"] == [alarm]
    resumed = app.post("/v1/runs", json={"name": "a", "kind": "train", "exist_ok": True})
    assert resumed.json()["alarms"] == [alarm]
    listed = app.get("/v1/runs", params={"brief": True}).json()["items"]
    assert listed[0]["alarms"] == [alarm]
    for wrong in ({"key": ""}, {"value": None}, {"update": -1}, {"severity": 3}):
        assert app.patch("/v1/runs/a", json={"alarms": [alarm | wrong]}).status_code == 422
    assert app.patch("/v1/runs/a", json={"alarms": []}).json()["alarms"] == []


def test_the_log_grows_by_lines_and_keeps_its_tail(
    app: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(app, "a")
    app.patch("/v1/runs/a", json={"log": "one"})
    app.patch("/v1/runs/a", json={"log": "two\n"})
    answer = app.get("/v1/runs/a/log")
    assert answer.text == "one\ntwo\n"
    assert answer.headers["content-type"].startswith("text/plain")
    monkeypatch.setattr(runs, "LOG_LIMIT", 6)
    app.patch("/v1/runs/a", json={"log": "three"})
    assert app.get("/v1/runs/a/log").text == "three\n"


def test_lists_are_newest_first_filtered_and_paged_without_gaps(app: TestClient) -> None:
    for i in range(7):
        kind = "collect" if i % 2 else "train"
        app.post("/v1/runs", json={"name": f"r{i}", "kind": kind, "tags": [f"t{i % 3}"]})
    seen, cursor, pages = [], None, 0
    while True:
        page = app.get("/v1/runs", params={"limit": 3, **({"cursor": cursor} if cursor else {})})
        seen += [run["name"] for run in page.json()["items"]]
        cursor, pages = page.json().get("next"), pages + 1
        if cursor is None:
            break
    assert (seen, pages) == ([f"r{i}" for i in range(6, -1, -1)], 3)
    names = {r["name"] for r in app.get("/v1/runs", params={"kind": "collect"}).json()["items"]}
    assert names == {"r1", "r3", "r5"}
    names = {r["name"] for r in app.get("/v1/runs", params={"tag": "t0"}).json()["items"]}
    assert names == {"r0", "r3", "r6"}
    app.patch("/v1/runs/r2", json={"status": "stopped"})
    found = app.get("/v1/runs", params={"status": "stopped"}).json()["items"]
    assert [r["name"] for r in found] == ["r2"]


def test_a_page_counts_all_that_match_whatever_page_it_is(app: TestClient) -> None:
    """Whoever shows a part of a list can say how much it leaves out."""
    for i in range(7):
        app.post("/v1/runs", json={"name": f"r{i}", "kind": "train", "tags": [f"T{i % 3}"]})
    first = app.get("/v1/runs", params={"limit": 3}).json()
    last = app.get("/v1/runs", params={"limit": 3, "cursor": first["next"]}).json()
    assert (first["total"], last["total"]) == (7, 7)
    assert app.get("/v1/runs", params={"tag": "T0", "limit": 1}).json()["total"] == 3
    assert app.get("/v1/runs", params={"kind": "eval"}).json()["total"] == 0


def test_search_finds_names_and_tags_in_any_case_and_no_wildcards(app: TestClient) -> None:
    for name, tags in (("Alpha-1", []), ("beta_2", ["Keep"]), ("beta-3", ["ümlaut"])):
        app.post("/v1/runs", json={"name": name, "kind": "train", "tags": tags})

    def names(text: str) -> list[str]:
        page = app.get("/v1/runs", params={"search": text}).json()
        assert page["total"] == len(page["items"])
        return [run["name"] for run in page["items"]]

    assert names("ALPHA") == ["Alpha-1"]
    assert names("keep") == ["beta_2"]
    assert names("üml") == ["beta-3"]
    assert names("_") == ["beta_2"]
    assert names("%") == []
    assert names("") == ["beta-3", "beta_2", "Alpha-1"]


def test_silent_runs_are_found_and_counted(
    app: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A running run that nobody hears of is what somebody must look at, however many there are."""
    for name in ("a", "b", "c", "done"):
        make(app, name)
    app.patch("/v1/runs/done", json={"status": "finished"})

    def found(**params: str) -> tuple[int, list[str]]:
        page = app.get("/v1/runs", params={"limit": 2, **params}).json()
        return page["total"], [run["name"] for run in page["items"]]

    assert found(status="running", alive="true") == (3, ["c", "b"])
    assert found(status="running", alive="false") == (0, [])
    assert found(alive="false") == (1, ["done"])
    monkeypatch.setattr(runs, "ALIVE_SECONDS", 0.0)
    assert found(status="running", alive="false") == (3, ["c", "b"])
    assert found(status="running", alive="true") == (0, [])


def test_since_counts_what_was_heard_of_then_or_later(app: TestClient) -> None:
    moment = make(app, "a")["heartbeat_at"]
    for since, total in ((moment, 1), (moment + 1.0, 0)):
        assert app.get("/v1/runs", params={"since": since}).json()["total"] == total


def test_a_brief_list_leaves_out_what_is_long(app: TestClient) -> None:
    make(app, "a", config={"x": 1})
    point = {"key": "loss", "step": 1, "value": 1.0, "time": 0.0}
    app.post("/v1/runs/a/metrics", json={"points": [point]})
    (brief,) = app.get("/v1/runs", params={"brief": "true"}).json()["items"]
    (whole,) = app.get("/v1/runs").json()["items"]
    assert (whole["config"], whole["latest"]) == ({"x": 1}, {"loss": 1.0})
    long = ("config", "latest", "latest_steps")
    assert [brief.get(key, {}) for key in long] == [{}, {}, {}]
    assert {k: v for k, v in whole.items() if k not in long} == {
        k: v for k, v in brief.items() if k not in long
    }


def test_a_list_has_the_newest_of_the_metrics_that_are_named(app: TestClient) -> None:
    """A table shows a few of hundreds of metrics of each run."""
    for name in ("a", "b", "c"):
        make(app, name, config={"x": name})
        points = [
            {"key": key, "step": step, "value": step, "time": 0.0}
            for key in ("loss", "odd,key", "other")
            for step in (1, 2)
        ]
        app.post(f"/v1/runs/{name}/metrics", json={"points": points})
    asked = {"name": ["a", "c"], "key": ["loss", "odd,key", "none"]}
    found = app.get("/v1/runs", params=asked).json()
    assert (found["total"], [r["name"] for r in found["items"]]) == (2, ["c", "a"])
    for run in found["items"]:
        assert run["latest"] == {"loss": 2.0, "odd,key": 2.0}
        assert run["latest_steps"] == {"loss": 2, "odd,key": 2}
        assert run["config"] == {"x": run["name"]}
    brief = app.get("/v1/runs", params={**asked, "brief": "true"}).json()["items"]
    assert [r["latest"] for r in brief] == [{"loss": 2.0, "odd,key": 2.0}] * 2
    assert [r.get("config", {}) for r in brief] == [{}, {}]
    assert app.get("/v1/runs", params={"name": ["x"] * 101}).status_code == 422


def test_runs_with_a_tag_are_left_out(app: TestClient) -> None:
    make(app, "a", tags=["archived", "x"])
    make(app, "b", tags=["archived-not"])
    found = app.get("/v1/runs", params={"without_tag": "archived"}).json()
    assert (found["total"], [r["name"] for r in found["items"]]) == (1, ["b"])


def test_a_run_keeps_its_number(app: TestClient) -> None:
    made = [make(app, name)["number"] for name in ("a", "b", "c")]
    assert made == sorted(set(made))
    app.delete("/v1/runs/a")
    app.patch("/v1/runs/b", json={"notes": "x"})
    assert [app.get(f"/v1/runs/{name}").json()["number"] for name in ("b", "c")] == made[1:]


def test_deleting_a_run_takes_its_metrics_along(app: TestClient) -> None:
    """A new run under the old name must not inherit the old curve."""
    make(app, "a")
    point = {"key": "loss", "step": 1, "value": 1.0, "time": 0.0}
    app.post("/v1/runs/a/metrics", json={"points": [point]})
    assert app.delete("/v1/runs/a").status_code == 204
    assert app.get("/v1/runs/a").status_code == 404
    make(app, "a")
    assert app.get("/v1/runs/a/metrics").json()["series"] == []


@pytest.mark.parametrize("name", ["", "a b", "../x", "-a", "a" * 129, "ä"])
def test_bad_names_are_refused(app: TestClient, name: str) -> None:
    answer = app.post("/v1/runs", json={"name": name, "kind": "train"})
    assert (answer.status_code, answer.json()["code"]) == (422, "validation_error")


def test_an_unknown_field_is_an_error(app: TestClient) -> None:
    """A typo must not vanish silently."""
    answer = app.post("/v1/runs", json={"name": "a", "kind": "train", "sed": 1})
    assert answer.status_code == 422
    assert "sed" in answer.json()["detail"]


def test_a_seed_beyond_64_bits_is_refused_not_a_defect(app: TestClient) -> None:
    answer = app.post("/v1/runs", json={"name": "a", "kind": "train", "seed": 2**64})
    assert answer.status_code == 422
