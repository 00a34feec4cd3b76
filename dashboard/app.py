"""The router of the dashboard, and nothing else: which pages there are and how they are grouped.

Run it with `stepwell dash`, or `streamlit run dashboard/app.py`.
"""

from __future__ import annotations

import streamlit as st

from dashboard import api, components
from dashboard.views import (
    console,
    datasets,
    evaluation,
    overview,
    runs,
    trajectories,
    workers,
)


def health_line() -> None:
    """The service's state, on every page: an idle page notices here that the service is gone."""
    if components.is_away():
        st.markdown(":red[● service not reachable]")
    else:
        components.guarded(health)
    st.text(api.address())


def health() -> None:
    now = api.health()
    fine = now.status == "ok"
    st.markdown(":green[● service ok]" if fine else f":orange[● degraded: {now.detail}]")


def main() -> None:
    st.set_page_config(page_title="Stepwell", page_icon=":material/stairs:", layout="wide")
    pages = {
        "overview": st.Page(
            overview.show, title="Overview", icon=":material/home:", url_path="overview",
            default=True,
        ),
        "datasets": st.Page(
            datasets.show, title="Datasets", icon=":material/database:", url_path="datasets"
        ),
        "trajectories": st.Page(
            trajectories.show, title="Trajectories", icon=":material/timeline:",
            url_path="trajectories",
        ),
        "sql": st.Page(console.show, title="SQL", icon=":material/terminal:", url_path="sql"),
        "runs": st.Page(runs.show, title="Runs", icon=":material/show_chart:", url_path="runs"),
        "evaluation": st.Page(
            evaluation.show, title="Evaluation", icon=":material/leaderboard:",
            url_path="evaluation",
        ),
        "workers": st.Page(
            workers.show, title="Workers", icon=":material/memory:", url_path="workers"
        ),
    }  # fmt: skip
    components.remember_pages(pages)
    chosen = st.navigation(
        {
            "": [pages["overview"]],
            "Data": [pages["datasets"], pages["trajectories"], pages["sql"]],
            "Train": [pages["runs"], pages["evaluation"]],
            "Operate": [pages["workers"]],
        }
    )
    with st.sidebar:
        st.fragment(run_every=10)(health_line)()
        with st.container(horizontal=True, vertical_alignment="center"):
            st.toggle("Live", value=True, key="live", help="Refresh the live parts every 5 s")
            if st.button("Refresh", icon=":material/refresh:", type="tertiary", key="refresh"):
                api.refresh()
    chosen.run()


main()
