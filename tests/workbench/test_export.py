"""`stepwell export`: what comes out goes in again bit for bit, or what is lost is named.

`CASES` is the round-trip table of docs/reference/formats.md.
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import pytest
import yaml

from server.imports.raw_file import ImportRefused
from stepwell import Box, Discrete, EnvSpec, MultiDiscrete, Trajectory, Vocabulary, _exported, cli
from stepwell.errors import Gone, InvalidData, JobFailed, NotFound
from stepwell.spaces import MultiBinary
from stepwell.testing import make_spec, make_trajectory
from tests.imported import read_file
from workbench.export import parquet, selection
from workbench.export.minari import dataset_id

DOCS = Path(__file__).parents[2] / "docs" / "reference"
FORMATS = ("npz", "d4rl", "minari", "lerobot", "parquet")
SUFFIX = {"npz": ".npz", "d4rl": ".hdf5", "minari": "", "lerobot": "", "parquet": ""}


@dataclass
class Case:
    spec: EnvSpec
    trajectories: list[Trajectory]
    lost: dict[str, str] = field(default_factory=dict)
    """By format: what it does not hold, or "refused"; other formats hold all."""


def several(spec: EnvSpec, **options: object) -> list[Trajectory]:
    return [make_trajectory(spec, length=3 + i, seed=i, **options) for i in range(4)]


def ends() -> list[Trajectory]:
    spec = make_spec()
    kinds = [(True, False), (False, True), (False, False), (False, False), (True, False)]
    return [
        make_trajectory(spec, length=1 + i % 2, seed=i, terminated=a, truncated=b)
        for i, (a, b) in enumerate(kinds)
    ]


def still() -> list[Trajectory]:
    """Every observation is the same, so only the list of ends tells where episodes end."""
    spec = make_spec(discrete=3)
    made = several(spec) + several(spec, truncated=True)
    obs = {"observation": np.ones((1, 3), np.float32)}
    return [
        replace(t, obs={k: np.repeat(a, len(t) + 1, axis=0) for k, a in obs.items()}) for t in made
    ]


WIDE = EnvSpec.of(Box((2, 2), "float64", -1, 1), Box((2,), "float64", (-2.0, 0.0), 5.0))
NAMED = EnvSpec.of(
    {"arm/angle": Box((2,)), "arm/on": Box((), "bool", 0, 1), "room": Discrete(5, 2)},
    {"move": Box((2,), low=-1, high=1), "hold": MultiBinary(2)},
    roles={"room": "critic"},
)
WORDS = EnvSpec.of(
    MultiDiscrete((4, 4, 4)), Discrete(2), vocabularies={"observation": Vocabulary(("go", "up"))}
)
LABELLED = EnvSpec.of(
    Box((3,)),
    Box((2,), low=-1.0, high=1.0),
    names={"observation/observation": ("x", "y", "z"), "action/action": ("push", "turn")},
)
COUNTS = EnvSpec.of(
    {"few": Box((2,), "uint8", 3, 300), "many": Box((2,), "int64"), "up": Box((), "int32", 0)},
    {"action": Discrete(3)},
)
OFFSET = EnvSpec.of(MultiDiscrete((3, 2), (-1, 4)), MultiDiscrete((2, 3), (1, -7)))
OFFSETS = EnvSpec.of(
    {"a": MultiDiscrete((3, 2), (-1, 4)), "b/0": Discrete(3, -2), "b/1": Box((1,))},
    {"a": MultiDiscrete((2, 3), (1, -7)), "b/0": Discrete(3, 9)},
)
SEVERAL = dict.fromkeys(("npz", "d4rl"), "refused")
CASES = {
    "float32 vectors, Box actions": Case(make_spec(), several(make_spec())),
    "discrete actions": Case(make_spec(discrete=7), several(make_spec(discrete=7))),
    "discrete actions that do not begin at 0": Case(OFFSET, several(OFFSET)),
    "named ones that do not begin at 0": Case(OFFSETS, several(OFFSETS), SEVERAL),
    "float64, bounds of each element": Case(WIDE, several(WIDE)),
    "float16": Case(
        EnvSpec.of(Box((2,), "float16"), MultiDiscrete((2, 3))),
        several(EnvSpec.of(Box((2,), "float16"), MultiDiscrete((2, 3)))),
    ),
    "images (uint8)": Case(
        EnvSpec.of(Box((4, 4, 3), "uint8", 0, 255), Discrete(3)),
        several(EnvSpec.of(Box((4, 4, 3), "uint8", 0, 255), Discrete(3))),
    ),
    "named observations and actions": Case(NAMED, several(NAMED), SEVERAL),
    "integers without bounds": Case(COUNTS, several(COUNTS), SEVERAL),
    "names of a vector's elements": Case(LABELLED, several(LABELLED)),
    "texts (token ids)": Case(WORDS, several(WORDS)),
    "infos, NaN among them": Case(
        make_spec(infos=True),
        several(make_spec(infos=True)),
        dict.fromkeys(("npz", "d4rl"), "infos of the final observations"),
    ),
    "terminated, truncated, pieces of episodes": Case(make_spec(), ends()),
    "the same observation everywhere": Case(make_spec(discrete=3), still()),
    "final observations unknown in all": Case(
        make_spec(), several(make_spec(), final_obs_valid=False)
    ),
    "final observations unknown in some": Case(
        make_spec(),
        several(make_spec(), final_obs_valid=False) + [make_trajectory(make_spec(), seed=9)],
        dict.fromkeys(("npz", "d4rl"), "which final observations are unknown"),
    ),
    "unknown actions": Case(
        make_spec(action_known=True),
        several(make_spec(action_known=True)),
        SEVERAL | {"minari": "refused", "lerobot": "refused"},
    ),
    "one step; 40,000 steps": Case(
        make_spec(), [make_trajectory(make_spec(), length=n, seed=n) for n in (1, 40_000, 2)]
    ),
    "metadata of trajectories": Case(
        make_spec(),
        several(make_spec(), run="r", tags=("a",), policy="p/1", metrics={"x": 0.5}, success=True)
        + several(make_spec(env="Other-v0"), first_step=2, episode_id="e"),
        dict.fromkeys(("npz", "d4rl", "minari"), "metadata"),
    ),
}


@pytest.fixture(scope="module")
def exported(service):
    """Every case as a dataset in the service: its name."""
    client = service.client()
    names = {}
    for number, (title, case) in enumerate(CASES.items()):
        names[title] = f"export-{number}"
        client.create_dataset(names[title], case.spec)
        client.post(names[title], case.trajectories, spec=case.spec, wait_sealed=True)
    return names


@pytest.fixture
def run(service):
    """One command; its exit status."""
    return lambda *words: cli.main([*map(str, words), "--url", service.url])


def stored(client, dataset):
    rows = client.sql("select id from trajectories where dataset = ? order by seq", [dataset])
    return [client.steps(id_) for (id_,) in rows]


def read_back(path: Path, format_: str) -> tuple[EnvSpec, list[Trajectory]]:
    """As an import into a new dataset reads it, in this process."""
    if format_ == "parquet":
        spec, _, trajectories = _exported.read(path)
        return spec, list(trajectories)
    found, made = read_file(path, kind=format_)
    return found.spec, made


def same(a: Trajectory, b: Trajectory, lost: str) -> None:
    for what in ("obs", "actions", "infos"):
        before, after = getattr(a, what), getattr(b, what)
        assert before.keys() == after.keys()
        for key, array in before.items():
            left, right = array, after[key]
            assert (left.dtype, left.shape) == (right.dtype, right.shape), key
            if what == "infos" and lost == "infos of the final observations":
                left, right = left[:-1], right[:-1]
            assert left.tobytes() == right.tobytes(), key
    assert a.rewards.tobytes() == b.rewards.tobytes()
    assert (a.terminated, a.truncated) == (b.terminated, b.truncated)
    if lost != "which final observations are unknown":
        assert a.final_obs_valid == b.final_obs_valid
    assert (a.action_known is None) == (b.action_known is None)
    if a.action_known is not None:
        assert a.action_known.tobytes() == b.action_known.tobytes()


@pytest.mark.sample(24)
@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("title", CASES)
def test_what_is_exported_is_read_bit_for_bit(exported, run, tmp_path, capsys, title, format_):
    case, out = CASES[title], tmp_path / "out"
    lost = case.lost.get(format_, "")
    status = run("export", exported[title], out, "--format", format_)
    assert status == (2 if lost == "refused" else 0)
    said = [
        line for line in capsys.readouterr().err.splitlines() if "for other readers" not in line
    ]
    if lost == "refused":
        assert "expected --format" in said[0]
        assert list(tmp_path.iterdir()) == []
        return
    spec, back = read_back(out, format_)
    assert spec.to_json() == case.spec.to_json()
    assert len(back) == len(case.trajectories)
    for before, after in zip(case.trajectories, back, strict=True):
        same(before, after, lost)
        if format_ == "parquet":
            assert after.digest == before.digest
        if format_ == "lerobot":
            said_of = after.metadata
            again = replace(before.metadata, source=said_of.source, episode_id=said_of.episode_id)
            assert again == said_of
            assert before.metadata.episode_id in ("", said_of.episode_id)
    if lost == "metadata":
        for name in ("run", "tags", "policy", "metrics", "success", "env", "first_step"):
            assert f"stepwell: note: {format_} does not hold {name} (4 trajectories)" in said
    elif lost:
        assert any(f"{format_} does not hold {lost}" in line for line in said)
    else:
        assert not any("(" in line for line in said)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("hopper@v3", "stepwell/hopper-v3"),
        ("hopper@clean", "stepwell/hopper-clean-v0"),
        ("hopper-medium-v2", "stepwell/hopper-medium-v2"),
        ("a.b@1.0", "stepwell/a-b-1-0-v0"),
        ("v2", "stepwell/v2-v0"),
    ],
)
def test_a_name_is_an_id_that_minari_reads(name, expected):
    """A pattern of its own: letters, digits, - and _, then -v and a number."""
    assert dataset_id(name) == expected


def test_bounds_of_integers_in_minari_are_those_that_the_type_has(exported, run, tmp_path):
    out = tmp_path / "out"
    assert run("export", exported["integers without bounds"], out, "--format", "minari") == 0
    metadata = json.loads((out / "data/metadata.json").read_text())
    spaces = json.loads(metadata["observation_space"])["subspaces"]
    bounds = {key: (space["low"], space["high"]) for key, space in spaces.items()}
    assert bounds == {
        "few": ([3, 3], [255, 255]),
        "many": ([-(2**63)] * 2, [2**63 - 1] * 2),
        "up": (0, 2**31 - 1),
    }


def test_other_readers_get_the_environments_own_numbers(exported, run, tmp_path):
    """Minari declares where they begin; the arrays of all formats hold them."""
    title = "discrete actions that do not begin at 0"
    assert run("export", exported[title], tmp_path / "out", "--format", "minari") == 0
    metadata = json.loads((tmp_path / "out/data/metadata.json").read_text())
    space = {"type": "MultiDiscrete", "dtype": "int64", "nvec": [2, 3], "start": [1, -7]}
    assert json.loads(metadata["action_space"]) == space
    actions = np.concatenate([t.actions["action"] for t in CASES[title].trajectories])
    assert set(actions[:, 0]) == {1, 2} and set(actions[:, 1]) == {-7, -6, -5}
    assert run("export", exported[title], tmp_path / "out.npz", "--format", "npz") == 0
    assert np.load(tmp_path / "out.npz")["actions"].tolist() == actions.tolist()


@pytest.mark.parametrize("format_", FORMATS)
def test_an_exported_dataset_is_imported_into_a_service(
    exported, run, client, tmp_path, capsys, format_
):
    title = "float32 vectors, Box actions"
    case, out, copy = CASES[title], tmp_path / f"out{SUFFIX[format_]}", f"copy-{format_}"
    assert run("export", exported[title], out, "--format", format_) == 0
    for stored_now in (4, 0):  # again: nothing twice
        capsys.readouterr()
        assert run("import", out, "--dataset", copy) == 0
        assert f": {stored_now} trajectories" in capsys.readouterr().out
    assert client.spec(copy) == case.spec
    for before, after in zip(case.trajectories, stored(client, copy), strict=True):
        same(before, after, "")
        assert after.metadata.env == "Test-v0"


def test_an_exported_folder_is_uploaded_by_the_client(client, exported, run, tmp_path):
    """As the command imports it; there is no job of the service."""
    case, dataset = CASES["infos, NaN among them"], exported["infos, NaN among them"]
    assert run("export", dataset, "--format", "parquet", str(tmp_path / "out")) == 0
    seen = []
    name = f"{dataset}-copy"
    job = client.upload(
        name, tmp_path / "out", env="Other-v0", progress=lambda *counts: seen.append(counts)
    )
    count = len(case.trajectories)
    assert (job.state, job.id, job.result["trajectories"]) == ("succeeded", "", count)
    assert seen[-1] == (count, count)
    sql = "select distinct env from trajectories where dataset = ?"
    assert client.sql(sql, [name]).rows == [("Other-v0",)]
    again = client.upload(name, tmp_path / "out", format="parquet", env="Other-v0", wait=False)
    assert (again.result["trajectories"], again.result["duplicates"]) == (0, count)
    with pytest.raises(InvalidData, match="its own spec"):
        client.upload(name, tmp_path / "out", action="discrete:3")
    with pytest.raises(NotFound):
        client.upload("absent-dataset", tmp_path / "out", create=False)


def test_lerobots_features_have_the_names_of_elements(exported, run, tmp_path):
    dataset = exported["names of a vector's elements"]
    assert run("export", dataset, "--format", "lerobot", str(tmp_path / "out")) == 0
    features = json.loads((tmp_path / "out/meta/info.json").read_text())["features"]
    assert features["observation.state"]["names"] == ["x", "y", "z"]
    assert features["action"]["names"] == ["push", "turn"]
    assert features["next.reward"]["names"] is None


def test_a_table_is_imported_with_given_columns(client, run, tmp_path, capsys):
    """A folder of Parquet files over HTTP: the roles of `--columns`, the guesses on stderr."""
    (tmp_path / "plays/data").mkdir(parents=True)
    table = {"x": [0.0, 1, 2, 3], "y": [5.0] * 4, "act": [0, 1, 1, 0], "gain": [0.5] * 4}
    frame = pd.DataFrame(table | {"run": ["a", "a", "b", "b"]})
    frame.to_parquet(tmp_path / "plays/data/train-00000-of-00001.parquet")
    words = ("import", tmp_path / "plays", "--dataset", "table")
    assert run(*words) == 1
    assert "no column is known to be the observation" in capsys.readouterr().err
    given = ("observation=y,x", "reward=gain", "episode=run")
    assert run(*words, "--columns", *given) == 0
    said = capsys.readouterr()
    assert ": 2 trajectories, 4 steps" in said.out
    assert "columns by their names: action=act" in said.err
    first, second = stored(client, "table")
    assert first.obs["observation"].tolist() == [[5, 0], [5, 1], [5, 1]]
    assert second.actions["action"].tolist() == [1, 0]


def test_a_selection_is_exported(client, run, tmp_path, capsys):
    """`--where` and `--purpose` choose; a wrong condition and an empty choice are errors."""
    spec = make_spec()
    client.create_dataset("chosen", spec)
    made = several(spec, purpose="train") + several(spec, purpose="eval")
    client.post("chosen", made, spec=spec)  # spooled: the export seals them

    def ids(*words):
        out = tmp_path / "out"
        assert run("export", "chosen", out, "--format", "parquet", *words) == 0
        found = set(pd.read_parquet(out / "trajectories.parquet")["id"])
        shutil.rmtree(out)
        return found

    assert ids() == {t.id for t in made[:4]}
    for words in (["--dataset", "chosen", "out"], ["out", "--dataset=chosen"]):
        words[words.index("out")] = tmp_path / "out"
        assert run("export", "--format", "parquet", *words) == 0
        shutil.rmtree(tmp_path / "out")
    assert ids("--purpose", "all") == {t.id for t in made}
    assert ids("--purpose", "eval", "--where", "length > 4 -- or more") == {t.id for t in made[6:]}
    for words in (["--where", "length >"], ["--where", "length > 99"], ["--purpose", "evil"]):
        try:
            assert run("export", "chosen", tmp_path / "out", "--format", "npz", *words) != 0
        except SystemExit as error:
            assert error.code == 2
        assert list(tmp_path.iterdir()) == []
    assert run("export", "no-such", tmp_path / "out", "--format", "npz") != 0
    assert "no-such" in capsys.readouterr().err


def test_steps_a_second_are_of_lerobot(exported, run, tmp_path, capsys):
    """LeRobot's timestamps need them; other formats have none."""
    words = ("export", exported["discrete actions"], tmp_path / "out", "--fps")
    assert run(*words, 5, "--format", "npz") == 2
    assert "npz has no timestamps; expected --format lerobot" in capsys.readouterr().err
    assert run(*words, 0, "--format", "lerobot") == 2
    assert "--fps counts steps a second; expected ≥ 1; got 0" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert run(*words, 5, "--format", "lerobot") == 0
    assert "--fps" not in capsys.readouterr().err
    frames = pd.read_parquet(tmp_path / "out/data")
    assert frames["timestamp"].tolist()[:3] == pytest.approx([0, 0.2, 0.4])


