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
    named = {k: f"{node.kind} {node.label}" for k, node in sorted(whole.nodes.items())}
    key = components.menu("What", named, "node")
    found = whole.around(key)
    if len(found.nodes) <= MOST_DRAWN:
        names = (node.name for node in found.nodes.values() if node.kind == "run")
        colours = components.run_colours(api.known_runs(names).values())
        marks = {f"run:{run}": colour for run, colour in colours.items()}
        st.graphviz_chart(found.dot(charts.ink(), marks), width="stretch")
    else:
        st.caption(f"{len(found.nodes):,} datasets and runs belong to it, too many for a drawing.")
    frame = pd.DataFrame(
        [
            {
                "from": found.nodes[e.of].label,
                "kind": found.nodes[e.of].kind,
                "how": e.how,
                "to": found.nodes[e.made].label,
                "of kind": found.nodes[e.made].kind,
            }
            for e in found.edges
        ],
        columns=["from", "kind", "how", "to", "of kind"],
    )
    components.table(frame, "lineage")
    components.commands(f"stepwell lineage {key}")
