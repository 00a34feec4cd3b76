"""Images among observations: which are, and how they are shown."""

import io

import numpy as np
import pytest
from PIL import Image

from dashboard import frames


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((5, 8, 8, 3), np.uint8, True),
        ((5, 8, 8), np.uint8, True),
        ((5, 8, 8, 1), np.uint8, True),
        ((5, 8, 8, 7), np.uint8, False),
        ((5, 8), np.uint8, False),
        ((5, 8, 8, 3), np.float32, False),
    ],
)
def test_images_are_bytes_with_one_to_four_channels(shape, dtype, expected):
    assert frames.is_image(np.zeros(shape, dtype)) is expected


@pytest.mark.parametrize("channels", [(), (1,), (3,), (4,)])
def test_a_film_has_every_frame_in_sharp_pixels(channels):
    episode = np.zeros((6, 4, 4, *channels), np.uint8)
    episode[np.arange(6), np.arange(6) % 4] = 255  # a line that moves down
    film = Image.open(io.BytesIO(frames.gif(episode)))
    assert (film.format, film.n_frames, film.size) == ("GIF", 6, (280, 280))
    film.seek(2)
    rows = np.asarray(film.convert("L"))[::70, 35]
    assert rows.tolist() == [0, 0, 255, 0]


def test_a_long_episode_is_shown_with_steps_left_out():
    episode = np.random.default_rng(0).integers(0, 255, (1001, 4, 4, 3), np.uint8)
    film = Image.open(io.BytesIO(frames.gif(episode)))
    assert 100 < film.n_frames <= frames.MOST_FRAMES


def test_a_strip_begins_and_ends_with_the_episode():
    assert frames.strip(np.zeros((3, 2, 2))) == [0, 1, 2]
    many = frames.strip(np.zeros((101, 2, 2)))
    assert (many[0], many[-1], len(many)) == (0, 100, frames.STRIP)
