"""Where the episodes of flat files and tables end, by whatever name or in whatever form it is said;
and which arrays have a role."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from server.imports.column_map import USUAL
from server.imports.parser import recognised
from server.imports.raw_file import ImportOptions, ImportRefused, Reading
from stepwell import Box, Discrete, EnvSpec, MultiDiscrete
from stepwell.trajectory import Trajectory
from tests.imported import read_file

from .conftest import Importing

ROWS = 40
ENDS = np.arange(ROWS) % 10 == 9
TERMINALS = np.arange(ROWS) == 19
IDS = np.repeat(np.arange(4), 10)
Arrays = dict[str, Any]
Read = Callable[..., tuple[Reading, list[Trajectory]]]


def arrays(**changes: Any) -> Arrays:
    """Four episodes of ten steps, the second of which terminated; None takes an array away."""
    rng = np.random.default_rng(0)
    made = {
        "observations": rng.normal(size=(ROWS, 3)).astype(np.float32),
        "actions": rng.uniform(-1, 1, (ROWS, 2)).astype(np.float32),
        "rewards": np.arange(ROWS, dtype=np.float32),
        "terminals": TERMINALS,
    } | changes
    return {name: array for name, array in made.items() if array is not None}


def hdf5_file(path: Path, made: Arrays) -> Path:
    with h5py.File(path, "w") as file:
        for name, array in made.items():
            texts = getattr(array, "dtype", np.dtype("i")).kind == "U" and np.ndim(array)
            file[name] = [str(text) for text in array] if texts else array
    return path


def npz_file(path: Path, made: Arrays) -> Path:
    with path.open("wb") as file:
        np.savez(file, **made)
    return path


def parquet_file(path: Path, made: Arrays) -> Path:
    columns = {k: [*v] if np.ndim(v) > 1 else v for k, v in made.items()}
    pq.write_table(pa.table({k: pa.array(v) for k, v in columns.items()}), path)
    return path


WRITERS = {"d4rl": hdf5_file, "npz": npz_file, "parquet": parquet_file}
FLAT = pytest.mark.parametrize("kind", ["d4rl", "npz"])
EVERY = pytest.mark.parametrize("kind", WRITERS)


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Write a file of a kind, and read it as the child does, in this process."""

    def read_(
        kind: str, made: Arrays, *columns: str, **options: Any
    ) -> tuple[Reading, list[Trajectory]]:
        path = WRITERS[kind](tmp_path / "file", made)
        return read_file(path, *columns, kind=kind, **options)

    return read_


def check_four(got: list[Trajectory], second: tuple[bool, bool] = (True, False)) -> None:
    """The four episodes, of which only the second terminated."""
    assert [len(t) for t in got] == [10] * 4
    cut = (False, True)
    assert [(t.terminated, t.truncated) for t in got] == [cut, second, cut, cut]
    assert np.concatenate([t.rewards for t in got]).tolist() == list(range(ROWS))


# --- words ----------------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("name", [*USUAL["truncated"], "Truncations", "TimeLimit.truncated"])
def test_every_word_for_truncated(read: Read, kind: str, name: str) -> None:
    found, got = read(kind, arrays(**{name: ENDS & ~TERMINALS}))
    check_four(got)
    if kind != "parquet" and name != "timeouts":
        assert f"truncated={name}" in found.warnings[0]


@EVERY
@pytest.mark.parametrize("name", [*USUAL["done"], "Dones"])
@pytest.mark.parametrize("dtype", [np.bool_, np.float32, np.int64])
def test_every_word_for_done_beside_terminals(read: Read, kind: str, name: str, dtype: Any) -> None:
    """It says where episodes end; terminals say which of them terminated."""
    found, got = read(kind, arrays(**{name: ENDS.astype(dtype)}))
    check_four(got)
    assert f"done={name}" in found.warnings[0]


@EVERY
@pytest.mark.parametrize("name", USUAL["first"])
def test_every_word_for_first(read: Read, kind: str, name: str) -> None:
    check_four(read(kind, arrays(**{name: np.roll(ENDS, 1)}))[1])
    begun = np.roll(ENDS, 1)
    begun[0] = False
    check_four(read(kind, arrays(**{name: begun}))[1])


@EVERY
@pytest.mark.parametrize("name", USUAL["not_done"])
def test_every_word_for_not_done(read: Read, kind: str, name: str) -> None:
    check_four(read(kind, arrays(**{name: (~ENDS).astype(np.float32)}))[1])


@EVERY
@pytest.mark.parametrize("name", USUAL["not_terminated"])
def test_every_word_for_not_terminated(read: Read, kind: str, name: str) -> None:
    made = arrays(**{name: (~TERMINALS).astype(int), "timeouts": ENDS & ~TERMINALS})
    check_four(read(kind, made | {"terminals": TERMINALS})[1])
    del made["terminals"]
    check_four(read(kind, made)[1])


@EVERY
@pytest.mark.parametrize("name", USUAL["terminated"])
def test_every_word_for_terminated(read: Read, kind: str, name: str) -> None:
    made = arrays(terminals=None, timeouts=ENDS & ~TERMINALS) | {name: TERMINALS}
    check_four(read(kind, made)[1])


@EVERY
@pytest.mark.parametrize("name", USUAL["episode"])
def test_every_word_for_episode(read: Read, kind: str, name: str) -> None:
    check_four(read(kind, arrays(**{name: IDS * 3}))[1])


@EVERY
@pytest.mark.parametrize(
    "names",
    [
        {"observations": "obs", "actions": "acts", "rewards": "rews", "terminals": "is_terminal"},
        {"observations": "states", "actions": "act", "rewards": "r", "terminals": "terminateds"},
    ],
)
def test_other_words_for_the_arrays_themselves(
    read: Read, kind: str, names: dict[str, str]
) -> None:
    made = {names.get(k, k): v for k, v in arrays(dones=ENDS).items()}
    found, got = read(kind, made)
    check_four(got)
    assert "columns by their names" in found.warnings[0]


@FLAT
def test_words_of_d4rl_go_without_saying(read: Read, kind: str) -> None:
    found, got = read(kind, arrays(timeouts=ENDS & ~TERMINALS))
    check_four(got)
    assert found.warnings == []