def test_a_version_is_exported(client, run, tmp_path):
    spec = make_spec()
    made = several(spec)
    client.create_dataset("exported-version", spec)
    client.post("exported-version", made, spec=spec, wait_sealed=True)
    client.create_version("exported-version", "v1", where="length > 4")
    client.post("exported-version", [make_trajectory(spec, length=9, seed=9)], spec=spec)
    assert run("export", "exported-version@v1", tmp_path / "out", "--format", "parquet") == 0
    ids = pd.read_parquet(tmp_path / "out" / "trajectories.parquet")["id"].tolist()
    assert sorted(ids) == sorted(t.id for t in made if len(t) > 4)


LICENCE = 'CC-BY-4.0 "of all", 日本'


@pytest.mark.sample(4)
@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("licence", ["CC-BY-4.0", LICENCE])
def test_the_licence_goes_out_and_comes_back(client, run, tmp_path, capsys, format_, licence):
    spec = make_spec()
    dataset, again = (f"licensed-{format_}-{n}-{len(licence)}" for n in ("out", "in"))
    client.create_dataset(dataset, spec)
    client.post(dataset, several(spec), spec=spec, wait_sealed=True)
    version = client.create_version(dataset, "v1", licence=licence)
    out = tmp_path / {"npz": "out.npz", "d4rl": "out.hdf5"}.get(format_, "out")
    assert run("export", f"{dataset}@v1", out, "--format", format_) == 0
    assert run("import", out, "--dataset", again) == 0, capsys.readouterr().err
    said = client.dataset(again).description
    assert f"licence={licence}" in said
    if format_ in ("npz", "d4rl", "minari"):
        assert f"SHA-256 {version.digest}" in said
        assert "not read" not in capsys.readouterr().err
    else:
        head, text = (out / "README.md").read_text().removeprefix("---\n").split("---\n", 1)
        known = yaml.safe_load(head)
        assert known["license"] == ("cc-by-4.0" if licence == "CC-BY-4.0" else "other")
        assert known["license_name"] == licence and known["configs"]
        assert f"Licence: {licence}\n" in text and f"SHA-256 {version.digest}" in text
    if format_ == "npz":
        with np.load(out) as arrays:
            assert str(arrays["metadata/licence"]) == licence
    if format_ == "minari":
        assert json.loads((out / "data/metadata.json").read_text())["license"] == licence


