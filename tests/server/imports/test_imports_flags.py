"""Ends in files, in whatever type of number: flags, or refused by name."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from server.imports.minari_metadata import end_of
from server.imports.raw_file import ImportRefused, as_flags
from tests.server.imports.conftest import table

FLAGS: list[Any] = [
    np.array([False, False, True]),
    np.array([0, 0, 1]),
    np.array([0, 0, 1], np.uint8),
    np.array([0.0, 0.0, 1.0]),
    np.array([0, 0, 1], np.float16),
    np.array([[0], [0], [1]]),
]
OTHERS: list[tuple[Any, str]] = [
    (np.array([0, 0, 2]), "2"),
    (np.array([0, 0, -1]), "-1"),
    (np.array([0.0, 0.0, 0.5]), "0.5"),
    (np.array([0.0, np.nan, 0.0]), "nan"),
    (np.array(["no", "no", "yes"]), "<U3"),
]


@pytest.mark.parametrize("flags", FLAGS, ids=lambda f: f"{f.dtype}{f.shape}")
def test_numbers_are_flags(flags: Any) -> None:
    assert as_flags("terminals", flags).reshape(-1).tolist() == [False, False, True]
    false = np.zeros(3, flags.dtype)
    assert end_of("e", flags, false, exported=False) == (True, False)
    assert end_of("e", false, flags, exported=False) == (False, True)


@pytest.mark.parametrize(("flags", "got"), OTHERS, ids=[got for _, got in OTHERS])
def test_other_numbers_are_refused_by_name(flags: Any, got: str) -> None:
    with pytest.raises(ImportRefused, match="terminals does not contain flags") as caught:
        as_flags("terminals", flags)
    assert caught.value.expected == "0 or 1"
    assert str(caught.value.got).partition(" in row ")[0] == got
    for name, both in (
        ("terminations", (flags, np.zeros(3))),
        ("truncations", (np.zeros(3), flags)),
    ):
        with pytest.raises(ImportRefused, match=f"e/{name} does not contain flags"):
            end_of("e", *both, exported=False)


@pytest.mark.parametrize("name", ["terminals", "timeouts"])
@pytest.mark.parametrize("wrong", [2, 0.5, np.nan])
def test_a_flat_file(read: Callable[..., Any], name: str, wrong: float) -> None:
    arrays = table(6, terminals=[5], timeouts=[])
    arrays[name] = np.where(np.arange(6) == 5, wrong, 0.0)
    with pytest.raises(ImportRefused, match=f"{name} does not contain flags"):
        read(arrays)