@EVERY
def test_done_alone_and_with_truncated(read: Read, kind: str) -> None:
    found, got = read(kind, arrays(terminals=None, dones=ENDS))
    assert all(t.terminated for t in got) and len(got) == 4
    assert "dones does not tell ends from time-outs" in " ".join(found.warnings)
    check_four(read(kind, arrays(terminals=None, dones=ENDS, timeouts=ENDS & ~TERMINALS))[1])


# --- lists ----------------------------------------------------------------------------------------


@FLAT
@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("episode_ends", [9, 19, 29, 39]),
        ("episode_ends", [10, 20, 30, 40]),
        ("ends", [10, 20, 30, 40]),
        ("meta/episode_ends", [10, 20, 30, 40]),
        ("episode_starts", [0, 10, 20, 30]),
        ("starts", [0, 10, 20, 30]),
        ("episode_lengths", [10, 10, 10, 10]),
        ("traj_lens", [10, 10, 0, 10, 10]),
        ("lengths", [10, 10, 10, 10]),
    ],
)
def test_lists_of_ends_starts_and_lengths(
    read: Read, kind: str, name: str, numbers: list[int]
) -> None:
    found, got = read(kind, arrays(**{name: np.array(numbers)}))
    check_four(got)
    assert f"episodes are those of {name}" in found.warnings


@FLAT
@pytest.mark.parametrize(
    ("made", "says"),
    [
        ({"episode_ends": [10, 20, 30]}, "no list of ends"),
        ({"episode_ends": [20, 10, 40]}, "no list of ends"),
        ({"starts": [3, 10]}, "no list of starts"),
        ({"episode_ends": [10, 40], "episode_lengths": [20, 20]}, "list other episodes"),
        ({"episode_ends": [10, 40]}, "terminals is set before the last step"),
    ],
)
def test_lists_that_do_not_fit_are_refused(read: Read, kind: str, made: Any, says: str) -> None:
    with pytest.raises(ImportRefused, match=says):
        read(kind, arrays(**{k: np.array(v) for k, v in made.items()}))
    assert len(read(kind, arrays(**made), "done=", "first=")[1]) == 2


@FLAT
def test_lengths_of_something_else_are_named(read: Read, kind: str) -> None:
    found, got = read(kind, arrays(dones=ENDS, episode_lengths=np.array([7, 9])))
    check_four(got)
    assert "not read: episode_lengths, which does not add up to 40" in found.warnings


