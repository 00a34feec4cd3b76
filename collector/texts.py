"""Text observations as token ids: gymnasium's Text, MiniGrid's missions, lists of words.

    Text                  characters of its character set, up to its max_length
    MissionSpace          words of its template and placeholders, up to its longest mission
    BabyAIMissionSpace    words of BabyAI's language, up to its longest instruction
    WordSpace             the given words

The vocabulary depends on nothing but the space, so that all collectors have the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
from gymnasium import spaces

from stepwell.vocabulary import Vocabulary, words_of

BABYAI_WORDS = words_of(
    "a after and ball behind blue box door front go green grey in key left next object of on open "
    "pick purple put red right the then to up yellow you your ,"
)
"""Its space does not tell them: minigrid/envs/babyai/core/verifier.py composes instructions."""
BABYAI_LENGTH = 72
""" "put A next to B and put C next to D, then put …", each a "the red ball in front of you"."""


class WordSpace(spaces.Space[str]):
    """Texts of at most `max_words` of `words`; punctuation marks count as words."""

    def __init__(self, words: Sequence[str], max_words: int) -> None:
        texts = [words] if isinstance(words, str) else words
        self.words = sorted({word for text in texts for word in words_of(text)})
        self.max_words = max_words
        if not self.words or max_words < 1:
            raise ValueError(f"expected words and max_words >= 1, got {words!r}, {max_words}")
        super().__init__(dtype=str)

    def sample(self, mask: Any = None, probability: Any = None) -> str:  # noqa: ARG002
        count = int(self.np_random.integers(self.max_words + 1))
        return " ".join(self.np_random.choice(self.words, count).tolist())

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WordSpace):
            return False
        return (self.words, self.max_words) == (other.words, other.max_words)

    def __hash__(self) -> int:
        return hash((*self.words, self.max_words))


class TextWords(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Declares the words of the texts in `env`'s observations, which are recorded as their ids.

    For texts whose space does not tell the words, and to choose words or another length. Unknown
    words share one id; longer texts are cut.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], words: Sequence[str], max_words: int) -> None:
        super().__init__(env)
        self.observation_space = _with_words(env.observation_space, WordSpace(words, max_words))


def vocabulary_of(space: spaces.Space[Any]) -> tuple[Vocabulary, int] | None:
    """(vocabulary, number of tokens) of a text; None if `space` is not one."""
    if isinstance(space, WordSpace):
        return Vocabulary(tuple(space.words)), space.max_words
    if isinstance(space, spaces.Text):
        return Vocabulary(tuple(sorted(space.character_set)), ""), space.max_length
    # MiniGrid's by their names, as it is imported only by its environments.
    if type(space).__name__ == "BabyAIMissionSpace":
        return Vocabulary(tuple(sorted(BABYAI_WORDS))), BABYAI_LENGTH
    template: Callable[..., str] | None = getattr(space, "mission_func", None)
    if template is None:
        return None
    choices: list[list[str]] = getattr(space, "ordered_placeholders", None) or []
    longest = [max(words, key=lambda text: len(words_of(text))) for words in choices]
    missions = [template(*longest)]
    for i, words in enumerate(choices):
        missions += [template(*longest[:i], word, *longest[i + 1 :]) for word in words]
    found = {word for mission in missions for word in words_of(mission)}
    return Vocabulary(tuple(sorted(found))), max(1, len(words_of(missions[0])))


def _with_words(space: spaces.Space[Any], words: WordSpace) -> spaces.Space[Any]:
    """`space` with `words` in the place of each text."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: _with_words(child, words) for key, child in space.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([_with_words(child, words) for child in space])
    return space if vocabulary_of(space) is None else words
