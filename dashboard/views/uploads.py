"""Uploads: send a file, follow the job that imports it, and come back to it by its link (?job=)."""

from __future__ import annotations

from typing import Any

import streamlit as st

from dashboard import api, components, formatting, uploading

JOB = "job"
"""The query parameter that names the job to show."""
FOLLOW_SECONDS = 1.0
"""Between refreshes of a job that is not done."""
_SENT, _READ = "_uploads_sent", "_uploads_read"
OPEN = ("queued", "running")


def popover(names: list[str]) -> None:
    """The button Upload; behind it a form, which is closed and empty again after each file."""
    count = st.session_state.get(_SENT, 0)
    with st.popover(
        "Upload a file", icon=":material/upload:", width="content", on_change="rerun",
        key=f"upload_{count}",
    ):  # fmt: skip
        _form(names, count)


def _form(names: list[str], count: int) -> None:
    """Take a file and send it to the service; then the page shows the job."""
    file = st.file_uploader(
        "A file, or the zip of a folder, up to 200 MB",
        type=uploading.SUFFIXES,
        key=f"upload_file_{count}",
    )
    st.caption(
        "D4RL, .npz, Parquet, Arrow, or the zip of a dataset's folder. Larger ones stream from a "
        "terminal: `stepwell import FILE --dataset NAME --env ID`"
    )
    name = st.text_input("Into dataset (made if it is not there)", key="upload_name")
    if name and name in names:
        st.caption("It exists: the file must have the same layout.")
    env = st.text_input("Environment", key="upload_env", placeholder="Hopper-v5")
    partition = st.segmented_control(
        "Partition", ["protected", "fifo"], default="protected", key="upload_partition",
        required=True,
    )  # fmt: skip
    options = _options(file, count) if file is not None else {}
    if not st.button("Upload", type="primary", key="upload_go", disabled=not (file and name)):
        return
    assert file is not None, "the button is disabled without a file"
    bar = st.progress(0.0, "sending")

    def show(done: int, total: int) -> None:
        sent = f"sending {formatting.size(done)} of {formatting.size(total)}"
        bar.progress(done / max(total, 1), sent)

    def send() -> None:
        job = uploading.send(
            name, file, partition=str(partition), env=env, options=options, progress=show
        )
        st.query_params[JOB] = job.id

    if components.attempt(send, f"{file.name} is sent"):
        st.session_state[_SENT] = count + 1
        st.rerun()


def _options(file: Any, count: int) -> dict[str, Any]:
    """Collect the options that the user has set for the format of the file."""
    formats = uploading.formats_of(file)
    columns = []
    if set(formats) & set(uploading.TABLES):
        with st.expander("Columns", icon=":material/view_column:"):
            columns = _columns(file, count)
    found: dict[str, Any] = {"columns": columns} if columns else {}
    with st.expander("Options", icon=":material/tune:"):
        options = list(uploading.options_of(formats).items())
        for place, (name, option) in components.columns(options, 2):
            with place:
                value = _option(name, option, f"upload_{name}_{count}")
            if value not in ("", None, False):
                found[name] = value
    return found


def _option(name: str, option: uploading.ImportOption, key: str) -> Any:
    label = name
    if option.kind == "switch":
        return st.checkbox(label, key=key, help=option.about)
    if option.kind == "count":
        return st.number_input(
            label, 1, value=None, key=key, help=option.about, placeholder=option.example
        )
    text = st.text_input(label, key=key, help=option.about, placeholder=option.example)
    return (text or "").strip()


