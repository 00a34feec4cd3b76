"""The index is damaged while the service is stopped or killed; then it starts. No answer is wrong.

One bit of index.sqlite is flipped, after a kill also of its log, or the file is cut off. A try ends

    unharmed    every answer is right and complete
    named       every answer is right or says what it lacks, and /readyz says what to do
    refused     the start names the command

and always: no file is deleted that the index needed, and after `stepwell fsck --rebuild` everything
is there again but what only a damaged row held, which is named.
STEPWELL_INDEX_FLIPS=200 is the proof of docs/reliability.md; the suite does a few.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from server.fsck import main as fsck
from server.index.db import IndexUnusable
from server.index.lost_rows import HEADER
from server.service import Service
from stepwell import Client
from stepwell.messages import MetricPoint
from stepwell.testing import make_spec, make_trajectory
from stepwell.trajectory import Trajectory
from tests.faults.serving import serving
from tests.specs import make_rich_spec

TRIES = int(os.environ.get("STEPWELL_INDEX_FLIPS", "6"))
SEED = int(os.environ.get("STEPWELL_SEED", "5"))
OPERATOR = "operator-of-the-test"
PLAIN, RICH = make_spec(observation=3, action=2), make_rich_spec()
SQL = {
    "trajectories": "* exclude (state, shard, traj_idx)",
    "datasets": "name, env, spec, spec_digest, description, capacity_trajectories",
    "versions": "version, digest, condition, description, trajectories",
    "version_trajectories": "*",
    "annotations": "*",
    "runs": "* exclude (heartbeat_at)",
    "metrics": "*",
    "policies": "* exclude (aliases)",
    "evaluations": "*",
    "videos": "*",
}
"""Table → what must be right of it; the rest changes with time, or with what is left out."""
CHANGING = (
    "heartbeat_at",
    "last_used_at",
    "state",
    "shard",
    "traj_idx",
    "excluded",
    "missing",
    "leased_until",
    "alive",
    # of a run: counted and read from rows that may be left out
    "policies",
    "latest",
    "latest_steps",
)


@dataclass
class Answer:
    """What a question was answered with."""

    status: int
    code: str = ""
    items: Counter[str] = field(default_factory=Counter)
    """Rows, items of a list, or the one thing."""
    said: bool = False
    """Something is left out, and the answer says so."""


@dataclass
class World:
    """A populated data directory, and every question about it with its right answer."""

    killed: Path
    stopped: Path
    questions: dict[str, Callable[[httpx2.Client], httpx2.Response]]
    truth: dict[str, Answer]
    tokens: dict[str, str]
    rights: dict[str, tuple[int, int]]
    sent: dict[str, list[Trajectory]]


def serve(data: Path) -> AbstractContextManager[tuple[str, Service]]:
    return serving(data, OPERATOR)


def make(folder: Path) -> World:
    """Populate `folder`: two datasets, everything a registry holds, sealed and unsealed data."""
    data = folder / "running"
    sent: dict[str, list[Trajectory]] = {"plain": [], "rich": []}
    with serve(data) as (url, _), Client(url, token=OPERATOR) as client:
        for name, spec in (("plain", PLAIN), ("rich", RICH)):
            client.create_dataset(name, spec, description=f"of {name}")
            for shard in range(2):
                some = [make_trajectory(spec, length=4, seed=50 * shard + i) for i in range(12)]
                sent[name] += some
                client.post(name, some)
                client.flush(name)
        for trajectory in sent["plain"][:3]:
            client.patch_trajectory(trajectory.id, tags=["good"], notes="seen", flags=["odd"])
        client.patch_trajectory(sent["rich"][0].id, partition="protected")
        client.create_version("plain", "v1", where="len(tags) > 0", description="frozen")
        annotate(client, sent["plain"][:4])
        for number in range(3):
            run = client.create_run(f"run{number}", "train", config={"lr": 0.1 * number})
            points = [
                MetricPoint(key=k, step=i, time=i, value=i / 3) for i in range(30) for k in "xy"
            ]
            client.log_metrics(run.name, points)
            for version in (1, 2):
                client.publish_policy(run.name, version, random.Random(number).randbytes(900))
            client.set_alias(run.name, "best", 1)
            scores = {"mean": 1.5, "iqm": 1.0, "ci_low": 1.0, "ci_high": 2.0}
            for env in ("A-v0", "B-v0"):
                scored = client.create_evaluation(
                    policy=f"{run.name}/1", env=env, seeds=[0, 1], returns=[1.0, 2.0], **scores
                )
            film = b"GIF89a" + random.Random(number).randbytes(700)
            client.put_video(scored.id, 0, film, media_type="image/gif", total_reward=1.0, length=5)
        client.save_query("mine", "select 1", description="one")
        tokens = {}
        for scope in ("read", "ingest:plain", "train"):
            token = client.create_token(scope, [scope])
            tokens[scope] = str(token.token)
        client.revoke_token(token.id)
        for name in sent:
            client.create_snapshot(dataset=name)
        questions = questions_of(client, sent)
        spec = {"plain": PLAIN, "rich": RICH}
        for name in sent:  # these wait in a segment
            some = [make_trajectory(spec[name], length=4, seed=900 + i) for i in range(3)]
            sent[name] += some
            client.post(name, some)
        shutil.copytree(data, folder / "killed", ignore=shutil.ignore_patterns("lock", "mirror"))
        truth, may = ask_all(url, questions), rights(tokens, url)
    shutil.copytree(data, folder / "stopped", ignore=shutil.ignore_patterns("lock", "mirror"))
    assert all(answer.status == 200 for answer in truth.values()), truth
    return World(folder / "killed", folder / "stopped", questions, truth, tokens, may, sent)


def annotate(client: Client, some: list[Trajectory]) -> None:
    values = [
        {"trajectory": t.id, **{what: [0.5] * len(t) for what in ("q", "v", "advantage", "weight")}}
        for t in some
    ]
    client.annotate("plain", "critic", "run0/1", values)


def questions_of(
    client: Client, sent: dict[str, list[Trajectory]]
) -> dict[str, Callable[[httpx2.Client], httpx2.Response]]:
    """Every way to read: SQL over all tables and steps, lists, single things, files."""
    paths = ["/v1/datasets", "/v1/runs", "/v1/evaluations", "/v1/tokens", "/v1/queries"]
    paths += ["/v1/snapshots", "/v1/datasets/plain/versions", "/v1/datasets/plain/annotations"]
    paths += ["/v1/datasets/plain/versions/v1", "/v1/queries/mine"]
    for name, some in sent.items():
        paths += [f"/v1/datasets/{name}", f"/v1/datasets/{name}/trajectories?limit=1000"]
        paths += [f"/v1/trajectories/{t.id}{what}" for t in some for what in ("", "/steps")]
    for run in client.runs():
        paths += [f"/v1/runs/{run.name}{what}" for what in ("", "/policies", "/metrics")]
        paths += [f"/v1/runs/{run.name}/policies/{which}" for which in ("1", "2", "latest", "best")]
    for evaluation in client.evaluations():
        paths.append(f"/v1/evaluations/{evaluation.id}/videos")
        if client.videos(evaluation.id):
            paths.append(f"/v1/evaluations/{evaluation.id}/videos/0")
    for snapshot in client.snapshots():
        paths += [f"/v1/snapshots/{snapshot.id}{what}" for what in ("", "/manifest")]
    found: dict[str, Callable[[httpx2.Client], httpx2.Response]] = {
        path: lambda http, path=path: http.get(path) for path in paths
    }
    queries = {f"sql {t}": f"SELECT {columns} FROM {t}" for t, columns in SQL.items()}
    # The others are sealed at one time or another.
    sealed = f"trajectory_id IN ({', '.join(repr(t.id) for some in sent.values() for t in some)})"
    for name in sent:
        queries[f"sql {name}"] = (
            f'SELECT trajectory_id, t, reward FROM "{name}".steps WHERE {sealed}'
        )
    queries["sql steps"] = f"SELECT trajectory_id, count(*) FROM steps WHERE {sealed} GROUP BY 1"
    for name, sql in queries.items():
        body = {"sql": sql, "limit": 100_000, "timeout": 60}
        found[name] = lambda http, body=body: http.post("/v1/query", json=body)
    return found


def ask_all(
    url: str, questions: dict[str, Callable[[httpx2.Client], httpx2.Response]]
) -> dict[str, Answer]:
    headers = {"authorization": f"Bearer {OPERATOR}"}
    with httpx2.Client(base_url=url, headers=headers, timeout=90.0, trust_env=False) as http:
        return {name: answer_of(ask(http)) for name, ask in questions.items()}


def answer_of(response: httpx2.Response) -> Answer:
    said = HEADER in response.headers
    kind = response.headers.get("content-type", "")
    if not response.is_success:
        return Answer(response.status_code, response.json()["code"])
    if "json" not in kind:
        return Answer(200, "", Counter([response.content.hex()]), said)
    document = response.json()
    if "columns" in document:
        said |= bool(document["excluded"])
        return Answer(200, "", Counter(map(repr, document["rows"])), said)
    items = document.get("items", [document])
    for series in document.get("series", ()):  # of metrics: each point is an item
        points = zip(series["steps"], series["times"], series["values"], strict=True)
        items = [*items, *({"key": series["key"], "point": point} for point in points)]
    document.pop("series", None)
    said |= any(item.get("excluded") for item in items)
    return Answer(200, "", Counter(json.dumps(lasting(i), sort_keys=True) for i in items), said)


def lasting(item: dict[str, Any]) -> dict[str, Any]:
    """What no start changes; the sums of a dataset change with what is left out of it."""
    known = ("name", "spec", "spec_digest", "description", "capacity", "tags", "created_at")
    if "spec_digest" in item:
        return {key: item[key] for key in known}
    if "segment" in item or "expires_at" in item:
        item.pop("expires_at", None)
    return {key: value for key, value in item.items() if key not in CHANGING}


# --- one try ------------------------------------------------------------------------------------


def flip(path: Path, rng: random.Random) -> str:
    """Where something is written: most of a small index is the empty rest of its pages."""
    content = bytearray(path.read_bytes())
    written = [place for place, byte in enumerate(content) if byte]
    place, bit = rng.choice(written), rng.randrange(8)
    content[place] ^= 1 << bit
    path.write_bytes(content)
    return f"{path.name} byte {place} bit {bit}"


def cut(path: Path, rng: random.Random) -> str:
    size = rng.randrange(1, path.stat().st_size)
    os.truncate(path, size)
    return f"{path.name} cut at {size}"


def damage(world: World, number: int, data: Path, rng: random.Random) -> str:
    """A copy of the directory, and in it one damage."""
    kind = number % 8
    shutil.copytree(world.killed if kind in (1, 3, 5) else world.stopped, data)
    if kind in (1, 5):
        return "killed, " + flip(data / "index.sqlite-wal", rng)
    if kind == 3:
        return "killed, " + flip(data / "index.sqlite", rng)
    if kind == 7:
        return "stopped, " + cut(data / "index.sqlite", rng)
    return "stopped, " + flip(data / "index.sqlite", rng)


def files_of(data: Path) -> Counter[str]:
    """Names of the data files, wherever they are kept."""
    folders = ("shards", "policies", "videos", "versions", "annotations", "snapshots")
    kept = ("quarantine", "lost-policies", "lost-videos", "lost-versions", "lost-annotations")
    found = {
        path.name
        for folder in (*folders, *kept)
        for path in (data / folder).rglob("*")
        if path.is_file()
    }
    return Counter(found)


def judge(world: World, answers: dict[str, Answer]) -> bool:
    """Whether all is there; AssertionError: a wrong answer."""
    complete = True
    for name, truth in world.truth.items():
        answer = answers[name]
        if answer.status != 200:
            assert answer.code in ("index_damaged", "damaged", "snapshot_expired"), (name, answer)
            complete = False
            continue
        wrong = answer.items - truth.items
        assert not wrong, f"{name}: {wrong} instead of {truth.items - answer.items}"
        if answer.items != truth.items:
            assert answer.said, f"{name} lacks {truth.items - answer.items} and does not say so"
            complete = False
    return complete


def rights(tokens: dict[str, str], url: str) -> dict[str, tuple[int, int]]:
    """Scope → how the token's attempts to read and to create are answered."""
    found = {}
    with httpx2.Client(base_url=url, timeout=60.0, trust_env=False) as http:
        for scope, secret in {"": "", **tokens}.items():
            headers = {"authorization": f"Bearer {secret}"} if secret else {}
            reads = http.get("/v1/datasets", headers=headers)
            creates = http.post("/v1/policies", headers=headers, json={})
            found[scope] = (reads.status_code, creates.status_code)
    return found


