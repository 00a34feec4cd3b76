"""Returns-to-go of batches are sums over whole trajectories; `dt` gets its target from the data."""

from __future__ import annotations

from contextlib import closing, nullcontext

import numpy as np
import pytest

from amago_model import load_policy
from stepwell._settings import override
from stepwell.testing import make_spec
from tests.trainer.small_runs import loader_of
from tests.trainer.test_derived_settings import make_profile
from trainer.config import DataConfig, SettingError, SourceConfig
from trainer.data.relabel import Episode, Relabeler, register
from trainer.derive.derived import apply_settings
from trainer.derive.rules import RETURN_SPREAD, derive_settings
from trainer.main import main
from trainer.options import resolve
from trainer.recipes import own_settings, recipe

LENGTHS = [[5, 40, 1, 17], [64, 3, 9], [2]]
TINY = {
    "agent.timestep_encoder.d_hidden": 8,
    "agent.timestep_encoder.d_output": 8,
    "agent.trajectory_encoder.d_model": 8,
    "agent.trajectory_encoder.d_ff": 8,
    "agent.trajectory_encoder.n_layers": 1,
    "agent.actor.d_hidden": 8,
    "data.batch": 4,
}
FLAGS = [word for name, value in TINY.items() for word in (f"--{name}", str(value))]


