"""The steps of a trajectory, sent in pieces: byte for byte what one piece would be."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from server.answer_memory import PIECE
from server.ingest import segments
from server.storage import steps
from stepwell.codec import decode, encode
from stepwell.messages import ARROW
from stepwell.spaces import Box, Discrete, EnvSpec
from stepwell.testing import make_spec, make_trajectory
from stepwell.trajectory import Trajectory
from tests.specs import make_rich_spec

WIDE = EnvSpec.of(Box((24, 20, 3), "uint8"), Box((40,), low=-1.0, high=1.0), env="Wide-v0")
PICTURES = EnvSpec.of(Box((64, 64, 3), "uint8"), Discrete(5), env="Pictures-v0")
SPECS = {"rich": make_rich_spec(), "wide": WIDE, "plain": make_spec(observation=3, action=2)}


def document(trajectory: Trajectory) -> dict[str, Any]:
    """{columns, rows}, made at once."""
    count = len(trajectory)
    columns: dict[str, list[Any]] = {"t": list(range(count + 1))}
    for key, array in trajectory.obs.items():
        columns[f"obs.{key}"] = array.tolist()
    for key, array in trajectory.actions.items():
        name = "action" if list(trajectory.actions) == ["action"] else f"action.{key}"
        columns[name] = [*array.tolist(), None]
    columns["reward"] = [*trajectory.rewards.tolist(), None]
    for name, flag in (("terminated", trajectory.terminated), ("truncated", trajectory.truncated)):
        columns[name] = [flag and t == count - 1 for t in range(count + 1)]
    columns["is_last"] = [t == count for t in range(count + 1)]
    if trajectory.action_known is not None:
        columns["action_known"] = [*trajectory.action_known.tolist(), None]
    for key, array in trajectory.infos.items():
        columns[f"info.{key}"] = array.tolist()
    rows = [list(row) for row in zip(*columns.values(), strict=True)]
    return {"columns": list(columns), "rows": rows}


def check(live: Any, sent: list[Trajectory], spec: EnvSpec) -> None:
    for t in sent:
        url = f"/v1/trajectories/{t.id}/steps"
        answer = live.http.get(url)
        assert (answer.status_code, answer.headers["content-type"]) == (200, ARROW)
        (got,) = decode(answer.content)[1]  # with what is stored where the sender left it out
        assert answer.content == encode([got], spec)
        assert got.digest == t.digest or (got.action_known is not None and t.action_known is None)
        as_json = live.http.get(url, headers={"accept": "application/json"})
        assert as_json.content == orjson.dumps(document(got))
    assert live.service.answers.budget.held == 0


@pytest.mark.parametrize("small", [False, True], ids=["large pieces", "small pieces"])
@pytest.mark.parametrize("name", SPECS)
def test_steps_are_those_that_were_sent_wherever_they_are_cut(
    live: Any, monkeypatch: pytest.MonkeyPatch, name: str, small: bool
) -> None:
    """In a segment and in a shard. With small pieces every row crosses the end of some block, and
    each array of numbers is cut."""
    if small:
        monkeypatch.setattr(steps, "BLOCK", 64)
        monkeypatch.setattr(steps, "ITEMS", 7)
    spec = SPECS[name]
    live.create("d", spec)
    sent = [make_trajectory(spec, length=n, seed=n) for n in (1, 2, 7, 8, 9, 40)]
    live.post(sent, spec=spec)
    check(live, sent, spec)
    live.flush()
    check(live, sent, spec)


@pytest.mark.long
def test_a_trajectory_longer_than_a_row_group_is_sent_in_pieces(live: Any) -> None:
    live.create("d", PICTURES)
    long = make_trajectory(PICTURES, length=2000, seed=1)
    short = make_trajectory(PICTURES, length=3, seed=2)
    live.post([long, short], spec=PICTURES)
    live.flush()
    check(live, [long, short], PICTURES)


def test_steps_are_written_outside_of_the_event_loop_in_small_pieces(
    live: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop: list[int] = []
    live.http.portal.call(lambda: loop.append(threading.get_ident()))
    seen: list[tuple[int, int]] = []
    real = orjson.dumps

    def dumps(value: Any, **options: Any) -> bytes:
        made = real(value, **options)
        seen.append((threading.get_ident(), len(made)))
        return made

    live.create("d", PICTURES)
    t = make_trajectory(PICTURES, length=30, seed=1)
    live.post([t], spec=PICTURES)
    monkeypatch.setattr(steps.orjson, "dumps", dumps)
    for _ in range(2):
        url = f"/v1/trajectories/{t.id}/steps"
        answer = live.http.get(url, headers={"accept": "application/json"})
        assert answer.content == real(document(t))
        live.flush()
    assert len(seen) > 60 and loop[0] not in {ident for ident, _ in seen}
    assert max(size for _, size in seen) < 2 * PIECE


def test_a_layout_names_every_column_and_takes_no_memory_for_its_values() -> None:
    spec = SPECS["rich"]
    t = make_trajectory(spec, length=5)
    (batch,) = decode(encode([t], spec))[1]
    held = steps.HeldSteps(batch.header(), spec, segments.pa.RecordBatch.from_pylist([]))
    layout = steps.arrow_layout(held)
    fields = [part for part in layout if not isinstance(part, bytes)]
    assert [f.name for f in fields] == steps.arrow_schema(spec).names


def test_damage_in_the_middle_ends_the_connection_and_the_next_request_says_so(
    live: Any, start: Callable[..., Any]
) -> None:
    """The first response has begun when the damage is found."""
    live.create("d", PICTURES)
    rng = np.random.default_rng(0)  # incompressible: the damage lies far behind the first piece
    t = Trajectory(
        obs={"observation": rng.integers(0, 256, (400, 64, 64, 3), dtype=np.uint8)},
        actions={"action": np.zeros(399, np.int64)},
        rewards=np.zeros(399, np.float32),
        truncated=True,
    )
    live.post([t], spec=PICTURES)
    live.flush()
    (path,) = (live.data / "shards/fifo").iterdir()
    spoil(path, 3 << 20)
    url = f"/v1/trajectories/{t.id}/steps"
    begun = live.http.get(url)
    assert begun.status_code == 200 and len(begun.content) < len(encode([t], PICTURES))
    answer = live.http.get(url)
    assert (answer.status_code, answer.json()["code"]) == (410, "damaged")
    assert live.service.answers.budget.held == 0


def spoil(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