def test_a_zip_of_an_exported_folder_says_how_it_is_imported(client, exported, run, tmp_path):
    """Its rows are T+1 for each trajectory, so as a table they would be other steps."""
    run("export", exported["discrete actions"], tmp_path / "out", "--format", "parquet")
    packed = shutil.make_archive(str(tmp_path / "packed"), "zip", tmp_path / "out")
    with pytest.raises(JobFailed, match="folder of stepwell export") as error:
        client.upload("unzipped", packed)
    assert "stepwell import FOLDER" in str(error.value)


def test_what_is_evicted_meanwhile_is_exported(client):
    """The selection is leased: its shards stay until it has been read."""
    spec = make_spec()
    client.create_dataset("evicting", spec, capacity={"trajectories": 4})
    sent = several(spec)
    client.post("evicting", sent, spec=spec)
    chosen = selection.select(client, "evicting", None, "train")
    client.post("evicting", [make_trajectory(spec, seed=n) for n in range(9, 13)], spec=spec)
    for trajectory in sent:
        with pytest.raises(Gone):
            client.steps(trajectory.id)
    assert client.snapshot(chosen.snapshot).leased_until > time.time() + selection.TTL / 2
    assert [t.digest for t in selection.read(client, chosen)] == [t.digest for t in sent]
    assert client.snapshot(chosen.snapshot).leased_until is None


