"""DNS rebinding in a real browser: a page whose name points to this machine gets nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.browser.conftest import FLAGS

EVIL = "attacker.example"
OPENS = """address => new Promise(done => {
  const socket = new WebSocket(address, ["streamlit"]);
  socket.onopen = () => done(true);
  socket.onerror = () => done(false);
})"""


@pytest.fixture
def page(chromium: str) -> Iterator[Any]:
    """Of a browser for which the attacker's name is 127.0.0.1, as its DNS server says."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        rules = f"--host-resolver-rules=MAP {EVIL} 127.0.0.1"
        browser = playwright.chromium.launch(executable_path=chromium, args=[*FLAGS, rules])
        yield browser.new_page()
        browser.close()


def test_a_page_whose_name_points_here_opens_nothing(
    page: Any, dashboard: Callable[[str], Any]
) -> None:
    """Neither its pages nor its websocket, by its own name or by the dashboard's."""
    own = dashboard("http://127.0.0.1:9").url
    evil = own.replace("127.0.0.1", EVIL)
    sockets = [f"{url.replace('http', 'ws')}/_stcore/stream" for url in (own, evil)]
    shown = page.goto(own)
    assert shown.status == 200 and page.evaluate(OPENS, sockets[0]) is True
    refused = page.goto(evil)
    assert refused.status == 421 and "not known by that name" in refused.text()
    assert [page.evaluate(OPENS, address) for address in sockets] == [False, False]
