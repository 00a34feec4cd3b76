"""What keeps a browser signed in: sessions, tickets that are good once, and the cookie."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from dashboard import sessions


@pytest.fixture(autouse=True)
def _none() -> Iterator[None]:
    yield
    sessions._sessions.clear()
    sessions._tickets.clear()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(sessions.time, "monotonic", lambda: now[0])
    return now


def test_a_session_has_the_token_until_it_ends(clock: list[float]) -> None:
    identity, _ = sessions.begin("secret")
    assert sessions.token_of(identity) == "secret"
    assert sessions.token_of("other") is sessions.token_of("") is sessions.token_of(None) is None
    clock[0] += sessions.SECONDS - 1
    assert sessions.token_of(identity) == "secret"
    clock[0] += 2
    assert sessions.token_of(identity) is None
    sessions.begin("new")
    assert len(sessions._sessions) == 1, "what has ended is forgotten"
    again, _ = sessions.begin("secret")
    sessions.end(again)
    sessions.end(None)
    assert sessions.token_of(again) is None


def test_a_ticket_is_good_once_and_not_for_long(clock: list[float]) -> None:
    identity, ticket = sessions.begin("secret")
    assert sessions.is_open(ticket) and sessions.redeem(ticket) == identity
    assert not sessions.is_open(ticket) and sessions.redeem(ticket) is None
    _, late = sessions.begin("secret")
    clock[0] += sessions.TICKET_SECONDS + 1
    assert sessions.redeem(late) is None


def test_there_are_not_more_than_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MOST", 3)
    found = [sessions.begin(f"token {n}")[0] for n in range(5)]
    tokens = [sessions.token_of(one) for one in found]
    assert tokens == [None, None, "token 2", "token 3", "token 4"]


def test_nothing_that_is_kept_is_an_id_or_a_ticket() -> None:
    identity, ticket = sessions.begin("secret")
    kept = str(list(sessions._sessions)) + str(list(sessions._tickets))
    assert identity not in kept and ticket not in kept


def test_the_route_gives_a_cookie_that_no_script_reads() -> None:
    browser = TestClient(Starlette(routes=[sessions.ROUTE]))
    identity, ticket = sessions.begin("secret")
    assert browser.post(sessions.PATH, content="wrong").status_code == 403
    assert browser.post(sessions.PATH, content="x" * 1000).status_code == 413
    assert browser.get(sessions.PATH).status_code == 405
    elsewhere = {"Sec-Fetch-Site": "cross-site"}
    assert browser.post(sessions.PATH, content=ticket, headers=elsewhere).status_code == 403
    done = browser.post(sessions.PATH, content=ticket, headers={"Sec-Fetch-Site": "same-origin"})
    assert done.status_code == 204
    said = done.headers["set-cookie"].lower()
    assert "httponly" in said and "samesite=strict" in said and "secure" not in said
    assert "secret" not in said and identity.lower() in said
    again = browser.post(sessions.PATH, content=ticket)
    assert again.status_code == 403 and "set-cookie" not in again.headers
    secure = TestClient(Starlette(routes=[sessions.ROUTE]), base_url="https://stepwell.example")
    _, other = sessions.begin("secret")
    assert "secure" in secure.post(sessions.PATH, content=other).headers["set-cookie"].lower()
