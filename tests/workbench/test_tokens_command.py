"""`stepwell tokens`: the first locks the service, an admin gives and revokes others."""

import argparse
import json

import pytest

from stepwell.cli import main
from workbench.commands.tokens import quota


def test_tokens_are_created_listed_limited_revoked_and_audited(fresh_service, capsys) -> None:
    def ask(*words: str, token: str | None = None, status: int = 0) -> str:
        given = ["--token", token] if token else []
        assert main(["tokens", *words, "--url", fresh_service.url, *given]) == status
        out = capsys.readouterr()
        return out.out or out.err

    assert "no tokens" in ask("list")
    made = ask("create", "me", "admin")
    assert "shown once" in made
    admin = made.split()[0]
    assert "401" in ask("list", status=1)
    robot = json.loads(
        ask("create", "robot", "ingest:kitchen", "--days", "2", "--json", token=admin)
    )
    assert robot["expires_at"] - robot["created_at"] == 2 * 86400
    assert "ingest:kitchen" in ask("list", token=admin)
    assert "403" in ask("audit", token=robot["token"], status=1)
    assert "revoked" in ask("revoke", robot["id"], token=admin)
    assert "401" in ask("list", token=robot["token"], status=1)
    entries = json.loads(ask("audit", "--json", token=admin))["items"]
    assert [e["action"] for e in entries] == ["token.revoke", "token.create", "token.create"]
    assert entries[0]["who"] != "local" and entries[-1]["who"] == "local"

    words = ("cheap", "ingest", "--bytes-per-day", "10G", "--requests-per-minute", "600")
    robot = json.loads(ask("create", *words, "--json", token=admin))
    assert (robot["bytes_per_day"], robot["requests_per_minute"]) == (10**10, 600)
    assert "10.0 GB/day, 600/min" in ask("list", token=admin)
    changed = ask("set", robot["id"], "--bytes-per-day", "none", "--json", token=admin)
    assert json.loads(changed)["bytes_per_day"] is None
    assert json.loads(changed)["requests_per_minute"] == 600
    assert "no quota" in ask("set", robot["id"], token=admin)
    log = json.loads(ask("audit", "--json", token=admin))["items"]
    assert log[0]["detail"] == {"bytes_per_day": None}


@pytest.mark.parametrize(
    ("text", "number"),
    [("600", 600), ("2k", 2000), ("10G", 10**10), ("500MB", 5 * 10**8), ("none", None)],
)
def test_sizes_of_quotas(text: str, number: int | None) -> None:
    assert quota(text) == number


@pytest.mark.parametrize("text", ["", "G", "-1", "1.5G", "10X", "all"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        quota(text)
