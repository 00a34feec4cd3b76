"""Steps that actor or critics may not learn from: told by an info of the data, or a relabeler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from amago_model import get_values
from amago_model.config import Spaces
from stepwell import Box, Discrete, EnvSpec, Trajectory
from stepwell.testing import make_trajectory
from tests.amago_model.cases import CASES, make
from tests.trainer.small_runs import loader_of
from trainer.config import DataConfig
from trainer.data import stream
from trainer.data.fields import fields_of
from trainer.data.loader import Loaded
from trainer.data.relabel import Episode, Relabeler, register
from trainer.data.snapshot import DataError
from trainer.errors import SettingError

SPEC = EnvSpec.of(
    Box((2,)),
    Discrete(3),
    infos={"by_hand": Discrete(2), "trust": Box(()), "lidar": Box((2,))},
)


@register("test_only_odd")
class OnlyOdd(Relabeler):
    """The actor learns from steps of odd number in trajectories of odd length."""

    def __call__(self, episode: Episode, rng: np.random.Generator) -> Episode:  # noqa: ARG002
        if len(episode) % 2 == 0:
            return episode
        return episode.replace(actor_mask=np.arange(len(episode)) % 2 == 1)


@register("test_cut")
class Cut(Relabeler):
    """Every trajectory of more than four steps ends after four."""

    def __call__(self, episode: Episode, rng: np.random.Generator) -> Episode:  # noqa: ARG002
        return episode.terminated_at(4) if len(episode) > 4 else episode


@register("test_bad_mask")
class BadMask(Relabeler):
    def __call__(self, episode: Episode, rng: np.random.Generator) -> Episode:  # noqa: ARG002
        return episode.replace(critic_mask=np.ones(len(episode) + 1, np.bool_))


def trajectories() -> Iterator[Trajectory]:
    for seed, length in enumerate((5, 2, 12, 7, 1, 9)):
        found = make_trajectory(SPEC, length=length, seed=seed)
        trust = np.random.default_rng(seed).choice([-1.0, 0.0, 0.5, np.nan], length + 1)
        yield Trajectory.from_arrays(
            obs=found.obs,
            actions=found.actions,
            rewards=found.rewards,
            terminated=True,
            infos={**found.infos, "trust": trust.astype(np.float32)},
            spec=SPEC,
        )


@pytest.fixture
def service(fake):
    service, found = fake(SPEC), list(trajectories())
    service.add_shard(found[:4])
    service.add_shard(found[4:])
    return service


def batches(service, folder: Path, n: int = 12, **options) -> list[Loaded]:
    config = DataConfig(**{"batch": 4, "window": 6, "padding": "both", **options})
    with closing(loader_of(service, folder, config)) as loader:
        found = [loader.load(step) for step in range(n)]
    for loaded in found:
        loaded.batch.check(Spaces.of_spec(SPEC.to_json()))
    return found


def expected(service, loaded: Loaded, allowed) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """[B, T]: `allowed` of a trajectory's step, wherever there is one; read one by one."""
    by_id = {t.id: t for t in service.trajectories()}
    mask = torch.zeros_like(loaded.batch.mask)
    for i, name in enumerate(loaded.ids):
        which, _, start = name.rpartition("@")
        for step in range(int(loaded.batch.mask[i].sum())):
            mask[i, step] = bool(allowed(by_id[which], int(start) + step))
    return mask


@pytest.mark.parametrize("relabel", [(), ("test_cut",)])
@pytest.mark.parametrize(("row", "later"), [("arrival", 1), ("departure", 0)])
def test_infos_say_what_actor_and_critics_may_learn_from(
    service, tmp_path, relabel, row, later
) -> None:
    """With windows cut from what was recorded, and from relabeled episodes."""
    masks = {"actor_mask": "by_hand", "critic_mask": "trust", "mask_row": row}
    seen = batches(service, tmp_path, relabel=relabel, **masks)
    for loaded in seen:
        by_hand = expected(service, loaded, lambda t, step: t.infos["by_hand"][step + later])
        trusted = expected(service, loaded, lambda t, step: t.infos["trust"][step + later] > 0)
        assert torch.equal(loaded.batch.actor_mask, by_hand)
        assert torch.equal(loaded.batch.critic_mask & loaded.batch.mask, trusted)
    some = torch.cat([loaded.batch.actor_mask[loaded.batch.mask] for loaded in seen])
    assert some.any() and not some.all()


def test_what_is_not_asked_for_is_not_there(service, tmp_path) -> None:
    (loaded,) = batches(service, tmp_path, n=1, critic_mask="by_hand")
    assert loaded.batch.actor_mask is None and loaded.batch.critic_mask is not None


def test_relabelers_may_say_so_too(service, tmp_path) -> None:
    """Where they say nothing of an episode, all of it may be learned from."""
    made = 0
    for loaded in batches(service, tmp_path, relabel=("test_only_odd",)):
        odd = expected(service, loaded, lambda t, row: len(t) % 2 == 0 or row % 2 == 1)
        if loaded.batch.actor_mask is not None:
            made += 1
            assert torch.equal(loaded.batch.actor_mask, odd)
        else:
            assert torch.equal(odd, loaded.batch.mask)
        assert loaded.batch.critic_mask is None
    assert made
    with pytest.raises(DataError, match=r"BadMask: critic_mask .* None or bool \(\d+,\), got bool"):
        batches(service, tmp_path, n=1, relabel=("test_bad_mask",))


def test_a_relabeled_mask_takes_the_place_of_the_recorded_one(service, tmp_path) -> None:
    options = {"actor_mask": "by_hand", "relabel": ("test_only_odd",)}
    for loaded in batches(service, tmp_path, **options):
        both = expected(
            service,
            loaded,
            lambda t, row: row % 2 == 1 if len(t) % 2 else t.infos["by_hand"][row + 1],
        )
        assert torch.equal(loaded.batch.actor_mask, both)


def test_a_row_for_masks_that_nobody_named_is_refused() -> None:
    with pytest.raises(SettingError, match=r"mask_row: 'departure'.*data\.actor_mask"):
        DataConfig(mask_row="departure")


def test_streams_for_any_learner_have_them(service, tmp_path) -> None:
    select = "SELECT id FROM trajectories"
    options = {"window": 6, "batch": 4, "client": service, "cache": tmp_path, "batches": 1}
    (batch,) = stream(select, **options, numpy=True, actor_mask="by_hand")
    assert batch["actor_mask"].shape == batch["mask"].shape and "critic_mask" not in batch


def test_values_are_told_of_all_steps_though_few_are_learned_from() -> None:
    agent, windows = make(CASES["loss masks, continuous"])
    batch = windows([4, 2, 3], 4)
    values = get_values(agent, batch)
    assert torch.equal(values.mask, batch.mask & batch.action_known)
    assert not torch.equal(values.mask, values.mask & batch.actor_mask)
    torch.manual_seed(0)
    some = get_values(agent, batch).q
    torch.manual_seed(0)
    batch.actor_mask = batch.critic_mask = None
    assert torch.equal(get_values(agent, batch).q, some)


@pytest.mark.parametrize("key", ["by_foot", "lidar"])
def test_an_info_that_is_no_mask_is_refused_by_name(key: str) -> None:
    with pytest.raises(DataError, match=rf"data\.critic_mask: .*{key!r}.* 'by_hand', 'trust'"):
        fields_of(SPEC, DataConfig(critic_mask=key))
