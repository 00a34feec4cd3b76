"""An upload is a job: its page shows how far it is, can be left, and says what came of it."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import h5py
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
from tests.dashboard.conftest import Page, no_traceback

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


def chosen(page: Page, url: str, name: str, file: str, data: bytes) -> AppTest:
    """The form with a file in it."""
    drawn = page("datasets", url)
    drawn.file_uploader(key="upload_file_0").upload(file, data)
    drawn.text_input(key="upload_name").set_value(name)
    drawn.run()
    no_traceback(drawn)
    return drawn


def send(drawn: AppTest) -> AppTest:
    """The page after the click on Upload."""
    drawn.run()
    drawn.button(key="upload_go").click().run(timeout=240)
    no_traceback(drawn)
    return drawn


def sent(page: Page, url: str, name: str, data: bytes, file: str = "toy.npz") -> AppTest:
    """The page after the upload of a file, without options."""
    drawn = chosen(page, url, name, file, data)
    drawn.text_input(key="upload_env").set_value("Toy-v0")
    return send(drawn)


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
    no_traceback(drawn)
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


def test_a_table_is_sent_as_what_it_is(service, client: Client, name: str, page: Page) -> None:
    """Tests below send Parquet files."""
    ones = [1.0] * STEPS
    table = pa.table({"obs": ones, "action": ones, "reward": ones, "terminated": ends()})
    file = io.BytesIO()
    with pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    drawn = ended(sent(page, service.url, name, file.getvalue(), "plays.arrow"), client)
    assert f"3 trajectories, 30 transitions in `{name}`" in drawn.success[0].value


def options_shown(drawn: AppTest) -> set[str]:
    keys = (w.key for w in (*drawn.text_input, *drawn.checkbox, *drawn.number_input))
    return {k.removeprefix("upload_").removesuffix("_0") for k in keys if k and k.endswith("_0")}


def parquet(**columns: object) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pa.table(columns), file)
    return file.getvalue()


def test_a_table_is_mapped_by_its_own_columns(
    service, client: Client, name: str, page: Page
) -> None:
    """No column has a usual name, so nothing could be guessed."""
    rows = np.arange(STEPS)
    data = parquet(
        x=rows / 2, y=rows / 4, push=rows / STEPS, gain=[2.0] * STEPS, over=ends(), v=rows * 1.0
    )
    drawn = chosen(page, service.url, name, "plays.parquet", data)
    seen = drawn.multiselect(key="upload_role_observation_0")
    assert seen.options == ["x", "y", "push", "gain", "over", "v"]
    seen.set_value(["y", "x"])
    drawn.multiselect(key="upload_role_action_0").set_value(["push"])
    drawn.selectbox(key="upload_role_reward_0").set_value("gain")
    drawn.selectbox(key="upload_role_terminated_0").set_value("over")
    drawn.text_area(key="upload_columns_0").set_value("info/speed=v\n")
    drawn.text_input(key="upload_action_high_0").set_value("4")
    drawn.text_input(key="upload_action_low_0").set_value("-4")
    drawn = ended(send(drawn), client)
    assert [e.value for e in drawn.error] == []
    spec = client.dataset(name).spec
    (action,) = spec["actions"].values()
    assert (action["low"], action["high"]) == (-4, 4)
    played = client.steps(client.sql(
        f"SELECT id FROM trajectories WHERE dataset = '{name}' ORDER BY id LIMIT 1"
    ).one())  # fmt: skip
    (obs,) = played.obs.values()
    assert np.array_equal(obs[:, 1], 2 * obs[:, 0])  # y, then x
    assert set(played.rewards) == {2.0} and list(played.infos) == ["speed"]


def test_arrays_of_an_hdf5_file_are_listed(service, name: str, page: Page) -> None:
    file = io.BytesIO()
    with h5py.File(file, "w") as arrays:
        arrays["robot/pose"], arrays["push"] = np.zeros((STEPS, 2)), np.zeros(STEPS)
    drawn = chosen(page, service.url, name, "plays.hdf5", file.getvalue())
    assert drawn.multiselect(key="upload_role_observation_0").options == ["push", "robot/pose"]


def test_a_role_without_a_column_is_not_guessed(
    service, client: Client, name: str, page: Page
) -> None:
    ones = [1.0] * STEPS
    drawn = chosen(
        page, service.url, name, "plays.parquet",
        parquet(obs=ones, action=ones, reward=ones, terminated=ends()),
    )  # fmt: skip
    drawn.selectbox(key="upload_role_reward_0").set_value("(no column)")
    ended(send(drawn), client)
    query = f"SELECT max(\"return\") FROM trajectories WHERE dataset = '{name}'"
    assert client.sql(query).one() == 0


def test_options_are_those_of_the_format(service, name: str, page: Page) -> None:
    shown = options_shown(chosen(page, service.url, name, "toy.npz", npz()))
    assert shown == {
        "observation",
        "action",
        "action_low",
        "action_high",
        "max_steps",
        "drop_infos",
    }
    folder = io.BytesIO()
    with zipfile.ZipFile(folder, "w") as archive:
        archive.writestr("features.json", "{}")
        archive.writestr("robot-train.tfrecord-00000-of-00001", b"")
    drawn = chosen(page, service.url, name, "robot.zip", folder.getvalue())
    assert "keep_last_step" in options_shown(drawn) - {"max_steps", "split", "videos"}
    drawn = chosen(page, service.url, name, "plays.parquet", b"PAR1 and nothing else")
    assert "split" in options_shown(drawn) and not drawn.multiselect
    assert "could not be read" in " ".join(c.value for c in drawn.caption)


def test_a_wrong_option_is_the_services_error(
    service, client: Client, name: str, page: Page
) -> None:
    drawn = chosen(page, service.url, name, "toy.npz", npz(timeouts=ends()))
    drawn.text_input(key="upload_action_low_0").set_value("much")
    (error,) = send(drawn).error
    assert "action_low is not a list of finite numbers" in error.value
    assert "job" not in drawn.query_params
    drawn.text_input(key="upload_action_low_0").set_value("")
    drawn.number_input(key="upload_max_steps_0").set_value(5)
    drawn.text_input(key="upload_action_0").set_value("discrete:x")
    (error,) = ended(send(drawn), client).error
    assert "discrete" in error.value


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
    no_traceback(drawn)
    assert "job_none" in drawn.error[0].value
    drawn.button(key="job_close").click().run()
    assert not drawn.error
