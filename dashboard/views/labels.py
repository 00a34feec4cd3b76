"""Forms that label trajectories: one of them, the selected ones, or all that match."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import streamlit as st

from dashboard import api, components, formatting

FLAG_HELP = "What is wrong with it: broken, duplicate, …"


def one(info: Any) -> None:
    """Everything that can be changed about one trajectory; its labels can be taken back."""
    protected = info.partition == "protected"
    with st.form(f"labels_{info.id}", border=True):
        st.markdown("**Label this trajectory**")
        with st.container(horizontal=True, vertical_alignment="bottom"):
            tags = _labels("Tags", info.tags, f"tags_{info.id}")
            flags = _labels("Flags", info.flags, f"flags_{info.id}", FLAG_HELP)
            note = st.text_input("Note", info.notes, key=f"note_{info.id}")
        with st.container(horizontal=True, vertical_alignment="center"):
            move = st.checkbox(
                "Demote to fifo" if protected else "Protect", key=f"move_{info.id}",
                help="It may be evicted then, at once if fifo is full" if protected
                else "Move it to the protected partition: it is never evicted",
            )  # fmt: skip
            sent = st.form_submit_button("Apply", type="primary", key=f"apply_{info.id}")
    if not sent:
        return

    def go() -> None:
        change: dict[str, Any] = {}
        for name, old, new in (
            ("tags", info.tags, tags),
            ("flags", info.flags, flags),
            ("notes", info.notes, note),
        ):
            if new != old:
                change[name] = new
        if move and not protected:
            change["partition"] = "protected"
        if change:
            api.client().patch_trajectory(info.id, **change)
        if move and protected:
            api.client().demote_trajectory(info.id)

    components.change(go, "this trajectory labelled")


def _labels(label: str, now: Sequence[str], key: str, note: str | None = None) -> list[str]:
    return list(
        st.multiselect(
            label, list(now), default=list(now), key=key, accept_new_options=True,
            placeholder="type one", help=note,
        )
    )  # fmt: skip


def many(ids: Sequence[str], where: str, total: int) -> None:
    """Labels to add to, or take from, the selected trajectories or all that match the filters."""
    with st.expander("Label many", icon=":material/label:"), st.form("labels_many", border=False):
        every = f"all {formatting.trajectories(total)} that match"
        scopes = [f"the {len(ids)} selected", every] if ids else [every]
        scope = st.radio("Change", scopes, key="many_scope", horizontal=True)
        with st.container(horizontal=True, vertical_alignment="bottom"):
            add_tag = st.text_input("Add tag", key="many_add_tag")
            remove_tag = st.text_input("Remove tag", key="many_remove_tag")
            add_flag = st.text_input("Add flag", key="many_add_flag", help=FLAG_HELP)
            remove_flag = st.text_input("Remove flag", key="many_remove_flag")
        with st.container(horizontal=True, vertical_alignment="center"):
            protect = st.checkbox("Protect", key="many_protect")
            sent = st.form_submit_button("Apply", type="primary", key="many_apply")
    if not sent:
        return

    words = components.tags_of
    changed: list[tuple[int, int]] = []

    def go() -> None:
        chosen = api.client().matching_trajectories(where) if scope == every else list(ids)
        now = api.client().label_trajectories(
            chosen, add_tags=words(add_tag), remove_tags=words(remove_tag),
            add_flags=words(add_flag), remove_flags=words(remove_flag), protect=protect,
        )  # fmt: skip
        changed.append((now, len(chosen)))

    if not (add_tag or remove_tag or add_flag or remove_flag or protect):
        st.info("Nothing to change: name a tag or a flag, or tick Protect.")
    elif components.attempt(go, "labelled"):
        now, of = changed[0]
        st.toast(f"{now:,} of {of:,} changed", icon=":material/label:")
        st.rerun()
