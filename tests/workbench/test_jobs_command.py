"""`stepwell jobs`, an import that one waits for, and commands that list without being asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from stepwell import Client, cli

OCTETS = {"content-type": "application/octet-stream"}


def write_npz(path: Path, steps: int = 6) -> Path:
    np.savez(
        path,
        observations=np.arange(steps * 2, dtype=np.float32).reshape(steps, 2),
        actions=np.zeros((steps, 1), np.float32),
        rewards=np.ones(steps, np.float32),
        terminals=np.arange(steps) == steps - 1,
        timeouts=np.zeros(steps, bool),
    )
    return path


def test_an_import_that_is_waited_for_answers_with_its_result(
    service: Any, client: Client, name: str, tmp_path: Path
) -> None:
    url = f"{service.url}/v1/datasets/{name}/imports?format=npz&create=true&wait=1"
    content = write_npz(tmp_path / "a.npz").read_bytes()
    done = httpx2.post(url, content=content, headers=OCTETS, timeout=60)
    assert done.status_code == 200
    assert done.json()["job"]["state"] == "succeeded"
    assert done.json()["job"]["result"]["trajectories"] == 1
    assert client.sql("SELECT sum(length) FROM trajectories WHERE dataset = ?", [name]).one() == 6
    bad = httpx2.post(url, content=b"no npz at all", headers=OCTETS, timeout=60)
    assert bad.status_code == 422
    assert client.job(bad.json()["detail"].rpartition("(job ")[2].rstrip(")")).state == "failed"
    without = httpx2.post(url.replace("&wait=1", ""), content=content, headers=OCTETS, timeout=60)
    assert without.status_code == 202
    client.wait_job(without.json()["job"]["id"])


def test_jobs_are_listed_followed_and_cancelled(
    service: Any, client: Client, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = client.upload(name, write_npz(tmp_path / "a.npz"), format="npz", create=True)
    where = ["--url", service.url]
    assert cli.main(["jobs", *where]) == 0, "without an action it lists"
    printed = capsys.readouterr().out
    assert job.id in printed and name in printed and "succeeded" in printed
    assert cli.main(["jobs", "list", "--running", *where]) == 0
    assert job.id not in capsys.readouterr().out
    assert cli.main(["jobs", "follow", job.id, *where]) == 0
    assert capsys.readouterr().out == f"{job.id}: import → {name}: succeeded\n"
    assert cli.main(["jobs", "cancel", job.id, *where]) == 0, "one that has ended stays as it is"
    with pytest.raises(SystemExit):
        cli.main(["jobs", "cancel"])
    (tmp_path / "b.npz").write_bytes(b"nothing")
    failed = client.upload(name, tmp_path / "b.npz", format="npz", wait=False)
    assert cli.main(["jobs", "follow", failed.id, *where]) == 1
    assert "failed" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["datasets", "runs", "tokens", "workers", "jobs"])
def test_a_command_without_an_action_lists(
    command: str, service: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command, "--url", service.url]) == 0
    plain = capsys.readouterr().out
    assert cli.main([command, "list", "--url", service.url]) == 0
    assert capsys.readouterr().out.splitlines()[:1] == plain.splitlines()[:1]
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    assert "actions" in capsys.readouterr().out


def test_a_dataset_is_named_as_the_first_word_or_by_its_option(
    service: Any, client: Client, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client.upload(name, write_npz(tmp_path / "a.npz"), format="npz", create=True)
    where = ["--url", service.url]
    for words in ([name], ["--dataset", name]):
        assert cli.main(["trajectories", "list", *words, *where]) == 0
        assert cli.main(["flush", *words, *where]) == 0
    capsys.readouterr()
    for words in ([], [name, "--dataset", name]):
        with pytest.raises(SystemExit) as refused:
            cli.main(["doctor", *words, *where])
        assert refused.value.code == 2 and "expected one dataset" in capsys.readouterr().err


def test_ctrl_c_says_that_the_service_goes_on(
    service: Any,
    client: Client,
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Client, "wait_job", interrupted)
    file = write_npz(tmp_path / "a.npz")
    assert cli.main(["import", str(file), "--dataset", name, "--url", service.url]) == 130
    said = capsys.readouterr().err
    monkeypatch.undo()
    (job,) = [job for job in client.jobs() if job.dataset == name]
    assert f"stepwell jobs follow {job.id}" in said and f"stepwell jobs cancel {job.id}" in said
    assert client.wait_job(job.id).result["trajectories"] == 1  # type: ignore[index]
