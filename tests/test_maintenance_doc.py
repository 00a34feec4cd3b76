"""Every command of docs/reference/maintenance.md, run as it is written there, in its order."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepwell import Client, cli
from stepwell.testing import make_spec, make_trajectory
from tests.scripts import status_of

DOC = Path(__file__).parents[1] / "docs" / "reference" / "maintenance.md"
SPEC = make_spec(observation=3, action=1)
SKIPPED = ("pip install", "STEPWELL_OIDC_ISSUER=")
"""Installing a package; a service with an issuer (tests/server/registry/test_oidc.py)."""
OF_RUNNING = ("tokens",)
"""Commands that talk to the service. A backup is made of the running one and of the stopped one."""
OF_STOPPED = ("fsck", "db")


def commands() -> list[str]:
    """Indented lines, with continuation lines joined."""
    text = DOC.read_text().replace("\\\n    ", "")
    return re.findall(r"^    (\S.*)$", text, re.MULTILINE)


def test_the_commands_do_what_the_page_says(
    start_service: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STEPWELL_TOKEN", "operator")
    service = start_service(tmp_path, env={"STEPWELL_SQL_WORKERS": "1"}, token="operator")
    with Client(service.url, "operator") as client:
        client.create_dataset("kitchen", SPEC)
        sent = [make_trajectory(SPEC, length=5, seed=seed) for seed in range(6)]
        client.post("kitchen", sent[:3])
        client.flush("kitchen")
        client.post("kitchen", sent[3:])
        client.create_run("r", "train")
        client.publish_policy("r", 1, b"weights")
        client.create_version("kitchen", "v1")
    token_id, seen = "", set()
    for words in commands():
        if words.startswith(SKIPPED):
            continue
        verb = shlex.split(words)[1]
        seen.add(verb)
        if verb in OF_STOPPED and service.running:
            assert service.stop() == 0, service.tail()
        if verb in OF_RUNNING and not service.running:
            service.start()
        monkeypatch.setenv("STEPWELL_URL", service.url)
        name, *args = shlex.split(words.replace("TOKEN_ID", token_id))
        assert name == "stepwell", words
        status, (said, errors) = status_of(cli.main, args), capfd.readouterr()
        assert status == 0, (words, said, errors)
        if words.startswith("stepwell tokens create"):
            with Client(service.url, "operator") as client:
                token_id = client.tokens()[0].id
    assert seen >= {"backup", "restore", "tokens", "fsck", "db"} and said
    service.start()
    (tmp_path / "other").mkdir()
    (tmp_path / "restored").rename(tmp_path / "other" / "data")
    restored = start_service(tmp_path / "other", token="operator")
    for one in (service, restored):
        with Client(one.url, "operator") as client:
            for trajectory in sent:
                assert client.steps(trajectory.id).digest == trajectory.digest
            assert client.download_policy("r", 1).data == b"weights"
            assert [version.name for version in client.versions("kitchen")] == ["v1"]
            assert client.ready()
