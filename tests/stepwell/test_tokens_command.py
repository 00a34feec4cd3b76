"""`stepwell tokens`: the first locks the service, an admin gives and revokes others."""

import json

from stepwell.cli import main


def test_tokens_are_created_listed_revoked_and_audited(fresh_service, capsys) -> None:
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