def judge_tokens(world: World, url: str) -> bool:
    """No token may more than it may; a lost one nothing."""
    found = rights(world.tokens, url)
    for scope, statuses in found.items():
        assert statuses in (world.rights[scope], (401, 401)), (scope, statuses)
    return found == world.rights


def judge_retries(world: World, url: str) -> None:
    """What is sent again is known, or stored once; never twice."""
    with Client(url, token=OPERATOR, retry_for=0.0) as client:
        for name, some in world.sent.items():
            try:
                client.post(name, some)
                client.flush(name)
            except Exception as error:
                assert getattr(error, "code", "") in ("index_damaged",), repr(error)
            rows = client.sql("SELECT id FROM trajectories", limit=1000, timeout=60)
            assert len({row[0] for row in rows}) == len(rows)


def one_try(world: World, number: int, data: Path, rng: random.Random) -> tuple[str, str]:
    """(what was done, how it ended)"""
    what = damage(world, number, data, rng)
    before = files_of(data)
    check_says(data)
    try:
        with serve(data) as (url, _):
            complete = judge(world, ask_all(url, world.questions))
            complete &= judge_tokens(world, url)
            says = httpx2.get(f"{url}/readyz", headers={"authorization": f"Bearer {OPERATOR}"})
            if not complete:
                assert "fsck --rebuild" in says.json()["detail"], says.text
            if number % 2:
                judge_retries(world, url)
        outcome = "unharmed" if complete else "named"
    except IndexUnusable as refusal:
        assert "fsck --rebuild" in str(refusal), refusal
        print("  ", refusal)
        outcome = "refused"
    assert before <= files_of(data), before - files_of(data)
    if outcome != "unharmed":
        is_back(world, data, before)
    return what, outcome


