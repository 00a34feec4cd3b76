"""A service that goes away and comes back, as a person at a page sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stepwell import Client
from stepwell.testing import make_spec, make_trajectory


@pytest.mark.timeout(900)
def test_an_outage_is_one_notice_and_the_page_comes_back_by_itself(
    fresh_service: Any, dashboard: Callable[..., Any], person: Callable[..., Any]
) -> None:
    """Without a reload, and what was typed is still there."""
    with Client(fresh_service.url) as client:
        client.create_dataset("hops", make_spec())
        client.post("hops", [make_trajectory(seed=seed) for seed in range(5)])
    running = dashboard(fresh_service.url)
    me = person(running, width=390, height=800, scheme="dark")
    me.opens("/trajectories?dataset=hops")
    me.sees("5 matching trajectories")
    me.types("Further SQL condition", "seq >= 0")
    me.page.evaluate("window.notReloaded = true")
    fresh_service.kill()
    me.sees("No answer from the service")
    me.look("outage")
    fresh_service.start()
    me.sees("5 matching trajectories")
    assert me.page.get_by_text("No answer from the service").count() == 0
    assert me.page.get_by_label("Further SQL condition").input_value() == "seq >= 0"
    assert me.page.evaluate("window.notReloaded")
    assert me.requests == []
    assert running.tracebacks() == []