# --- contradictions -------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"timeouts": ENDS, "truncations": ENDS & TERMINALS}, "columns=truncated="),
        ({"dones": ENDS, "is_last": TERMINALS}, "columns=done="),
        ({"dones": ENDS, "not_done": ENDS}, "columns=not_done="),
        ({"dones": np.roll(TERMINALS, 3)}, "columns=done="),
        ({"episode_starts": np.roll(TERMINALS, 5)}, "columns=first="),
        ({"episode_ids": np.arange(ROWS) // 25}, "columns=terminated="),
        ({"episode_ids": IDS, "dones": np.roll(ENDS, 2), "terminals": None}, "columns=done="),
        ({"episode_ids": IDS, "is_first": np.roll(ENDS, 3), "terminals": None}, "columns=first="),
        ({"dones": ENDS * 0.5}, "columns=done="),
        ({"episode_ids": IDS, "traj_id": np.arange(ROWS) // 5, "terminals": None}, "traj_id"),
    ],
)
def test_what_contradicts_itself_is_refused_with_the_options(
    read: Read, kind: str, changes: Any, option: str
) -> None:
    with pytest.raises(ImportRefused) as caught:
        read(kind, arrays(**changes))
    assert option in str(caught.value.expected)


@EVERY
@pytest.mark.parametrize("name", ["mask", "masks", "Masks"])
def test_a_mask_that_may_mark_ends_needs_a_word(read: Read, kind: str, name: str) -> None:
    made = arrays(**{name: (~ENDS).astype(np.float32)})
    with pytest.raises(ImportRefused) as caught:
        read(kind, made)
    assert f"columns=not_done={name}" in str(caught.value.expected)
    check_four(read(kind, made, f"not_done={name}")[1])
    assert [len(t) for t in read(kind, made, "not_done=")[1]] == [20, 20]
    with pytest.raises(ImportRefused, match="differ about where episodes are terminated"):
        read(kind, made, f"not_terminated={name}")
    _, got = read(kind, made, f"not_terminated={name}", "terminated=")
    assert [t.terminated for t in got] == [True] * 4


@EVERY
@pytest.mark.parametrize(
    "mask", [np.ones(ROWS), ~TERMINALS, np.linspace(0, 1, ROWS), np.ones((ROWS, 4))]
)
def test_a_mask_that_says_nothing_new_is_named_only(read: Read, kind: str, mask: Any) -> None:
    found, got = read(kind, arrays(masks=mask))
    assert [len(t) for t in got] == [20, 20]
    assert "not read: masks" in " ".join(found.warnings)


@FLAT
def test_flags_by_a_word_that_is_not_known_are_pointed_at(read: Read, kind: str) -> None:
    found, got = read(kind, arrays(over=ENDS, other=np.arange(ROWS)))
    assert (
        "not read: other, over; if over says where episodes end: columns=done=over"
        in found.warnings
    )
    check_four(read(kind, arrays(over=ENDS), "done=over")[1])


# --- ids ------------------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize(
    "ids", [IDS + 877733342111222000, np.array([f"ep {n}" for n in IDS]), IDS.astype(np.float64)]
)
def test_ids_of_any_type(read: Read, kind: str, ids: Any) -> None:
    check_four(read(kind, arrays(episode_ids=ids))[1])


@EVERY
def test_rows_of_interleaved_episodes(read: Read, kind: str) -> None:
    """All arrays are put in order, next observations and infos, too."""
    order = np.arange(ROWS).reshape(4, 10).T.reshape(-1)
    made = arrays(episode=IDS, t=np.tile(np.arange(10), 4))
    made["next_observations"] = made["observations"] + 1
    mixed = {name: array[order] for name, array in made.items()}
    if kind != "parquet":
        mixed["infos/row"] = np.arange(ROWS, dtype=np.float32)[order]
    found, got = read(kind, mixed)
    check_four(got)
    assert all(t.final_obs_valid for t in got)
    for number, t in enumerate(got):
        rows = slice(10 * number, 10 * number + 10)
        assert np.array_equal(t.obs["observation"][:-1], made["observations"][rows])
        assert np.array_equal(t.obs["observation"][-1], made["next_observations"][rows][-1])
        if kind != "parquet":
            assert t.infos["row"][:-1].tolist() == list(range(ROWS))[rows]


@EVERY
@pytest.mark.parametrize("steps", [True, False])
def test_ids_that_repeat_for_each_worker(read: Read, kind: str, steps: bool) -> None:
    made = arrays(episode=IDS % 2, worker=IDS // 2, step=np.tile(np.arange(10), 4))
    if not steps:
        del made["step"], made["terminals"]
    with pytest.raises(ImportRefused) as caught:
        read(kind, made)
    assert "columns=episode=worker,episode" in str(caught.value.expected)
    _, got = read(kind, made, "episode=worker,episode")
    if steps:
        check_four(got)
    assert [len(t) for t in got] == [10] * 4


@EVERY
def test_rows_of_workers_without_ids(read: Read, kind: str) -> None:
    made = arrays(env_id=np.arange(ROWS) % 2, dones=ENDS)
    with pytest.raises(ImportRefused, match="several values of env_id"):
        read(kind, made)
    check_four(read(kind, made, "episode=")[1])


@FLAT
def test_nan_among_ids(read: Read, kind: str) -> None:
    with pytest.raises(ImportRefused, match="no id in some rows") as caught:
        read(kind, arrays(episode=np.where(np.arange(ROWS) == 7, np.nan, IDS)))
    assert caught.value.got == "row 7"


# --- columns --------------------------------------------------------------------------------------


@EVERY
def test_columns_as_tables_have_them(read: Read, kind: str) -> None:
    made = arrays(observations=None, actions=None, rewards=None, terminals=None)
    made |= {f"q_{n}": np.full(ROWS, n, np.float32) for n in (10, 2, 1)}
    made |= {"u": np.zeros((ROWS, 2), np.float32), "gain": np.arange(ROWS, dtype=np.float32)}
    made |= {"fell": TERMINALS, "last": ENDS, "heat": np.arange(ROWS, dtype=np.float32)}
    given = ("observation=q_*", "action=u", "reward=gain", "terminated=fell", "done=last")
    found, got = read(kind, made, *given, "info/heat=heat")
    check_four(got)
    assert got[0].obs["observation"][0].tolist() == [1, 2, 10]
    assert found.spec.names == {"observation/observation": ("q_1", "q_2", "q_10")}
    assert got[1].infos["heat"].tolist() == [*range(10, 20), 19]
    assert "columns: observation=q_1, q_2, q_10" in found.warnings
    named = ("observation/a=q_1", "observation/b=q_2,q_10", *given[1:])
    spec = read(kind, made, *named)[0].spec
    assert {k: s.shape for k, s in spec.observations.items()} == {"a": (1,), "b": (2,)}


@FLAT
def test_a_later_file_is_matched_by_name(read: Read, kind: str) -> None:
    def made(*numbers: int) -> Arrays:
        ones = {f"q_{n}": np.full(ROWS, n, np.float32) for n in numbers}
        nexts = {f"n_{n}": np.full(ROWS, 100 + n, np.float32) for n in numbers}
        return arrays(observations=None, dones=ENDS) | ones | nexts

    given = ("observation=q_*", "next_observation=n_*")
    spec = read(kind, made(1, 2, 10), *given)[0].spec
    turned = ("observation=q_10,q_2,q_1", "next_observation=n_10,n_2,n_1")
    found, got = read(kind, made(10, 2, 1), *turned, spec=spec)
    assert got[0].obs["observation"][[0, -1]].tolist() == [[1, 2, 10], [101, 102, 110]]
    assert "put in the dataset's order" in " ".join(found.warnings)
    with pytest.raises(ImportRefused, match="lacks q_10; adds q_3"):
        read(kind, made(1, 2, 3), *given, spec=spec)


@FLAT
def test_groups_and_dotted_names_are_named_arrays(read: Read, kind: str) -> None:
    """Matched by name in a later file, in whatever order it has them."""
    arm, hand = np.ones((ROWS, 2), np.float32), np.zeros((ROWS, 2), np.float32)
    made = arrays(observations=None, dones=ENDS)
    first = made | {"observations/arm": arm, "observations/hand": hand}
    found, got = read(kind, first)
    check_four(got)
    assert list(found.spec.observations) == ["arm", "hand"]
    assert got[0].obs["arm"][0].tolist() == [1, 1]
    second = made | {"observations/hand": hand, "observations/arm": arm}
    assert read(kind, second, spec=found.spec)[1][0].obs["arm"][0].tolist() == [1, 1]
    with pytest.raises(ImportRefused, match="other observations") as caught:
        read(kind, made | {"observations/arm": arm, "observations/leg": hand}, spec=found.spec)
    assert (caught.value.expected, caught.value.got) == (["arm", "hand"], ["arm", "leg"])


@FLAT
@pytest.mark.parametrize("role", ["observation", "action", "reward"])
def test_a_refusal_lists_the_names_of_the_file(read: Read, kind: str, role: str) -> None:
    made = {f"{k}_x": v for k, v in arrays().items()}
    given = {"observation": "observations_x", "action": "actions_x", "reward": "rewards_x"}
    with pytest.raises(ImportRefused, match=f"{role}s is missing") as caught:
        read(kind, made, *(f"{r}={n}" for r, n in given.items() if r != role))
    assert {*caught.value.got.split(", ")} == {*made}
    assert f"columns={role}=NAME" in str(caught.value.expected)
    with pytest.raises(ImportRefused, match="does not exist") as caught:
        read(kind, made, "observation=absent")
    assert "observations_x" in str(caught.value.expected)


@FLAT
def test_without_rewards_if_somebody_says_so(read: Read, kind: str) -> None:
    found, got = read(kind, arrays(rewards=None, dones=ENDS), "reward=")
    assert [t.total_reward for t in got] == [0] * 4
    assert "there is no reward: all are 0" in found.warnings


@FLAT
def test_integer_columns_are_a_vector_of_choices(read: Read, kind: str) -> None:
    made = arrays(actions=None, dones=ENDS, u_0=IDS % 2, u_1=IDS)
    found, _ = read(kind, made, "action=u_*")
    assert found.spec.actions["action"] == MultiDiscrete((2, 4))
    assert found.spec.names == {"action/action": ("u_0", "u_1")}


# --- what nobody needs ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "extra",
    [
        {"version": "1.0"},
        {"task": ["reach"] * ROWS},
        {"zz": np.array([b"reach"] * ROWS)},
        {"extra/name": "x"},
        {"metadata/version": "1.0"},
        {"metadata/names": np.array([b"a", b"b"])},
        {"compound": np.zeros(3, [("a", "i4"), ("b", "f4")])},
        {"metadata/compound": np.zeros(3, [("a", "i4"), ("b", "f4")])},
        {"complex": np.zeros(ROWS, np.complex64)},
        {"gamma": 0.99},
        {"nothing": h5py.Empty("f4")},
    ],
)
def test_hdf5_arrays_that_nobody_needs_are_named_only(read: Read, extra: Any) -> None:
    found, got = read("d4rl", arrays(dones=ENDS) | extra)
    check_four(got)
    (name,) = extra
    assert name.startswith("metadata/") or f"not read: {name}" in found.warnings


def test_unknown_filters_count_only_where_an_array_is_needed(read: Read, tmp_path: Path) -> None:
    path = hdf5_file(tmp_path / "file", arrays(dones=ENDS))
    with h5py.File(path, "a") as file:
        file.create_dataset("packed", data=np.arange(ROWS), scaleoffset=0)
        made = {name: file[name][()] for name in file}
    assert "not read: packed" in read_file(path)[0].warnings and made["packed"][3] == 3
    with pytest.raises(ImportRefused, match="unknown filter"):
        read_file(path, "reward=packed")


def test_npz_members_that_nobody_needs_are_named_only(read: Read) -> None:
    extra = {"objects": np.array([{}] * ROWS, object), "version": np.array("1.0")}
    extra["task"] = np.array(["reach"] * ROWS)
    found, got = read("npz", arrays(dones=ENDS) | extra)
    check_four(got)
    assert "not read: objects, task, version" in found.warnings


@EVERY
@pytest.mark.parametrize("name", ["observations", "actions", "rewards"])
def test_nan_is_refused_with_its_row(read: Read, kind: str, name: str) -> None:
    made = arrays(dones=ENDS)
    made[name] = made[name].copy()
    made[name][23] = np.nan
    with pytest.raises(ImportRefused, match="invalid numbers|NaN") as caught:
        read(kind, made)
    assert "row 23" in f"{caught.value.detail} {caught.value.got}"
    assert name.removesuffix("s") in caught.value.detail


# --- other layouts --------------------------------------------------------------------------------


def imitation(lengths: list[int], terminal: list[bool]) -> Arrays:
    steps, count = sum(lengths), len(lengths)
    firsts = np.concatenate([[0], np.cumsum(lengths)[:-1] + np.arange(1, count)])
    numbers = np.arange(steps + count, dtype=np.float32)
    assert firsts[0] == 0
    return {
        "obs": np.stack([numbers, -numbers], 1),
        "acts": np.arange(steps) % 3,
        "rews": np.arange(steps, dtype=np.float32),
        "infos": np.array([{}] * steps, object),
        "terminal": np.array(terminal),
        "indices": np.cumsum(lengths[:-1]),
    }


@pytest.mark.parametrize("lengths", [[3, 1, 4], [5], [1, 1]])
def test_imitations_arrays(read: Read, lengths: list[int]) -> None:
    """T+1 observations for each trajectory, so that the final ones are known."""
    terminal = [number % 2 == 0 for number in range(len(lengths))]
    found, got = read("npz", imitation(lengths, terminal))
    assert [len(t) for t in got] == lengths
    assert [t.terminated for t in got] == terminal and all(t.final_obs_valid for t in got)
    seen = np.concatenate([t.obs["observation"][:, 0] for t in got])
    assert seen.tolist() == list(range(sum(lengths) + len(lengths)))
    assert np.concatenate([t.rewards for t in got]).tolist() == list(range(sum(lengths)))
    assert "of imitation" in " ".join(found.warnings)


def test_imitations_arrays_without_rewards_and_as_a_zip(
    read: Read, tmp_path: Path, importing: Importing
) -> None:
    made = imitation([3, 1, 4], [True, False, True])
    del made["rews"]
    with pytest.raises(ImportRefused, match="rewards is missing") as caught:
        read("npz", made)
    assert "columns=reward=" in str(caught.value.expected)
    assert [len(t) for t in read("npz", made, "reward=")[1]] == [3, 1, 4]
    path = npz_file(tmp_path / "trajectories.zip", imitation([3, 1], [True, True]))
    with path.open("rb") as file:
        assert recognised(file, ImportOptions(dataset="d", format="zip"), 1 << 28) == "npz"
    job = importing.run(path, "imitation", format="zip")
    assert job.state == "succeeded" and job.result is not None
    assert (job.result["trajectories"], job.result["format"]) == (2, "npz")


@pytest.mark.parametrize("change", [{"indices": np.array([4, 2])}, {"indices": np.array([3])}])
def test_imitations_arrays_that_do_not_fit_are_refused(read: Read, change: Any) -> None:
    with pytest.raises(ImportRefused):
        read("npz", imitation([3, 1, 4], [True] * 3) | change)


@FLAT
def test_imitations_transitions(read: Read, kind: str) -> None:
    made = arrays()
    names = {"obs": made["observations"], "acts": made["actions"], "rews": made["rewards"]}
    names |= {"next_obs": made["observations"] + 1, "dones": TERMINALS}
    _, got = read(kind, names)
    assert [len(t) for t in got] == [20, 20] and got[0].final_obs_valid


@FLAT
@pytest.mark.parametrize("final", [0, 1])
def test_one_set_of_arrays_for_each_episode(read: Read, kind: str, final: int) -> None:
    """d3rlpy 2: more than ten, so that 10 must not come after 1."""
    made: Arrays = {"version": np.array("2.1")} if kind == "npz" else {"version": "2.1"}
    for number in range(12):
        steps = 2 + number % 3
        made |= {
            f"observations_{number}": np.full((steps + final, 3), number, np.float32),
            f"actions_{number}": np.zeros((steps, 1), np.float32),
            f"rewards_{number}": np.full((steps, 1), number, np.float32),
            f"terminated_{number}": np.array(number == 1),
        }
    found, got = read(kind, made)
    assert [len(t) for t in got] == [2 + number % 3 for number in range(12)]
    assert [t.rewards[0] for t in got] == list(range(12))
    assert [t.obs["observation"][-1, 0] for t in got] == list(range(12))
    assert [t.terminated for t in got] == [number == 1 for number in range(12)]
    assert all(t.final_obs_valid == bool(final) for t in got)
    assert "one set of arrays for each of 12 episodes" in found.warnings
    made |= {name: array[:0] for name, array in made.items() if name.endswith("s_5")}
    found, got = read(kind, made)
    assert [t.rewards[0] for t in got] == [0, 1, 2, 3, 4, *range(6, 12)]
    assert "1 episode without a step left out" in found.warnings
    del made["actions_3"]
    with pytest.raises(ImportRefused, match="not there for every episode"):
        read(kind, made)


@FLAT
def test_an_existing_dataset_of_another_single_name(read: Read, kind: str) -> None:
    spec = EnvSpec.of({"state": Box((3,))}, {"push": Box((2,), low=-1.0, high=1.0)})
    _, got = read(kind, arrays(dones=ENDS), spec=spec)
    assert list(got[0].obs) == ["state"] and list(got[0].actions) == ["push"]


def test_a_zip_of_something_else_is_no_npz() -> None:
    out = io.BytesIO()
    np.savez(out)
    out.seek(0)
    with pytest.raises(ImportRefused, match="not of a known dataset"):
        recognised(out, ImportOptions(dataset="d", format="zip", size=22), 1 << 28)


STEPS = np.tile(np.arange(10), 4)


@EVERY
@pytest.mark.parametrize("name", ["t", "timesteps", "frame_index"])
def test_an_episode_ends_where_its_steps_begin_again(read: Read, kind: str, name: str) -> None:
    """Time limits that no flag tells: rows of the next episode are not a part of this one."""
    found, got = read(kind, arrays(**{name: STEPS}))
    assert [(len(t), t.terminated) for t in got] == [(10, False), (10, True), *[(10, False)] * 2]
    assert f"wherever {name} begins again: 2 ends without a flag" in " ".join(found.warnings)
    _, got = read(kind, arrays(**{name: STEPS}), "step=")
    assert [len(t) for t in got] == [20, 20]
    found, got = read(kind, arrays(**{name: np.arange(ROWS)}))
    assert [len(t) for t in got] == [20, 20] and "begins again" not in " ".join(found.warnings)


@EVERY
@pytest.mark.parametrize("flags", [{}, {"terminals": None, "dones": ENDS}])
def test_rows_out_of_the_order_of_their_steps_are_refused(
    read: Read, kind: str, flags: Arrays
) -> None:
    shuffled = np.random.default_rng(1).permutation(ROWS)
    with pytest.raises(ImportRefused, match="t does not increase within an episode") as caught:
        read(kind, arrays(t=shuffled, **flags))
    assert "columns=step=" in caught.value.expected
    assert [len(t) for t in read(kind, arrays(t=shuffled, **flags), "step=")[1]]


@EVERY
def test_done_that_says_no_end_where_steps_begin_again_is_refused_with_the_cure(
    read: Read, kind: str
) -> None:
    made = arrays(terminals=None, dones=TERMINALS, t=STEPS)
    with pytest.raises(ImportRefused, match="t does not increase .* of dones") as caught:
        read(kind, made)
    assert "columns=terminated=dones done=" in caught.value.expected
    _, got = read(kind, made, "terminated=dones", "done=")
    assert [(len(t), t.terminated) for t in got] == [(10, False), (10, True), *[(10, False)] * 2]


@EVERY
def test_masks_beside_ends_may_tell_terminations(read: Read, kind: str) -> None:
    """dones_float marks ends, and masks is 0 at those that are terminations (IQL's files)."""
    made = arrays(terminals=None, dones_float=ENDS.astype(float), masks=1.0 - TERMINALS)
    with pytest.raises(ImportRefused, match="masks is 0 in 1 row where episodes end") as caught:
        read(kind, made)
    assert "columns=not_terminated=masks" in caught.value.expected
    _, got = read(kind, made, "not_terminated=masks")
    assert [t.terminated for t in got] == [False, True, False, False]
    _, got = read(kind, made, "not_terminated=")
    assert [t.terminated for t in got] == [True] * 4
    for harmless in (1.0 - ENDS, np.ones(ROWS), STEPS % 2):
        _, got = read(kind, arrays(terminals=None, dones_float=ENDS.astype(float), masks=harmless))
        assert [t.terminated for t in got] == [True] * 4


# --- what a later look found ----------------------------------------------------------------------


RLDS_ROWS = np.arange(ROWS) % 10


def rlds(**changes: Any) -> Arrays:
    """Episodes of nine steps; the last row of each has an observation and no action."""
    last = RLDS_ROWS == 9
    made = {"is_first": RLDS_ROWS == 0, "is_last": last, "is_terminal": last & (IDS == 1)}
    return arrays(terminals=None, **made) | changes


@EVERY
def test_flags_of_rlds_mark_final_observations(read: Read, kind: str) -> None:
    made = rlds()
    found, got = read(kind, made)
    assert [(len(t), t.terminated, t.final_obs_valid) for t in got] == [
        (9, number == 1, True) for number in range(4)
    ]
    for number, t in enumerate(got):
        rows = slice(10 * number, 10 * number + 10)
        assert np.array_equal(t.obs["observation"], made["observations"][rows])
        assert np.array_equal(t.rewards, made["rewards"][rows][:-1])
        assert np.array_equal(t.actions["action"], made["actions"][rows][:-1])
    assert "columns=first= makes them steps" in " ".join(found.warnings)
    assert [len(t) for t in read(kind, made, "first=")[1]] == [10] * 4


@EVERY
def test_what_is_left_out_of_such_rows_is_said(read: Read, kind: str) -> None:
    made = rlds(rewards=np.where(RLDS_ROWS == 9, 0, 1).astype(np.float32))
    assert "left out" not in " ".join(read(kind, made)[0].warnings)
    cut = RLDS_ROWS == 9
    cut[-1] = False
    found, got = read(kind, rlds(is_last=cut, is_terminal=cut & (IDS == 1)))
    assert [len(t) for t in got] == [9] * 4
    assert "4 rewards of such rows left out" in found.warnings
    assert "1 episode without is_last" in " ".join(found.warnings)


@EVERY
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"is_terminal": RLDS_ROWS == 4}, "is_terminal is set where is_first has no end"),
        ({"is_first": RLDS_ROWS == 5}, "is_terminal is set where is_first has no end"),
        ({"episode": np.arange(ROWS) // 8}, "tell other episodes apart|before the last step"),
    ],
)
def test_such_flags_that_contradict_themselves_are_refused(
    read: Read, kind: str, changes: Arrays, says: str
) -> None:
    with pytest.raises(ImportRefused, match=says):
        read(kind, rlds(**changes))