@register("test_double_and_cut")
class DoubleAndCut(Relabeler):
    """Two thirds of the steps, twice the rewards."""

    def __call__(self, episode: Episode, rng: np.random.Generator) -> Episode:
        cut = episode.terminated_at(1 + 2 * len(episode) // 3)
        return cut.replace(reward=2 * cut.reward)


@pytest.mark.parametrize("padding", ["none", "both", "right"])
@pytest.mark.parametrize("relabel", [(), ("test_double_and_cut",)])
def test_they_are_sums_over_the_whole_trajectory(fake, tmp_path, padding, relabel):
    """Of the (relabeled) rewards, also after the window's end, in every row of every window."""
    service = fake(lengths=LENGTHS)
    rewards = {t.id: t.rewards.tolist() for t in service.trajectories()}
    if relabel:
        rewards = {i: [2 * x for x in r[: 1 + 2 * len(r) // 3]] for i, r in rewards.items()}
    config = DataConfig(batch=16, window=8, padding=padding, relabel=relabel)
    with closing(loader_of(service, tmp_path, config, return_to_go=True)) as loader:
        cut, ends = 0, 0
        for _ in range(12):
            loaded = next(loader)
            found, windows = loaded.batch.return_to_go, loaded.windows
            assert found is not None and found.shape == loaded.batch.prev_reward.shape
            names = loaded.manifest.trajectory_ids(windows.trajectory)
            for i, name in enumerate(names):
                start, length = int(windows.start[i]), int(windows.length[i])
                whole = rewards[name]
                want = [sum(whole[t:]) for t in range(start, start + length + 1)]
                np.testing.assert_allclose(found[i, : length + 1], want, rtol=1e-5, atol=1e-5)
                cut += start + length < len(whole)
                ends += start + length == len(whole)
        assert cut and ends


def test_other_recipes_load_none(fake, tmp_path):
    with closing(loader_of(fake(lengths=LENGTHS), tmp_path, DataConfig(batch=4))) as loader:
        assert next(loader).batch.return_to_go is None


def test_the_target_is_a_high_return_and_the_scale_follows_the_spread():
    """The 95th percentile; the highest one where rewards are sparse, as few may have any."""
    config = recipe("dt").replace(dataset="made")
    profile = make_profile([[float(i)] * 10 for i in range(60)])
    settings = derive_settings(profile, config)
    config, used = apply_settings(config, {}, own_settings("dt"), settings)
    conditioning = config.agent.return_conditioning
    assert conditioning is not None and conditioning.target_return == pytest.approx(560.5)
    low, _, high = profile.returns
    assert high == pytest.approx(560.5) and profile.best_return == 590.0
    assert conditioning.scale * (high - low) == pytest.approx(RETURN_SPREAD, rel=0.2)
    assert config.agent.trajectory_encoder.kind == "transformer" and config.data.window == 20
    assert not config.agent.timestep_encoder.hide_previous
    assert [d.reason for d in used if d.key.endswith("target_return")][0].startswith("the 95th")
    for rewards, best, said in (
        ([[0.0]] * 60, 0.0, "all returns are 0"),
        ([[-2.0]] * 60, -2.0, "all returns are -2"),
        ([[0.0]] * 59 + [[1.0]], 1.0, "returns differ by about 0.5: scaled to about 3"),
    ):
        found = {d.key: d for d in derive_settings(make_profile(rewards), config)}
        assert found["agent.return_conditioning.target_return"].value == best
        scale = found["agent.return_conditioning.scale"]
        assert scale.value * max(abs(best), 1.0) <= 2 * RETURN_SPREAD
        assert scale.reason == said
    others = derive_settings(profile, recipe("bc").replace(dataset="made"))
    assert not [d for d in others if "return_conditioning" in d.key]


@pytest.mark.parametrize("memory", ["transformer", "gru", "feed_forward"])
def test_a_run_publishes_a_policy_that_aims_at_its_target(fake, tmp_path, monkeypatch, memory):
    """With a target of its own; a resumed run continues as if it had not stopped."""
    service = fake(lengths=[[5, 6, 9], [7]])
    service.dataset = lambda _: None
    monkeypatch.setattr("trainer.main.Client", lambda **_: nullcontext(service))
    flags = FLAGS if memory == "transformer" else FLAGS[:4] + FLAGS[10:]
    words = ["dt", "--derive=off", "--dataset=fake", *flags, "--device=cpu"]
    words += [f"--agent.trajectory_encoder.kind={memory}", f"--data.cache={tmp_path / 'cache'}"]
    words += ["--agent.return_conditioning.target_return=3.5", "--schedule.drain-timeout=0.1"]
    words += ["--optimizer.decay=none", "--schedule.publish_every=0"]
    for folder, lengths in (("once", ["4"]), ("twice", ["2", "4"])):
        for updates in lengths:
            run = ["--run=r", f"--output={tmp_path / folder}", "--updates", updates]
            assert main([*words, *run]) == 0
        service.runs.clear()
    once, twice = (
        (tmp_path / f / "r/policies/4.safetensors").read_bytes() for f in ("once", "twice")
    )
    policy, other = load_policy(once), load_policy(twice)
    assert policy.target_return == 3.5
    for name, weight in policy.state_dict().items():
        assert (weight == other.state_dict()[name]).all(), name


def test_without_a_target_training_does_not_start(fake, tmp_path, monkeypatch, capsys):
    service = fake(make_spec(), lengths=[[5, 6]])
    service.dataset = lambda _: None
    monkeypatch.setattr("trainer.main.Client", lambda **_: nullcontext(service))
    words = ["dt", "--dataset=fake", "--derive=off", *FLAGS, f"--output={tmp_path}"]
    assert main(words) == 2
    assert "agent.return_conditioning.target_return: set the return" in capsys.readouterr().err
    source = SourceConfig(select="SELECT id FROM trajectories")
    with pytest.raises(SettingError, match="derived only from the recorded rewards"):
        recipe("dt").replace(sources=(source,)).require_target_return()
    relabeled = override(recipe("dt"), {"dataset": "made", "data.relabel": ["hindsight"]})
    found = derive_settings(make_profile([[1.0]] * 60), relabeled)
    assert not [d for d in found if "return_conditioning" in d.key]
    with pytest.raises(SettingError, match="memory: 'gru' has no effect with agent.return_cond"):
        resolve(["dt", "--dataset=made", "--memory=gru"])