def test_the_card_of_a_parquet_folder_names_its_steps(exported, run, tmp_path):
    """Without it Hugging Face's reader takes all Parquet files for one table, and fails."""
    out = tmp_path / "out"
    run("export", exported["discrete actions"], out, "--format", "parquet")
    _, head, text = (out / "README.md").read_text().split("---\n")
    (pattern,) = [line.split()[1] for line in head.splitlines() if "data_files:" in line]
    assert [path.name for path in out.glob(pattern)] == ["steps-00000.parquet"]
    assert text.lstrip().startswith(f"4 trajectories of {exported['discrete actions']}, 18 steps,")


def test_parquet_is_read_by_pandas_and_duckdb(exported, run, tmp_path):
    title = "metadata of trajectories"
    run("export", exported[title], tmp_path / "out", "--format", "parquet")
    about = pd.read_parquet(tmp_path / "out/trajectories.parquet").set_index("traj_idx")
    steps = pd.read_parquet(tmp_path / "out/steps-00000.parquet")
    case = CASES[title]
    assert about["id"].tolist() == [t.id for t in case.trajectories]
    assert steps.groupby("traj_idx").size().tolist() == [len(t) + 1 for t in case.trajectories]
    np.testing.assert_allclose(
        steps.groupby("traj_idx")["reward"].sum(), about["return"], rtol=1e-5
    )
    sql = (
        f"select metrics['x'], tags[1], count(*) from '{tmp_path}/out/steps-*.parquet'"
        f" join '{tmp_path}/out/trajectories.parquet' using (traj_idx) where not is_last"
        " and run = 'r' group by all"
    )
    assert duckdb.sql(sql).fetchall() == [(0.5, "a", 3 + 4 + 5 + 6)]


