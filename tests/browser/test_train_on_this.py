"""From an answer of SQL, a list and a version to the form that trains on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stepwell import Box, EnvSpec
from stepwell.testing import make_trajectory
from workbench.launcher.programs import program_of

QUERY = "SELECT id FROM trajectories WHERE length > 12 -- the long ones"
ONE = QUERY.replace("WHERE", "WHERE dataset = 'hops' AND")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("scheme,width", [("light", 1280), ("dark", 390)])
def test_a_selection_goes_into_the_form_with_one_click(
    fresh_service: Any,
    dashboard: Callable[..., Any],
    person: Callable[..., Any],
    scheme: str,
    width: int,
) -> None:
    client = fresh_service.client()

    def heartbeat() -> None:
        client.heartbeat("box-1", role="launcher", host="box")

    heartbeat()
    client.put_program("box-1", "train", program_of("train", []))
    spec = EnvSpec.of(Box((2,)), Box((1,), low=-1.0, high=1.0), env="Hopper-v5")
    for name in ("hops", "jumps"):
        client.create_dataset(name, spec)
        sent = [make_trajectory(spec, length=10 + i, seed=i) for i in range(5)]
        client.post(name, sent, spec=spec, wait_sealed=True)
    client.create_version("hops", "v1")
    running = dashboard(fresh_service.url)
    me = person(running, width=width, scheme=scheme)

    def written(label: str) -> str:
        return str(me.page.get_by_label(label, exact=True).first.input_value())

    def arrives(label: str) -> None:
        heartbeat()  # on a busy machine, the last one is long ago
        me.clicks(label, role="link")
        me.page.get_by_role("heading", name="Start", exact=True).wait_for()
        me.page.get_by_role("button", name="Launch").first.wait_for()
        me.rests()
        assert me.page.get_by_role("button", name="Launch").first.is_enabled()

    me.opens("/sql")
    me.types("Query", QUERY)
    me.sees("4 rows")
    me.unfolds("Train on this")
    me.sees("Train on those of jumps")
    me.types("Query", ONE)
    me.sees("2 rows")
    me.look(f"train-on-this-{scheme}-{width}")
    arrives("Train on it")
    assert "-- the long ones\n))" in written("where")
    me.sees("--dataset=hops")
    me.look(f"start-filled-{scheme}-{width}")
    me.types("where", "")
    me.page.evaluate("document.querySelector('a[href$=\"/sql\"]').click()")  # in its menu
    me.page.get_by_role("heading", name="SQL", exact=True).wait_for()
    me.rests()
    me.types("Query", ONE)
    me.sees("2 rows")
    if me.page.get_by_role("link", name="Train on it").count() == 0:
        me.unfolds("Train on this")
    arrives("Train on it")
    assert "-- the long ones\n))" in written("where"), "filled in again"

    me.opens("/trajectories?dataset=jumps&where=length>13")
    arrives("Train on all that match")
    assert "length>13" in written("where")
    me.opens("/datasets?dataset=hops&version=v1&dataset_tab=Versions")
    arrives("Open the form")
    me.sees("--dataset=hops@v1")
    assert written("where") == ""
    assert running.tracebacks() == []
