"""The dashboard manages: what its buttons do is seen in the service, through its own client."""

import pytest

from stepwell import Client, NotFound
from tests.dashboard.conftest import Page, check, no_traceback, play


@pytest.fixture
def dataset(client: Client, name: str) -> str:
    play(client, name, "Toy-v0", 0.0, 3.0, 6.0, 9.0)
    return name


@pytest.fixture
def run(client: Client, name: str) -> str:
    client.create_run(name, "train")
    for version in (1, 2):
        client.publish_policy(name, version, bytes([version]))
    return name


def test_create_a_dataset(service, client: Client, name: str, page: Page) -> None:
    drawn = page("datasets", service.url)
    drawn.text_input(key="new_name").set_value(name)
    drawn.text_input(key="new_env").set_value("Toy-v0")
    drawn.number_input(key="new_obs").set_value(5)
    drawn.number_input(key="new_capacity").set_value(1000)
    drawn.text_input(key="new_tags").set_value("a, b")
    drawn.button(key="new_go").click().run()
    check(drawn)
    made = client.dataset(name)
    assert (made.tags, made.capacity.steps, made.spec["env"]) == (["a", "b"], 1000, "Toy-v0")
    assert client.spec(name).observations["observation"].shape == (5,)


def test_a_refused_name_is_explained_and_nothing_made(service, client: Client, page: Page) -> None:
    drawn = page("datasets", service.url)
    drawn.text_input(key="new_name").set_value("Not A Name")
    drawn.button(key="new_go").click().run()
    no_traceback(drawn)
    assert "name" in drawn.error[0].value
    assert "Not A Name" not in {d.name for d in client.datasets()}


def test_change_settings_of_a_dataset(service, client: Client, dataset: str, page: Page) -> None:
    drawn = page("datasets", service.url, dataset=dataset, dataset_tab="Manage")
    drawn.text_area(key="set_description").set_value("New words")
    drawn.text_input(key="set_tags").set_value("x,y, x")
    drawn.number_input(key="set_trajectories").set_value(2)
    drawn.button(key="set_go").click().run()
    check(drawn)
    now = client.dataset(dataset)
    assert (now.description, now.tags, now.capacity.trajectories) == ("New words", ["x", "y"], 2)


def test_protect_the_best(service, client: Client, dataset: str, page: Page) -> None:
    drawn = page("datasets", service.url, dataset=dataset, dataset_tab="Manage")
    drawn.number_input(key="protect_min").set_value(5.0)
    drawn.button(key="protect_go").click().run()
    check(drawn)
    saved = client.trajectories(dataset, partition="protected").items
    assert sorted(item.total_reward for item in saved) == [6.0, 9.0]


def test_a_dataset_is_deleted_only_by_its_name(
    service, client: Client, dataset: str, page: Page
) -> None:
    drawn = page("datasets", service.url, dataset=dataset, dataset_tab="Manage")
    drawn.text_input(key="delete_dataset_name").set_value("something else")
    drawn.button(key="delete_dataset_go").click().run()
    assert client.dataset(dataset).name == dataset
    drawn.text_input(key="delete_dataset_name").set_value(dataset)
    drawn.button(key="delete_dataset_go").click().run()
    with pytest.raises(NotFound):
        client.dataset(dataset)


def test_what_is_protected_cannot_be_deleted_by_accident(
    service, client: Client, dataset: str, page: Page
) -> None:
    (first, *_) = client.trajectories(dataset).items
    client.patch_trajectory(first.id, partition="protected")
    drawn = page("datasets", service.url, dataset=dataset, dataset_tab="Manage")
    drawn.text_input(key="delete_dataset_name").set_value(dataset)
    drawn.button(key="delete_dataset_go").click().run()
    assert "protected" in drawn.error[0].value
    assert client.dataset(dataset).protected.trajectories == 1
    drawn.checkbox(key="delete_dataset_protected").check()
    drawn.text_input(key="delete_dataset_name").set_value(dataset)
    drawn.button(key="delete_dataset_go").click().run()
    with pytest.raises(NotFound):
        client.dataset(dataset)


