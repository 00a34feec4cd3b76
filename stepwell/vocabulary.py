"""Texts as token ids: the vocabulary of a text, which a dataset's spec keeps."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepwell.errors import InvalidSpace

PADDING, UNKNOWN = 0, 1
MOST_TOKENS, LONGEST_TOKEN = 65_536, 64
_FIRST = 2
"""The id of the first token."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a text by id: 0 is padding, 1 an unknown token, i + 2 is `tokens[i]`.

    Example: Vocabulary(("go", "red", "to")).encode("Go to it", 4) → [2, 4, 1, 0]
    """

    tokens: tuple[str, ...]
    separator: str = " "
    """" " between words, which are in lower case; "" between characters."""

    def __post_init__(self) -> None:
        if len(self.tokens) > MOST_TOKENS:
            raise InvalidSpace(
                "too many tokens", expected=f"at most {MOST_TOKENS:,}", got=f"{len(self.tokens):,}"
            )
        for token in self.tokens:
            if not (isinstance(token, str) and 0 < len(token) <= LONGEST_TOKEN):
                raise InvalidSpace(
                    "bad token",
                    expected=f"a text of 1 to {LONGEST_TOKEN} characters",
                    got=repr(token)[:80],
                )
            if self.separator and words_of(token) != [token]:
                raise InvalidSpace(
                    "bad token", expected="one word or mark, in lower case", got=repr(token)
                )
        if len(set(self.tokens)) != len(self.tokens):
            raise InvalidSpace("the same token twice", got=repr(self.tokens)[:120])
        if self.separator not in ("", " "):
            raise InvalidSpace(
                "bad separator", expected="' ' (words) or '' (characters)", got=repr(self.separator)
            )

    @property
    def n(self) -> int:
        """The number of ids."""
        return len(self.tokens) + _FIRST

    def encode(self, text: str, length: int) -> NDArray[np.int64]:
        """`text` as `length` ids. A longer text is cut, a shorter one padded."""
        tokens = words_of(text) if self.separator else text
        ids = np.full(length, PADDING, np.int64)
        known = [self._ids.get(token, UNKNOWN) for token in tokens[:length]]
        ids[: len(known)] = known
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, with "?" for unknown tokens."""
        tokens = ("", "?", *self.tokens)
        return self.separator.join(tokens[i] for i in ids if i != PADDING)

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {token: i + _FIRST for i, token in enumerate(self.tokens)}

    def to_json(self) -> dict[str, Any]:
        return {"tokens": list(self.tokens), "separator": self.separator}

    @classmethod
    def from_json(cls, data: Any) -> Vocabulary:
        """Inverse of `to_json`; raises `InvalidSpace` for anything else."""
        match data:
            case {"tokens": list() as tokens, "separator": str() as separator, **others} if (
                not others
            ):
                return cls(tuple(tokens), separator)
        raise InvalidSpace(
            "bad vocabulary", expected="{tokens: [texts], separator: text}", got=repr(data)[:120]
        )


def words_of(text: str) -> list[str]:
    """Split into words and punctuation marks, in lower case."""
    return re.findall(r"\w+|[^\w\s]", text.lower())
