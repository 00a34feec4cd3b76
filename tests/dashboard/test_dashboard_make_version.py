"""A version from an answer of the SQL page, and parameters as literals."""

from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from dashboard import formatting
from stepwell import Client
from stepwell.testing import make_spec, make_trajectory
from tests.dashboard.conftest import Page, no_traceback, open_folders

SPEC = make_spec(env="Test-v1")
QUERY = "SELECT id FROM trajectories WHERE dataset = $name AND length >= $low -- not $this"


@pytest.fixture
def dataset(client: Client, name: str) -> str:
    client.create_dataset(name, SPEC)
    client.post(name, [make_trajectory(SPEC, length=i + 4, seed=i) for i in range(4)])
    client.post(name, [make_trajectory(SPEC, length=9, seed=9, purpose="eval")])
    return name


def create(page: AppTest, dataset: str, name: str) -> None:
    assert [e.value for e in page.error] == [] and [e.message for e in page.exception] == []
    page.selectbox(key="make_version_of").set_value(dataset)
    page.text_input(key="make_version_name").set_value(name)
    page.button(key="make_version_go").click()
    open_folders(page)
    no_traceback(page)


def test_an_answer_with_ids_becomes_a_version(
    service: Any, client: Client, dataset: str, page: Page
) -> None:
    # One row at most is drawn; the version has all that the query returns.
    drawn = page("console", service.url, q=QUERY, param_name=dataset, param_low="5", limit="1")
    open_folders(drawn)
    create(drawn, dataset, "")
    assert "name" in drawn.warning[0].value
    create(drawn, dataset, "best")
    assert [e.value for e in drawn.error] == []
    made = client.version(f"{dataset}@best")
    assert made.statistics.trajectories == 3, "not the evaluation episode"
    assert made.description == f"{QUERY}".replace("$name", f"'{dataset}'").replace("$low", "5")
    assert "3 trajectories" in drawn.success[0].value
    drawn.checkbox(key="make_version_eval").set_value(True)
    create(drawn, dataset, "all")
    assert client.version(f"{dataset}@all").statistics.trajectories == 4
    create(drawn, dataset, "best")
    assert "version_exists" in drawn.error[0].value


def test_an_answer_without_ids_has_no_such_form(service: Any, dataset: str, page: Page) -> None:
    drawn = page("console", service.url, q=f"SELECT length FROM trajectories -- {dataset}")
    open_folders(drawn)
    assert not [b for b in drawn.button if b.key == "make_version_go"]


def test_placeholders_become_literals_where_they_are_placeholders() -> None:
    query = """SELECT '$a', "$a", $a, $b, $$a /* $a
    */ WHERE x = $c AND y = $d -- $e"""
    assert formatting.placeholders(query) == ["a", "b", "c", "d"]
    values = {"a": "it's", "b": True, "c": None, "d": 1.5, "e": 0}
    assert formatting.with_values("$a $b $c $d $f '$a'", values) == "'it''s' true null 1.5 $f '$a'"