def test_label_one_trajectory(service, client: Client, dataset: str, page: Page) -> None:
    """Labels are added and taken back, and protection, too."""
    (first, *_) = client.trajectories(dataset).items
    client.patch_trajectory(first.id, tags=["old"], flags=["odd"])
    drawn = page("trajectories", service.url, dataset=dataset, id=first.id)
    drawn.multiselect(key=f"tags_{first.id}").set_value(["old", "good"])
    drawn.multiselect(key=f"flags_{first.id}").set_value([])
    drawn.text_input(key=f"note_{first.id}").set_value("look at t = 2")
    drawn.checkbox(key=f"move_{first.id}").check()
    drawn.button(key=f"apply_{first.id}").click().run()
    check(drawn)
    now = client.trajectory(first.id)
    assert (now.tags, now.flags, now.notes) == (["old", "good"], [], "look at t = 2")
    assert now.partition == "protected"
    assert drawn.checkbox(key=f"move_{first.id}").label == "Demote to fifo"
    drawn.checkbox(key=f"move_{first.id}").check()
    drawn.button(key=f"apply_{first.id}").click().run()
    check(drawn)
    assert client.trajectory(first.id).partition == "fifo"


def test_label_all_that_match(service, client: Client, dataset: str, page: Page) -> None:
    ids = [t.id for t in client.trajectories(dataset, order="seq").items]
    drawn = page("trajectories", service.url, dataset=dataset, where="seq > 1")
    drawn.button(key="many_apply").click().run()
    assert "Nothing to change" in drawn.info[0].value
    drawn.text_input(key="many_add_flag").set_value("odd, late")
    drawn.checkbox(key="many_protect").check()
    drawn.button(key="many_apply").click().run()
    check(drawn)
    found = [client.trajectory(one) for one in ids]
    assert [t.flags for t in found] == [[], *(len(ids) - 1) * [["odd", "late"]]]
    assert [t.partition for t in found] == ["fifo", *(len(ids) - 1) * ["protected"]]


def test_set_an_alias_and_notes_of_a_run(service, client: Client, run: str, page: Page) -> None:
    drawn = page("runs", service.url, run=run, part="Details")
    drawn.selectbox(key="alias_of").set_value(1)
    drawn.button(key="alias_go").click().run()
    check(drawn)
    got = client.download_policy(run, "best")
    assert got is not None and got.version == 1
    drawn.text_input(key="run_tags").set_value("keep")
    drawn.text_area(key="run_notes").set_value("the good one")
    drawn.button(key="run_save").click().run()
    check(drawn)
    assert (client.run(run).tags, client.run(run).notes) == (["keep"], "the good one")


def test_delete_a_run(service, client: Client, run: str, page: Page) -> None:
    drawn = page("runs", service.url, run=run, part="Details")
    drawn.text_input(key="delete_run_name").set_value(run)
    drawn.button(key="delete_run_go").click().run()
    with pytest.raises(NotFound):
        client.run(run)


def test_workers_hear_what_was_asked(service, client: Client, name: str, page: Page) -> None:
    client.heartbeat(name, role="collect")
    drawn = page("workers", service.url)
    for what in ("pause", "resume", "drain", "stop"):
        drawn.multiselect(key="command").set_value([name]).run()
        drawn.button(key=f"command_{what}").click().run()
        check(drawn)
        assert client.heartbeat(name, role="collect").command == what


def test_stop_the_workers_of_a_run(service, client: Client, run: str, page: Page) -> None:
    client.heartbeat(f"{run}-w", role="train", run=run)
    drawn = page("runs", service.url, run=run, part="Details")
    drawn.button(key="run_stop").click().run()
    check(drawn)
    assert client.heartbeat(f"{run}-w", role="train", run=run).command == "stop"
