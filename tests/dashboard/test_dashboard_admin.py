"""Tokens: created and revoked on the page Admin, asked for where they are needed."""

from collections.abc import Callable

import pytest
from streamlit.testing.v1 import AppTest

from dashboard import api
from stepwell import Client
from stepwell.errors import Unauthorized
from stepwell.testing import make_spec, make_trajectory
from tests.conftest import ServiceProcess
from tests.dashboard.conftest import Page, check, no_traceback
from tests.index_file import write_index


@pytest.fixture(scope="module")
def guarded(file_service: ServiceProcess) -> tuple[str, str]:
    """A service with tokens: its address, and the token of somebody who may do everything."""
    return file_service.url, file_service.client().create_token("me", ["admin"]).token


@pytest.fixture
def reader(guarded: tuple[str, str]) -> Callable[..., str]:
    """reader(scopes): a new token with these."""

    def create(*scopes: str) -> str:
        with Client(*guarded) as client:
            return client.create_token("reader", scopes).token

    return create


def logged_in(drawn: AppTest, token: str) -> AppTest:
    """A page that asks for a token, once it has got this one."""
    no_traceback(drawn)
    drawn.text_input(key="login_token").set_value(token)
    drawn.button(key="login_go").click().run()
    no_traceback(drawn)
    return drawn


def test_a_service_with_tokens_asks_for_one(guarded: tuple[str, str], page: Page) -> None:
    """The page becomes a form, refuses a wrong token, and acts with the right one."""
    url, admin = guarded
    drawn = page("datasets", url)
    no_traceback(drawn)
    assert drawn.text_input(key="login_token").label == "Token" and not drawn.metric
    logged_in(drawn, "wrong")
    assert len(drawn.error) == 1 and drawn.text_input(key="login_token")
    check(logged_in(drawn, admin))
    assert "login_token" not in drawn.session_state
    other = page("datasets", url)
    assert other.text_input(key="login_token"), "another session has no token"


def test_a_token_is_created_and_revoked(guarded: tuple[str, str], page: Page) -> None:
    url, admin = guarded
    drawn = logged_in(page("admin", url), admin)
    drawn.text_input(key="token_name").set_value("robot")
    drawn.multiselect(key="token_scopes").set_value(["read", "sql"])
    drawn.button(key="token_go").click().run()
    no_traceback(drawn)
    secret = next(c.value for c in drawn.code if c.value.startswith("sw_") or len(c.value) > 30)
    with Client(url, secret) as robot:
        assert robot.datasets() == []
        with pytest.raises(Unauthorized):
            robot.tokens()
        shown = drawn.run().dataframe[0].value
        assert {"robot", "me"} <= set(shown["name"]) and shown["name"][0] == "robot"
        assert list(shown["scopes"][0]) == ["read", "sql"]
        drawn.selectbox(key="token").set_value(shown["id"][0])
        drawn.button(key="revoke_go").click().run()
        no_traceback(drawn)
        with pytest.raises(Unauthorized):
            robot.datasets()
    drawn.session_state["admin_tab"] = "Audit log"
    (log,) = [table.value for table in drawn.run().dataframe]
    assert log["action"].tolist()[:2] == ["token.revoke", "token.create"]
    assert log["subject"][0] == shown["id"][0]


def test_who_may_not_administrate_is_told_so(
    guarded: tuple[str, str], reader: Callable[..., str], page: Page
) -> None:
    drawn = logged_in(page("admin", guarded[0]), reader("read", "sql"))
    lacks = "Not shown: this needs a token with the scope `admin`; yours has `read`, `sql`."
    assert [c.value for c in drawn.caption if "Not shown" in c.value] == [
        f":material/lock: {lacks}"
    ]
    assert drawn.metric and not drawn.error
    assert "token_name" not in drawn.session_state, "no form that would be refused"


def test_without_the_scope_sql_a_page_says_so_in_a_sentence(
    guarded: tuple[str, str], reader: Callable[..., str], page: Page
) -> None:
    url, token = guarded[0], reader("read")
    with Client(*guarded) as client:
        client.create_dataset("d", make_spec())
    drawn = logged_in(page("overview", url), token)
    lacks = ":material/lock: Not shown: this needs a token with the scope `sql`; yours has `read`."
    assert not drawn.error and lacks in [c.value for c in drawn.caption]
    assert not drawn.success, "no all-clear beside what cannot be read"
    assert "Runs" in [title.value for title in drawn.subheader]
    for name in ("trajectories", "datasets", "console", "evaluation"):
        check(logged_in(page(name, url), token))


def test_limits_are_changed_and_what_evicts_is_asked(fresh_service, page: Page) -> None:
    with Client(fresh_service.url) as client:
        client.create_dataset("d", make_spec(), capacity={"steps": 1000})
        client.post("d", [make_trajectory(length=5, seed=i) for i in range(3)])
        drawn = page("admin", fresh_service.url, admin_tab="Stored data and limits")
        no_traceback(drawn)
        (table,) = drawn.dataframe
        assert table.value["limit of size"].isna().all() and table.proto.placeholder == ""
        steps = drawn.number_input(key="limit_steps_d")
        assert steps.value == 1000
        steps.set_value(6)
        drawn.button(key="limits_go").click().run()
        no_traceback(drawn)
        assert any("evicts" in w.value for w in drawn.warning)
        assert client.dataset("d").capacity.steps == 1000
        drawn.checkbox(key="limits_sure_d").check()
        drawn.button(key="limits_go").click().run()
        no_traceback(drawn)
        assert client.dataset("d").capacity.steps == 6 and client.dataset("d").evicted == 2
        (entry,) = [e for e in client.audit().items if e.action == "dataset.capacity"]
        assert (entry.subject, entry.detail["steps"]) == ("d", 6)


def test_the_index_is_checked_from_the_page(fresh_service, page: Page) -> None:
    with Client(fresh_service.url) as client:
        client.create_dataset("d", make_spec())
        drawn = page("admin", fresh_service.url, admin_tab="Jobs")
        drawn.button(key="check_index").click().run()
        no_traceback(drawn)
        (job,) = client.jobs()
        assert client.wait_job(job.id).result == {"clean": True, "problems": []}
        with write_index(fresh_service.data / "index.sqlite") as index:
            index.execute("INSERT INTO tombstones VALUES ('a', 1, 1, '', 0, 0)")
            index.execute("DROP TRIGGER living_shard")
        job = client.wait_job(client.check_index().id)
        assert job.result and not job.result["clean"] and len(job.result["problems"]) >= 1
        api.refresh()
        drawn.run()
        no_traceback(drawn)
        assert any("in the index" in e.value for e in drawn.error)