@pytest.mark.parametrize("format_", FORMATS)
def test_the_target_is_complete_or_absent(exported, run, tmp_path, capsys, monkeypatch, format_):
    """An existing target stays, a failure in the middle leaves nothing."""
    name, out = exported["discrete actions"], tmp_path / "out"
    out.write_text("mine")
    assert run("export", name, out, "--format", format_) == 2
    assert f"{out} exists" in capsys.readouterr().err
    assert out.read_text() == "mine"
    out.unlink()
    assert run("export", name, tmp_path / "no/out", "--format", format_) == 2
    real = selection.read_shard

    def damaged(path, numbers):
        yield next(real(path, numbers))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(selection, "read_shard", damaged)
    assert run("export", name, out, "--format", format_) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []

    def meanwhile(path, numbers):
        out.write_text("mine")
        return real(path, numbers)

    monkeypatch.setattr(selection, "read_shard", meanwhile)
    assert run("export", name, out, "--format", format_) == 2
    assert list(tmp_path.iterdir()) == [out]
    assert out.read_text() == "mine"


def test_a_dataset_of_many_shards_and_row_groups(service, run, client, tmp_path, monkeypatch):
    """Small limits: several shards, row groups and files, and a trajectory longer than a group."""
    spec = make_spec()
    client.create_dataset("many", spec)
    sent = []
    for first in range(0, 30, 10):
        group = [make_trajectory(spec, length=1 + i % 7, seed=i) for i in range(first, first + 10)]
        client.post("many", group, spec=spec, wait_sealed=True)
        sent += group
    monkeypatch.setattr(parquet, "GROUP_ROWS", 5)
    monkeypatch.setattr(parquet, "FILE_BYTES", 600)
    out = tmp_path / "out"
    assert run("export", "many", out, "--format", "parquet") == 0
    assert len(list(out.glob("steps-*.parquet"))) > 3
    _, _, back = _exported.read(out)
    assert [t.digest for t in back] == [t.digest for t in sent]