def _columns(file: Any, count: int) -> list[str]:
    """A menu of the file's columns for each role; what is left empty is guessed by name."""
    known = _columns_of(file)
    about = "What is left empty is guessed by name, and the end of the import says what it took."
    roles: dict[str, str | list[str] | None] = {}
    if known:
        st.caption(f"{about} Several columns make one vector, in the order chosen.")
        for role in uploading.ARRAY_ROLES:
            roles[role] = st.multiselect(
                role, known, key=f"upload_role_{role}_{count}",
                placeholder="guessed", accept_new_options=True,
            )  # fmt: skip
        options = [uploading.NONE, *known]
        for place, role in components.columns(uploading.COLUMN_ROLES, 2):
            roles[role] = place.selectbox(
                role, options, index=None, key=f"upload_role_{role}_{count}", placeholder="guessed"
            )
    else:
        st.caption(f"The columns of this file could not be read here, so type them. {about}")
    others = st.text_area(
        "Others, one per line" if known else "Columns, one role per line",
        key=f"upload_columns_{count}", height=80,
        placeholder="info/speed=v" if known else "observation=x,y\naction=push_*",
        help=f"ROLE=COLUMN,COLUMN; {', '.join((*uploading.ARRAY_ROLES, *uploading.COLUMN_ROLES))}, "
        "info/NAME, observation/NAME, action/NAME; * matches names; ROLE= is none",
    )  # fmt: skip
    return uploading.column_map(roles, others or "")


def _columns_of(file: Any) -> list[str]:
    """Read once for each file."""
    read = st.session_state.get(_READ)
    if read is None or read[0] != file.file_id:
        read = st.session_state[_READ] = (file.file_id, uploading.columns_of(file))
    return list(read[1])


def follow() -> None:
    """The job that the page's address names, if it names one: its progress, then its end."""
    job_id = st.query_params.get(JOB)
    if not job_id:
        return
    with st.container(border=True):
        components.guarded(lambda: _follow(job_id))
        if st.button("Close", key="job_close", icon=":material/close:", type="tertiary"):
            del st.query_params[JOB]
            st.rerun()


def _follow(job_id: str) -> None:
    was_open = api.job(job_id).state in OPEN

    def part() -> None:
        job = api.job(job_id)
        if was_open and job.state not in OPEN:
            # What was imported shows up all over the page.
            api.refresh()
            st.rerun()
        draw(job)

    live = was_open and st.session_state.get("live", True)
    st.fragment(run_every=FOLLOW_SECONDS if live else None)(
        lambda: components.guarded(part)
    )()  # fmt: skip


def draw(job: Any) -> None:
    """One job, in whatever state it is."""
    into = f" into `{job.dataset}`" if job.dataset else ""
    with st.container(horizontal=True, vertical_alignment="center"):
        st.markdown(f"**{job.kind.capitalize()}**{into}")
        st.badge(components.mark(job.state))
        st.caption(f"started {formatting.ago(job.created_at)}")
    if job.state in OPEN:
        st.progress(job.progress, job.message or job.state)
        st.caption("You can leave this page: its address, and the tab *Imports*, lead back here.")
        if st.button("Cancel", key="job_cancel_go", icon=":material/cancel:"):
            components.attempt(lambda: api.client().cancel_job(job.id), "it is being cancelled")
    elif job.state == "succeeded":
        _succeeded(job)
    elif job.state == "cancelled":
        st.info("Cancelled: nothing was stored.", icon=":material/block:")
    else:
        _failed(job)
    st.caption(job.id)


def _succeeded(job: Any) -> None:
    result = job.result or {}
    trajectories = formatting.trajectories(result.get("trajectories", 0))
    steps = formatting.pluralize(result.get("steps", 0), "transition")
    st.success(f"{trajectories}, {steps} in `{job.dataset}`", icon=":material/check_circle:")
    for warning in result.get("warnings", []):
        st.warning(str(warning), icon=":material/warning:")
    with st.container(horizontal=True):
        for page, label, icon in (
            ("datasets", "Open the dataset", "database"),
            ("trajectories", "Look at its trajectories", "timeline"),
            ("doctor", "Check it", "stethoscope"),
        ):
            components.link(page, label, icon, dataset=job.dataset)


def _failed(job: Any) -> None:
    error = job.error
    st.error(error.detail if error else job.message, icon=":material/error:")
    for label, value in (("Expected", error.expected), ("Got", error.got)) if error else ():
        if value is not None:
            st.text(f"{label}: {value if isinstance(value, str) else components.show_json(value)}")
    st.caption(
        "Nothing was stored. docs/reference/formats.md and own_data.md describe the layouts."
    )
