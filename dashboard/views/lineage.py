"""Lineage: what datasets and runs were made from, and what was made from them."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from dashboard import api, charts, components

MOST_DRAWN = 60
"""Nodes of a drawing that can still be read."""


@components.view(
    "Lineage",
    "Runs learn from datasets and publish policies, which play trajectories into datasets.",
)
def show() -> None:
    whole = api.lineage()
    if not whole.nodes:
        components.empty(
            "Nothing is there yet. Import data, or let a policy play:",
            "stepwell import FILE --dataset NAME\nstepwell run Pendulum-v1",
        )
        return
    keys = sorted(whole.nodes)
    if st.session_state.get("node") not in keys:
        st.session_state.pop("node", None)
    key = st.selectbox(
        "What", keys, key="node", bind="query-params",
        format_func=lambda k: k.replace(":", " ", 1),
    )  # fmt: skip
    found = whole.around(str(key))
    if len(found.nodes) <= MOST_DRAWN:
        st.graphviz_chart(found.dot(charts.ink()), width="stretch")
    else:
        st.caption(f"{len(found.nodes):,} datasets and runs belong to it, too many for a drawing.")
    frame = pd.DataFrame(
        [
            {
                "from": found.nodes[e.of].name,
                "kind": found.nodes[e.of].kind,
                "how": e.how,
                "to": found.nodes[e.made].name,
                "of kind": found.nodes[e.made].kind,
            }
            for e in found.edges
        ],
        columns=["from", "kind", "how", "to", "of kind"],
    )
    components.table(frame, "lineage")
    st.code(f"stepwell lineage {key}", language=None)