@EVERY
def test_such_rows_with_ids_are_the_same_episodes(read: Read, kind: str) -> None:
    _, got = read(kind, rlds(episode=IDS))
    assert [(len(t), t.final_obs_valid) for t in got] == [(9, True)] * 4


@FLAT
def test_a_time_limit_among_infos_is_one(read: Read, kind: str) -> None:
    name = "infos/TimeLimit.truncated"
    found, got = read(kind, arrays(terminals=None, dones=ENDS, **{name: ENDS & ~TERMINALS}))
    check_four(got)
    assert not found.spec.infos and f"truncated={name}" in found.warnings[0]


@EVERY
def test_ends_that_are_both_are_said(read: Read, kind: str) -> None:
    found, got = read(kind, arrays(episode=IDS, terminals=ENDS, timeouts=TERMINALS))
    assert all(t.terminated for t in got)
    assert "1 step is both terminal and timeout" in " ".join(found.warnings)


@EVERY
def test_the_advice_for_done_alone_works(read: Read, kind: str) -> None:
    made = arrays(terminals=None, dones=ENDS)
    assert "columns=truncated=dones done=" in " ".join(read(kind, made)[0].warnings)
    _, got = read(kind, made, "truncated=dones", "done=")
    assert [(t.terminated, t.truncated) for t in got] == [(False, True)] * 4


