"""Lineage: read from configs and trajectories, upwards and downwards."""

import json

import duckdb
import numpy as np
import pytest

from stepwell import Box, Client, Discrete, EnvSpec
from stepwell.cli import main
from stepwell.errors import InvalidData
from workbench.analysis.lineage import (
    Edge,
    Lineage,
    Node,
    datasets_of,
    learned_from,
    read_lineage,
    runs_that_saw,
)

SPEC = EnvSpec.of(Box((1,)), Discrete(2), env="Toy-v0")


def play(client: Client, dataset: str, reward: float = 1.0, **more: str) -> str:
    """Store a trajectory of two steps; its id."""
    return client.add(
        dataset, obs=np.zeros((3, 1), np.float32), actions=np.zeros(2, np.int64),
        rewards=np.full(2, reward, np.float32), terminated=True, **more,
    ).id  # fmt: skip


@pytest.fixture
def family(client: Client, name: str) -> str:
    """old -> run a -> new -> run b, and a stranger."""
    for suffix in ("old", "new", "stranger"):
        client.create_dataset(f"{name}-{suffix}", SPEC)
    client.create_run(
        f"{name}-a", "train", config={"dataset": f"{name}-old", "where": "length > 1"}
    )
    select = f"SELECT id FROM trajectories WHERE dataset = '{name}-new' AND length > 2"
    client.create_run(f"{name}-b", "train", config={"sources": [{"select": select, "share": 0.5}]})
    client.publish_policy(f"{name}-a", 3, b"weights", step=3)
    for policy, dataset in ((f"{name}-a/3", f"{name}-new"), ("", f"{name}-old")):
        play(client, dataset, policy=policy, source="a file")
    return name


def test_a_chain_is_followed_both_ways(client: Client, family: str) -> None:
    n = family
    found = read_lineage(client).around(f"dataset:{n}-new")
    assert {e.of.split(":")[1] + " > " + e.made.split(":")[1]: e.how for e in found.edges} == {
        f"{n}-old > {n}-a": "length > 1",
        f"{n}-a > {n}-new": "played 1, return 2",
        f"{n}-new > {n}-b": "trained, share 0.5",
    }
    first = read_lineage(client).around(f"run:{n}-a")
    assert f"dataset:{n}-stranger" not in first.nodes
    assert "1 policy" in first.nodes[f"run:{n}-a"].about
    dot = found.dot()
    assert f'"run:{n}-a" -> "dataset:{n}-new" [label="played 1, return 2", ' in dot


def test_a_drawing_shows_the_beginning_of_a_long_condition() -> None:
    how = 'length > 1 and "return" > 0 and terminated and not truncated'
    nodes = {f"{k}:{n}": Node(k, n) for k, n in (("dataset", "a"), ("run", "b"))}
    dot = Lineage(nodes, [Edge("dataset:a", "run:b", how)]).dot("#c3ccd7")
    label = r'label="length > 1 and \"return\" > 0 and…", tooltip='
    assert label in dot
    assert r"and not truncated" in dot
    assert 'fontcolor="#c3ccd7"' in dot


def test_a_version_stands_between_its_dataset_and_its_runs(client: Client, family: str) -> None:
    n = family
    client.create_version(f"{n}-new", "v1")
    fork = client.create_version(f"{n}-new", "v2", parent="v1")
    client.create_run(f"{n}-c", "train", config={"dataset": f"{n}-new@v1"})
    client.create_run(f"{n}-d", "train", config={"sources": [{"select": fork.select, "share": 1}]})
    found = read_lineage(client).around(f"dataset:{n}-new")
    made = {(e.of.split(":")[1], e.made.split(":")[1]) for e in found.edges}
    assert made >= {
        (f"{n}-new", f"{n}-new@v1"), (f"{n}-new@v1", f"{n}-c"),
        (f"{n}-new@v1", f"{n}-new@v2"), (f"{n}-new@v2", f"{n}-d"),
    }  # fmt: skip
    assert found.nodes[f"dataset:{n}-new@v1"].about == "1 trajectories, for ever"


def test_a_title_stands_with_the_name(client: Client, family: str) -> None:
    client.patch_run(f"{family}-a", title='The "good" one')
    found = read_lineage(client).around(f"run:{family}-a")
    assert found.nodes[f"run:{family}-a"].label == f'The "good" one ({family}-a)'
    assert f'label="The \\"good\\" one\\n{family}-a\\n' in found.dot()


