"""An upload is a job: its page shows how far it is, can be left, and says what came of it."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest
from streamlit.testing.v1 import AppTest

from dashboard import api
from stepwell import Client, NotFound
from stepwell.testing import wait_until

Page = Callable[..., AppTest]
STEPS = 30
PARSER = "server.imports.parser"


def npz(**changes: np.ndarray) -> bytes:
    """Three episodes; without `timeouts`, one without an end."""
    file = io.BytesIO()
    arrays = {
        "observations": np.random.default_rng(0).normal(size=(STEPS, 3)).astype(np.float32),
        "actions": np.zeros((STEPS, 1), np.float32),
        "rewards": np.ones(STEPS, np.float32),
        "terminals": np.zeros(STEPS, bool),
    }
    np.savez(file, **(arrays | changes))
    return file.getvalue()


def ends() -> np.ndarray:
    return np.arange(1, STEPS + 1) % 10 == 0


def sent(page: Page, url: str, name: str, data: bytes, file: str = "toy.npz") -> AppTest:
    """The page after the click on Upload."""
    drawn = page("datasets", url)
    drawn.file_uploader(key="upload_file_0").upload(file, data)
    drawn.text_input(key="upload_name").set_value(name)
    drawn.text_input(key="upload_env").set_value("Toy-v0")
    drawn.run()
    drawn.button(key="upload_go").click().run(timeout=240)
    assert [e.message for e in drawn.exception] == []
    return drawn


def job_of(drawn: AppTest) -> str:
    value = drawn.query_params["job"]
    return value if isinstance(value, str) else value[0]


def ended(drawn: AppTest, client: Client) -> AppTest:
    """The page once the job has ended."""
    job_id = job_of(drawn)
    running = ("queued", "running")
    wait_until(lambda: client.job(job_id).state not in running, what="the end of the job")
    api.refresh()
    drawn.run()
    assert [e.message for e in drawn.exception] == []
    return drawn


@contextmanager
def suspended(pid: int) -> Iterator[Callable[[], None]]:
    """The next parsers of this service stand still from the start; the returned function waits
    until one does."""
    found: list[psutil.Process] = []

    def parsers() -> list[psutil.Process]:
        children = psutil.Process(pid).children(recursive=True)
        return [child for child in children if _is_parser(child)]

    def catch() -> None:
        wait_until(lambda: bool(parsers()), what="a parser")
        found.extend(parsers())
        for process in found:
            process.suspend()

    with ThreadPoolExecutor(1) as watching:
        caught = watching.submit(catch)  # a page that is drawn slowly would look too late
        try:
            yield caught.result
        finally:
            for process in found:
                if process.is_running():
                    process.resume()


def _is_parser(process: psutil.Process) -> bool:
    try:
        return PARSER in process.cmdline()
    except psutil.NoSuchProcess:
        return False


def test_a_file_is_sent_and_its_job_says_what_was_stored(
    service, client: Client, name: str, page: Page
) -> None:
    """Through the page, the REST route and the confined parser, into protected."""
    drawn = ended(sent(page, service.url, name, npz(timeouts=ends())), client)
    assert [e.value for e in drawn.error] == []
    made = client.dataset(name)
    assert (made.protected.trajectories, made.protected.steps) == (3, STEPS)
    assert f"3 trajectories, 30 transitions in `{name}`" in drawn.success[0].value
    assert not (client.job(job_of(drawn)).result or {})["warnings"]
    assert [w.value for w in drawn.warning if " ago)" not in w.value] == []  # of older jobs
    drawn.button(key="job_close").click().run()
    assert not drawn.success
    assert "job" not in drawn.query_params


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_tables_are_sent_as_what_they_are(
    service, client: Client, name: str, page: Page, suffix: str
) -> None:
    ones = [1.0] * STEPS
    table = pa.table({"obs": ones, "action": ones, "reward": ones, "terminated": ends()})
    file = io.BytesIO()
    if suffix == "parquet":
        pyarrow.parquet.write_table(table, file)
    else:
        with pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    drawn = ended(sent(page, service.url, name, file.getvalue(), f"plays.{suffix}"), client)
    assert f"3 trajectories, 30 transitions in `{name}`" in drawn.success[0].value


def test_its_link_leads_back_to_it_with_its_warnings(
    service, client: Client, name: str, page: Page
) -> None:
    first = ended(sent(page, service.url, name, npz()), client)
    job_id = job_of(first)
    again = page("datasets", service.url, job=job_id, dataset_tab="Imports")
    assert "1 trajectory, 30 transitions" in again.success[0].value
    assert any("have no end" in w.value for w in again.warning)
    again.button(key="job_close").click().run()
    assert not again.success
    again.button(key=f"open_{job_id}").click().run()
    assert "1 trajectory, 30 transitions" in again.success[0].value
    assert job_of(again) == job_id


def test_while_it_runs_the_page_shows_how_far_it_is_and_can_cancel(
    service, client: Client, name: str, page: Page
) -> None:
    large = np.zeros((600_000, 3), np.float32)
    rows = len(large)
    data = npz(
        observations=large,
        actions=np.zeros((rows, 1), np.float32),
        rewards=np.ones(rows, np.float32),
        terminals=np.zeros(rows, bool),
        timeouts=np.arange(1, rows + 1) % 1000 == 0,
    )
    with suspended(service.pid) as catch:
        drawn = sent(page, service.url, name, data)
        catch()
        api.refresh()
        drawn.run()
        job_id = job_of(drawn)
        assert client.job(job_id).state == "running"
        (bar,) = drawn.get("progress")
        assert "reading the file" in bar.proto.text
        assert not drawn.success
        drawn.button(key="job_cancel_go").click().run()
        assert [e.value for e in drawn.error] == []
        drawn = ended(drawn, client)
    assert client.job(job_id).state == "cancelled"
    assert any("nothing was stored" in i.value for i in drawn.info)
    with pytest.raises(NotFound):
        client.dataset(name)


def test_a_bad_file_is_refused_with_its_reason(
    service, client: Client, name: str, page: Page
) -> None:
    drawn = ended(sent(page, service.url, name, b"not a zip file at all"), client)
    (error,) = drawn.error
    assert "not an .npz file" in error.value
    assert any(t.value.startswith("Expected: a numpy .npz") for t in drawn.text)
    with pytest.raises(NotFound):
        client.dataset(name)


def test_a_link_to_no_job_is_an_error_that_can_be_closed(service, page: Page) -> None:
    drawn = page("datasets", service.url, job="job_none")
    assert [e.message for e in drawn.exception] == []
    assert "job_none" in drawn.error[0].value
    drawn.button(key="job_close").click().run()
    assert not drawn.error
