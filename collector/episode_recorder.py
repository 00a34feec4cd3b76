"""Records a running episode as trajectories. Independent of environments, actors and networks.

    start_episode(o0)   add_step(a0, r0, o1)   …   add_step(…, terminated or truncated) → summary

An episode is one trajectory, unless it is longer than `max_steps`: then it is cut into pieces that
share an `episode_id`, each with its `first_step`. A full piece is passed to the sink only after the
next transition, so the last piece of an episode always contains the end of the episode.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from stepwell.flags import as_bool
from stepwell.metadata import MAX_NAME
from stepwell.spaces import Array, EnvSpec
from stepwell.trajectory import Trajectory, TrajectoryMetadata, new_id, refuse_masked

BROKEN = "broken"
"""Tag: the environment failed after the last transition."""
INTERRUPTED = "interrupted"
"""Tag: the episode was still running when the collector was stopped."""
MAX_STEPS = 10_000
MAX_BYTES = 16 << 20
"""Pieces with images are cut at this size: a group of trajectories must fit into one request."""

LOG_PREFIX = "log/"
POLICY_LAG = "policy_lag"
"""The metric of an episode with EpisodeSummary.policy_lag."""
_MAX_METRICS = 255  # of 256: one is the policy's lag


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSummary:
    """The result of one episode, over all its pieces."""

    index: int
    """Index in the order in which episodes started, from 0."""
    env_index: int
    seed: int | None
    policy_id: str
    total_reward: float
    """Sum of the recorded (float32) rewards, equal to `return` in SQL."""
    length: int
    success: bool | None
    tags: tuple[str, ...] = ()
    policy_lag: int | None = None
    """Updates by which the policy was older, at the end, than the newest one that was known."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The last value of each number that the environment reported: `info` keys under "log/"."""
    task: str = ""
    """info["env_name"], of environments that play several tasks."""

    @property
    def complete(self) -> bool:
        """Whether the environment ended the episode, rather than a failure or a stop."""
        return BROKEN not in self.tags and INTERRUPTED not in self.tags


Sink = Callable[[Trajectory, int], None]
"""Function of (trajectory, index of its episode)."""


@dataclass(slots=True)
class _Rows:
    """The data of the piece that is being recorded: one observation more than actions."""

    obs: list[Mapping[str, Array]]
    infos: list[Mapping[str, Array]]
    actions: list[Mapping[str, Array]] = field(default_factory=list)
    rewards: list[np.float32] = field(default_factory=list)
    started_at: float = field(default_factory=time.time)