@FLAT
@pytest.mark.parametrize(
    ("name", "flags", "advice"),
    [
        ("over", ENDS, "if over says where episodes end: columns=done=over"),
        ("going", ~ENDS, "if going says where episodes end: columns=not_done=going"),
        ("agent_id", IDS % 2, ""),
    ],
)
def test_advice_about_flags_says_which_kind(
    read: Read, kind: str, name: str, flags: Any, advice: str
) -> None:
    found, got = read(kind, arrays(timeouts=ENDS & ~TERMINALS, **{name: flags}))
    check_four(got)
    line = next(line for line in found.warnings if line.startswith("not read"))
    assert line.partition("; ")[2] == advice


@EVERY
@pytest.mark.parametrize(("dtype", "first"), [(np.float32, 2**24), (np.float16, 2**11)])
def test_ids_that_a_float_cannot_tell_apart_are_refused(
    read: Read, kind: str, dtype: Any, first: int
) -> None:
    with pytest.raises(ImportRefused, match=f"floats of 2\\^{first.bit_length() - 1} or more"):
        read(kind, arrays(episode=(IDS + first).astype(dtype)))
    assert len(read(kind, arrays(episode=(IDS + first - 4).astype(dtype)))[1]) == 4


@EVERY
def test_rows_that_do_not_follow_are_said_where_ids_tell_episodes(read: Read, kind: str) -> None:
    made = arrays(terminals=None, episode=IDS, t=np.tile(np.arange(10)[::-1], 4))
    made["next_observations"] = made["observations"] + 1
    made["next_observations"][:-1][~ENDS[:-1]] = made["observations"][1:][~ENDS[:-1]]
    found, _ = read(kind, made)
    assert "after 36 steps inside trajectories" in " ".join(found.warnings)
    assert "does t count their order?" in " ".join(found.warnings)
    found, got = read(kind, made | {"t": STEPS})
    assert "inside trajectories" not in " ".join(found.warnings)
    assert got[0].final_obs_valid


