"""First and last frames of listed trajectories, of datasets with images; read only when asked for.

One query per dataset and page of the list, for its two frames a trajectory: the other columns, and
datasets without images, are not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import streamlit as st

from dashboard import api, components, formatting, frames

ROWS = 20
"""Rows of the list while it has pictures."""
HEIGHT = 72
"""Pixels of a row with pictures."""
SECONDS = 600.0
COLUMNS = {"first": "first frame", "last": "last frame"}


def cameras(dataset: str | None) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dataset → its first observation that is an image, and the shape of that.

    `dataset`: the only one to look at; None for all.
    """
    found = {}
    for one in api.datasets():
        if dataset and one.name != dataset:
            continue
        for key, space in (one.spec.get("observations") or {}).items():
            shape = tuple(space.get("shape") or ())
            if frames.is_picture(shape, str(space.get("dtype"))):
                found[one.name] = (key, shape)
                break
    return found


def draw(frame: pd.DataFrame, known: dict[str, tuple[str, tuple[int, ...]]]) -> pd.DataFrame:
    """Columns "first" and "last" of data URLs beside the rows of `frame`, None without images."""
    urls: dict[str, tuple[str, str]] = {}

    def read() -> None:
        for dataset, rows in frame.groupby("dataset"):
            if dataset in known:
                urls.update(_frames(str(dataset), *known[str(dataset)], tuple(rows["id"])))

    components.guarded(read)
    pairs = [urls.get(str(one), (None, None)) for one in frame["id"]]
    return pd.DataFrame(pairs, columns=list(COLUMNS), index=frame.index)


def columns() -> dict[str, Any]:
    return {key: st.column_config.ImageColumn(label) for key, label in COLUMNS.items()}


@api.read(SECONDS)
def _frames(
    dataset: str, key: str, shape: tuple[int, ...], ids: Sequence[str]
) -> dict[str, tuple[str, str]]:
    """Trajectory → data URLs of its first and its last frame."""
    listed = ", ".join(formatting.literal(one) for one in ids)
    query = (
        f"SELECT trajectory_id AS id, t, obs.{formatting.quoted(key)} AS frame\n"
        f"FROM {formatting.quoted(dataset)}.steps\n"
        f"WHERE trajectory_id IN ({listed}) AND (t = 0 OR is_last) ORDER BY t"
    )
    result = api.run_query(query, limit=2 * len(ids))
    found: dict[str, list[str]] = {}
    for row in result.to_arrow().to_pylist():
        array = np.frombuffer(row["frame"], np.uint8).reshape(shape)
        found.setdefault(str(row["id"]), []).append(frames.data_url(array, HEIGHT))
    return {one: (urls[0], urls[-1]) for one, urls in found.items()}
