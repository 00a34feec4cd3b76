"""FindBlock: a task whose solution needs both an image and a sentence.

    image     [6, 6 x colours, 3] uint8: squares side by side, with one coloured block in each
    mission   [6] word ids, padded with 0: "find the block that is red", "green"
    left      [1] fraction of the episode's steps that remain
    action    the square to touch
    reward    1 if the block in that square has the mission's colour, else 0

The mission is fixed within an episode; every step has a new image. A policy that ignores the image
or the sentence succeeds with probability 1 / colours per step. No memory is needed.
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from collector.builtin.checks import require, require_step
from collector.builtin.drawing import RENDERS

SQUARE, BLOCK = 6, 4
COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "yellow": (255, 255, 0)}
SENTENCES = ("{}", "the {} one", "touch the {} block", "find the block that is {}")
LONGEST = 6
VOCABULARY = 32
WORDS = ("", *sorted({w for s in SENTENCES for w in s.split() if w != "{}"}), *COLOURS)
"""Word by its id. The ids from len(WORDS) to VOCABULARY - 1 are unused."""

Observation = dict[str, NDArray[Any]]


class FindBlock(gymnasium.Env[Observation, np.int64]):
    """Touch the block of the mission's colour in each of `steps` steps.

    An episode has `steps` steps and ends with `terminated`. In its last step `info["log/success"]`
    is 1 if all touches were right, else 0.
    """

    metadata: dict[str, Any] = RENDERS

    def __init__(self, colours: int = 2, steps: int = 5, render_mode: str | None = None) -> None:
        require(2 <= colours <= len(COLOURS), "colours", f"2 … {len(COLOURS)}", colours)
        require(steps >= 1, "steps", "at least 1", steps)
        self.colours, self.steps = colours, steps
        self.render_mode = render_mode
        self.observation_space = spaces.Dict(  # type: ignore[assignment]
            {
                "image": spaces.Box(0, 255, (SQUARE, SQUARE * colours, 3), np.uint8),
                "mission": spaces.MultiDiscrete([VOCABULARY] * LONGEST),
                "left": spaces.Box(0.0, 1.0, (1,), np.float32),
            }
        )
        self.action_space = spaces.Discrete(colours)
        self._t, self._right, self._wanted = steps, 0, 0
        self._image = np.zeros((SQUARE, SQUARE * colours, 3), np.uint8)
        self._mission = np.zeros(LONGEST, np.int64)
        self._colour_of = np.arange(colours)

    @property
    def wanted_colour(self) -> tuple[int, int, int]:
        """Red, green and blue of the mission's colour."""
        return list(COLOURS.values())[self._wanted]

    @property
    def answer(self) -> int:
        """The square that the current observation asks for."""
        return int(np.flatnonzero(self._colour_of == self._wanted)[0])

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self._t = self._right = 0
        self._wanted = int(self.np_random.integers(self.colours))
        sentence = SENTENCES[int(self.np_random.integers(len(SENTENCES)))]
        words = sentence.format(list(COLOURS)[self._wanted]).split()
        self._mission = np.zeros(LONGEST, np.int64)
        self._mission[: len(words)] = [WORDS.index(word) for word in words]
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        require_step(self, action, over=self._t >= self.steps)
        right = int(self._colour_of[int(action)]) == self._wanted
        self._t, self._right = self._t + 1, self._right + right
        over = self._t == self.steps
        info = {"log/success": float(self._right == self.steps)} if over else {}
        return self._observe(), float(right), over, False, info

    def render(self) -> NDArray[np.uint8] | None:
        """The mission's colour and the image, enlarged, with render_mode "rgb_array"."""
        mission = np.full((SQUARE, SQUARE, 3), self.wanted_colour, np.uint8)
        line = np.full((SQUARE, 1, 3), 255, np.uint8)
        picture = np.concatenate([mission, line, self._image], 1)
        return picture.repeat(16, 0).repeat(16, 1) if self.render_mode == "rgb_array" else None

    def _observe(self) -> Observation:
        """Draw the next image: the order of the colours, and each block's place in its square."""
        self._colour_of = self.np_random.permutation(self.colours)
        image = np.zeros((SQUARE, SQUARE * self.colours, 3), np.uint8)
        for square, colour in enumerate(self._colour_of):
            row, column = self.np_random.integers(SQUARE - BLOCK + 1, size=2)
            column += SQUARE * square
            image[row : row + BLOCK, column : column + BLOCK] = list(COLOURS.values())[colour]
        self._image = image
        left = np.array([1.0 - self._t / self.steps], np.float32)
        return {"image": image, "mission": self._mission.copy(), "left": left}


class FindBlockImage(gymnasium.Env[NDArray[np.uint8], np.int64]):
    """FindBlock whose observation is one image, for formats with a single array per step.

    Observation: uint8 [6, 6 x (colours + 1), 3]. The first square is filled with the mission's
    colour; the blocks follow. The rest is as in FindBlock, which is `inner`.
    """

    metadata: dict[str, Any] = RENDERS

    def __init__(self, colours: int = 2, steps: int = 5, render_mode: str | None = None) -> None:
        self.inner = FindBlock(colours, steps, render_mode)
        self.render_mode = render_mode
        shape = (SQUARE, SQUARE * (colours + 1), 3)
        self.observation_space = spaces.Box(0, 255, shape, np.uint8)
        self.action_space = self.inner.action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        super().reset(seed=seed, options=options)
        obs, info = self.inner.reset(seed=seed, options=options)
        return self._with_mission(obs), info

    def step(self, action: np.int64) -> tuple[NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.inner.step(action)
        image = self._with_mission(obs)
        # Black after the end: there are so few images that it could look like the next start.
        return image * np.uint8(not terminated), reward, terminated, truncated, info

    def render(self) -> NDArray[np.uint8] | None:
        """Draw the inner FindBlock environment."""
        return self.inner.render()

    def _with_mission(self, obs: Observation) -> NDArray[np.uint8]:
        mission = np.zeros((SQUARE, SQUARE, 3), np.uint8)
        mission[:] = self.inner.wanted_colour
        return np.concatenate([mission, obs["image"]], axis=1)
