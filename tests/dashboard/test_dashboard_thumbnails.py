"""Pictures in the list of trajectories: only where there are images, and only when asked for."""

import base64
import io
import uuid
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dashboard import api
from dashboard.views import thumbnails
from stepwell import Box, Client, Discrete, EnvSpec
from stepwell.errors import ServiceUnreachable
from tests.dashboard.conftest import Page, no_traceback, play

MANY = 25


@pytest.fixture(scope="module")
def films(service: Any) -> str:
    """The k-th trajectory is grey: k in its first frame, 100 + k in its last, 255 between."""
    client, name = service.client(), f"t-{uuid.uuid4().hex[:12]}"
    image = Box((8, 16, 3), dtype="uint8", low=0, high=255)
    spec = EnvSpec.of({"vector": Box((2,)), "cam/left": image}, Discrete(3), env="Toy-v0")
    client.create_dataset(name, spec)
    for k in range(MANY):
        film = np.full((4, 8, 16, 3), 255, np.uint8)
        film[0], film[-1] = k, 100 + k
        client.add(
            name, obs={"vector": np.zeros((4, 2), np.float32), "cam/left": film},
            actions=np.zeros(3, np.int64), rewards=np.full(3, float(k), np.float32),
            terminated=True, env="Toy-v0",
        )  # fmt: skip
    client.flush(name)
    return name


def grey(url: str) -> tuple[tuple[int, int], int]:
    head, data = url.split(",")
    assert head == "data:image/png;base64"
    picture = Image.open(io.BytesIO(base64.b64decode(data)))
    return picture.size, int(np.asarray(picture)[0, 0, 0])


def test_each_row_has_its_first_and_last_frame(service: Any, films: str, page: Page) -> None:
    drawn = page("trajectories", service.url, dataset=films)
    assert "first" not in drawn.dataframe[0].value and len(drawn.dataframe[0].value) == MANY
    drawn.toggle(key="frames").set_value(True).run()
    assert [e.message for e in drawn.exception] == [e.value for e in drawn.error] == []
    shown = drawn.dataframe[0].value
    assert len(shown) == thumbnails.ROWS
    for _, row in shown.iterrows():
        k = int(row["return"]) // 3
        assert grey(row["first"]) == ((16, 8), k)
        assert grey(row["last"]) == ((16, 8), 100 + k)


def test_a_link_with_pictures_reads_only_their_page_of_the_list(
    service: Any, films: str, page: Page, monkeypatch: Any
) -> None:
    asked: list[str] = []
    sql = api.sql

    def noted(query: str, *args: Any, **options: Any) -> Any:
        asked.append(query)
        return sql(query, *args, **options)

    monkeypatch.setattr(api, "sql", noted)
    drawn = page("trajectories", service.url, dataset=films, frames="true")
    assert len(drawn.dataframe[0].value) == thumbnails.ROWS
    lists = {query for query in asked if "OFFSET" in query}
    assert len(lists) == 1 and f"LIMIT {thumbnails.ROWS} " in lists.pop()


def test_without_images_nothing_is_offered_or_read(
    service: Any, client: Client, name: str, page: Page, monkeypatch: Any
) -> None:
    play(client, name, "Toy-v0", 2.0)

    def never(*_: Any) -> Any:
        raise AssertionError("frames were read")

    monkeypatch.setattr(thumbnails, "_frames", never)
    drawn = page("trajectories", service.url, dataset=name, frames="true")
    no_traceback(drawn)
    assert [t for t in drawn.toggle if t.key == "frames"] == []
    assert len(drawn.dataframe[0].value) == 1


def test_frames_that_cannot_be_read_are_a_message_and_the_list_stands(
    service: Any, films: str, page: Page, monkeypatch: Any
) -> None:
    def refused(*_: Any) -> Any:
        raise api.StepwellError("the query took too long")

    monkeypatch.setattr(thumbnails, "_frames", refused)
    drawn = page("trajectories", service.url, dataset=films, frames="true")
    no_traceback(drawn)
    assert "too long" in drawn.error[0].value
    assert drawn.dataframe[0].value["first"].isna().all()

    def away(*_: Any) -> Any:
        raise ServiceUnreachable("gone")

    monkeypatch.setattr(thumbnails, "_frames", away)
    drawn = page("trajectories", service.url, dataset=films, frames="true")
    no_traceback(drawn)
    assert "No answer from the service" in drawn.error[0].value
