"""The data of a trained run, and the actions that its policies take in the data's states.

A policy sees whole trajectories, so its memory is what it is while acting. Rewards are the recorded
ones, also for a run that relabels its data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

from amago_model.acting import ActingPolicy
from amago_model.config import LossConfig, Spaces
from amago_model.data.batch import Batch, encode_action, one_hot
from amago_model.data.transitions import loss_masks
from amago_model.encoders.modalities import modalities_of
from amago_model.encoders.observation_features import vector_features
from stepwell.client import Client
from stepwell.errors import Gone, NotFound
from stepwell.messages import Run
from trainer.config import DataConfig, TrainConfig, default_cache
from trainer.data.alignment import collate
from trainer.data.cache import Cache
from trainer.data.columns import gather
from trainer.data.fields import fields_of
from trainer.data.loader import SnapshotView, open_view
from trainer.data.returns import data_returns, margin_of_returns, returns_to_go
from trainer.data.sampler import Windows
from trainer.data.snapshot import (
    DataError,
    LeaseKeeper,
    Manifest,
    create_snapshot,
    load_manifest,
)
from trainer.data.validation import validation_sampler
from trainer.errors import SettingError
from trainer.offline_evaluation.fitted_q import Transitions

TIMESTEPS = 16_384
"""Timesteps, with padding, of one forward pass; a longer trajectory has a pass of its own."""
NO_MEMORY = ("identity", "feed_forward")


@dataclass(frozen=True)
class RunData:
    """The trajectories that a run was trained on, also those held back from training, or those of
    another selection; each once."""

    snapshot: str
    spaces: Spaces
    env: str
    view: SnapshotView

    @property
    def trajectories(self) -> int:
        return len(self.view.manifest)

    @property
    def steps(self) -> int:
        return self.view.manifest.steps

    def lengths(self, rows: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[int]:
        """Transitions of some rows of the manifest."""
        return [int(n) for n in self.view.manifest.length[rows]]

    def bounds(self, gamma: float) -> tuple[float, float]:
        """The possible discounted returns: those of the data and a margin."""
        manifest = self.view.manifest
        returns = data_returns(manifest, self._column("reward"), gamma)
        certain = bool(manifest.terminated.mean() > 0.5)
        margin = margin_of_returns(returns.low, returns.high, certain=certain)
        return returns.low - margin, returns.high + margin

    def value(self, gamma: float) -> float:
        """The mean discounted return of the data from initial states; after a truncation a
        trajectory's mean reward goes on."""
        manifest, rewards = self.view.manifest, self._column("reward")
        found = []
        for index in np.flatnonzero(self.initial):
            reward, one = rewards.trajectory(int(index)).astype(np.float64), [index]
            ends = manifest.terminated[one]
            found.append(returns_to_go(reward, manifest.length[one], gamma, ends)[0])
        return float(np.mean(found))

    @property
    def initial(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """[n] whether a trajectory starts an episode; all do if none is known to."""
        starts: np.ndarray[tuple[int], np.dtype[np.bool_]] = self.view.manifest.first_step == 0
        return starts if starts.any() else np.ones_like(starts)

    def _column(self, name: str):  # type: ignore[no-untyped-def]
        return next(column for column in self.view.columns if column.field.name == name)

    def batches(self) -> Iterator[tuple[np.ndarray[tuple[int], np.dtype[np.int64]], Batch]]:
        """All whole trajectories, those of similar lengths together: (rows of the manifest [B],
        their batch)."""
        manifest = self.view.manifest
        order = np.argsort(manifest.length, kind="stable")
        first = 0
        while first < len(order):
            end = first + 1
            while end < len(order):
                if (end + 1 - first) * int(manifest.length[order[end]] + 1) > TIMESTEPS:
                    break
                end += 1
            rows = order[first:end]
            windows = Windows(np.zeros_like(rows), rows, np.zeros_like(rows), manifest.length[rows])
            columns = gather(self.view.columns, windows, self.view.rows_left)
            yield rows, collate(manifest, rows, windows, columns, self.view.unknown_action)
            first = end


def open_run_data(
    client: Client, run: Run, leases: LeaseKeeper, max_steps: int, cache: Path | None = None
) -> RunData:
    """The data of a run's newest snapshot; of more than `max_steps` steps evenly chosen
    trajectories. If the service has deleted the snapshot or evicted some of its trajectories, the
    data is selected again.

    Raises:
        DataError: the run names neither a snapshot nor a dataset.
        StepwellError: the data cannot be read.
    """
    trained = run.config.get("data", {})
    masked = {k: trained[k] for k in ("critic_mask", "mask_row") if trained.get("critic_mask")}
    trained_from = Path(trained.get("cache") or default_cache())  # perhaps on another machine
    own = trained_from if trained_from.is_dir() else default_cache()
    data = DataConfig(cache=cache or own, **masked)
    try:
        if not run.snapshots:
            raise DataError(f"run {run.name} has no snapshot: it has not begun to train")
        snapshot = run.snapshots[-1]
        manifest = _manifest(client, snapshot)
    except (Gone, NotFound) as error:
        dataset = run.config.get("dataset")
        if not dataset:
            raise DataError(
                f"the snapshot of run {run.name} cannot be read ({error}), and its data cannot be "
                "selected again, because it was trained on a mixture"
            ) from error
        include = DataConfig(include_eval=bool(trained.get("include_eval")))
        again = TrainConfig(dataset=dataset, where=run.config.get("where", ""), data=include)
        snapshot = create_snapshot(client, again, f"estimate/{run.name}")
        manifest = _manifest(client, snapshot)
    leases.hold(snapshot)
    manifest = _each_once(manifest)
    if manifest.steps > max_steps:
        count = max(1, int(len(manifest) * max_steps / manifest.steps))
        keep = np.zeros(len(manifest), np.bool_)
        keep[np.linspace(0, len(manifest) - 1, count).round().astype(int)] = True
        manifest = manifest.only(keep, f"{count} of them")
    return _opened(client, snapshot, manifest, data)


def open_selection(
    client: Client, config: TrainConfig, leases: LeaseKeeper, holder: str
) -> RunData:
    """The data that a config selects.

    Raises:
        BadRequest: nothing is selected.
        StepwellError: the data cannot be read.
    """
    snapshot = create_snapshot(client, config, holder)
    leases.hold(snapshot)
    return _opened(client, snapshot, _each_once(_manifest(client, snapshot)), config.data)


def _opened(client: Client, snapshot: str, manifest: Manifest, data: DataConfig) -> RunData:
    fields, columns = fields_of(manifest.spec, data), Cache(data.cache, data.cache_gb * 1e9, client)
    manifest = manifest.without(list(columns.ensure(manifest, fields)))
    view = open_view(columns, fields, validation_sampler(manifest, data))
    spaces = Spaces.of_spec(manifest.spec.to_json())
    return RunData(snapshot, spaces, manifest.spec.env, view)


def _each_once(manifest: Manifest) -> Manifest:
    """Components of a mixture share trajectories."""
    keep = np.zeros(len(manifest), np.bool_)
    keep[np.unique(manifest.ids, return_index=True)[1]] = True
    return manifest.only(keep, "each once")


def _manifest(client: Client, snapshot: str) -> Manifest:
    with TemporaryDirectory() as folder:
        return load_manifest(client, snapshot, Path(folder))


@torch.no_grad()
def policy_transitions(policy: ActingPolicy, data: RunData) -> Transitions:
    """The transitions of `data`, with the policy's greedy actions.

    A state is the plain observations. With memory, or other observations such as images, the
    policy's state vector is added to it. A return-conditioned policy aims at its target return.
    """
    initial, parts = data.initial, []
    for rows, batch in data.batches():
        state, action = _states_and_actions(policy, batch)
        used = loss_masks(batch, LossConfig()).critic_mask  # fitted Q has no penalty
        starts = torch.from_numpy(initial[rows])
        trajectory = torch.from_numpy(rows)
        taken = encode_action(policy.spaces.action, batch.action)
        parts.append(
            (
                trajectory.unsqueeze(1).expand(used.shape)[used],
                state[:, :-1][used],
                taken[used],
                batch.reward[used],
                batch.terminated[used],
                state[:, 1:][used],
                action[:, 1:][used],
                trajectory[starts],
                state[:, 0][starts],
                action[:, 0][starts],
            )
        )
    return Transitions(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _states_and_actions(policy: ActingPolicy, batch: Batch) -> tuple[Tensor, Tensor]:
    """States [B, L, D], and the policy's encoded actions [B, L, A]."""
    conditioned = policy.config.return_conditioning is not None
    if conditioned:  # as in acting: the target return minus the rewards so far
        if policy.target_return is None:
            raise SettingError(
                "this policy is conditioned on a return and names none to aim at; train it with "
                "agent.return_conditioning.target_return"
            )
        received = batch.prev_reward.clone()
        received[:, 0] = 0.0
        batch = replace(batch, return_to_go=policy.target_return - received.cumsum(dim=1))
    encoded, packing = policy.encode_windows(batch)
    if packing is not None:
        encoded = packing.unpack(encoded)
    shape = encoded.shape[:2]
    obs = {key: value.flatten(0, 1) for key, value in batch.obs.items()}
    given = {"obs": {key: obs[key] for key in policy.actor_keys}} if policy.actor_keys else {}
    chosen = policy.actor.acting(encoded.flatten(0, 1), policy.legal_actions(obs), **given).greedy()
    action = policy.spaces.action
    if action.kind == "discrete":
        chosen = one_hot(chosen, action.n)
    elif action.kind == "continuous":
        chosen = chosen.clamp(-1.0, 1.0)

    settings, custom = policy.config.timestep_encoder, policy.config.custom
    kinds = modalities_of(settings, policy.spaces)
    kinds |= modalities_of(settings, policy.spaces, role="critic")
    plain = [key for key, kind in kinds.items() if kind == "vector"]
    parts = [vector_features(policy.spaces.observations[key], batch.obs[key]) for key in plain]
    memory = conditioned or policy.config.trajectory_encoder.kind not in NO_MEMORY
    if memory or custom.timestep_encoder or custom.trajectory_encoder or len(plain) < len(kinds):
        parts.append(encoded)
    return torch.cat(parts, dim=-1), chosen.unflatten(0, shape)
