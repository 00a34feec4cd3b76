"""What people see in SQL: names, types, alignment, and nothing that is not alive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from server.problems import ProblemError
from server.sql.catalog import describe
from stepwell.manifest import id_bytes, id_texts
from stepwell.testing import make_spec, make_trajectory


def test_trajectories_have_the_columns_of_the_message(world: Any) -> None:
    """SQL `trajectories` and TrajectoryInfo are one thing under one set of names."""
    from stepwell.messages import TrajectoryInfo

    result = world.service.sql.query("select * from trajectories limit 0")
    names = {f.alias or name for name, f in TrajectoryInfo.model_fields.items()}
    assert {column.name for column in result.columns} == names


def test_acknowledged_trajectories_show_at_once_and_their_steps_when_sealed(world: Any) -> None:
    states = dict(
        map(
            tuple,
            world.rows("select state, count(*) from trajectories where dataset='plain' group by 1"),
        )
    )
    assert states == {"sealed": 6, "spooled": 1}
    spooled = world.stored["plain"][-1].id
    assert (
        world.rows("select * from steps where trajectory_id = ?", [spooled], dataset="plain") == []
    )


def test_a_trajectory_reads_back_in_sql_as_it_was_sent(world: Any) -> None:
    """T+1 rows, reward beside the action that earned it, NULLs in the last row."""
    sent = world.stored["plain"][0]
    rows = world.rows(
        "select t, obs.observation, action, reward, terminated, truncated, is_last from steps"
        " where trajectory_id = $id order by t",
        {"id": sent.id},
        dataset="plain",
    )
    steps = len(sent)
    assert [row[0] for row in rows] == list(range(steps + 1))
    assert np.array_equal([r[1] for r in rows], sent.obs["observation"].tolist())
    assert np.array_equal([r[2] for r in rows[:-1]], sent.actions["action"].tolist())
    assert [r[3] for r in rows[:-1]] == sent.rewards.tolist()
    assert rows[-1][2:] == [None, None, False, False, True]
    assert [r[4] for r in rows] == [False] * (steps - 1) + [sent.terminated, False]


def test_every_kind_of_space_has_a_typed_column(world: Any) -> None:
    sent = world.stored["rich"][1]
    result = world.service.sql.query(
        'select obs."arm/angles", obs.camera, obs.contacts, obs.legal, obs.room, obs.speed,'
        ' action.grip, action.move, action_known, info.lidar, info.distance from "rich".steps'
        " where trajectory_id = ? and t = 2",
        [sent.id],
        form="arrow",
    )
    kinds = [column.type for column in result.columns]
    assert kinds == [
        *("DOUBLE[6]", "BLOB", "TINYINT[4]", "TINYINT[3]", "BIGINT", "FLOAT"),
        *("BIGINT[2]", "FLOAT[2]", "BOOLEAN", "SMALLINT[3]", "FLOAT"),
    ]
    row = pa.ipc.open_stream(result.payload).read_all().to_pylist()[0]
    assert row["camera"] == sent.obs["camera"][2].tobytes()
    assert row["arm/angles"] == sent.obs["arm/angles"][2].reshape(-1).tolist()
    assert row["room"] == int(sent.obs["room"][2])
    assert row["move"] == sent.actions["move"][2].tolist()
    assert row["lidar"] == sent.infos["lidar"][2].tolist()


def test_array_functions_work_on_observations(world: Any) -> None:
    found = world.rows(
        "select max(array_distance(obs.observation, obs.observation)) from steps", dataset="plain"
    )
    assert found == [[0.0]]


def test_bare_steps_without_a_dataset_has_only_the_common_columns(world: Any) -> None:
    result = world.service.sql.query("select * from steps limit 0")
    assert [c.name for c in result.columns] == [
        *("dataset", "trajectory_id", "t", "reward", "terminated", "truncated", "is_last")
    ]
    counts = dict(map(tuple, world.rows("select dataset, count(*) from steps group by 1")))
    sealed = {n: [t for t in ts if t.metadata.purpose != "eval"] for n, ts in world.stored.items()}
    assert counts == {name: sum(len(t) + 1 for t in ts) for name, ts in sealed.items()}


def test_steps_join_trajectories(world: Any) -> None:
    rows = world.rows(
        'select j.id, j."return", sum(s.reward) from trajectories j join steps s'
        " on s.trajectory_id = j.id where j.dataset = 'plain' group by all"
    )
    assert len(rows) == 6
    assert all(total == pytest.approx(summed, abs=1e-5) for _, total, summed in rows)


def test_lists_and_maps_arrive_as_such(world: Any) -> None:
    assert world.rows("select count(*) from trajectories where list_contains(tags, 'even')") == [
        [3]
    ]
    rows = world.rows("select max(metrics['success']) from trajectories")
    assert rows == [[0.5]]
    assert world.rows("select tags, env from datasets where name = 'plain'") == [
        [["a", "b"], "Plain-v0"]
    ]


def test_the_schema_route_names_what_a_query_sees(world: Any) -> None:
    """No table or column is shown that cannot be selected, and none is hidden."""
    shown = describe(world.service.mirror.state("steps"))
    for table in shown.tables:
        result = world.service.sql.query(f"select * from {table.name} limit 0")
        # DuckDB quotes the names of a struct only where it must.
        assert [(c.name, c.type.replace('"', "")) for c in result.columns] == [
            (c.name, c.type.replace('"', "")) for c in table.columns
        ], table.name


def test_json_says_what_it_can_and_null_where_it_cannot(world: Any) -> None:
    rows = world.rows(
        "select 'nan'::float, 'inf'::double, 1.5::decimal(9,2), date '2026-02-01',"
        " timestamp '2026-02-01 03:04:05', timestamptz '2026-02-01 03:04:05+00', 'ab'::blob,"
        " interval 90 second, {'a': [1, 2]}, map {'k': 2.5}, 2::hugeint, null, true"
    )
    assert rows == [
        [
            *(None, None, 1.5, "2026-02-01", "2026-02-01T03:04:05", "2026-02-01 03:04:05+00"),
            *("YWI=", "00:01:30", {"a": [1, 2]}, {"k": 2.5}, 2, None, True),
        ]
    ]


def test_limit_and_truncated(world: Any) -> None:
    for limit, rows, truncated in ((3, 3, True), (10, 10, False), (11, 10, False), (0, 0, True)):
        result = world.service.sql.query("select * from range(10)", limit=limit)
        assert (result.rows, result.truncated) == (rows, truncated)


def test_order_survives_the_wrapping(world: Any) -> None:
    rows = world.rows(
        "select hash(i) % 100000 as h from range(130000) t(i) order by h", limit=130_000
    )
    assert rows == sorted(rows)


def test_a_semicolon_a_comment_and_quotes_are_fine(world: Any) -> None:
    assert world.rows("/* é; */ select ';é' as \"a;b\" ; -- done;") == [[";é"]]


def test_an_unknown_dataset_is_404(world: Any) -> None:
    with pytest.raises(ProblemError) as caught:
        world.rows("select * from steps", dataset="nobody")
    assert (caught.value.status, caught.value.code) == (404, "not_found")


def test_a_dataset_named_as_duckdb_names_things_is_reached_by_request(
    make_world: Callable[..., Any],
) -> None:
    """`main`, `memory` and `temp` are legal names of datasets, and schemas of DuckDB."""
    world = make_world(sql_workers=1)
    spec = make_spec()
    for name in ("main", "memory", "temp", "system", "a.b-c"):
        world.create(name, spec)
        world.post(name, [make_trajectory(spec, length=2)])
        assert world.rows("select count(*) from steps", dataset=name) == [[3]]
    assert world.rows("select count(*) from steps") == [[15]]
    assert world.rows('select count(*) from "a.b-c".steps') == [[3]]


def test_the_steps_of_one_trajectory_are_read_from_one_shard(
    make_world: Callable[..., Any],
) -> None:
    """By file name and number: shards that it does not lie in are not even opened.

    Proved the hard way: all others are damaged (but the first, whose schema is looked at).
    """
    world = make_world(sql_workers=1)
    spec = make_spec()
    world.create("d", spec)
    for seed in range(6):
        world.post("d", [make_trajectory(spec, length=4, seed=seed)])
    wanted = world.stored["d"][3].id
    home = world.rows("select shard from trajectories where id = ?", [wanted])[0][0]
    shards = sorted((world.service.settings.data / "shards/fifo").iterdir())
    assert len(shards) == 6
    for path in shards[1:]:
        if path.stem != home:
            path.write_bytes(b"PAR1 damaged PAR1")
    sql = "select count(*), sum(reward) from steps where trajectory_id = ?"
    count, total = world.rows(sql, [wanted], dataset="d")[0]
    assert (count, total) == (5, pytest.approx(world.stored["d"][3].total_reward, abs=1e-5))
    rest = world.service.sql.query("select count(*) from steps", dataset="d", timeout=30)
    assert rest.payload == b"[[10]]", "the first, and the wanted one"
    assert {one.file for one in rest.excluded} == {p.stem for p in shards[1:] if p.stem != home}


# --- selections -----------------------------------------------------------------------------------


def chosen_by(world: Any, select: str, dataset: str | None = None) -> dict[str, float | None]:
    """id → weight of what a selection names."""
    found = world.service.sql.select_rows(select, dataset)
    ids: dict[int, str] = {}
    for path in found.state.locations.values():
        locations = world.service.mirror.read_locations(found.state, path)
        ids |= dict(
            zip(locations["pk"].to_pylist(), id_texts(id_bytes(locations["id"])), strict=True)
        )
    weights = [None] * len(found.rows) if found.weights is None else found.weights.tolist()
    return {ids[row]: weight for row, weight in zip(found.rows.tolist(), weights, strict=True)}


def test_a_selection_names_rows_and_weights(world: Any) -> None:
    plain = {t.id: None for t in world.stored["plain"]}
    where = "select id from trajectories where dataset = 'plain'"
    assert chosen_by(world, f"{where} order by seq") == plain
    assert chosen_by(world, f"{where} and id in (select id from trajectories)") == plain
    weighted = chosen_by(
        world,
        "select length as weight, id from trajectories where dataset='plain' order by length desc;",
    )
    assert weighted == {t.id: float(len(t)) for t in world.stored["plain"]}


def test_a_selection_for_a_dataset_sees_only_that_one(world: Any) -> None:
    assert chosen_by(world, "select id from trajectories", "rich").keys() == {
        t.id for t in world.stored["rich"]
    }
    by_steps = "select distinct trajectory_id as id from steps where t = 8"
    assert list(chosen_by(world, by_steps, "plain")) == [world.stored["plain"][5].id]


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("select", "reads"),
    [
        ("select id from trajectories", []),
        ("select id from trajectories as t order by t.seq, t.id", ["seq"]),
        ("select id from trajectories group by all", None),
        (
            "select id, 1 + length as weight from trajectories where env like 'a%' and tags = []",
            ["env", "length", "tags"],
        ),
        (
            "select id from trajectories where (return > 1 or success is null)",
            ["return", "success"],
        ),
        ("select id from trajectories where case when length > 2 then true end", ["length"]),
        ("select id from trajectories where metrics['a'] between 0 and 1", ["metrics"]),
        ("select id from trajectories where seed::double > 1", ["seed"]),
        ("select id from trajectories where id > '0'", None),
        ("select distinct id from trajectories", None),
        ("select id from trajectories limit 1", None),
        ("select id from trajectories where random() < 2", None),
        ("select id from trajectories where created_at < epoch(now())", None),
        ("select id from trajectories where started_at is null or current_date is null", None),
        (
            "select id from trajectories where '2020-01-01'::timestamp is null",
            None,
        ),
        ("select id from trajectories where seq <= (select max(seq) from trajectories)", None),
        ("select id from trajectories qualify row_number() over () > 0", None),
        ("select id from trajectories group by id", None),
        ("select t.id from trajectories as t, trajectories as u where t.id = u.id", None),
        ("with t as (select id from trajectories) select id from t", None),
        ("select id from trajectories using sample 100%", None),
        ("select lower(id) as id from trajectories", None),
    ],
)
def test_what_looks_at_one_row_at_a_time_is_recognised(
    world: Any, select: str, reads: list[str] | None
) -> None:
    """Only that may be asked of changed rows alone. Both ways name the same rows."""
    found = world.service.sql.select_rows(select)
    assert found.reads == (None if reads is None else tuple(reads))
    wrapped = f"select * from ({select.removesuffix(';')}) as q"
    assert world.service.sql.select_rows(wrapped).reads is None
    if "limit" not in select:
        assert chosen_by(world, select) == chosen_by(world, wrapped)


@pytest.mark.parametrize(
    ("select", "code", "says"),
    [
        ("select seq from trajectories", "sql_not_allowed", "columns"),
        (
            "select id, weight, 1 as more from (select id, 1 as weight from trajectories)",
            "sql_not_allowed",
            "columns",
        ),
        ("select 'abc' as id", "sql_error", "not living"),
        ("select id, 0 as weight from trajectories", "sql_error", "weight"),
        ("select id, -1.5 as weight from trajectories", "sql_error", "weight"),
        ("select id, 'nan'::double as weight from trajectories", "sql_error", "weight"),
        ("select id, 'inf'::double as weight from trajectories", "sql_error", "weight"),
        ("select id from trajectories union all select id from trajectories", "sql_error", "twice"),
        ("select nope from trajectories", "sql_error", "nope"),
        ("select null as id", "sql_error", "not living"),
    ],
)
def test_bad_selections_say_what_is_wrong(world: Any, select: str, code: str, says: str) -> None:
    with pytest.raises(ProblemError) as caught:
        world.service.sql.select_rows(select)
    assert (caught.value.status, caught.value.code) == (422, code)
    assert says in caught.value.detail


def test_a_selection_may_be_empty(world: Any) -> None:
    assert chosen_by(world, "select id from trajectories where length < 0") == {}
