"""`stepwell serve` and `stepwell db`: options, refusals, the one line printed, and the end."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from pydantic import ValidationError

from server.fsck import main as fsck
from server.index.tables import REVISION, tokens
from server.main import db_main, main
from server.service import Service
from server.settings import Settings
from server.storage.store import DirectoryLock
from stepwell.messages import CreateToken
from stepwell.testing import make_spec, make_trajectory, wait_until
from tests.index_file import write_index


def test_settings_come_from_the_environment_and_know_loopback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STEPWELL_DATA", str(tmp_path))
    monkeypatch.setenv("STEPWELL_SEAL_IDLE", "0.5")
    monkeypatch.setenv("STEPWELL_ALLOWED_HOSTS", '["a", "b"]')
    settings = Settings()  # type: ignore[call-arg]
    assert (settings.data, settings.seal_idle, settings.allowed_hosts) == (
        tmp_path,
        0.5,
        ("a", "b"),
    )
    for host, loopback in (("localhost", True), ("::1", True), ("127.9.9.9", True),
                           ("0.0.0.0", False), ("::", False), ("data.example", False)):  # fmt: skip
        assert Settings(data=tmp_path, host=host).loopback is loopback
    with pytest.raises(ValidationError):
        Settings(data=tmp_path, port=70_000)


def test_the_token_is_never_shown(tmp_path: Path) -> None:
    assert "s3cret" not in repr(Settings(data=tmp_path, token="s3cret"))  # type: ignore[arg-type]


def test_another_address_than_loopback_needs_a_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--data", str(tmp_path / "d"), "--host", "0.0.0.0"]) == 2
    assert "STEPWELL_TOKEN" in capsys.readouterr().err
    assert not (tmp_path / "d").exists()


def test_an_admins_token_in_the_index_or_an_issuer_is_as_good(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token that cannot manage the service, or can no longer, is none; the refusal names each
    way."""
    served: list[Settings] = []

    def serve(made: Settings, listener: socket.socket) -> int:
        listener.close()
        served.append(made)
        return 0

    monkeypatch.setattr("server.main._serve", serve)
    words = ["--data", str(tmp_path), "--host", "0.0.0.0", "--port", "0"]
    service = Service(Settings(data=tmp_path))

    def create(*scopes: str, seconds: float | None = None) -> str:
        body = CreateToken(name="t", scopes=list(scopes), expires_in=seconds)
        return service.auth.create(body, "local").id

    first = create("admin", "read")
    assert main(words) == 0 and len(served) == 1
    create("admin", seconds=1e-3)
    create("read")
    with service.db.write() as c:
        c.execute(sa.update(tokens).where(tokens.c.id == first).values(revoked_at=1.0))
    wait_until(lambda: main(words) == 2)
    error = capsys.readouterr().err
    for way in ("STEPWELL_TOKEN", "stepwell tokens create me admin", "STEPWELL_OIDC_ISSUER"):
        assert way in error
    monkeypatch.setenv("STEPWELL_OIDC_ISSUER", "https://login.example.org")
    monkeypatch.setenv("STEPWELL_OIDC_AUDIENCE", "stepwell")
    count = len(served)
    assert main(words) == 0 and len(served) == count + 1
    service.close()
    for damaged in (b"", b"no index"):
        (tmp_path / "index.sqlite").write_bytes(damaged)
        monkeypatch.delenv("STEPWELL_OIDC_ISSUER", raising=False)
        assert main(words) == 2


def test_bad_options_are_one_line_naming_the_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STEPWELL_DATA", raising=False)
    assert main(["--port", "99999"]) == 2
    error = capsys.readouterr().err
    assert "--data or STEPWELL_DATA" in error and "--port" in error
    assert error.count("\n") == 1


def test_a_path_that_cannot_hold_data_is_named_with_the_cure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("not a directory")
    for path in ("/proc/foo", tmp_path / "file", tmp_path / "file" / "below"):
        assert main(["--data", str(path), "--port", "0"]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{path} cannot hold the data" in line and "expected a directory" in line
        assert "Errno" not in line


def test_a_taken_port_and_a_taken_directory_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["--data", str(tmp_path), "--port", port]) == 1
    assert port in capsys.readouterr().err
    lock = DirectoryLock(tmp_path)
    assert main(["--data", str(tmp_path), "--port", "0"]) == 1
    assert re.search(r"in use by process \d+", capsys.readouterr().err)
    lock.close()


def test_an_empty_directory_is_initialised_and_the_address_printed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "server.main", "--data", str(tmp_path / "new"), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"stepwell serves .*/new at (http://127\.0\.0\.1:\d+)\n", line)
        assert found, line
        with urllib.request.urlopen(f"{found[1]}/readyz", timeout=60) as answer:
            assert answer.status == 200
        process.terminate()
        assert process.wait(240) == 0
        assert process.stdout.read() == ""
    assert (tmp_path / "new" / "index.sqlite").exists()


def test_db_upgrade_and_current(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert db_main(["current", "--data", str(tmp_path)]) == 0
    assert "revision none" in capsys.readouterr().out
    assert db_main(["upgrade", "--data", str(tmp_path)]) == 0
    assert db_main(["current", "--data", str(tmp_path)]) == 0
    assert f"revision {REVISION}, this program needs {REVISION}" in capsys.readouterr().out


def test_an_index_of_a_newer_version_is_left_alone(
    start: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start().service.close()
    with write_index(tmp_path / "data" / "index.sqlite") as index:
        index.execute("UPDATE alembic_version SET version_num = '9999'")
    assert main(["--data", str(tmp_path / "data"), "--port", "0"]) == 1
    error = capsys.readouterr().err
    assert "newer" in error and "9999" in error


def test_an_index_from_before_the_first_release_is_taken_over_by_a_rebuild(
    start: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    live = start()
    live.create()
    live.post([make_trajectory(make_spec(observation=3, action=2), seed=1)])
    live.http.post("/v1/runs", json={"name": "r", "kind": "train"})
    before = live.listing()
    live.service.close()
    data = str(tmp_path / "data")
    with write_index(tmp_path / "data" / "index.sqlite") as index:
        index.execute("UPDATE alembic_version SET version_num = '0008'")
        index.execute("ALTER TABLE runs DROP COLUMN crc")  # which it did not have
        index.execute("ALTER TABLE runs DROP COLUMN alarms")  # nor this
    assert main(["--data", data, "--port", "0"]) == 1
    assert "stepwell fsck --rebuild" in capsys.readouterr().err
    assert fsck.main(["--data", data, "--rebuild"]) == 0
    live = start()
    assert [item["id"] for item in live.listing()] == [item["id"] for item in before]
    run = live.http.get("/v1/runs/r").json()
    assert (run["kind"], run["alarms"]) == ("train", [])