def check_says(data: Path) -> None:
    """fsck ends with a report, and never advises to accept a loss: all files are intact."""
    try:
        found = fsck.check(data)
    except IndexUnusable as error:
        assert "fsck --rebuild" in str(error), error
        return
    for problem in found.problems:
        assert "sqlalche.me" not in problem.what, problem
        assert "accept the loss" not in problem.cure, problem


def is_back(world: World, data: Path, before: Counter[str]) -> None:
    """After the rebuild: all answers are right, and what is still missing was named."""
    printed: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "builtins.print", lambda *words, **_: printed.append(" ".join(map(str, words)))
        )
        assert fsck.main(["--data", str(data), "--rebuild"]) == 0, printed
    report = "\n".join(printed)
    snapshots = {name for name in before if name.startswith("snap")}
    assert before - Counter(snapshots) <= files_of(data)
    with serve(data) as (url, service):
        assert not service.db.lost
        answers = ask_all(url, world.questions)
    for name, truth in world.truth.items():
        if "snapshots" in name:
            continue
        answer = answers[name]
        missing = truth.items - answer.items
        kind = name.split()[-1].split("/")[2] if "/" in name else name.split()[-1]
        if missing or answer.status != 200:
            assert kind in report or kind in ("versions",), f"{name} lacks {missing}:\n{report}"
        if kind in ("trajectories", "steps", "rich"):
            assert answer.status == 200, (name, answer)


@pytest.mark.timeout(300 + 30 * TRIES)
def test_no_damage_of_the_index_ever_becomes_a_wrong_answer(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    world = make(tmp_path)
    outcomes: Counter[tuple[str, str]] = Counter()
    first = int(os.environ.get("STEPWELL_FIRST_TRY", "0"))
    for number in range(TRIES):
        seed = rng.randrange(2**32)
        if number < first:
            continue
        data = tmp_path / "copy"
        what, outcome = one_try(world, number, data, random.Random(seed))
        print(number, what, outcome, flush=True)
        outcomes[what.split(" byte")[0].split(" cut")[0], outcome] += 1
        shutil.rmtree(data)
    for (what, outcome), total in sorted(outcomes.items()):
        print(f"{what:28} {outcome:9} {total}")
