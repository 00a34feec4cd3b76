"""The router of the dashboard: defines the pages and their groups.

Run it with `stepwell dash`, or `streamlit run dashboard/app.py`.
"""

from __future__ import annotations

import gc
from pathlib import Path

import streamlit as st

from dashboard import api, components, login
from dashboard.views import (
    admin,
    console,
    datasets,
    doctor,
    evaluation,
    lineage,
    overview,
    runs,
    start,
    trajectories,
    workers,
)

LOGO = str(Path(__file__).with_name("logo.svg"))
STYLE = Path(__file__).with_name("style.css")
# Width in pixels: the longest name of a page, or the address of the service.
SIDEBAR = 232
# Group → name, which is also the path → page, title, icon.
PAGES = {
    "": {"overview": (overview.show, "Overview", "home")},
    "Data": {
        "datasets": (datasets.show, "Datasets", "database"),
        "trajectories": (trajectories.show, "Trajectories", "timeline"),
        "doctor": (doctor.show, "Doctor", "stethoscope"),
        "sql": (console.show, "SQL", "terminal"),
        "lineage": (lineage.show, "Lineage", "account_tree"),
    },
    "Train": {
        "start": (start.show, "Start", "rocket_launch"),
        "runs": (runs.show, "Runs", "show_chart"),
        "evaluation": (evaluation.show, "Evaluation", "leaderboard"),
    },
    "Operate": {
        "workers": (workers.show, "Workers", "memory"),
        "admin": (admin.show, "Admin", "admin_panel_settings"),
    },
}


def health_line() -> None:
    """Show the service's state on every page. It also detects an unavailable service on an idle
    page."""
    if components.is_away():
        st.markdown(":red[● service not reachable]")
    else:
        components.guarded(health)
    st.text(api.address())


def health() -> None:
    now = api.health()
    fine = now.status == "ok"
    st.markdown(":green[● service ok]" if fine else f":orange[● degraded: {now.detail}]")


@st.cache_resource(show_spinner=False)
def freeze_modules() -> None:
    """Exclude what is imported by now from garbage collection. Streamlit collects after every run
    of every part, which would stop all sessions for 0.12 s each time."""
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()


def main() -> None:
    freeze_modules()
    # A material icon as favicon would be fetched from another host.
    st.set_page_config(
        page_title="Stepwell", page_icon=LOGO, layout="wide", initial_sidebar_state=SIDEBAR
    )
    st.html(STYLE)
    login.resume()
    st.logo(LOGO, size="large")
    pages = {
        name: st.Page(
            show, title=title, icon=f":material/{icon}:", url_path=name, default=name == "overview"
        )
        for group in PAGES.values()
        for name, (show, title, icon) in group.items()
    }
    components.remember_pages(pages)
    chosen = st.navigation(
        {title: [pages[name] for name in group] for title, group in PAGES.items()}
    )
    with st.sidebar:
        st.fragment(run_every=10)(health_line)()
        with st.container(horizontal=True, vertical_alignment="center"):
            st.toggle("Live", value=True, key="live", help="Refresh the live parts every 5 s")
            if api.TOKEN in st.session_state:
                st.button("Log out", icon=":material/logout:", type="tertiary", key="log_out",
                          on_click=login.log_out)  # fmt: skip
            if st.button("Refresh", icon=":material/refresh:", type="tertiary", key="refresh"):
                api.refresh()
    chosen.run()


main()
