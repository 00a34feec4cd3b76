"""Admin: the service's state, tokens, what is kept for readers, and the audit log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import streamlit as st

from dashboard import api, components, formatting
from dashboard.views import admin_data

SCOPES = ["read", "sql", "train", "ingest", "admin"]
DAY, GB = 86400.0, 1e9


@components.view("Admin", "The service, its tokens, and who changed what.")
def show() -> None:
    api.prefetch(api.health, api.datasets)
    _service()
    components.tabs(PARTS, "admin_tab")


def _service() -> None:
    health = api.health()
    datasets = api.datasets()
    components.numbers(
        [
            ("Service", health.status, health.detail),
            ("Writable", "yes" if health.writable else "no", "No while its disk refuses writes"),
            ("Version", health.version, f"Index revision {health.database_revision}"),
            ("Datasets", formatting.count(len(datasets)), ""),
            ("Stored", formatting.size(sum(d.stored_bytes for d in datasets)), "Shards, on disk"),
        ]
    )
    if health.detail:
        st.warning(health.detail, icon=":material/warning:")
    st.caption("Its files are checked once a week, while it runs.")


def _tokens() -> None:
    api.tokens()  # who may not see tokens may not create one
    left, right = st.columns([3, 2], gap="large")
    with left:
        components.guarded(_given)
    with right:
        components.guarded(_create)


def _given() -> None:
    found = api.tokens()
    if not found:
        components.empty(
            "No tokens: the service accepts connections of its own machine only, and all of them "
            "may do everything. The first token should have the scope admin."
        )
        return
    rows = [
        {
            "name": t.name,
            "scopes": t.scopes,
            "bytes per day": t.bytes_per_day,
            "requests per minute": t.requests_per_minute,
            "created": t.created_at,
            "last used": t.last_used_at,
            "expires": t.expires_at,
            "id": t.id,
        }
        for t in found
    ]
    times = ["created", "last used", "expires"]
    components.table(rows, "tokens", times=times, sizes=["bytes per day"])
    names = {t.id: f"{t.name} ({t.id})" for t in found}
    with st.container(horizontal=True, vertical_alignment="bottom"):
        chosen = st.selectbox("Token", list(names), key="token", format_func=names.__getitem__)
        components.confirm(
            "Revoke", "key_off", "Whoever uses it is refused from now on.", "revoke_go",
            lambda: api.client().revoke_token(str(chosen)), "revoked",
        )  # fmt: skip


def _create() -> None:
    with st.form("new_token", border=True):
        st.markdown("**New token**")
        name = st.text_input("Whose", key="token_name", placeholder="robot-7")
        scopes = st.multiselect(
            "It may", SCOPES, default=["read"], key="token_scopes", accept_new_options=True,
            help="ingest:NAME for one dataset only, play:RUN for the policies of one run; "
            "* stands for any characters",
        )  # fmt: skip
        days = st.number_input("Days until it expires (0: never)", 0, 3650, 90, key="token_days")
        sends = st.number_input("GB that it may send in a day (0: no limit)", 0.0, key="token_gb")
        asks = st.number_input("Requests in a minute (0: no limit)", 0, key="token_requests")
        sent = st.form_submit_button("Create", type="primary", key="token_go")
    if not sent:
        return
    made: list[Any] = []

    def go() -> None:
        seconds = days * DAY if days else None
        quotas = {"bytes_per_day": int(sends * GB), "requests_per_minute": int(asks)}
        given = {quota: limit for quota, limit in quotas.items() if limit}
        made.append(api.client().create_token(name, scopes, seconds, **given))

    if components.attempt(go, f"token of {name} created"):
        st.success("Its secret, shown this once:")
        st.code(made[0].token, language=None, wrap_lines=True)
        if not api.token():
            st.info("From now on every caller needs a token: this page will ask for one.")


def _leases() -> None:
    found = api.snapshots()
    if not found:
        st.caption("None: whatever is evicted or deleted frees its disk space.")
        return
    rows = [
        {
            "snapshot": s.id,
            "datasets": s.datasets,
            "trajectories": s.trajectories,
            "size": s.bytes,
            "created": s.created_at,
            "leased until": s.leased_until,
        }
        for s in found
    ]
    components.table(rows, "snapshots_in_use", times=["created", "leased until"], sizes=["size"])


def _audit() -> None:
    pages = components.Pages("audit")
    found, following = api.audit(pages.cursor)
    if not found:
        st.caption("Nothing was changed.")
        return
    rows = [
        {
            "when": e.until or e.time,
            "who": e.who,
            "action": e.action,
            "subject": e.subject,
            "times": e.count,
            "detail": components.show_json(e.detail) if e.detail else "",
        }
        for e in found
    ]
    components.table(rows, "audit", times=["when"])
    pages.draw(len(found), following)


PARTS: dict[str, Callable[[], None]] = {
    "Tokens": _tokens,
    "Stored data and limits": admin_data.stored,
    "Jobs": admin_data.index_and_jobs,
    "Snapshots in use": _leases,
    "Audit log": _audit,
}
