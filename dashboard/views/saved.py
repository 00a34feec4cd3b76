"""Saved queries: kept under a name, opened from a menu or by a link."""

from __future__ import annotations

from typing import Any

import streamlit as st

from dashboard import api, components, formatting

OPENED = "_saved_opened"


def open_linked(name: str) -> None:
    """Put the query of the link's `saved` into the editor, once; what else the link says comes
    first. It stays in the URL until the editor's own text is there."""
    if "q" in st.query_params:
        del st.query_params["saved"]
        return
    if st.session_state.get(OPENED) == name:
        return
    st.session_state[OPENED] = name
    known = api.saved_queries()
    found = next((one for one in known if one.name == name), None)
    if found is None:
        st.warning(f"There is no saved query `{name}`.")
        return
    given = [key for key in st.query_params if key.startswith("param_")]
    _take(found, leave=given)


def _take(found: Any, leave: list[str] | None = None) -> None:
    st.session_state["q"] = found.sql
    st.session_state["dataset"] = found.dataset
    for name, value in found.params.items():
        if f"param_{name}" not in (leave or []):
            st.session_state[f"param_{name}"] = formatting.text_of(value)


def menu(query: str, params: dict[str, Any], dataset: str | None) -> None:
    """A popover with all of them, and a form that saves the query of the editor."""
    with st.popover("Saved queries", icon=":material/bookmarks:", width="content"):
        known = sorted(api.saved_queries(), key=lambda one: one.name)
        if known:
            _one(known)
        else:
            st.caption("None yet. A saved query has a name, a link, and values of its parameters.")
        _save(known, query, params, dataset)


def _one(known: list[Any]) -> None:
    names = {one.name: one for one in known}
    name = st.selectbox(
        "Open", list(names), key="saved_name",
        format_func=lambda n: f"{n}: {names[n].description}" if names[n].description else n,
    )  # fmt: skip
    found = names[name]
    st.caption(f"saved by {found.owner}, {formatting.ago(found.updated_at)}")
    with st.container(horizontal=True, vertical_alignment="center"):
        st.button("Open", key="saved_take", on_click=_take, args=(found,), type="primary")
        components.link("sql", "Link", "link", saved=name)
        if st.button("Delete", key="saved_delete", icon=":material/delete:", type="tertiary"):
            components.change(
                lambda: api.client().delete_saved_query(name), f"saved query {name} deleted"
            )


def _save(known: list[Any], query: str, params: dict[str, Any], dataset: str | None) -> None:
    with st.form("save_query", border=False, clear_on_submit=True):
        name = st.text_input(
            "Save this query as", key="save_name", placeholder="long-episodes",
            help="Small letters, digits, dots and dashes; a name of yours is replaced",
        )  # fmt: skip
        description = st.text_input("Description", key="save_description")
        sent = st.form_submit_button("Save", key="save_go", icon=":material/bookmark_add:")
    if not sent:
        return
    given = {key: value for key, value in params.items() if value != ""}
    name = name.strip()
    if not name:
        st.warning("Give it a name.")
        return
    components.change(
        lambda: api.client().save_query(
            name, query, description=description, params=given, dataset=dataset
        ),
        f"{name} {'replaced' if name in {q.name for q in known} else 'saved'}",
    )
