"""Policies by environments: a part of the evaluation page. A cell opens its environment."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pandas as pd
import streamlit as st

from dashboard import components, formatting, ranking
from dashboard.views import leaderboard

SQL = (
    "SELECT policy, env, arg_max(mean, created_at) AS mean, arg_max(iqm, created_at) AS iqm,\n"
    "  arg_max(normalised, created_at) AS normalised\n"
    "FROM evaluations GROUP BY policy, env ORDER BY policy, env"
)
KEY = "scores"
HEIGHT = 560
"""Pixels of the longest table."""
NAMES, LONGEST = 190, 24
"""Width of a name in pixels, and its characters."""
REFERENCES = {"random": "--random", "scripted": "--scripted MODULE:FUNCTION"}
"""Rows that somebody has to play, and how."""


class Score(float):
    """A number that sorts as one and is drawn with its interval."""

    text: str

    @classmethod
    def of(cls, found: Any, digits: int, played: bool) -> Score:
        score = cls(found.value)
        score.text = f"{found.value:.{digits}f}"
        if played:
            score.text += f" ({found.low:.{digits}f} … {found.high:.{digits}f})"
        return score


def draw(envs: list[str], pick: ranking.Pick, statistic: str) -> None:
    rows = ranking.score_table(pick)
    labels, colours = leaderboard.looks(rows)
    scaled = {env for env in envs if ranking.reference_family(env)}
    frame, exported = table(rows, envs, statistic, labels)
    shown = components.marked(frame, [colours[row.name] for row in rows])
    shown = shown.format(lambda score: score.text, subset=envs, na_rep="")
    shown = shown.format(partial(formatting.middle, most=LONGEST), subset=["policy"])
    columns: dict[str, Any] = {
        components.MARK: components.MARK_COLUMN,
        "policy": st.column_config.TextColumn(pinned=True, width=NAMES),
        "average": st.column_config.NumberColumn(
            format="%.1f", help="Mean of the normalised scores, of rows that have all"
        ),
    }
    for env in envs:
        label = f"{env}, normalised" if env in scaled else env
        columns[env] = st.column_config.NumberColumn(label, width=190)
    st.caption(
        f"The {leaderboard.STATISTICS[statistic]} of the returns and its 95% interval; normalised: "
        "0 = random, 100 = expert, on the D4RL scale. Select a cell to see its environment."
    )
    st.dataframe(
        shown, key=KEY, hide_index=True, column_config=columns, placeholder="",
        height=components.height_of(frame, HEIGHT),
        on_select=partial(_open, envs), selection_mode="single-cell",
    )  # fmt: skip
    components.export(exported, KEY, sql=SQL)
    _missing(rows)


def table(
    rows: Sequence[Any], envs: list[str], statistic: str, labels: dict[str, str]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """What is drawn, and the same with intervals as numbers."""
    scaled = [env for env in envs if ranking.reference_family(env)]
    drawn: list[dict[str, Any]] = []
    exported: list[dict[str, Any]] = []
    for row in rows:
        line: dict[str, Any] = {"policy": labels[row.name], "seeds": _seeds(row)}
        if len(scaled) > 1:
            line["average"] = ranking.average(row, statistic, scaled)
        cells: dict[str, Score] = {}
        bounds: dict[str, float] = {}
        for env in envs:
            found = ranking.interval_of(row.cells.get(env), statistic)
            if found is None:
                continue
            played = bool(row.cells[env].evaluations)
            found = ranking.normalised(env, found) or found
            cells[env] = Score.of(found, 1 if env in scaled else 2, played)
            if played:
                bounds |= {f"{env} low": found.low, f"{env} high": found.high}
        drawn.append(line | cells)
        exported.append(line | cells | bounds)
    average = ["average"] if len(scaled) > 1 else []
    # Objects: as floats, they would lose their text.
    frame = pd.DataFrame(drawn, columns=["policy", "seeds", *average, *envs], dtype=object)
    frame[average] = frame[average].astype(float)
    return frame, pd.DataFrame(exported)


def _seeds(row: Any) -> str:
    """The number of training seeds in its cells."""
    counts = sorted({len(cell.evaluations) for cell in row.cells.values()} - {0})
    return " … ".join(map(str, counts[:: max(1, len(counts) - 1)]))


def _open(envs: list[str]) -> None:
    """Show the environment of the cell that was selected."""
    cells = st.session_state[KEY]["selection"]["cells"]
    if cells and cells[0][1] in envs:
        st.session_state["env"] = cells[0][1]


def _missing(rows: Sequence[Any]) -> None:
    have = {row.name for row in rows}
    commands = [
        f"`stepwell evaluate {option} --env ID`"
        for name, option in REFERENCES.items()
        if name not in have
    ]
    if commands:
        st.caption(f"Rows to compare with: {' and '.join(commands)}")
