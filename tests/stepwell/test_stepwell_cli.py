"""`stepwell <command>`: help that teaches, errors in one line, each command on the real service."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pytest

from stepwell import cli, new_id, terminal
from stepwell._extras import modules_of, require
from stepwell.messages import MetricPoint
from stepwell.testing import make_spec, make_trajectory

SPEC = make_spec(env="Test-v1")


@pytest.fixture
def run(service, capsys):
    """Run one command against the service: (exit status, stdout, stderr)."""

    def command(*argv, url=service.url):
        status = cli.main([*argv, *(["--url", url] if url else [])])
        out, err = capsys.readouterr()
        return status, out, err

    return command


@pytest.fixture
def ask(run):
    """Like `run` for what must succeed; the parsed JSON."""

    def command(*argv):
        status, out, err = run(*argv, "--json")
        assert status == 0, err
        return json.loads(out)

    return command


@pytest.fixture
def dataset(client, name):
    client.create_dataset(name, SPEC)
    client.post(
        name, [make_trajectory(SPEC, length=i + 1, seed=i) for i in range(3)], wait_sealed=True
    )
    return name


# --- the table itself -------------------------------------------------------------------------


def test_help_names_every_command_and_shows_examples(capsys):
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    for name, command in cli.COMMANDS.items():
        assert f"  {name} " in out and command.summary in out
    assert "stepwell import hopper-medium-v2.hdf5" in out
    assert max(map(len, out.splitlines())) <= 100
    assert cli.main([]) == 2


PLAIN = [n for n, c in cli.COMMANDS.items() if c.target.split(".")[0] in ("stepwell", "server")]


@pytest.mark.parametrize("name", PLAIN)
def test_each_command_explains_itself(name, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([name, "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert f"usage: stepwell {name}" in out and "examples:" in out


def test_an_unknown_command_suggests_one(capsys):
    assert cli.main(["datset"]) == 2
    assert "did you mean: stepwell datasets" in capsys.readouterr().err
    assert cli.main(["xyzzy"]) == 2
    assert "stepwell --help" in capsys.readouterr().err


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("stepwell 0.")


def test_a_missing_extra_prints_the_line_that_installs_it(capsys, monkeypatch):
    broken = cli.Command("no_such_library.main:main", "x", "server")
    monkeypatch.setitem(cli.COMMANDS, "serve", broken)
    assert cli.main(["serve"]) == 2
    err = capsys.readouterr().err
    assert "no_such_library is not installed; pip install 'stepwell[server]'" in err


def test_a_missing_library_inside_a_program_is_named_too(capsys, monkeypatch, tmp_path):
    (tmp_path / "half_program.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(cli.COMMANDS, "train", cli.Command("half_program:main", "x", "trainer"))
    assert cli.main(["train"]) == 2
    assert "no_such_dependency is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(("missing", "is_of_the_extra"), [("torch", True), ("theirs", False)])
def test_a_library_that_a_program_misses_later(monkeypatch, capsys, missing, is_of_the_extra):
    """Also what only some options import; not the modules of a user."""

    def program(_argv: list[str]) -> int:
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr("trainer.main.main", program)
    if not is_of_the_extra:
        with pytest.raises(ModuleNotFoundError):
            cli.main(["train"])
        return
    assert cli.main(["train"]) == 2
    assert capsys.readouterr().err == (
        "stepwell: `stepwell train` needs more than the SDK: torch is not installed; "
        "pip install 'stepwell[trainer]'\n"
    )


def test_the_modules_of_every_extra_are_called_as_they_are_imported():
    """So that `require` finds what is there: those of `all` are, where the tests run."""
    everything = modules_of("all")
    assert {"torch", "gymnasium", "PIL", "google", "streamlit", "pydantic_settings"} <= everything
    require(*everything)
    with pytest.raises(ModuleNotFoundError, match="nothing_of_that_name"):
        require(*everything, "nothing_of_that_name")
    assert modules_of("nothing") == set()


# --- errors -----------------------------------------------------------------------------------


def test_an_error_is_one_line_and_debug_shows_where(run, capsys, monkeypatch):
    monkeypatch.setenv("STEPWELL_DEBUG", "")  # put back afterwards: --debug sets it
    status, out, err = run("datasets", "show", "nothing-here")
    assert (status, out) == (1, "")
    assert err.startswith("stepwell: 404 not_found") and err.count("\n") == 1
    status, _, err = run("--debug", "datasets", "show", "nothing-here")
    assert status == 1 and "Traceback" in err and "NotFound" in err


NOWHERE = "http://127.0.0.1:9"
TRAIN = ["train", "offline", "--dataset", "d"]
PLAYED = ["--dataset", "d", "--url", NOWHERE, "--random"]


@pytest.mark.parametrize(
    "words",
    [
        ["train", "ofline"],
        ["train", "offline"],
        [*TRAIN, "--data.batch", "0"],
        [*TRAIN, "--data.batsh", "3"],
        [*TRAIN, "--agent.losses.tau", "7"],
        [*TRAIN, "--agent.losses.filter-beta", "2"],
        [*TRAIN, "--config", "no-such-file.toml"],
        [*TRAIN, "--plugin", "no_such_module"],
        ["collect", "--env", "Pendulum-v1", "--dataset", "d"],
        ["collect", "--env", "NoSuchEnvironment-v0", *PLAYED],
        ["collect", "--env", "Pendulum-v1", *PLAYED, "--envs", "0"],
        ["collect", "--env", "Pendulum-v1", *PLAYED, "--device", "abacus"],
        ["evaluate", "--env", "Pendulum-v1", "--policy", "a", "--random"],
        ["evaluate", "--env", "Pendulum-v1", "--file", "no-such-file", "--url", NOWHERE],
        ["serve", "--data", "d", "--port", "99999"],
        ["serve", "--data", "d", "--host", "0.0.0.0"],
        ["demo", "--dataset", "no-such-file"],
        ["launcher", "--capacity", "0"],
        ["import", "f.hdf5"],
        ["datasets", "create", "d", "--spec", "no-such-file"],
        ["datasets", "list", "--url", "nonsense"],
        ["runs", "delete", "r", "--url", NOWHERE],
        ["sql", "--csv", "--json", "select 1"],
        ["db", "current"],
        ["fsck"],
    ],
    ids=" ".join,
)
def test_wrong_words_are_one_line_and_status_2(words, capsys, monkeypatch, tmp_path):
    """Whatever of them is wrong: a flag, a setting, what they name. Nothing is begun."""
    monkeypatch.chdir(tmp_path)
    for name in ("STEPWELL_DATA", "STEPWELL_TOKEN", "STEPWELL_URL"):
        monkeypatch.delenv(name, raising=False)
    try:
        status = cli.main(words)
    except SystemExit as left:
        status = left.code
    err = capsys.readouterr().err
    assert status == 2, err
    assert err and "Traceback" not in err
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_no_service_is_one_line_with_the_cure(run):
    status, _, err = run("datasets", "list", url="http://127.0.0.1:9")
    assert status == 1 and "stepwell serve" in err and err.count("\n") == 1


def test_where_the_service_is_can_come_from_the_environment(service, capsys, monkeypatch):
    monkeypatch.setenv("STEPWELL_URL", service.url)
    assert cli.main(["status"]) == 0


def test_a_reader_that_has_seen_enough_is_no_error(service):
    """`stepwell sql … | head -1` ends quietly."""
    command = [sys.executable, "-m", "stepwell.cli", "sql", "--csv", "--limit", "1000000"]
    with subprocess.Popen(
        [*command, "select * from range(1000000)", "--url", service.url],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONWARNINGS": "error"},
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


# --- commands ---------------------------------------------------------------------------------


def test_datasets(run, ask, dataset, name, tmp_path):
    assert name in [d["name"] for d in ask("datasets", "list")]
    assert name in run("datasets", "list")[1]
    shown = run("datasets", "show", name)[1]
    assert "Test-v1" in shown and "obs observation (policy)" in shown and "3 trajectories" in shown
    assert ask("datasets", "show", name)["fifo"]["trajectories"] == 3

    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(SPEC.to_json()))
    new = ask("datasets", "create", f"{name}-2", "--spec", str(spec), "--max-trajectories", "7")
    assert new["capacity"]["trajectories"] == 7
    changed = ask("datasets", "set-capacity", f"{name}-2", "--max-steps", "50")
    assert (changed["capacity"]["steps"], changed["capacity"]["trajectories"]) == (50, None)

    status, _, err = run("datasets", "delete", f"{name}-2")
    assert status == 2 and "--yes" in err
    assert run("datasets", "delete", f"{name}-2", "--yes")[0] == 0
    assert run("datasets", "show", f"{name}-2")[0] == 1


@pytest.mark.parametrize("content", [None, "{", '{"observations": {}}'])
def test_a_bad_spec_file_is_one_line(run, name, tmp_path, content):
    path = tmp_path / "spec.json"
    if content is not None:
        path.write_text(content)
    status, _, err = run("datasets", "create", name, "--spec", str(path))
    assert status == 2 and err.count("\n") == 1


def test_trajectories(run, ask, dataset, name):
    page = ask("trajectories", "list", name, "--order=length", "--limit", "2")
    assert [t["length"] for t in page["items"]] == [1, 2] and page["next"]
    out = run("trajectories", "list", name, "--limit", "2")[1]
    assert "terminated" in out and "and more" in out
    one = page["items"][0]["id"]
    assert ask("trajectories", "tag", one, "a", "b")["tags"] == ["a", "b"]
    assert ask("trajectories", "tag", one, "a", "--remove")["tags"] == ["b"]
    assert ask("trajectories", "protect", one)[0]["partition"] == "protected"
    assert "protected" in run("trajectories", "show", one)[1]
    assert ask("trajectories", "demote", one)[0]["partition"] == "fifo"


def test_many_trajectories_are_labelled_by_a_condition(run, ask, dataset, name):
    short = f"dataset = '{name}' and length < 3"
    flagged = ask("trajectories", "label", "--where", short, "--flag", "short", "--tag", "a")
    assert flagged == {"matching": 2, "changed": 2}
    page = ask("trajectories", "list", name, "--order=length")
    assert [t["flags"] for t in page["items"][:3]] == [["short"], ["short"], []]
    bad = "list_contains(flags, 'short')"
    assert "2 of 2" in run("trajectories", "label", "--where", bad, "--unflag", "short")[1]
    assert ask("trajectories", "label", "--where", bad, "--tag", "b")["matching"] == 0
    one = page["items"][0]["id"]
    assert ask("trajectories", "label", one, "--untag", "a", "--protect")["changed"] == 1
    for wrong in ([one], ["--tag", "x"], [one, "--where", "true", "--tag", "x"]):
        status, _, err = run("trajectories", "label", *wrong)
        assert status == 2 and "label: " in err and err.count("\n") == 1
    status, _, err = run("trajectories", "label", "--where", "lenth < 3", "--tag", "x")
    assert status != 0 and "lenth" in err


def test_values_of_a_query_are_typed(run, ask, dataset, name):
    query = "select length from trajectories where dataset = $name and length > $low order by 1"
    found = ask("sql", query, "--param", f"name={name}", "--param", "low=1")
    assert [row[0] for row in found["rows"]] == [2, 3]
    status, _, err = run("sql", query, "--param", "name")
    assert status == 2 and "expected NAME=VALUE; got name" in err


def test_saved_queries(run, ask, dataset, name):
    query = "select length from trajectories where dataset = $name and length > $low order by 1"
    words = ("--param", f"name={name}", "--param", "low=1", "--description", "long ones")
    assert "stepwell sql --saved" in run("sql", "--save", name, query, *words)[1]
    assert [row[0] for row in ask("sql", "--saved", name)["rows"]] == [2, 3]
    assert [row[0] for row in ask("sql", "--saved", name, "--param", "low=2")["rows"]] == [3]
    assert "long ones" in run("sql", "--list")[1]
    assert name in [q["name"] for q in ask("sql", "--list")]
    status, _, err = run("sql", "--saved", name, "select 1")
    assert status == 2 and "expected no other" in err
    assert ask("sql", "--delete", name) == {"removed": name}
    status, _, err = run("sql", "--saved", name)
    assert status == 1 and "there is no saved query" in err


def test_sql_in_every_format(run, ask, dataset, name, tmp_path, monkeypatch):
    query = f"select length, return from trajectories where dataset = '{name}' order by length"
    status, out, _ = run("sql", query)
    assert status == 0 and out.split()[:4] == ["length", "return", "1", out.split()[3]]
    answer = ask("sql", query)
    assert answer["columns"] == ["length", "return"]
    assert [row[0] for row in answer["rows"]] == [1, 2, 3]
    rows = list(csv.reader(io.StringIO(run("sql", query, "--csv")[1])))
    assert rows[0] == ["length", "return"] and [r[0] for r in rows[1:]] == ["1", "2", "3"]
    status, out, err = run("sql", query, "--arrow", str(tmp_path / "x.arrow"))
    assert status == 0 and out == "" and "3 rows" in err
    with pa.OSFile(str(tmp_path / "x.arrow")) as file:
        assert pa.ipc.open_file(file).read_all()["length"].to_pylist() == [1, 2, 3]
    monkeypatch.setattr(sys, "stdin", io.StringIO(query))
    assert run("sql")[1].startswith("length")
    status, out, err = run("sql", query, "--limit", "1")
    assert status == 0 and "only the first 1 row;" in err
    assert "6" in run("sql", "select count(*) - 3 as n from steps", "--dataset", name)[1]
    assert "trajectories" in run("sql", "--schema")[1]
    assert ask("sql", "--schema")["tables"]


def test_sql_in_json_is_exact(run, ask):
    """Whole numbers of any size, decimals with their digits, and bytes as base64, nested, too."""
    query = (
        "select 18446744073709551617::hugeint, -170141183460469231731687303715884105727::hugeint,"
        " [18446744073709551617::hugeint], {'a': 2::hugeint}, 18446744073709551615::ubigint,"
        " 1.25::decimal(9, 2), '\\xFFa'::blob, ['a'::blob], null::hugeint"
    )
    ((huge, least, several, field, big, small, blob, blobs, none),) = ask("sql", query)["rows"]
    assert (huge, least, several, field) == (2**64 + 1, 1 - 2**127, [2**64 + 1], {"a": 2})
    assert (big, small, none) == (2**64 - 1, 1.25, None)
    assert (blob, blobs) == ("/2E=", ["YQ=="])
    out = run("sql", "--csv", "select 18446744073709551617::hugeint as a, 'a'::blob as b")[1]
    assert "18446744073709551617" in out and "YQ==" in out


@pytest.mark.parametrize(
    "interval",
    [
        *("'14 months 3 days 4 hours 5.5 seconds'", "'-14 months -3 days'", "'0 days'"),
        *("'-5 seconds'", "'100 hours'", "'-1 month 40 days -0.000001 seconds'", "'1 year'"),
    ],
)
def test_sql_shows_intervals_as_text(run, ask, interval):
    query = f"select interval {interval} as a, [interval {interval}] as b"
    text = ask("sql", f"select (interval {interval})::varchar")["rows"][0][0]
    assert ask("sql", query)["rows"] == [[text, [text]]]
    assert run("sql", query)[1].split("\n")[1].split() == [*text.split()] * 2
    rows = list(csv.reader(io.StringIO(run("sql", "--csv", query)[1])))
    assert rows[1][0] == text and json.loads(rows[1][1]) == [text]


def test_sql_in_csv_has_json_for_lists_and_structs(run):
    values = "[1.5, null] as a, {'x': ['a\"b'], 'y': 'a'::blob, 'z': date '2026-02-01'} as b, "
    out = run("sql", "--csv", f"select {values}2.50::decimal(9, 2) as c, null::int[] as d")[1]
    first, second, third, fourth = list(csv.reader(io.StringIO(out)))[1]
    assert json.loads(first) == [1.5, None]
    assert json.loads(second) == {"x": ['a"b'], "y": "YQ==", "z": "2026-02-01"}
    assert (third, fourth) == ("2.50", "")


def test_sql_says_where_null_may_be_nan_or_infinity(run):
    plain, nested = "select 'nan'::float as a, null as b", "select {'x': ['-inf'::float]} as a"
    said = "null in JSON may also be NaN or infinity"
    assert said in run("sql", "--json", plain)[2] and said in run("sql", "--json", nested)[2]
    status, out, err = run("sql", "--csv", plain)
    assert (status, out.split(), err) == (0, ['"a","b"', "nan,"], "")
    assert said in run("sql", "--csv", nested)[2]
    for argv in (["--json", "select null as a, [1.5, null] as b"], [nested]):
        assert run("sql", *argv)[2] == ""


def test_sql_shows_nested_and_missing_values(run, dataset, name):
    query = "select obs, action from steps where is_last limit 1"
    for option in ("--csv", "--json", None):
        argv = ["sql", query, "--dataset", name, *([option] if option else [])]
        status, out, err = run(*argv)
        assert status == 0, err
        assert "observation" in out


def test_sql_refuses_in_one_line(run):
    status, _, err = run("sql", "drop table trajectories")
    assert status == 1 and err.startswith("stepwell: 422") and "Traceback" not in err
    assert run("sql", "  ")[0] == 2


def test_text_of_strangers_cannot_paint_the_terminal(run, client, name):
    client.create_dataset(name, SPEC, description="a\x1b[2Jb [red]c[/red]")
    out = run("datasets", "show", name)[1]
    assert "\x1b" not in out and "a\\x1b[2Jb [red]c[/red]" in out


def test_import_uploads_and_reports(run, ask, name, tmp_path):
    rows = 60
    np.savez(
        tmp_path / "x.npz",
        observations=np.zeros((rows, 2)),
        actions=np.zeros((rows, 1), np.float32),
        rewards=np.ones(rows, np.float32),
        terminals=np.arange(rows) % 20 == 19,
    )
    argv = ["import", str(tmp_path / "x.npz"), "--dataset", name, "--env", "X-v1"]
    status, out, err = run(*argv, "--option", "action_low=-2", "--option", "action_high=2")
    assert status == 0 and "3 trajectories, 60 steps" in out
    assert "float64 stored as float32" in err
    spec = ask("datasets", "show", name)["spec"]
    assert spec["actions"]["action"]["high"] == 2.0 and spec["env"] == "X-v1"
    assert ask(*argv)["state"] == "succeeded"
    (tmp_path / "y.npz").write_bytes(b"not a zip")
    status, out, err = run("import", str(tmp_path / "y.npz"), "--dataset", f"{name}-2")
    assert status == 1 and "failed" in err and err.count("\n") == 1
    assert run("import", str(tmp_path / "z.npz"), "--dataset", name)[0] == 2
    with pytest.raises(SystemExit):
        run(*argv, "--option", "nonsense")


def test_flush(run, ask, client, dataset, name):
    client.post(name, [make_trajectory(SPEC)])
    assert ask("flush", name)["sealed"] <= 1
    assert client.dataset(name).unsealed == 0
    assert run("flush", name)[1].startswith("sealed")


def test_runs(run, ask, client):
    name = f"run-{new_id()[-8:]}"
    client.create_run(name, "train", config={"lr": 0.5})
    points = [
        MetricPoint(key=k, step=s, value=s / 2, time=time.time()) for k in "ab" for s in (1, 2)
    ]
    client.log_metrics(name, points)
    client.patch_run(name, log="hello\x1b[2J\n")
    assert name in [r["name"] for r in ask("runs", "list", "--kind", "train")]
    assert name in run("runs", "list")[1]
    assert name in [r["name"] for r in ask("runs", "list", "--where", "lr < 1 and a = 1")]
    assert name not in [r["name"] for r in ask("runs", "list", "--where", "lr < 1 and a > 1")]
    assert '"lr": 0.5' in run("runs", "show", name)[1]
    assert ask("runs", "show", name)["latest"] == {"a": 1.0, "b": 1.0}
    assert "alarm" not in run("runs", "show", name)[1]
    alarm = {"key": "td_error", "message": "by 0.9 on average", "update": 3, "value": 2.0}
    client.patch_run(name, alarms=[alarm])
    shown = run("runs", "show", name)[1].split("alarm td_error")[1].splitlines()[0]
    assert shown.strip() == "by 0.9 on average (since update 3)"
    assert ask("runs", "show", name)["alarms"] == [alarm]
    (listed,) = [line for line in run("runs", "list")[1].splitlines() if line.startswith(name)]
    assert listed.split()[:4] == [name, "train", "running", "td_error"]
    client.patch_run(name, alarms=[alarm, {**alarm, "key": "q_above_data"}])
    assert " td_error +1 " in run("runs", "list")[1]
    assert ask("runs", "title", name, "First try")["title"] == "First try"
    (listed,) = [line for line in run("runs", "list")[1].splitlines() if line.startswith(name)]
    assert listed.split()[1:4] == ["First", "try", "train"]
    assert run("runs", "title", name, "two\nlines")[0] == 2
    assert run("runs", "title", name, "")[1] == f"{name}: no title\n"
    out = run("runs", "metrics", name, "--keys", "a,b")[1]
    assert [line.split() for line in out.splitlines()] == [
        ["step", "a", "b"],
        ["1", "0.5", "0.5"],
        ["2", "1", "1"],
    ]
    assert ask("runs", "metrics", name)["a"]["values"] == [0.5, 1.0]
    assert run("runs", "log", name)[1] == "hello\\x1b[2J\n"
    assert "no policies" in run("runs", "policies", name)[1]
    assert run("runs", "delete", name)[0] == 2
    assert run("runs", "delete", name, "--yes")[0] == 0


def test_a_run_with_many_metrics_is_a_summary_and_its_config_says_where_from(run, client):
    """Thirty columns side by side tell nobody anything; nor do a hundred defaults."""
    name = f"run-{new_id()[-8:]}"
    config = {"agent": {"gamma": 0.9, "tau": 0.1}}
    config["origins"] = {"agent.gamma": "command line", "agent.tau": "default"}
    client.create_run(name, "train", config=config)
    points = [
        MetricPoint(key=f"k{k}", step=s, value=float(s), time=time.time())
        for k in range(9)
        for s in (1, 2)
    ]
    client.log_metrics(name, points)
    lines = [line.split() for line in run("runs", "metrics", name)[1].splitlines()]
    assert lines[1] == ["k0", "2", "1", "2", "1", "2"] and len(lines) == 11
    assert "--keys k0,k1" in run("runs", "metrics", name)[1]
    shown = run("runs", "show", name)[1]
    assert "config agent.gamma" in shown and "0.9  (command line)" in shown
    assert "agent.tau" not in shown
    assert "no log lines" in run("runs", "log", name)[2]


def test_a_refused_command_line_says_where_the_help_is(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["datasets", "show"])
    assert caught.value.code == 2
    assert "see: stepwell datasets show --help" in capsys.readouterr().err


def test_workers(run, ask, client):
    worker = f"w-{new_id()[-8:]}"
    client.heartbeat(worker, role="collect", counters={"episodes": 3})
    assert worker in [w["id"] for w in ask("workers", "list")]
    assert "episodes=3" in run("workers", "list")[1]
    assert ask("workers", "command", worker, "drain")["command"] == "drain"
    assert client.heartbeat(worker, role="collect").command == "drain"


def test_status(run, ask, dataset):
    answer = ask("status")
    assert answer["health"]["status"] == "ok" and answer["counts"]["trajectories"] >= 3
    assert "trajectories" in run("status")[1]


# --- printing ---------------------------------------------------------------------------------


def test_numbers_stand_to_the_right_and_nothing_is_cut_off_in_a_pipe(capsys):
    long = "x" * 150
    terminal.print_table(["n", "text"], [(1, long), (1000, "y")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("   1") and long in lines[1]
    terminal.print_table(["a"], [], empty="nothing")
    assert capsys.readouterr().out == "nothing\n"


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (True, "yes"), (0.123456789, "0.123457"), (["a", 1], "a, 1"), ("a\nb", "a\\nb")],
)
def test_cells(value, text):
    assert terminal.cell(value) == text


def test_sizes_and_ages():
    assert [terminal.size(n) for n in (0, 999, 1000, 2.5e9, 7e15)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "2.5 GB",
        "7000.0 TB",
    ]
    now = time.time()
    assert [terminal.ago(now - s) for s in (1, 120, 7200, 200_000)] == [
        "1 s ago",
        "2 min ago",
        "2 h ago",
        "2 d ago",
    ]
    assert terminal.ago(None) == "-"


def test_large_numbers_in_tables_have_all_their_digits() -> None:
    assert terminal.cell(1700000001.5) == "1700000001.5" and terminal.cell(16777217.0) == "16777217"
    assert terminal.cell(-123456.25) == "-123456.25" and terminal.cell(0.1234567) == "0.123457"
    assert terminal.cell(1e300) == "1e+300"


def test_numbers_that_sql_prints_are_exact(run) -> None:
    values = [0.1234567890123, 99999.987654321, -0.1, 1e300, 2.0**60 + 2**9, 16777217.0, 5.0]
    query = f"select * from (values {', '.join(f'({v!r}::double)' for v in values)}) as t(v)"
    _, out, _ = run("sql", query)
    assert [float(word) for word in out.split()[1:]] == values
    assert out.split()[-1] == "5"
    listed = run("sql", "select [0.1234567890123::double, 2.0] as v")[1]
    assert "0.1234567890123, 2" in listed