def test_what_was_deleted_is_named(client: Client, family: str) -> None:
    client.delete_dataset(f"{family}-old")
    client.delete_run(f"{family}-b")
    found = read_lineage(client).around(f"run:{family}-a")
    assert found.nodes[f"dataset:{family}-old"].about == "deleted"
    assert f"run:{family}-b" not in found.nodes
    with pytest.raises(InvalidData, match="expected a dataset or a training run"):
        found.around("run:nobody")


def test_a_run_that_feeds_itself_is_a_cycle(client: Client, name: str) -> None:
    client.create_dataset(name, SPEC)
    client.create_run(name, "train", config={"dataset": name})
    play(client, name, policy=f"{name}/1")
    found = read_lineage(client).around(f"run:{name}")
    assert sorted((e.of, e.made) for e in found.edges) == [
        (f"dataset:{name}", f"run:{name}"), (f"run:{name}", f"dataset:{name}")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        ("SELECT id FROM trajectories WHERE dataset = 'a'", ["a"]),
        ("select id from trajectories where DATASET IN ('a', 'b') and x = 'c'", ["a", "b"]),
        ("select id from trajectories where length > 3", []),
    ],
)
def test_datasets_are_found_in_queries(select: str, expected: list[str]) -> None:
    assert list(datasets_of({"sources": [{"select": select}]})) == expected


def test_the_command_takes_any_name(client: Client, service, family: str, capsys) -> None:
    def ask(*words: str) -> str:
        assert main(["lineage", *words, "--url", service.url]) == 0
        return capsys.readouterr().out

    (played,) = client.trajectories(f"{family}-new").items
    a = f"{family}-a"
    words = (f"{family}-new", f"{a}/3", f"{a}:3", f"{a}:latest", f"run:{family}-b", played.id)
    for name in words:
        assert f"dataset {family}-old" in ask(name)
    for option, name in (("dataset", f"{family}-new"), ("run", a), ("policy", f"{a}:3")):
        assert f"dataset {family}-old" in ask(f"--{option}", name)
    for option in ("--dataset", "--run"):
        client.create_dataset(a, SPEC, exist_ok=True)
        assert (ask(option, a) == f"dataset:{a}: nothing else is known\n") is (option != "--run")
    assert main(["lineage", a, "--url", service.url]) == 2
    assert f"expected dataset:{a} or run:{a}" in capsys.readouterr().err
    client.delete_dataset(a)
    assert f"made by {family}-a/3" in ask(played.id)
    assert ask(f"{family}-a", "--dot").startswith("digraph")
    assert len(json.loads(ask(f"{family}-a", "--json"))["edges"]) == 3
    assert "nothing else is known" in ask(f"{family}-stranger")
    assert main(["lineage", "nobody", "--url", service.url]) == 2
    assert "expected a dataset, run, RUN:VERSION or id" in capsys.readouterr().err


def test_the_trajectories_of_a_run_are_those_of_its_snapshots(
    client: Client, service, name: str, tmp_path, capsys
) -> None:
    """Not those of its dataset: what a condition leaves out, or what came later, was never seen."""
    client.create_dataset(name, SPEC)
    good, bad = play(client, name), play(client, name, -1.0)
    first = client.create_snapshot(dataset=name, where="return > 0")
    better = play(client, name, 2.0)
    second = client.create_snapshot(dataset=name, where="return > 0", since=first.id)
    later = play(client, name, 3.0)
    run = f"{name}-run"
    client.create_run(run, "train", config={"dataset": name, "where": "return > 0"})
    client.patch_run(run, snapshots=[first.id, second.id])
    assert "learned from 2 snapshots" in read_lineage(client).nodes[f"run:{run}"].about
    table = learned_from(client, run)
    found = {row["id"]: (row["return"], row["snapshot"]) for row in table.to_pylist()}
    assert found == {good: (2.0, first.id), better: (4.0, second.id)}
    assert [runs_that_saw(client, one) for one in (good, bad, better, later)] == [
        [run], [], [run], []
    ]  # fmt: skip
    for suffix in ("parquet", "csv"):
        path = tmp_path / f"seen.{suffix}"
        words = ["lineage", f"{run}/1", "--trajectories", str(path), "--url", service.url]
        assert main(words) == 0 and "2 trajectories →" in capsys.readouterr().out
        assert duckdb.sql(f"select count(distinct id) from '{path}'").fetchall() == [(2,)]
    assert main(["lineage", run, "--trajectories", "x.txt", "--url", service.url]) == 2
    capsys.readouterr()
    assert main(["lineage", good, "--url", service.url]) == 0
    assert f"in the data of: {run}\n" in capsys.readouterr().out
    assert learned_from(client, _empty_run(client, name)).num_rows == 0


def _empty_run(client: Client, name: str) -> str:
    client.create_run(f"{name}-empty", "train")
    return f"{name}-empty"