class EpisodeRecorder:
    """Records one episode after another; complete trajectories go to `sink`.

    Arrays are not copied: the caller must not change them later.
    """

    def __init__(
        self,
        spec: EnvSpec,
        metadata: TrajectoryMetadata,
        sink: Sink,
        *,
        encode_info: Callable[[Mapping[str, Any]], Mapping[str, Array]],
        max_steps: int = MAX_STEPS,
        env_index: int = 0,
        policy_lag: Callable[[str], int | None] = lambda _: None,
    ):
        self._policy_lag, self._encode_info = policy_lag, encode_info
        self._spec, self._metadata, self._sink, self._env_index = spec, metadata, sink, env_index
        self._max_steps = min(max_steps, max(1, MAX_BYTES // _row_bytes(spec)))
        self._rows: _Rows | None = None
        # Multiples of the golden ratio spread evenly, however many environments there are.
        self._stagger = self._max_steps - int(self._max_steps / 2 * (env_index * 0.618034 % 1))
        """Steps of the second piece of an episode, so that environments that never end, and were
        started together, are not cut together, too."""

    @property
    def running(self) -> bool:
        return self._rows is not None

    @property
    def seed(self) -> int | None:
        """Return the seed of the running episode."""
        return self._seed

    @property
    def length(self) -> int:
        """Transitions of the running episode so far, over all its pieces."""
        return 0 if self._rows is None else self._first_step + len(self._rows.rewards)

    @property
    def at_border(self) -> bool:
        """Whether a piece of the running episode is full: its next step begins another."""
        return self._rows is not None and len(self._rows.rewards) == self._piece_steps

    def change_policy(self, policy_id: str) -> None:
        """The next piece is another policy's."""
        self._next_policy_id = policy_id

    def start_episode(
        self,
        obs: Mapping[str, Array],
        *,
        index: int,
        seed: int | None,
        policy_id: str,
        info: Mapping[str, Any] | None = None,
    ) -> None:
        """Start an episode with its first observation."""
        assert self._rows is None, "the episode before has not ended"
        self._rows = _Rows([obs], [self._encode_info(info or {})])
        self._index, self._seed, self._policy_id = index, seed, policy_id
        self._next_policy_id = policy_id
        self._piece_steps = self._max_steps
        self._first_step, self._episode_id = 0, ""
        self._total = 0.0
        self._metrics: dict[str, float] = {}
        self._success: bool | None = None
        self._task = ""
        self._read(info or {})

    def add_step(
        self,
        actions: Mapping[str, Array],
        reward: float,
        obs: Mapping[str, Array] | None,
        terminated: bool,
        truncated: bool,
        info: Mapping[str, Any] | None = None,
    ) -> EpisodeSummary | None:
        """Add one transition and the observation after it. Returns the summary if the episode ends.

        `obs` may be None (unknown) only in the last transition of an episode.
        """
        rows = self._rows
        assert rows is not None, "no episode has begun"
        if self.at_border:
            rows = self._next_piece(rows)
        rows.actions.append(actions)
        rows.rewards.append(np.float32(reward))
        assert obs is not None or terminated or truncated, "only a final observation may be unknown"
        self._add_final_obs(rows, obs)
        rows.infos.append(self._encode_info(info or {}))
        self._total += float(rows.rewards[-1])
        if info:
            self._read(info)
        if not (terminated or truncated):
            return None
        # An episode that terminated is not truncated, even if a time limit fell on the same step.
        return self._end(terminated, truncated and not terminated)

    def _add_final_obs(self, rows: _Rows, obs: Mapping[str, Array] | None) -> None:
        """Append the newest observation, which is the final one if the episode ends here; unknown,
        it repeats the one before."""
        rows.obs.append(rows.obs[-1] if obs is None else obs)
        self._final_obs_valid = obs is not None

    def truncate(self, tag: str) -> EpisodeSummary | None:
        """End the running episode here: a truncated trajectory with `tag`.

        Returns None if no transition was recorded: a trajectory needs at least one.
        """
        if self._rows is None:
            return None
        if not self._rows.rewards:
            self._rows = None
            return None
        return self._end(False, True, tags=(tag,))

    def _next_piece(self, rows: _Rows) -> _Rows:
        self._episode_id = self._episode_id or new_id()
        self._rows = following = _Rows([rows.obs[-1]], [rows.infos[-1]])
        self._send(rows, False, False)
        self._piece_steps = self._max_steps if self._first_step else self._stagger
        self._first_step += len(rows.rewards)
        self._policy_id = self._next_policy_id
        return following

    def _end(self, terminated: bool, truncated: bool, tags: tuple[str, ...] = ()) -> EpisodeSummary:
        rows = self._rows
        assert rows is not None
        self._rows = None  # ended, even if the sink refuses the trajectory
        lag = self._policy_lag(self._policy_id)
        self._send(rows, terminated, truncated, last=True, tags=tags)
        return EpisodeSummary(
            index=self._index,
            env_index=self._env_index,
            seed=self._seed,
            policy_id=self._policy_id,
            total_reward=self._total,
            length=self._first_step + len(rows.rewards),
            success=self._success,
            tags=tags,
            policy_lag=lag,
            metrics=dict(self._metrics),
            task=self._task,
        )

    def _send(
        self,
        rows: _Rows,
        terminated: bool,
        truncated: bool,
        *,
        last: bool = False,
        tags: tuple[str, ...] = (),
    ) -> None:
        lag = self._policy_lag(self._policy_id)
        # Statistics of the episode are known only at its end.
        metrics = dict(self._metrics) if last else {}
        metadata = replace(
            self._metadata,
            env=self._task or self._metadata.env,
            episode_id=self._episode_id,
            first_step=self._first_step,
            seed=self._seed,
            policy=self._policy_id or self._metadata.policy,
            tags=(*self._metadata.tags, *tags),
            started_at=rows.started_at,
            success=self._success if last else None,
            metrics=metrics if lag is None else {**metrics, POLICY_LAG: float(lag)},
        )
        trajectory = Trajectory(
            obs={k: np.stack([o[k] for o in rows.obs]) for k in self._spec.observations},
            actions={k: np.stack([a[k] for a in rows.actions]) for k in self._spec.actions},
            rewards=np.array(rows.rewards, np.float32),
            infos={k: np.stack([i[k] for i in rows.infos]) for k in self._spec.infos},
            terminated=terminated,
            truncated=truncated,
            final_obs_valid=not last or self._final_obs_valid,
            metadata=metadata,
        )
        self._sink(trajectory, self._index)

    def _read(self, info: Mapping[Any, Any]) -> None:
        """Store numbers that the environment reports; the last value of each name is kept."""
        for key, value in info.items():
            if not isinstance(key, str):
                continue
            if key.startswith(LOG_PREFIX):
                self._note(key[len(LOG_PREFIX) :], value)
            elif key == "env_name" and isinstance(value, str) and value.isprintable():
                if not self._first_step:  # later, pieces have been sent without it
                    self._task = value[:MAX_NAME]
            elif key in ("is_success", "success"):
                self._success = _flag(value, self._success)
            elif key == "episode" and isinstance(value, Mapping):
                for name, symbol in (("episode_return", "r"), ("episode_length", "l")):
                    if symbol in value:
                        self._note(name, value[symbol])
        if "log/success" in info:
            self._success = _flag(info["log/success"], self._success)

    def _note(self, name: str, value: Any) -> None:
        try:
            refuse_masked(name, value)
            numbers = np.asarray(value, dtype=np.float64).reshape(-1)
        except (TypeError, ValueError, OverflowError):
            return  # a text, an object or masked
        for i, number in enumerate(numbers.tolist()):
            label = (name if len(numbers) == 1 else f"{name}/{i}")[:128]
            accepted = label in self._metrics or len(self._metrics) < _MAX_METRICS
            if np.isfinite(number) and label and accepted:
                self._metrics[label] = number


def _flag(value: Any, fallback: bool | None) -> bool | None:
    """The last of the flags in `value`; `fallback` if there is none."""
    try:
        refuse_masked("success", value)
        return as_bool("success", np.asarray(value).reshape(-1)[-1:])
    except (ValueError, TypeError):  # InvalidTrajectory among them
        return fallback


def _row_bytes(spec: EnvSpec) -> int:
    spaces = [*spec.observations.values(), *spec.actions.values(), *spec.infos.values()]
    return sum(int(np.prod(s.shape, dtype=np.int64)) * np.dtype(s.dtype).itemsize for s in spaces)