@EVERY
def test_unsigned_numbers_of_64_bits_are_read_as_signed_ones(read: Read, kind: str) -> None:
    flags = {"timeouts": ENDS & ~TERMINALS}
    _, got = read(kind, arrays(actions=np.arange(ROWS, dtype=np.uint64) % 3, **flags))
    assert got[1].actions["action"].tolist() == [int(n) % 3 for n in range(10, 20)]
    with pytest.raises(ImportRefused):
        read(kind, arrays(observations=np.full((ROWS, 2), 2**63, np.uint64), **flags))


@EVERY
@pytest.mark.parametrize(
    ("stored", "given", "says"),
    [
        (np.float32, np.int64, "observations: int64 stored as float32, which rounds them"),
        (np.float32, np.float64, "observations: float64 stored as float32"),
        (np.float16, np.float32, "observations: float32 stored as float16"),
        (np.float32, np.uint8, ""),
    ],
)
def test_a_later_file_that_loses_digits_is_said(
    read: Read, kind: str, stored: Any, given: Any, says: str
) -> None:
    flags = {"timeouts": ENDS & ~TERMINALS}
    spec = read(kind, arrays(observations=np.ones((ROWS, 2), stored), **flags))[0].spec
    values = np.full((ROWS, 2), 200 if given is np.uint8 else 2000, given)
    values[3] += given(0) if given is np.uint8 else given(2**24 - 1999)
    if stored is np.float16:
        values[3] = 2.1
    found, _ = read(kind, arrays(observations=values, **flags), spec=spec)
    assert [line for line in found.warnings if "stored as" in line] == ([says] if says else [])


@EVERY
def test_a_later_file_whose_infos_lose_digits_is_said(read: Read, kind: str) -> None:
    made = arrays(timeouts=ENDS & ~TERMINALS) | {"infos/fuel": np.arange(ROWS) + 2**24}
    found, _ = read(kind, made)
    spec = replace(found.spec, infos={key: Box(()) for key in found.spec.infos})
    again, _ = read(kind, made, spec=spec)
    lines = [line for line in again.warnings if "stored as" in line]
    assert lines == ["infos/fuel: int64 stored as float32, which rounds them"]


def test_arrays_of_an_episode_have_its_length(read: Read) -> None:
    """d3rlpy's: lengths that only add up are those of other episodes."""
    made: Arrays = {}
    for number, (obs, steps) in enumerate(((6, 5), (4, 5))):
        made[f"observations_{number}"] = np.ones((obs, 2), np.float32)
        made[f"actions_{number}"] = np.ones((steps, 1), np.float32)
        made[f"rewards_{number}"] = np.ones(steps, np.float32)
        made[f"terminals_{number}"] = np.arange(steps) == steps - 1
    with pytest.raises(ImportRefused, match="observations_0 has the wrong length") as caught:
        read("npz", made)
    assert "5, as rewards_0 has" in caught.value.expected


