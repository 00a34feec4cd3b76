"""The tab Versions of the page Datasets: empty, a few, one made from a WHERE, errors."""

from __future__ import annotations

import pytest

from stepwell import Client, NotFound
from stepwell.testing import make_spec, make_trajectory
from tests.dashboard.conftest import Page, check, no_traceback, open_folders

SPEC = make_spec(env="Test-v1")


@pytest.fixture
def dataset(client: Client, name: str) -> str:
    client.create_dataset(name, SPEC)
    client.post(name, [make_trajectory(SPEC, length=i + 4, seed=i) for i in range(4)])
    return name


def test_without_a_version_it_says_how_to_make_one(service, dataset: str, page: Page) -> None:
    drawn = page("datasets", service.url, dataset=dataset, dataset_tab="Versions")
    check(drawn)
    assert any(f"stepwell versions create {dataset}@v1" in one.value for one in drawn.markdown)


def test_make_one_from_a_where(service, client: Client, dataset: str, page: Page) -> None:
    client.create_version(dataset, "v1")
    drawn = page("datasets", service.url, dataset=dataset, dataset_tab="Versions")
    drawn.text_input(key="version_name").set_value("v2")
    drawn.text_area(key="version_where").set_value("length > 5")
    drawn.text_input(key="version_licence").set_value("MIT")
    drawn.selectbox(key="version_parent").set_value("v1")
    drawn.button(key="version_go").click().run()
    check(drawn)
    made = client.version(f"{dataset}@v2")
    assert (made.statistics.trajectories, made.licence) == (2, "MIT")
    assert made.parent == f"{dataset}@v1"


def test_a_wrong_where_is_told_and_nothing_is_made(
    service, client: Client, dataset: str, page: Page
) -> None:
    drawn = page("datasets", service.url, dataset=dataset, dataset_tab="Versions")
    drawn.text_input(key="version_name").set_value("v1")
    drawn.text_area(key="version_where").set_value("no_such_column > 1")
    drawn.button(key="version_go").click().run()
    no_traceback(drawn)
    assert "no_such_column" in drawn.error[0].value
    assert client.versions(dataset) == []


def test_one_version_its_card_and_what_differs(
    service, client: Client, dataset: str, page: Page
) -> None:
    client.create_version(dataset, "v1")
    text = "**bold** ![x](https://example.org/x.png)"
    made = client.create_version(
        dataset, "v2", where="length > 5", parent="v1", description=text, licence="CC0-1.0"
    )
    drawn = page("datasets", service.url, dataset=dataset, version="v2")
    drawn.session_state["card_open"] = True
    check(drawn.run())
    shown = [code.value for code in drawn.code]
    assert any(made.digest in one and "CC0-1.0" in one for one in shown), "the card"
    assert any(f"--dataset {dataset}@v2" in one.value for one in drawn.markdown)
    assert not any(one.key.startswith("version_before") for one in drawn.selectbox if one.key)
    drawn.session_state["version_compare_open"] = True
    drawn.run()
    check(open_folders(drawn))
    shown = [code.value for code in drawn.code]
    assert text in [one.value for one in drawn.text]
    assert not any("example.org" in one.value for one in drawn.markdown), "no foreign picture"
    removed = client.diff_versions(f"{dataset}@v1", f"{dataset}@v2").removed
    assert removed.sql in shown and removed.statistics.trajectories == 2
    assert drawn.selectbox(key=f"version_before_{dataset}@v2").value == f"{dataset}@v1"


def test_a_stale_link_shows_the_newest(service, client: Client, dataset: str, page: Page) -> None:
    client.create_version(dataset, "v1")
    drawn = page("datasets", service.url, dataset=dataset, version="gone")
    check(drawn)
    assert drawn.selectbox(key="version").value == "v1"


def test_a_version_is_deleted_only_by_its_name(
    service, client: Client, dataset: str, page: Page
) -> None:
    client.create_version(dataset, "v1")
    drawn = page("datasets", service.url, dataset=dataset, dataset_tab="Versions")
    drawn.text_input(key="delete_version_name").set_value("v1")
    drawn.button(key="delete_version_go").click().run()
    assert client.version(f"{dataset}@v1")
    drawn.text_input(key="delete_version_name").set_value(f"{dataset}@v1")
    drawn.button(key="delete_version_go").click().run()
    with pytest.raises(NotFound):
        client.version(f"{dataset}@v1")
