"""A login that outlives its tab, if its person wants that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

SEEN = """() => JSON.stringify(
  [{...localStorage}, {...sessionStorage}, document.cookie, location.href])"""
"""What a script of the page can read."""


def kept_by(me: Any) -> list[Any]:
    return [one for one in me.page.context.cookies() if one["name"].startswith("stepwell")]


def signs_in(me: Any, token: str, stay: bool) -> None:
    me.page.get_by_label("Token", exact=True).fill(token)
    if stay:
        me.page.get_by_text("Stay signed in in this browser").click()
        me.rests()
    me.look(f"signin-{stay}")
    me.clicks("Log in")
    me.page.get_by_role("button", name="Log out").wait_for(state="attached")
    me.rests()


def is_asked(me: Any) -> bool:
    me.rests()
    return me.page.get_by_label("Token", exact=True).count() > 0


def will_be_asked(me: Any) -> None:
    """After a click, which the page answers in its own time."""
    me.page.get_by_label("Token", exact=True).wait_for(timeout=60_000)


@pytest.mark.timeout(900)
def test_a_browser_stays_signed_in_until_it_signs_out(
    fresh_service: Any, dashboard: Callable[..., Any], person: Callable[..., Any]
) -> None:
    token = fresh_service.client().create_token("me", ["admin"]).token
    running = dashboard(fresh_service.url)
    me = person(running)
    me.opens("/workers")
    assert is_asked(me)
    with me.page.expect_response("**/signin") as answer:
        signs_in(me, token, stay=True)
    assert answer.value.status == 204
    (cookie,) = kept_by(me)
    assert cookie["httpOnly"] and cookie["sameSite"] == "Strict"
    assert token not in cookie["value"]
    seen = me.page.evaluate(SEEN)
    assert token not in seen and cookie["value"] not in seen

    me.opens("/workers")
    assert not is_asked(me), "after a reload"
    second = me.page.context.new_page()
    first, me.page = me.page, second
    me.opens("/runs")
    assert not is_asked(me), "in a new tab"
    me.clicks("Log out")
    will_be_asked(me)
    me.page = first
    me.clicks("Refresh")
    will_be_asked(me)  # the other tab is signed out, too
    me.opens("/workers")
    assert is_asked(me), "the cookie is worth nothing now"

    other = person(running)
    other.opens("/workers")
    signs_in(other, token, stay=False)
    assert kept_by(other) == []
    other.opens("/workers")
    assert is_asked(other)
    assert me.requests == other.requests == []
    assert running.tracebacks() == []
