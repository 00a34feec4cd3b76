"""Saved queries on the SQL page: save, open, link, delete; with and without a service."""

from typing import Any

from streamlit.testing.v1 import AppTest

from dashboard import api, formatting
from stepwell import Client
from tests.dashboard.conftest import Page, check, no_traceback

QUERY = "SELECT $low + 1 AS more, $word AS word"


def answer(page: AppTest) -> dict[str, Any]:
    return dict(page.dataframe[0].value.iloc[0])


def test_a_query_is_saved_with_its_values_opened_and_deleted(
    service: Any, client: Client, name: str, page: Page
) -> None:
    drawn = page("console", service.url, q=QUERY, param_low="4", param_word="7x")
    check(drawn)
    drawn.text_input(key="save_name").set_value(name)
    drawn.text_input(key="save_description").set_value("A test")
    drawn.button(key="save_go").click().run()
    check(drawn)
    kept = client.saved_query(name)
    assert (kept.sql, kept.params, kept.description) == (QUERY, {"low": 4, "word": "7x"}, "A test")
    drawn.text_area(key="q").set_value("SELECT 1 AS one").run()
    drawn.selectbox(key="saved_name").set_value(name).run()
    drawn.button(key="saved_take").click().run()
    check(drawn)
    assert drawn.text_area(key="q").value == QUERY
    assert answer(drawn) == {"more": 5, "word": "7x"}
    drawn.selectbox(key="saved_name").set_value(name)
    drawn.button(key="saved_delete").click().run()
    check(drawn)
    assert name not in [q.name for q in client.saved_queries()]


def test_a_link_opens_it_and_may_give_other_values(
    service: Any, client: Client, name: str, page: Page
) -> None:
    client.save_query(name, QUERY, params={"low": 4, "word": "12"})
    drawn = page("console", service.url, saved=name)
    check(drawn)
    assert answer(drawn) == {"more": 5, "word": "12"}, "text that looks like a number stays text"
    drawn.text_area(key="q").set_value("SELECT 8 AS more").run()
    assert answer(drawn) == {"more": 8}, "it was opened once"
    drawn = page("console", service.url, saved=name, param_low="9")
    assert answer(drawn) == {"more": 10, "word": "12"}
    drawn = page("console", service.url, saved=name, q="SELECT 3 AS more")
    assert answer(drawn) == {"more": 3}
    drawn = page("console", service.url, saved="no-such-query")
    check(drawn)
    assert "no-such-query" in drawn.warning[0].value


def test_a_refused_save_is_a_message(service: Any, page: Page) -> None:
    drawn = page("console", service.url, q="SELECT 1 AS one")
    drawn.button(key="save_go").click().run()
    assert "name" in drawn.warning[0].value
    drawn.text_input(key="save_name").set_value("Not A Name")
    drawn.button(key="save_go").click().run()
    no_traceback(drawn)
    assert "name" in drawn.error[0].value


def test_a_thousand_saved_queries_are_one_menu(
    service: Any, client: Client, name: str, page: Page, monkeypatch: Any
) -> None:
    kept = client.save_query(name, "SELECT 1")
    many = [kept.model_copy(update={"name": f"{name}-{i}"}) for i in range(1000)]
    monkeypatch.setattr(api, "saved_queries", lambda: many)
    drawn = page("console", service.url)
    check(drawn)
    assert len(drawn.selectbox(key="saved_name").options) == 1000


def test_values_are_written_as_a_person_would_type_them() -> None:
    for value in (1, 1.5, True, "x", "1", "true", '"', "a b"):
        assert formatting.value_of(formatting.text_of(value)) == value
    assert formatting.text_of("x") == "x"