@FLAT
@pytest.mark.parametrize("final", [0, 1])
def test_arrays_of_episodes_by_steps_are_refused_with_the_cure(
    read: Read, kind: str, final: int
) -> None:
    """[E, T, …]: what the refusal says is what makes them right."""
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(4, 10 + final, 3)).astype(np.float32)
    made = arrays(observations=obs, actions=rng.uniform(-1, 1, (4, 10, 2)).astype(np.float32))
    made |= {name: made[name].reshape(4, 10) for name in ("rewards", "terminals")}
    with pytest.raises(ImportRefused, match="rewards has the wrong length") as caught:
        read(kind, made)
    said = caught.value.expected
    assert "[episodes, steps, …]: a.reshape(40, *a.shape[2:]) of each" in said
    assert "episode_ids = numpy.repeat(numpy.arange(4), 10)" in said
    assert ("observations[:, :-1], and [:, 1:] as next_observations" in said) is bool(final)
    if final:
        made |= {"observations": obs[:, :-1], "next_observations": obs[:, 1:]}
    flat = {name: a.reshape(40, *a.shape[2:]) for name, a in made.items()}
    _, got = read(kind, flat | {"episode_ids": np.repeat(np.arange(4), 10)})
    check_four(got)
    assert all(
        np.array_equal(t.obs["observation"][: 10 + final], o) for t, o in zip(got, obs, strict=True)
    )
    with pytest.raises(ImportRefused, match="wrong length") as caught:
        read(kind, arrays(rewards=np.zeros((ROWS, 4), np.float32)))
    assert "episodes, steps" not in caught.value.expected, "rewards of two kinds"


@FLAT
@pytest.mark.parametrize("given", [(), ("reward=",)])
def test_one_observation_too_many_is_refused_with_the_cure(
    read: Read, kind: str, given: tuple[str, ...]
) -> None:
    whole = np.random.default_rng(0).normal(size=(ROWS + 1, 3)).astype(np.float32)
    with pytest.raises(ImportRefused, match="has the wrong length") as caught:
        read(kind, arrays(observations=whole), *given)
    said = caught.value.expected
    assert "1 more; if it is final" in said and "observations[1:] as next_observations" in said
    made = arrays(
        observations=whole[:-1], next_observations=whole[1:], terminals=np.arange(ROWS) == 39
    )
    (one,) = read(kind, made, *given)[1]
    assert np.array_equal(one.obs["observation"], whole) and one.final_obs_valid


@FLAT
def test_flags_of_rlds_without_observations_are_no_matter_of_lengths(read: Read, kind: str) -> None:
    with pytest.raises(ImportRefused, match="observations is missing"):
        read(kind, {name: a for name, a in rlds().items() if name != "observations"})


@EVERY
@pytest.mark.parametrize("dtype", [np.int64, np.float64])
def test_times_as_whole_numbers_are_no_missing_steps(read: Read, kind: str, dtype: Any) -> None:
    times = (1_700_000_000_000 + 20 * np.arange(ROWS)).astype(dtype)
    made = arrays(episode=IDS, when=times, timeouts=ENDS & ~TERMINALS)
    found, got = read(kind, made, "step=when")
    check_four(got)
    said = " ".join(found.warnings)
    assert said.count("when goes up by 20 from row to row, so it is taken for times") == 1
    assert "steps are missing" not in said and "jumps" not in said
    times[15:] += 10_000
    said = " ".join(read(kind, made, "step=when")[0].warnings)
    assert "when jumps in episode 1" in said and "taken for times" in said


@EVERY
def test_a_column_that_is_an_info_has_its_usual_role_too(read: Read, kind: str) -> None:
    given = ("info/x=rewards", "info/angle=observations", "info/flag=terminals")
    found, got = read(kind, arrays(dones=ENDS), *given)
    check_four(got)
    assert got[1].rewards.tolist() == got[1].infos["x"][:-1].tolist() == list(range(10, 20))
    assert np.array_equal(got[1].infos["angle"][:10], got[1].obs["observation"][:10])


@FLAT
@pytest.mark.parametrize(
    ("marks", "at"),
    [
        ({"ptr": ROWS, "size": ROWS, "max_size": ROWS + 3}, 0),
        ({"pos": np.array([ROWS]), "full": np.array([False])}, 0),
        ({"pos": 2, "full": True}, 2),
        ({"_index": 2, "_size": ROWS}, 2),
    ],
)
def test_replay_buffers_are_refused_with_the_line_that_orders_them(
    read: Read, kind: str, marks: Arrays, at: int
) -> None:
    def stored(array: np.ndarray) -> np.ndarray:
        if at:
            return np.roll(array, at, axis=0)
        return np.concatenate([array, np.zeros((3, *array.shape[1:]), array.dtype)])

    made = {name: stored(array) for name, array in arrays(timeouts=ENDS & ~TERMINALS).items()}
    with pytest.raises(ImportRefused, match="replay buffer") as caught:
        read(kind, made | marks)
    line = caught.value.expected.partition("numpy.savez(NEW, **")[2].partition("); or")[0]
    fixed = eval(line, {"f": made | {k: np.array(v) for k, v in marks.items()}, "numpy": np})
    check_four(read(kind, fixed)[1])
    whole = arrays(timeouts=ENDS & ~TERMINALS)
    for fine in ({"ptr": 0, "size": ROWS}, {"pos": ROWS, "full": False}, {"size": 7}, {"ptr": 7}):
        check_four(read(kind, whole | fine)[1])


@FLAT
def test_rows_at_the_end_that_nobody_wrote_are_said(read: Read, kind: str) -> None:
    made = arrays(timeouts=ENDS & ~TERMINALS)
    longer = {k: np.concatenate([a, np.zeros((3, *a.shape[1:]), a.dtype)]) for k, a in made.items()}
    assert any("the last 3 rows are 0" in line for line in read(kind, longer)[0].warnings)
    assert not any("rows are 0" in line for line in read(kind, made)[0].warnings)


def shifted(fill: float, ends: np.ndarray = ENDS) -> Arrays:
    """The next row as next observation, and `fill` at ends."""
    made = arrays(timeouts=ENDS & ~TERMINALS)
    following = np.roll(made["observations"], -1, axis=0)
    return made | {"next_observations": np.where(ends[:, None], np.float32(fill), following)}


