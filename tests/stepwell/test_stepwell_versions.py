"""Versions from the outside: the client, the command, the card."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from stepwell import BadRequest, Conflict, InvalidData, NotFound, cli
from stepwell.messages import Version, split_version
from stepwell.testing import make_spec, make_trajectory
from stepwell.version_card import card

SPEC = make_spec(env="Test-v1")
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "versions.md"


@pytest.fixture
def dataset(client, name):
    client.create_dataset(name, SPEC)
    sent = [make_trajectory(SPEC, length=i + 4, seed=i, policy=f"p|{i % 2}/1") for i in range(4)]
    client.post(name, sent)
    return name


@pytest.fixture
def run(service, capsys):
    def command(*argv):
        status = cli.main(["versions", *argv, "--url", service.url])
        out, err = capsys.readouterr()
        return status, out, err

    return command


def test_the_client_makes_reads_compares_and_deletes(client, dataset):
    first = client.create_version(dataset, "v1", licence="MIT")
    second = client.create_version(dataset, "v2", where="length > 5", parent="v1")
    assert client.version(f"{dataset}@v1") == first
    assert [v.name for v in client.versions(dataset)] == ["v2", "v1"]
    assert second.parent == first.version == f"{dataset}@v1"
    diff = client.diff_versions(first.version, second.version)
    assert diff.removed.statistics.steps == 4 + 5
    kept = client.sql(f"SELECT id FROM ({diff.kept.sql})").rows
    assert sorted(client.sql(second.select).rows) == sorted(kept)
    with pytest.raises(Conflict, match="given once"):
        client.create_version(dataset, "v1")
    with pytest.raises(BadRequest, match="selects no trajectory"):
        client.create_version(dataset, "v3", where="length > 99")
    with pytest.raises(InvalidData, match="name has at most 64"):
        client.create_version(dataset, "V 3")
    with pytest.raises(InvalidData, match="DATASET@VERSION"):
        client.version(dataset)
    with pytest.raises(InvalidData, match="of one dataset"):
        client.diff_versions("other@v1", second.version)
    with pytest.raises(Conflict, match=f"{dataset}@v1"):
        client.delete_dataset(dataset, protected=True)
    client.delete_version(second.version)
    with pytest.raises(NotFound, match="there is no version of"):
        client.version(second.version)


def test_a_name_is_a_dataset_and_perhaps_a_version():
    assert split_version("hopper@v3") == ("hopper", "v3")
    assert split_version("hopper") == ("hopper", "")


def test_the_digest_is_checked_with_the_tools_that_the_page_names(service, client, dataset):
    made = client.create_version(dataset, "v1", where="length > 4")
    (line,) = re.findall(r"^    (stepwell sql .*sha256sum)$", PAGE.read_text(), re.MULTILINE)
    command = line.replace("halfcheetah@v2", made.version)
    command = command.replace("stepwell", f"{shlex.quote(sys.executable)} -m stepwell.cli", 1)
    env = os.environ | {"STEPWELL_URL": service.url}
    done = subprocess.run(command, shell=True, env=env, capture_output=True, text=True)
    assert done.stdout == f"{made.digest}  -\n", done.stderr


def test_the_command(client, dataset, run):
    text = "first\n\x1b[2Jsecond | third"
    words = ("--licence", "CC0-1.0", "--description", text, "--json")
    status, out, err = run("create", f"{dataset}@v1", *words)
    assert status == 0, err
    made = Version.model_validate(json.loads(out))
    assert made.statistics.trajectories == 4
    assert run("create", f"{dataset}@v2", "--where", "length > 5", "--parent", "v1")[0] == 0
    status, out, _ = run("list", dataset)
    assert status == 0 and f"{dataset}@v2" in out and made.digest[:12] in out
    shown = run("show", f"{dataset}@v2")[1]
    assert "length > 5" in shown and f"{dataset}@v1" in shown
    status, out, _ = run("show", f"{dataset}@v1", "--card")
    assert status == 0 and "\x1b" not in out
    status, out, _ = run("diff", f"{dataset}@v1", f"{dataset}@v2")
    assert status == 0 and "removed: SELECT" in out and "added: SELECT" not in out
    status, _, err = run("create", dataset)
    assert status == 2 and "DATASET@VERSION" in err
    status, _, err = run("delete", f"{dataset}@v1")
    assert status == 2 and "add --yes" in err
    assert run("delete", f"{dataset}@v1", "--yes")[0] == 0
    assert run("show", f"{dataset}@v1")[0] == 1
    assert dataset in run("list")[1]


def test_the_card_says_what_to_cite_and_a_name_breaks_no_table(client, dataset):
    text = card(
        client.create_version(dataset, "v1", where="length > 4", description="a\nb", licence="MIT")
    )
    version = client.version(f"{dataset}@v1")
    assert text.startswith(f"# {dataset}@v1\n\n> a\n> b\n\n| ")
    assert f"| digest | sha256 `{version.digest}` |" in text
    assert "| licence | MIT |" in text and "3 trajectories, 18 steps" in text
    assert "| p\\|1/1 | 2 |" in text and "| Test-v1 | 3 |" in text
    assert "    length > 4\n" in text and f"    {version.select}\n" in text
    assert f"@misc{{{dataset}-v1," in text and "{Stepwell dataset version, SHA-256 " in text
    bare = version.model_copy(update={"licence": "", "missing": 2})
    assert "| licence | not stated |" in card(bare) and "2 of its trajectories were lost" in card(
        bare
    )
