"""One run: its figures, policies, log, settings, and what can be done with it."""

from __future__ import annotations

from typing import Any

import pandas as pd
import streamlit as st

from dashboard import api, components, formatting
from dashboard.formatting import pluralize
from dashboard.views import workers

LOG_LINES = 500
LOG_HEIGHT = 360


def draw(name: str) -> None:
    run = api.run(name)
    if run.title:
        st.text(run.label)
    components.numbers(
        [
            ("Status", components.run_mark(run), formatting.last_line(run.error)),
            ("Heartbeat", formatting.ago(run.heartbeat_at), ""),
            ("Policies", formatting.count(run.policies), "Published"),
            ("Seed", "–" if run.seed is None else str(run.seed), ""),
            ("Commit", run.git_commit[:7] or "–", "Of the code it ran"),
            ("Host", run.host or "–", ""),
        ]
    )
    if run.error:
        if run.status == "failed":
            st.error("It ended with an error:")
        else:
            st.warning("Not all of it went well:")
        st.code(run.error, language=None, wrap_lines=True)
    left, right = st.columns(2, gap="large")
    with left:
        _policies(name)
        components.live(lambda: _log(name), lambda: api.run(name).alive)
    with right:
        _manage(run)
        components.json_note("Configuration, complete", run.config, "config")
        newest = pd.DataFrame(sorted(run.latest.items()), columns=["metric", "value"])
        components.folder(
            "Newest value of every metric", "latest", lambda: components.table(newest, "latest")
        )


def _policies(name: str) -> None:
    st.markdown("**Policies**")
    found = api.policies(name)
    if not found:
        st.caption("None published yet.")
        return
    estimates = api.estimates(name)
    estimated = {
        v: f"{value:.5g} ({low:.5g} … {high:.5g})" for v, (value, low, high) in estimates.items()
    }
    rows = [
        {
            "version": p.version,
            "aliases": ", ".join(p.aliases),
            **({"estimate (95 %)": estimated.get(p.version, "")} if estimated else {}),
            "step": p.step,
            "size": p.bytes,
            "published": p.created_at,
            "sha256": p.sha256[:16],
        }
        for p in found
    ]
    sql = f"SELECT * FROM policies WHERE run = {formatting.literal(name)} ORDER BY version DESC"
    components.table(
        rows, "policies", sql=sql, most_height=280, times=["published"], sizes=["size"]
    )
    components.commands(
        f"stepwell evaluate --policy {name} --env ENV",
        f"stepwell estimate {name}",
        f"stepwell collect --policy {name} --env ENV --dataset NAME",
    )
    with st.form("alias", border=True):
        with st.container(horizontal=True, vertical_alignment="bottom"):
            alias = st.text_input("Alias", "best", key="alias_name")
            version = st.selectbox("means version", [p.version for p in found], key="alias_of")
            sent = st.form_submit_button("Set", key="alias_go")
    if sent:
        components.change(
            lambda: api.client().set_alias(name, alias, int(version)),
            f"{name}/{alias} is version {version}",
        )


def _log(name: str) -> None:
    st.markdown("**Log**")
    text = api.run_log(name)
    if not text.strip():
        st.caption("No lines.")
        return
    lines = text.splitlines()
    with st.container(horizontal=True, vertical_alignment="bottom"):
        words = st.text_input("Line contains", key="log_search", width=220)
        wrap = st.toggle("Wrap long lines", value=True, key="log_wrap")
    found = [x for x in lines if (words or "").lower() in x.lower()] if words else lines
    # Scrolled to its end, where the newest line is. Text in monospace (style.css), not st.code, for
    # which a browser first runs 1.5 MB of scripts.
    with st.container(height=LOG_HEIGHT, autoscroll=True, key="log" if wrap else "log_unwrapped"):
        st.text("\n".join(found[-LOG_LINES:]) or "No such line.")
    kept = f"{len(found):,} of {len(lines):,} lines" if words else f"{len(lines):,} lines"
    with st.container(horizontal=True, vertical_alignment="center"):
        last = f"The last {LOG_LINES} of " if len(found) > LOG_LINES else ""
        st.caption(f"{last}{kept}, newest last")
        components.download("All lines", text, f"{name}.log", "text/plain", "log_all")


def tag_all(names: list[str], archived: str) -> None:
    """A form that changes the tags of many runs; archiving is a tag, and can be taken back."""
    with st.form("tag_all", border=False):
        add = st.text_input("Add tags, separated by commas", key="tags_add")
        remove = st.text_input("Remove tags", key="tags_remove")
        sent = st.form_submit_button(f"Change {pluralize(len(names), 'run')}", key="tags_go")
    with st.container(horizontal=True):
        put = st.button("Archive", key="archive", icon=":material/archive:")
        back = st.button("Take out of the archive", key="unarchive", icon=":material/unarchive:")
    st.caption("An archived run has the tag `archived`; the list leaves it out unless asked.")
    plus, minus = components.tags_of(add or ""), components.tags_of(remove or "")
    if put or back:
        plus, minus = ([archived], []) if put else ([], [archived])
    if sent or put or back:
        done = f"{pluralize(len(names), 'run')} changed"
        components.change(lambda: api.tag_runs(names, plus, minus), done)


def _manage(run: Any) -> None:
    with st.form("run_settings", border=True):
        title = st.text_input(
            "Title", run.title or "", key="run_title", max_chars=200,
            help="Shown with the name, which stays: trajectories, policies and evaluations name it",
        )  # fmt: skip
        tags = st.text_input("Tags, separated by commas", ", ".join(run.tags), key="run_tags")
        notes = st.text_area("Notes", run.notes, key="run_notes", height=80)
        if st.form_submit_button("Save", key="run_save"):
            changed = {"title": title, "tags": components.tags_of(tags), "notes": notes}
            components.change(lambda: api.client().patch_run(run.name, **changed), "saved")
    mine = [w.id for w in api.workers() if w.run == run.name and w.alive]
    with st.container(horizontal=True):
        workers.buttons(("pause", "resume", "stop"), mine, "run")
    if not mine:
        st.caption("No live process of this run reports here.")
    components.link(
        "start", "Copy into a form, to start another like it", "content_copy",
        clone=f"run:{run.name}",
    )  # fmt: skip
    if run.command:
        st.caption("Started by; run it again, with the same run name, to resume:")
        st.code(run.command, language=None, wrap_lines=True)
    components.confirm_delete(
        "run", run.name, "delete_run", lambda: api.client().delete_run(run.name)
    )
