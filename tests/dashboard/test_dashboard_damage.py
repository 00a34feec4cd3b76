"""Whoever asks for data of which a part is damaged is told, on every screen."""

from __future__ import annotations

import json
from typing import Any

import pytest
import streamlit as st

from stepwell.testing import make_spec, make_trajectory
from tests.dashboard.conftest import Page
from workbench.commands import sql

SPEC = make_spec()


def test_pages_and_the_command_line_say_what_is_left_out(
    fresh_service: Any, page: Page, capsys: pytest.CaptureFixture[str]
) -> None:
    client = fresh_service.client()
    client.create_dataset("d", SPEC)
    for seed in range(2):
        client.post("d", [make_trajectory(SPEC, length=9, seed=seed)])
        client.flush("d")
    for view in ("console", "datasets"):
        drawn = page(view, fresh_service.url, q="SELECT count(*) FROM steps")
        assert not drawn.warning and not drawn.exception
    shard = min((fresh_service.data / "shards" / "fifo").iterdir())
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 8
    shard.write_bytes(content)

    url = ["--url", fresh_service.url]
    assert sql.main(["select count(*) from steps", *url]) == 0
    out, err = capsys.readouterr()
    assert "10" in out and f"1 trajectory of d left out: {shard.stem} is damaged" in err
    assert sql.main(["select count(*) from steps", "--json", *url]) == 0
    lost = {"dataset": "d", "file": shard.stem, "trajectories": 1}
    assert json.loads(capsys.readouterr().out)["excluded"] == [lost]
    assert repr(client.sql("select 1 from steps")).count("without 1 damaged file,") == 1

    st.cache_data.clear()  # a page may show what it read a few seconds ago
    for view in ("console", "datasets"):
        drawn = page(view, fresh_service.url, q="SELECT count(*) FROM steps LIMIT 5")
        assert not drawn.exception
        (warning,) = drawn.warning
        assert shard.stem in warning.value and "1 trajectory is left out" in warning.value