def test_a_damaged_folder_is_refused(exported, run, tmp_path, capsys):
    out = tmp_path / "out"
    run("export", exported["discrete actions"], out, "--format", "parquet")
    steps = out / "steps-00000.parquet"
    whole = steps.read_bytes()
    for damage in (whole[: len(whole) // 2], None):
        steps.unlink() if damage is None else steps.write_bytes(damage)
        assert run("import", out, "--dataset", "damaged") == 2
        assert f"{out} cannot be read" in capsys.readouterr().err
    (out / "spec.json").write_text("{}")
    assert run("import", out, "--dataset", "damaged") == 2


@pytest.mark.parametrize("name", ["episode_ends", "stepwell_spec"])
def test_a_wrong_description_in_a_file_is_refused(exported, run, tmp_path, name):
    """Files come from anywhere: the arrays that an export adds are checked like the others."""
    run("export", exported["discrete actions"], tmp_path / "out", "--format", "npz")
    arrays = dict(np.load(tmp_path / "out"))
    for bad in (np.zeros(3, np.int64), np.full((2, 2), 255, np.uint8), np.array([5.0])):
        np.savez(tmp_path / "bad.npz", **arrays | {f"metadata/{name}": bad})
        with pytest.raises(ImportRefused, match=name):
            read_back(tmp_path / "bad.npz", "npz")


def docs_table() -> str:
    lines = [f"| data | {' | '.join(FORMATS)} |", f"|---|{'---|' * len(FORMATS)}"]
    for title, case in CASES.items():
        cells = []
        for format_ in FORMATS:
            lost = case.lost.get(format_, "equal")
            cells.append(lost if lost in ("equal", "refused") else f"without {lost}")
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_table_of_the_docs_is_this_list():
    assert docs_table() in (DOCS / "formats.md").read_text()
