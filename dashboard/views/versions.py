"""Versions of one dataset: the list, one version with its card, differences, create."""

from __future__ import annotations

from typing import Any

import pandas as pd
import streamlit as st

from dashboard import api, components, formatting
from dashboard.views import launches

SPREAD = ("mean", "std", "min", "q25", "median", "q75", "max")


def show(dataset: Any) -> None:
    """The tab of the page Datasets."""
    found = api.versions(dataset.name)
    with st.popover("Create a version", icon=":material/bookmark_add:", width="content"):
        _create(dataset, [version.name for version in found])
    if not found:
        components.empty(
            "No version yet. A version is a named selection that never changes: it can be cited, "
            "compared and trained on. From a terminal:"
        )
        components.commands(f"stepwell versions create {dataset.name}@v1")
        return
    _table(dataset, found)
    chosen = components.choose("Version", [version.name for version in found], "version")
    version = next(v for v in found if v.name == chosen)
    _detail(version)
    others = [v for v in found if v is not version]
    if others:
        components.folder(
            "Compare with another version", "version_compare", lambda: _difference(version, others)
        )
    with st.expander("Delete this version"):
        st.caption("Its trajectories stay, and stay protected. Its name is not given again.")
        components.confirm_delete(
            "version", version.version, "delete_version",
            lambda: api.client().delete_version(version.version),
        )  # fmt: skip


def _table(dataset: Any, found: list[Any]) -> None:
    rows = [
        {
            "version": v.name,
            "made from": v.parent or "",
            "trajectories": v.statistics.trajectories,
            "transitions": v.statistics.steps,
            "mean return": v.statistics.returns.mean if v.statistics.returns else None,
            "licence": v.licence,
            "created": v.created_at,
            "by": v.created_by,
            "digest": v.digest,
        }
        for v in found
    ]
    columns = {"mean return": components.HUNDREDTHS, "transitions": components.GROUPED}
    sql = (
        "SELECT version, parent, trajectories, steps, licence, digest, created_at\n"
        f"FROM versions WHERE dataset = {formatting.literal(dataset.name)} ORDER BY created_at DESC"
    )
    components.table(rows, "versions", sql=sql, columns=columns, times=["created"])


def _detail(version: Any) -> None:
    found = version.statistics
    if version.description:
        st.text(version.description)
    if version.missing:
        st.warning(f"{version.missing} of its trajectories were lost: it cannot be trained on.")
    mean = found.returns.mean if found.returns else None
    length = found.lengths.mean if found.lengths else None
    components.numbers(
        [
            ("Trajectories", formatting.count(found.trajectories), "Protected by the version"),
            ("Transitions", formatting.count(found.steps), ""),
            ("Mean return", formatting.decimal(mean), ""),
            ("Mean length", formatting.decimal(length, 1), "Transitions"),
            ("Licence", version.licence or "not stated", ""),
        ]
    )
    spreads = {"return": found.returns, "length": found.lengths}
    st.dataframe(
        pd.DataFrame(
            [
                {"": what, **{name: getattr(spread, name) for name in SPREAD}}
                for what, spread in spreads.items()
                if spread is not None
            ]
        ),
        hide_index=True,
        key="version_spreads",
    )
    st.markdown("Train on it:")
    components.commands(f"stepwell train offline --dataset {version.version}")
    launches.train_link(version.version)
    where = version.select.split("WHERE ", 1)[1]
    components.sql_note(f"SELECT * FROM trajectories WHERE {where}", "version")
    components.folder("Card (Markdown)", "card", lambda: _card(version))


def _card(version: Any) -> None:
    text = api.version_card(version)
    components.download("Download", text, f"{version.version}.md", "text/markdown", "version_card")
    st.code(text, language=None, wrap_lines=True)


def _difference(version: Any, others: list[Any]) -> None:
    names = [other.version for other in others]
    start = names.index(version.parent) if version.parent in names else 0
    # The key has the version's name: another version has another natural choice.
    before = st.selectbox(
        "Compared with", names, index=start, key=f"version_before_{version.version}"
    )
    found = api.diff_versions(str(before), version.version)
    parts = {"in both": found.kept, "added": found.added, "removed": found.removed}
    rows = [
        {
            "": name,
            "trajectories": part.statistics.trajectories,
            "transitions": part.statistics.steps,
            "mean return": part.statistics.returns.mean if part.statistics.returns else None,
            "mean length": part.statistics.lengths.mean if part.statistics.lengths else None,
        }
        for name, part in parts.items()
    ]
    components.table(rows, "version_difference")
    for name, part in parts.items():
        if part.statistics.trajectories:
            components.sql_note(part.sql, f"difference_{name}", label=f"SQL: {name}")


def _create(dataset: Any, names: list[str]) -> None:
    with st.form("create_version", border=False):
        name = st.text_input("Name", key="version_name", placeholder="v1")
        where = st.text_area(
            "WHERE (SQL over `trajectories`; empty: all for training)", key="version_where",
            placeholder='"return" > 100 AND NOT list_contains(flags, \'bad\')',
        )  # fmt: skip
        description = st.text_area("Description", key="version_description")
        licence = st.text_input("Licence", key="version_licence", placeholder="CC-BY-4.0")
        parent = st.selectbox("Made from", names, index=None, key="version_parent")
        st.caption("Its trajectories become protected for as long as the version exists.")
        sent = st.form_submit_button("Create", type="primary", key="version_go")
    if sent:
        components.change(
            lambda: api.client().create_version(
                dataset.name, name, where=where.strip() or None, description=description,
                licence=licence, parent=parent,
            ),
            f"version {dataset.name}@{name} created",
        )  # fmt: skip
