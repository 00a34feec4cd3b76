"""Relabeled batches are windows of relabeled trajectories, whoever draws them and when."""

from __future__ import annotations

from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from amago_model.config import Spaces
from amago_model.data.batch import Batch
from stepwell import Box, Discrete, EnvSpec, Trajectory
from tests.trainer import small_runs
from trainer.config import DataConfig, SettingError
from trainer.data.fields import fields_of
from trainer.data.loader import Loader
from trainer.data.relabel import Episode, Relabeler, make_relabelers, register, registered
from trainer.data.relabel.sampling import generator
from trainer.data.sampler import WindowSampler, philox, start_range, uniform_int
from trainer.data.snapshot import DataError
from trainer.options import resolve

SPEC = EnvSpec.of(
    {"achieved": Box((1,), "int16"), "goal": Box((1,), "int16"), "state": Box((2,))},
    Discrete(4, start=2),
    roles={"achieved": "relabel"},
    action_known=True,
    env="Line-v0",
)
LENGTHS = [[5, 30, 1, 17], [12, 3, 9]]


@register("test_halve")
class Halve(Relabeler):
    """Cut at half of the length, and pay the new last step."""

    pay: float = 1.0

    def __call__(self, episode: Episode, rng: np.random.Generator) -> Episode:
        half = episode.terminated_at((len(episode) + 1) // 2)
        reward = half.reward.copy()
        reward[-1] = self.pay * rng.integers(1, 100)
        return half.replace(reward=reward)


@register("test_broken")
class Broken(Relabeler):
    """What a relabeler must not do."""

    how: str = ""

    def __call__(self, episode: Episode, rng: np.random.Generator) -> Episode:
        if self.how == "edit":
            episode.reward[0] = 1.0
        if self.how == "empty":
            return replace(episode, reward=episode.reward[:0], action=episode.action[:0])
        if self.how == "double":
            return episode.replace(reward=episode.reward.astype(np.float64))
        if self.how == "rows":
            return episode.replace(obs={"goal": episode.obs["goal"][:-1]})
        if self.how == "key":
            return episode.replace(obs={"gaol": episode.obs["goal"]})
        if self.how == "number":
            return episode.replace(obs={"goal": 0})
        if self.how == "reward":
            return episode.replace(reward=1.0)
        if self.how == "forgot":
            return None
        return replace(episode, terminated=True, truncated=True)


def line_walks(lengths=LENGTHS):
    """Walks on a line, by shard; some are pieces, some lack the last observation."""
    seed = 0
    for shard in lengths:
        found = []
        for length in shard:
            rng = np.random.default_rng(seed)
            place = np.cumsum(rng.integers(-1, 2, length + 1))[:, None]
            found.append(
                Trajectory.from_arrays(
                    obs={
                        "achieved": place,
                        "goal": np.full((length + 1, 1), 99),
                        "state": rng.standard_normal((length + 1, 2), np.float32),
                    },
                    actions=rng.integers(2, 6, length),
                    rewards=rng.standard_normal(length, np.float32),
                    truncated=seed % 3 == 0,
                    action_known=rng.random(length) < 0.8,
                    final_obs_valid=seed % 5 != 4,
                    first_step=8 if seed % 4 == 3 else 0,
                    episode_id=f"e{seed}",
                    spec=SPEC,
                    env="Line-v0",
                )
            )
            seed += 1
        yield found


@pytest.fixture
def service(fake):
    service = fake(SPEC)
    for shard in line_walks():
        service.add_shard(shard)
    return service


def loader_of(service, folder: Path, *relabel: str, step=0, rank=0, world=1, **options) -> Loader:
    config = DataConfig(**{"batch": 8, "window": 6, "relabel": relabel, **options})
    return small_runs.loader_of(service, folder, config, step=step, rank=rank, world=world, seed=3)


def same(one: Batch, other: Batch, rows: slice = slice(None)) -> bool:
    """Bit by bit, for the rows of `one`; where they are padded more, by the other's length."""
    length = other.mask.shape[1]
    for f in fields(Batch):
        ours, theirs = getattr(one, f.name), getattr(other, f.name)
        pairs = [(ours, theirs)] if f.name != "obs" else [(ours[k], theirs[k]) for k in theirs]
        for a, b in pairs:
            if (a is None) != (b is None):
                return False
            if a is not None and not torch.equal(a[rows, : b.shape[1]], b):
                return False
    return not bool(one.mask[rows, length:].any())


@pytest.mark.parametrize("padding", ["none", "both", "left", "right", "center"])
@pytest.mark.parametrize("relabel", [("hindsight",), ("hindsight:terminates=false", "test_halve")])
def test_a_batch_holds_windows_of_relabeled_trajectories(service, tmp_path, relabel, padding):
    """Cell by cell, against the slow way: the whole trajectory, the relabelers, then the cut."""
    by_id = {t.id: t for t in service.trajectories()}
    relabelers = make_relabelers(relabel)
    shortened = relabeled = 0
    with closing(loader_of(service, tmp_path, *relabel, padding=padding)) as loader:
        sampler, manifest = loader.view(0).sampler, loader.view(0).manifest
        for step in range(8):
            loaded = next(loader)
            b, rows = loaded.batch, loaded.batch.prev_reward.shape[1]
            b.check(Spaces.of_spec(SPEC.to_json()))
            assert set(b.obs) == {"goal", "state"}
            recorded = sampler.samples(8 * step, 8)
            assert rows == int(loaded.windows.length.max()) + 1
            for i in range(8):
                k, which = 8 * step + i, int(recorded.trajectory[i])
                t = by_id[manifest.trajectory_ids([which])[0]]
                e = Episode(
                    obs=t.obs,
                    action=t.actions["action"],
                    reward=t.rewards,
                    terminated=t.terminated,
                    truncated=t.truncated,
                    final_obs_valid=t.final_obs_valid,
                    first_step=t.metadata.first_step,
                    action_known=t.action_known,
                )
                for place, relabeler in enumerate(relabelers):
                    e = relabeler(e, generator(sampler.key, k, place))
                shortened += len(e) < len(t)
                relabeled += not np.array_equal(e.reward, t.rewards[: len(e)])
                low, high = start_range(np.array([len(e)]), 6, padding)
                start = int((low + uniform_int(philox(sampler.key, k, 1)[:, 1], high - low + 1))[0])
                if padding == "center":
                    start = min(max(start, 0), max(len(e) - 6, 0))
                stop, start = min(start + 6, len(e)), max(start, 0)
                n = stop - start
                assert loaded.ids[i] == f"{t.id}@{start}"
                assert b.mask[i].tolist() == [True] * n + [False] * (rows - 1 - n)
                assert b.time_idx[i].tolist() == [e.first_step + start + r for r in range(rows)]
                for row in range(n + 1):
                    at = start + row
                    assert b.prev_reward[i, row] == (e.reward[at - 1] if at else 0.0)
                    known = at > 0 and e.action_known[at - 1]
                    assert b.prev_action[i, row] == (e.action[at - 1] if known else 1)
                    for key, value in b.obs.items():
                        assert np.array_equal(value[i, row].numpy(), e.obs[key][at])
                last = stop == len(e)
                end = [False] * (n - 1) + [last] + [False] * (rows - 1 - n)
                flags = (e.terminated, e.truncated, not e.final_obs_valid)
                found = (b.terminated, b.truncated, b.mask & ~b.next_obs_valid)
                for flag, values in zip(flags, found, strict=True):
                    assert values[i].tolist() == [flag and x for x in end]
                assert b.action_known[i, :n].tolist() == e.action_known[start:stop].tolist()
                for values in (b.prev_reward, *b.obs.values()):
                    assert not values[i, n + 1 :].any()
    assert relabeled and shortened


@pytest.mark.parametrize(
    "options",
    [
        {"padding": "none"},
        {"padding": "both", "draw": "windows"},
        {"padding": "center", "draw": "steps"},
        {"padding": "right", "epochs": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("gaps", [True, False])
def test_relabeling_nothing_gives_the_same_bits_as_no_relabeler(fake, tmp_path, gaps, options):
    service = fake(replace(SPEC, action_known=gaps), LENGTHS)
    with (
        closing(loader_of(service, tmp_path, **options)) as plain,
        closing(loader_of(service, tmp_path, "hindsight:probability=0", **options)) as nothing,
    ):
        for _ in range(6):
            one, other = next(plain), next(nothing)
            assert same(one.batch, other.batch) and same(other.batch, one.batch)
            assert one.ids == other.ids
            assert not one.metrics and other.metrics["relabel/changed"] == 0


def test_a_sample_depends_on_seed_and_number_alone(service, tmp_path):
    """Two ranks, another beginning, any order of asking: the same samples."""
    relabel = ("hindsight", "test_halve")
    with closing(loader_of(service, tmp_path, *relabel)) as whole:
        batches = [next(whole).batch for _ in range(6)]
        assert not same(batches[0], batches[1])
        for step in (4, 1, 1, 5):
            assert same(whole.load(step).batch, batches[step])
    with closing(loader_of(service, tmp_path, *relabel, step=4)) as resumed:
        assert same(next(resumed).batch, batches[4])
    for rank in (0, 1):
        with closing(loader_of(service, tmp_path, *relabel, step=3, rank=rank, world=2)) as half:
            assert same(batches[3], next(half).batch, slice(4 * rank, 4 * rank + 4))


def test_relabelers_are_applied_in_their_order_each_with_its_own_chance(service, tmp_path):
    """Halving first leaves fewer goals to choose; what one draws does not move the next."""

    def episodes(*relabel: str) -> list[Episode]:
        with closing(loader_of(service, tmp_path, *relabel)) as loader:
            view = loader.view(0)
            return view.relabeling.draw(view.sampler, 0, 0)[0]

    one = episodes("hindsight:terminates=false", "test_halve")
    other = episodes("test_halve", "hindsight")
    assert any(
        len(a) != len(b) or (a.reward != b.reward).any() for a, b in zip(one, other, strict=True)
    )
    nothing = episodes("hindsight:probability=0", "test_halve")
    paid = [e.reward[-1] for e in episodes("hindsight:terminates=false", "test_halve")]
    assert [e.reward[-1] for e in nothing] == paid
    assert paid != [e.reward[-1] for e in episodes("test_halve")]


def test_what_only_relabelers_read_is_fetched_for_them_and_shown_to_nobody(service, tmp_path):
    relabeled = DataConfig(relabel=("hindsight",))
    names = [f.name for f in fields_of(SPEC, relabeled)]
    assert "obs.achieved" in names and "obs.achieved" not in [f.name for f in fields_of(SPEC)]
    assert set(Spaces.of_spec(SPEC.to_json()).observations) == {"goal", "state"}
    with closing(loader_of(service, tmp_path, "hindsight")) as loader:
        assert "achieved" not in next(loader).batch.obs


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("edit", ValueError, "read-only"),
        ("empty", DataError, "Broken: expected 1 to .* transitions .*, got 0"),
        ("double", DataError, r"reward of trajectory .*expected float32 .*got float64"),
        ("rows", DataError, r"obs\['goal'\]"),
        ("key", DataError, "expected the observations .*gaol"),
        ("number", DataError, r"obs\['goal'\] of trajectory .*: expected int16 .*, got 0"),
        ("reward", DataError, r"reward of trajectory .*: expected float32 .*, got 1\.0"),
        ("forgot", DataError, "expected an Episode for trajectory .*, got None; return the one"),
        ("both ends", DataError, "both terminated and was truncated"),
    ],
)
def test_a_relabeler_that_breaks_its_promise_is_named(service, tmp_path, how, error, message):
    with closing(loader_of(service, tmp_path, f"test_broken:how={how}")) as loader:
        with pytest.raises(error, match=message):
            next(loader)


# ------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("hindsigt", "unknown relabeler 'hindsigt'.*'hindsight'.*--plugin"),
        ("hindsight:stategy=final", "Hindsight: unknown setting 'stategy'.*'strategy'"),
        ("hindsight:strategy=last", "strategy: expected 'final' or 'future', got 'last'"),
        ("hindsight:terminates=maybe", "terminates: expected a valid boolean.*got 'maybe'"),
        ("hindsight:tolerance=big", "tolerance: expected a valid number.*got 'big'"),
        ("hindsight:tolerance", "expected FIELD=VALUE"),
        ("hindsight:tolerance=1,tolerance=2", "FIELD=VALUE once, got 'tolerance=2'"),
        ("hindsight:probability=2", "probability: expected less than or equal to 1"),
        ("mazerunner:probability=1.5", "MazeRunnerGoals.probability: expected less"),
        ("instructions:_rarity=1", "unknown setting"),
        ("instructions:steps_after=-1", "steps_after: expected greater than or equal to 0"),
    ],
)
def test_a_setting_with_a_mistake_is_refused_by_name(word, message):
    with pytest.raises(SettingError, match=message):
        make_relabelers([word])


