"""The form for a token, and browsers that stay signed in (sessions.py)."""

from __future__ import annotations

from functools import cache
from typing import Any

import streamlit as st

from dashboard import api, sessions

_TICKET, _KEPT = "_ticket", "_kept"
SCRIPT = """
export default function ({ data }) {
  fetch(data.path, { method: "POST", body: data.ticket, credentials: "same-origin" });
}
"""


def form() -> bool:
    """Ask for a token; whether one that is valid was given."""
    with st.form("login", border=True):
        st.markdown("**This service needs a token**")
        given = st.text_input("Token", type="password", key="login_token")
        stay = st.checkbox(
            "Stay signed in in this browser", key="login_stay",
            help=f"For {sessions.SECONDS // 3600} hours, in new tabs and after a reload. The token "
            "stays in the dashboard's memory; the browser gets a cookie with a random number. "
            "Leave it out on a computer that others use.",
        )  # fmt: skip
        sent = st.form_submit_button("Log in", type="primary", key="login_go")
    if not sent:
        st.caption(
            "Who may create tokens gives you one: `stepwell tokens create NAME read sql`, or the "
            "page Admin. Without the box, it is forgotten when this tab is closed."
        )
        return False
    try:
        api.log_in(given.strip())
    except api.StepwellError as error:
        st.error(str(error), icon=":material/error:")
        return False
    sessions.end(st.session_state.pop(_KEPT, None))
    if stay:
        st.session_state[_KEPT], st.session_state[_TICKET] = sessions.begin(given.strip())
    return True


def resume() -> None:
    """Use the session of this browser, if it has one, and fetch the cookie of a new one."""
    kept = st.session_state.get(_KEPT)
    if kept and sessions.token_of(kept) is None:  # it ended, or was ended in another tab
        del st.session_state[_KEPT]
        api.log_out()
    if api.TOKEN not in st.session_state and not kept:
        kept = _cookie()
        if token := sessions.token_of(kept):
            st.session_state[api.TOKEN], st.session_state[_KEPT] = token, kept
    if ticket := st.session_state.get(_TICKET):
        if sessions.is_open(ticket):
            path = f"/{st.get_option('server.baseUrlPath').strip('/')}".rstrip("/")
            _fetch()(key="signin", data={"path": path + sessions.PATH, "ticket": ticket})
        else:
            del st.session_state[_TICKET]


def log_out() -> None:
    """In all tabs of this browser."""
    sessions.end(st.session_state.pop(_KEPT, None))
    sessions.end(_cookie())
    api.log_out()


def _cookie() -> str | None:
    name = sessions.cookie_name(int(st.get_option("server.port")))
    found: object = st.context.cookies.get(name)
    return found if isinstance(found, str) else None  # a test of a page has no browser


@cache
def _fetch() -> Any:
    return st.components.v2.component("stepwell_signin", html="", js=SCRIPT)