@EVERY
@pytest.mark.parametrize("fill", [0.0, np.nan])
def test_final_observations_that_a_shift_left_empty_are_unknown(
    read: Read, kind: str, fill: float
) -> None:
    found, got = read(kind, shifted(fill))
    check_four(got)
    assert not any(t.final_obs_valid for t in got)
    assert any("at the end of every episode, as a shift leaves it" in w for w in found.warnings)
    if fill == 0:
        _, kept = read(kind, shifted(0), "next_observation=next_observations")
        assert all(t.final_obs_valid and not t.obs["observation"][-1].any() for t in kept)
        made = shifted(0)
        made["observations"][3] = made["next_observations"][2] = 0
        assert all(t.final_obs_valid for t in read(kind, made)[1]), "zeros are observations here"
    assert all(t.final_obs_valid for t in read(kind, shifted(7.0))[1])


@EVERY
def test_final_observations_that_are_nan_are_refused_with_the_cure(read: Read, kind: str) -> None:
    with pytest.raises(ImportRefused, match="next_observations contains invalid") as caught:
        read(kind, shifted(np.nan, TERMINALS))
    assert "columns=next_observation=" in caught.value.expected
    check_four(read(kind, shifted(np.nan, TERMINALS), "next_observation=")[1])


@EVERY
def test_actions_that_led_to_their_row_are_refused_with_both_readings(
    read: Read, kind: str
) -> None:
    """The second row has the first action and its reward, as Dreamer writes them."""
    first, last = np.roll(ENDS, 1), ENDS
    values = np.where(first, 0, np.arange(ROWS)).astype(np.float32)
    made = arrays(
        terminals=None, is_first=first, is_last=last, is_terminal=TERMINALS,
        actions=values[:, None], rewards=values,
    )  # fmt: skip
    with pytest.raises(ImportRefused, match="may have led to") as caught:
        read(kind, made)
    assert "numpy.roll(a, -1, axis=0)" in caught.value.expected
    rolled = {name: np.roll(made[name], -1, axis=0) for name in ("actions", "rewards")}
    _, (got, *_) = read(kind, made | rolled)
    assert got.actions["action"].ravel().tolist() == got.rewards.tolist() == [*range(1, 10)]
    assert "action[is_last] = 0" in caught.value.expected
    _, (got, *_) = read(kind, made | {"actions": np.where(last[:, None], 0, made["actions"])})
    assert got.rewards.tolist() == [*range(9)]


@FLAT
def test_arrays_of_steps_by_environments_are_refused_with_the_cure(read: Read, kind: str) -> None:
    """[T, E, …]: what the refusal says keeps environments and episodes apart."""
    made = arrays(dones=ENDS, terminals=None)
    made = {name: a.reshape(2, 20, *a.shape[1:]).swapaxes(0, 1) for name, a in made.items()}
    with pytest.raises(ImportRefused, match="wrong length") as caught:
        read(kind, made)
    said = caught.value.expected
    assert "[steps, envs, …]: a.swapaxes(0, 1).reshape(40, *a.shape[2:]) of each array" in said
    line = said.rpartition("episode_ids = ")[2].partition(", where")[0]
    made["episode_ids"] = eval(line, {"d": made["dones"].astype(int), "numpy": np})
    flat = {name: a.swapaxes(0, 1).reshape(40, *a.shape[2:]) for name, a in made.items()}
    _, got = read(kind, flat)
    assert [t.rewards.tolist() for t in got] == np.arange(ROWS).reshape(4, 10).tolist()


@FLAT
@pytest.mark.parametrize("dtype", [np.int64, np.float32])
def test_actions_of_one_element_have_any_shape(read: Read, kind: str, dtype: Any) -> None:
    actions = np.arange(ROWS).reshape(ROWS, 1, 1).astype(dtype)
    found, got = read(kind, arrays(actions=actions, timeouts=ENDS & ~TERMINALS))
    assert found.spec.actions["action"].shape == (() if dtype == np.int64 else (1,))
    assert np.concatenate([t.actions["action"].ravel() for t in got]).tolist() == [*range(ROWS)]


@FLAT
def test_choices_from_another_number_are_refused_with_the_option(read: Read, kind: str) -> None:
    made = arrays(actions=np.arange(ROWS) % 3 - 1, timeouts=ENDS & ~TERMINALS)
    with pytest.raises(ImportRefused, match="not small choices") as caught:
        read(kind, made)
    assert "?action=discrete:3:-1 if they are 3 choices" in caught.value.expected
    found, got = read(kind, made, action="discrete:3:-1")
    assert found.spec.actions["action"] == Discrete(3, -1)
    assert got[0].actions["action"][:4].tolist() == [-1, 0, 1, -1]
    with pytest.raises(ImportRefused, match="discrete:N:START"):
        read(kind, made, action="discrete:3:x")


@EVERY
def test_step_type_is_refused_with_the_flags_to_make_of_it(read: Read, kind: str) -> None:
    step_type = np.where(ENDS, 2, np.where(np.roll(ENDS, 1), 0, 1))
    made = arrays(terminals=None, step_type=step_type)
    for given in ((), ("done=step_type",)):
        with pytest.raises(ImportRefused) as caught:
            read(kind, made, *given)
        assert "is_first = step_type == 0, is_last = step_type == 2" in caught.value.expected
    flags = {"is_first": step_type == 0, "is_last": ENDS, "is_terminal": TERMINALS}
    assert [len(t) for t in read(kind, made | flags)[1]] == [9] * 4


@EVERY
@pytest.mark.parametrize("both", [True, False])
def test_valids_that_mark_final_observations_are_refused_with_the_cure(
    read: Read, kind: str, both: bool
) -> None:
    """OGBench sets terminals at the last step and at the final observation."""
    marks = ENDS | np.roll(ENDS, -1) if both else ENDS
    made = arrays(terminals=marks, valids=(~ENDS).astype(np.float32))
    with pytest.raises(ImportRefused, match="seem to be final observations") as caught:
        read(kind, made)
    assert "is_last = valids == 0" in caught.value.expected
    assert "without valids and terminals" in " ".join(caught.value.expected.split())
    cured = {"is_last": ENDS, "is_first": np.roll(ENDS, 1), "is_terminal": ENDS & False}
    _, got = read(kind, arrays(terminals=None) | cured)
    assert [(len(t), t.final_obs_valid) for t in got] == [(9, True)] * 4
    check_four(read(kind, arrays(timeouts=ENDS & ~TERMINALS, valid=np.ones(ROWS)))[1])