def test_names_are_taken_once_and_can_be_written():
    assert {"hindsight", "instructions", "mazerunner", "test_halve"} <= set(registered())
    with pytest.raises(SettingError, match="'hindsight' is trainer.data.relabel.hindsight"):
        register("hindsight")(Halve)
    with pytest.raises(SettingError, match="no place in NAME"):
        register("a:b")


def test_files_and_flags_choose_relabelers_and_the_checksum_tells_them_apart(fake, tmp_path):
    file = tmp_path / "r.toml"
    file.write_text('[data]\nrelabel = ["hindsight:strategy=final"]\n')
    words = ["offline", "--config", str(file), "--dataset", "d"]
    assert resolve(words).config.data.relabel == ("hindsight:strategy=final",)
    flags = ["--data.relabel", "mazerunner:strategy=all", "hindsight"]
    config = resolve([*words, *flags]).config.data
    assert config.relabel == ("mazerunner:strategy=all", "hindsight")
    manifest = small_runs.manifest_of(fake(SPEC, [[5, 6]]), tmp_path)
    sums = {
        WindowSampler(manifest, config.replace(relabel=r), 0).checksum(0)
        for r in ((), config.relabel, config.relabel[:1])
    }
    assert len(sums) == 3
    with pytest.raises(SettingError, match="epochs: .*data.relabel"):
        DataConfig(epochs=True, draw="windows", relabel=("hindsight",))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("hindsight:goal=target", "needs an observation 'target'.*'goal'"),
        ("hindsight:goal=state", r"'achieved' \(1,\) with 'state' \(2,\)"),
        ("instructions:goals=goal", r"'goal' of shape \(K, d\)"),
    ],
)
def test_data_that_does_not_fit_is_refused_before_the_first_batch(service, tmp_path, word, message):
    with pytest.raises(DataError, match=message):
        loader_of(service, tmp_path, word)


@pytest.mark.parametrize("word", ["hindsight", "instructions:goals=goal"])
def test_fractions_cannot_become_goals_of_whole_numbers(word):
    """They would be cut off, and the goal shown would not be the one that pays."""
    spec = EnvSpec.of(
        {"achieved": Box((2, 1)), "goal": Box((2, 1), "int16")},
        Discrete(2),
        roles={"achieved": "relabel"},
        env="Line-v0",
    )
    (relabeler,) = make_relabelers([word])
    with pytest.raises(DataError, match=r"'achieved' \(float32\), among goals, 'goal' \(int16\)"):
        relabeler.check(spec)
