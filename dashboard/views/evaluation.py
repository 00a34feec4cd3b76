"""Evaluation: scores of policies on fixed seeds, with intervals, compared and in detail."""

from __future__ import annotations

import shlex
from typing import Any

import pandas as pd
import streamlit as st

from dashboard import api, charts, components, formatting
from dashboard.views import comparison, leaderboard, score_table

ALL = ""
"""In place of an environment: all of them."""
VIDEO_WIDTH = 480
"""Pixels."""


@components.view(
    "Evaluation",
    "Greedy episodes with fixed seeds. Runs that differ in nothing but their training seed are one "
    "row; its interval is a bootstrap over training seeds and episodes.",
)
def show() -> None:
    api.prefetch(api.evaluations, api.comparisons)
    comparison.section()
    found = api.evaluations()
    if not found:
        components.empty(
            "Nothing has been evaluated yet:",
            "stepwell evaluate --policy RUN --env Pendulum-v1 --episodes 30",
        )
        return
    envs = sorted({e.env for e in found})
    options = [ALL, *envs] if len(envs) > 1 else envs
    with st.container(horizontal=True, vertical_alignment="bottom"):
        env = components.choose("Environment", options, "env", "all")
        pick, statistic = leaderboard.controls()
    if env == ALL:
        score_table.draw(envs, pick, statistic)
        return
    leaderboard.draw(str(env), pick, statistic)
    # What is in it takes as long to draw as all the rest.
    components.folder(
        "One evaluation: episodes and videos", "one",
        lambda: _drill([e for e in found if e.env == env]),
        expanded="evaluation" in st.query_params, linked=True,
    )  # fmt: skip


def _label(evaluation: Any, known: dict[str, Any]) -> str:
    episodes = formatting.pluralize(len(evaluation.returns), "episode")
    return f"{api.label(evaluation.policy, known)} ({episodes})"


def _drill(mine: list[Any]) -> None:
    """Details of one evaluation: the return of each seed."""
    known = api.known_runs(e.policy.rpartition("/")[0] for e in mine)
    named = {e.id: f"{_label(e, known)}, {formatting.ago(e.created_at)}" for e in mine}
    chosen = components.menu("Evaluation", named, "evaluation")
    one = next(e for e in mine if e.id == chosen)
    frame = pd.DataFrame(
        {
            "episode": range(len(one.returns)),
            "seed": one.seeds or [None] * len(one.returns),
            "return": one.returns,
            "length": one.lengths or [None] * len(one.returns),
        }
    )
    left, right = st.columns(2, gap="large")
    with left:
        st.vega_lite_chart(
            *charts.bars(
                frame, x="episode", y="return", x_title="episode (in order of seeds)",
                y_title="return (sum of rewards)",
            ),
            key="episodes",
        )  # fmt: skip
    with right:
        sql = (
            'SELECT unnest(seeds) AS seed, unnest(returns) AS "return"\n'
            f"FROM evaluations WHERE id = {formatting.literal(one.id)}"
        )
        components.table(frame, "episodes_table", sql=sql, most_height=250)
    _videos(one)
    if one.dataset:
        components.link(
            "trajectories", "Watch its episodes", "timeline",
            dataset=one.dataset, purpose="eval", policy=one.policy,
        )  # fmt: skip
    if one.details:
        components.json_note("Details", one.details, "details")


def _videos(one: Any) -> None:
    """Play the episodes of an evaluation that were recorded as videos."""
    found = {video.seed: video for video in api.videos(one.id)}
    if not found:
        player = ["--random"] if one.policy == "random" else ["--policy", one.policy]
        command = ["stepwell", "evaluate", *player, "--env", one.env, "--videos", "3"]
        message = "No episode of this evaluation was recorded as a video; another one with videos:"
        components.empty(message)
        components.commands(shlex.join(command))
        return

    def label(seed: int) -> str:
        video = found[seed]
        steps = formatting.pluralize(video.length, "step")
        return f"seed {seed}: return {video.total_reward:.6g}, {steps}"

    seed = components.choose("Video", list(found), "video", linked=False, format_func=label)
    data = api.video(one.id, seed)
    if found[seed].media_type.startswith("image/"):
        st.image(data, width=VIDEO_WIDTH)
    else:
        st.video(data, format=found[seed].media_type, loop=True, width=VIDEO_WIDTH)
    sql = f"SELECT * FROM videos WHERE evaluation = {formatting.literal(one.id)} ORDER BY seed"
    components.sql_note(sql, "video")
