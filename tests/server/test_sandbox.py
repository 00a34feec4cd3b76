"""What confined children can no longer do, tried in a real one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from server.sandbox import LAYERS, active, environment, libraries

PROGRAM = """
import json, os, socket, sys
from server.sandbox import confine, libraries
layers = confine([*libraries(), *sys.argv[1:2]], address_space=2 << 30, cpu_seconds=20)
tried = {}
def attempt(name, action):
    try:
        action()
        tried[name] = "done"
    except (OSError, MemoryError) as error:
        tried[name] = type(error).__name__
attempt("read_allowed", lambda: open(sys.argv[1] + "/file").read())
attempt("read_other", lambda: open(sys.argv[2] + "/file").read())
attempt("read_passwd", lambda: open("/etc/passwd").read())
attempt("overwrite", lambda: open(sys.argv[1] + "/file", "r+b").write(b"x"))
def create():
    with open(sys.argv[1] + "/new", "wb") as file:
        file.write(b"x")
attempt("create", create)
attempt("remove", lambda: os.remove(sys.argv[1] + "/file"))
attempt("socket", lambda: socket.socket().connect(("127.0.0.1", 9)))
attempt("exec", lambda: os.execv("/bin/true", ["true"]))
attempt("memory", lambda: bytearray(3 << 30))
import numpy, zoneinfo
sys.stdout.write(json.dumps([layers, tried, sorted(os.environ)]))
"""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Any:
    allowed, other = tmp_path_factory.mktemp("allowed"), tmp_path_factory.mktemp("other")
    for folder in (allowed, other):
        (folder / "file").write_bytes(b"content")
    done = subprocess.run(
        [sys.executable, "-P", "-s", "-c", PROGRAM, str(allowed), str(other)],
        env=environment(),
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), allowed


def test_limits_hold_everywhere(outcome: Any) -> None:
    (layers, tried, _), _ = outcome
    assert layers["limits"]
    assert tried["memory"] == "MemoryError"
    assert tried["create"] != "done"


def test_what_is_needed_still_works(outcome: Any) -> None:
    """Its own files, and libraries that load late."""
    (_, tried, _), _ = outcome
    assert tried["read_allowed"] == "done"


def test_each_layer_that_says_it_holds_does(outcome: Any) -> None:
    (layers, tried, _), allowed = outcome
    if layers["files"]:
        refused = {"read_other", "read_passwd", "overwrite", "create", "remove"}
        assert {name: tried[name] for name in refused} == dict.fromkeys(refused, "PermissionError")
    if layers["uid"]:
        assert {tried["overwrite"], tried["remove"]} == {"PermissionError"}
    if layers["network"]:
        assert (tried["socket"], tried["exec"]) == ("PermissionError", "PermissionError")
    assert (allowed / "file").read_bytes() == b"content" or not (layers["files"] or layers["uid"])


def test_a_child_gets_no_secrets(monkeypatch: pytest.MonkeyPatch, outcome: Any) -> None:
    monkeypatch.setenv("STEPWELL_TOKEN", "secret")
    assert not any("STEPWELL" in name for name in environment())
    (_, _, names), _ = outcome
    assert set(names) <= {*environment(), "LC_CTYPE"}


def test_the_report_names_every_layer() -> None:
    report = active()
    assert set(report) == set(LAYERS)
    assert report["limits"]


def test_the_importing_child_loads_nothing_of_the_server_but_what_it_needs(tmp_path: Path) -> None:
    """What parses strangers' bytes must not hold a door to the index."""
    program = (
        "import server.imports.parser, server.imports.flat, server.imports.hdf5, sys;"
        "sys.stdout.write(' '.join(m for m in sys.modules if m.split('.')[0] in"
        " ('sqlalchemy', 'fastapi', 'duckdb', 'pydantic')))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-s", "-c", program],
        env=environment(),
        cwd=str(tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == ""


def test_children_find_packages_of_pip_install_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages, plain = tmp_path / "packages", tmp_path / "plain"
    (packages / "thing-1.0.dist-info").mkdir(parents=True)
    plain.mkdir()
    (plain / "thing.py").touch()
    for folder in (packages, plain, tmp_path / "absent"):
        monkeypatch.syspath_prepend(str(folder))
    assert str(packages) in libraries()
    path = environment()["PYTHONPATH"].split(os.pathsep)
    assert str(packages) in path
    assert not {str(plain), str(tmp_path / "absent"), ""} & {*path, *libraries()}
