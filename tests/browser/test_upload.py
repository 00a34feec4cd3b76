"""The form of an upload, as a person fills it in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

STEPS = 30


def write_plays(path: Path) -> Path:
    """Three episodes in a table whose columns have no usual names."""
    rows = np.arange(STEPS)
    columns = {"x": rows / 2, "y": rows / 4, "push": rows / STEPS, "gain": np.ones(STEPS)}
    columns |= {"run": rows // 10, "speed": rows * 1.0}
    pyarrow.parquet.write_table(pa.table(columns), path)
    return path


@pytest.mark.timeout(900)
@pytest.mark.parametrize("scheme,width", [("light", 1280), ("dark", 390)])
def test_columns_of_a_table_are_chosen_from_its_own(
    fresh_service: Any,
    dashboard: Callable[..., Any],
    person: Callable[..., Any],
    tmp_path: Path,
    scheme: str,
    width: int,
) -> None:
    running = dashboard(fresh_service.url)
    me = person(running, width=width, scheme=scheme)
    me.opens("/datasets")
    me.clicks("Upload a file")
    me.page.locator("input[type=file]").set_input_files(write_plays(tmp_path / "plays.parquet"))
    me.rests()
    me.types("Into dataset (made if it is not there)", "plays")
    me.unfolds("Columns")
    me.adds("observation", "y", "x")
    me.adds("action", "push")
    me.chooses("reward", "gain")
    me.chooses("episode", "run")
    me.look(f"upload-columns-{scheme}-{width}")
    me.unfolds("Options")
    me.types("action_low", "-4")
    me.types("action_high", "4")
    me.look(f"upload-options-{scheme}-{width}")
    me.clicks("Upload")
    me.sees("3 trajectories")
    me.look(f"upload-done-{scheme}-{width}")
    spec = fresh_service.client().dataset("plays").spec
    assert [space["shape"] for space in spec["observations"].values()] == [[2]]
    assert [space["high"] for space in spec["actions"].values()] == [4]
    assert me.requests == []
    assert running.tracebacks() == []
