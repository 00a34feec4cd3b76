"""Record episodes of any policy: a person, a script, an agent of another library.

    env = collector.record.record(gymnasium.make("CartPole-v1"), "my-data", policy="by hand")
    …                      reset and step as usual
    env.close()            sends the rest

Each finished episode goes to the dataset through an outbox on disk, which waits while the service
is down; `close` raises an error if episodes remain unsent. A missing dataset is created from the
environment's spaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, SupportsFloat

import gymnasium

from collector.envs import Arrays, Env, Interface, interface_of
from collector.episode_recorder import BROKEN, INTERRUPTED, MAX_STEPS, EpisodeRecorder
from collector.outbox_slots import open_outbox
from collector.registered_run import open_dataset
from stepwell.client import Client
from stepwell.errors import Undelivered
from stepwell.outbox import Outbox
from stepwell.trajectory import Trajectory, TrajectoryMetadata


def record(
    env: Env,
    dataset: str,
    client: Client | None = None,
    *,
    policy: str = "",
    run: str = "",
    env_id: str = "",
    tags: Sequence[str] = (),
    infos: Sequence[str] = (),
    partition: str = "fifo",
    outbox: str | Path | None = None,
    max_steps: int = MAX_STEPS,
) -> RecordTrajectories:
    """Wrap `env` so that its episodes are sent to `dataset`.

    Args:
        client: default: of the service at STEPWELL_URL.
        policy: name of the player, a column of the dataset.
        infos: single numbers of the environment's infos that a dataset made here keeps.
        outbox: directory; default: stepwell-outbox/DATASET/… below the current folder.
        max_steps: longer episodes are stored in pieces.

    Raises:
        InvalidSpace: the environment does not fit the dataset.
        ServiceUnreachable: no service answers.
    """
    own = client is None
    client = client or Client()
    env_id = env_id or (env.spec.id if env.spec is not None else type(env.unwrapped).__name__)
    try:
        interface = open_dataset(client, dataset, interface_of(env, env_id, infos=infos))
        queue = open_outbox(client, dataset, interface.spec, directory=outbox, partition=partition)
    except BaseException:
        if own:
            client.close()
        raise
    metadata = TrajectoryMetadata(env=env_id, policy=policy, run=run, tags=tuple(tags))
    return RecordTrajectories(env, interface, queue, metadata, max_steps, client if own else None)


class RecordTrajectories(gymnasium.Wrapper[Any, Any, Any, Any]):
    """The wrapper of `record`. It behaves like the environment; `outbox` has the unsent items."""

    def __init__(
        self,
        env: Env,
        interface: Interface,
        outbox: Outbox,
        metadata: TrajectoryMetadata,
        max_steps: int,
        client: Client | None,
    ):
        super().__init__(env)
        self.outbox = outbox
        self._interface, self._client, self._episodes = interface, client, 0
        self._closed = False
        self._recorder = EpisodeRecorder(interface.spec, metadata, self._keep, max_steps=max_steps)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode; an unfinished episode is kept, tagged "interrupted"."""
        self._recorder.truncate(INTERRUPTED)
        obs, info = self.env.reset(seed=seed, options=options)
        self._recorder.start_episode(
            self._interface.encode_observation(obs),
            index=self._episodes,
            seed=seed,
            policy_id="",
            info=info,
        )
        self._episodes += 1
        return obs, info

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """One step; if the environment raises, its episode is kept, tagged "broken"."""
        # A copy, because the environment may change it.
        recorded: Arrays = self._interface.encode_action(action)
        try:
            obs, reward, terminated, truncated, info = self.env.step(action)
            next_obs = self._interface.encode_observation(obs)
        except Exception:
            self._recorder.truncate(BROKEN)
            raise
        if self._recorder.running:
            self._recorder.add_step(recorded, float(reward), next_obs, terminated, truncated, info)
        return obs, reward, terminated, truncated, info

    def close(self, timeout: float = 10.0) -> None:
        """Keep what was played, send for at most `timeout` seconds; the rest waits on disk.

        Raises `Undelivered`, once all is closed, if something is left.
        """
        if self._closed:
            return
        self._closed = True
        self._recorder.truncate(INTERRUPTED)
        self.outbox.close(timeout)
        if self._client is not None:
            self._client.close()
        super().close()
        if undelivered := self.outbox.undelivered():
            raise Undelivered(undelivered)

    def _keep(self, trajectory: Trajectory, _: int) -> None:
        self.outbox.put(trajectory)
