"""The doctor: what is wrong with a dataset, the SQL that shows it, and what to do."""

from __future__ import annotations

from typing import Any

import streamlit as st

from dashboard import api, components, formatting

REPORT = "_doctor_report"
PLAN = "_doctor_plan"
WHOLE = "the whole dataset"
MARKS = {
    "error": (":material/error:", "red"),
    "warning": (":material/warning:", "orange"),
    "note": (":material/info:", "gray"),
}


@components.view("Doctor", "Looks for what is wrong with a dataset, and makes versions without it.")
def show() -> None:
    names = [d.name for d in api.datasets()]
    if not names:
        components.empty(
            "There is no dataset yet:", "stepwell import FILE --dataset NAME --env ENV"
        )
        return
    with st.container(horizontal=True, vertical_alignment="bottom"):
        name = str(components.choose("Dataset", names, "dataset"))
        versions = [None, *(version.name for version in api.versions(name))]
        version = components.choose("Version", versions, "version", WHOLE, placeholder=WHOLE)
        examined = f"{name}@{version}" if version else name
        go = st.button("Check", type="primary", icon=":material/stethoscope:", key="check")
    if go:
        _check(examined)
    report = st.session_state.get(REPORT)
    if report is None or report.dataset != examined:
        st.caption("A few dozen queries: seconds for small datasets, minutes for large ones.")
        components.commands(f"stepwell doctor {examined}")
        return
    _draw(report)


def _check(examined: str) -> None:
    """`examined`: a dataset, or a version of one, such as "hopper@v3"."""
    bar = st.progress(0.0, "asking")
    st.session_state.pop(PLAN, None)
    st.session_state[REPORT] = api.diagnose(
        examined, lambda done, total, what: bar.progress(done / total, what.replace("_", " "))
    )
    bar.empty()


def _draw(report: Any) -> None:
    part = f"; steps of one in {report.one_in} were read" if report.one_in > 1 else ""
    st.caption(
        f"{formatting.trajectories(report.trajectories)}, "
        f"{formatting.pluralize(report.steps, 'step')}{part}"
    )
    if report.numbers > report.numbers_read:
        st.caption(
            f"Of {report.numbers:,} numbers of an observation, the first {report.numbers_read:,} "
            "were checked one by one."
        )
    if not report.findings and not report.failed:
        st.success("Nothing found.", icon=":material/check_circle:")
    for finding in report.findings:
        _finding(report.dataset.partition("@")[0], finding)
    for kind, why in report.failed.items():
        st.warning(f"{kind} was not checked: {why}")
    if report.failed and not report.findings:
        st.caption("The other checks found nothing.")
    if any(finding.leave_out for finding in report.findings):
        _repair(report)


def _repair(report: Any) -> None:
    """Choose findings, see what a version without them would be, make it."""
    can = [f for f in report.findings if f.leave_out]
    with st.container(border=True):
        st.markdown("**Make a version without these**")
        kinds = st.multiselect(
            "Findings", [f.kind for f in can], [f.kind for f in can if f.severity != "note"],
            key="repair_kinds",
        )  # fmt: skip
        if st.button("Preview", key="repair_preview", disabled=not kinds):

            def plan() -> None:
                st.session_state[PLAN] = (kinds, api.plan_repair(report, kinds))

            components.attempt(plan, "counted")
        chosen, plan_made = st.session_state.get(PLAN, (None, None))
        if plan_made is None or chosen != kinds or plan_made.dataset != report.dataset:
            return
        out = formatting.trajectories(plan_made.count)
        left = formatting.trajectories(plan_made.trajectories)
        steps = formatting.pluralize(plan_made.steps, "step")
        st.text(f"{out} left out; {left}, {steps} remain")
        named = ", ".join(f"{kind} {n:,}" for kind, n in plan_made.left_out.items())
        st.caption(f"Named by findings: {named}")
        for kind, why in plan_made.not_repaired.items():
            st.warning(f"{kind}: {why}")
        name = st.text_input("Name of the version", "clean", key="repair_name")
        if st.button("Make a version without these", type="primary", key="repair_go"):
            made = f"version {report.dataset.partition('@')[0]}@{name} made"
            components.attempt(lambda: api.make_version(plan_made, name), made)


def _finding(dataset: str, finding: Any) -> None:
    icon, colour = MARKS[finding.severity]
    with st.container(border=True):
        with st.container(horizontal=True, vertical_alignment="center"):
            st.badge(finding.severity, icon=icon, color=colour)  # type: ignore[arg-type]
            st.markdown(f"**{finding.kind.replace('_', ' ')}**")
        st.text(finding.message)
        if finding.examples:
            components.link(
                "trajectories", "Look at the first of them", "timeline",
                dataset=dataset, id=finding.examples[0],
            )  # fmt: skip
        st.caption("What to do")
        st.code(finding.repair, language=None, wrap_lines=True)
        components.sql_note(
            finding.sql, f"finding_{finding.kind}", dataset=dataset, label="SQL that shows them"
        )
