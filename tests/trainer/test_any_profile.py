"""Derived settings of any dataset: finite numbers that are valid together."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell import Box, Discrete, EnvSpec, MultiDiscrete
from stepwell._settings import flatten
from stepwell.testing import make_spec, make_trajectory
from trainer.config import TrainConfig
from trainer.data.returns import NEGLIGIBLE
from trainer.derive.dataset_profile import DatasetProfile, summarise
from trainer.derive.derived import apply_settings
from trainer.derive.rules import derive_settings
from trainer.main import main as train
from trainer.recipes import RECIPES, own_settings, recipe
from trainer.recommend import main as recommend

RULED = [name for name in RECIPES if recipe(name).derive != "off"]
SPECS = {
    "vector": EnvSpec.of(Box((3,)), Box((2,), low=-1.0, high=1.0)),
    "wide": EnvSpec.of(Box((1500,)), Discrete(4)),
    "image": EnvSpec.of(Box((64, 64, 3), "uint8", low=0, high=255), Discrete(2)),
    "several": EnvSpec.of({"x": Box((5,)), "id": Discrete(7)}, MultiDiscrete((3, 2))),
}


@st.composite
def profiles(draw: st.DrawFn) -> DatasetProfile:
    """Up to 80 trajectories of up to 300 steps; rewards of any size, some of them all equal."""
    seed = draw(st.integers(0, 2**31))
    rng = np.random.default_rng(seed)
    count = draw(st.sampled_from([1, 2, 19, 41, 80]))
    longest = draw(st.sampled_from([1, 2, 7, 60, 300]))
    length = rng.integers(1, longest + 1, count)
    scale = 10.0 ** draw(st.integers(-5, 8))
    kind = draw(st.sampled_from(["noise", "constant", "sparse", "single", "offset", "outlier"]))
    steps = int(length.sum())
    reward = {
        "noise": lambda: rng.normal(size=steps),
        "constant": lambda: np.full(steps, rng.choice([-1.0, 0.0])),
        "single": lambda: (np.arange(steps) == steps // 2).astype(float),
        "sparse": lambda: (rng.random(steps) < 0.05).astype(float),
        "offset": lambda: 1.0 + 1e-3 * rng.normal(size=steps),
        "outlier": lambda: np.where(np.arange(steps) == steps // 2, -100.0, rng.random(steps)),
    }[kind]()
    reward = (scale * reward).astype(np.float32).astype(np.float64)
    terminated = (rng.random(count) < draw(st.sampled_from([0.0, 0.5, 1.0]))).astype(float)
    returns = np.array([r.sum() for r in np.split(reward, np.cumsum(length)[:-1])])
    profile = summarise(
        "made",
        SPECS[draw(st.sampled_from(sorted(SPECS)))],
        partially_observable=draw(st.booleans()),
        length=length.astype(np.float64),
        returns=returns,
        terminated=terminated,
        best_tenth=-(-count // 10),
        reward=reward,
        sampled_length=length,
        sampled_terminated=terminated,
    )
    return dataclasses.replace(profile, random_outcomes=draw(st.sampled_from([0.0, 0.6])))


@settings(max_examples=200, deadline=None)
@given(profile=profiles(), name=st.just("offline") | st.sampled_from(RULED))
def test_all_derived_settings_are_finite_and_valid_together(
    profile: DatasetProfile, name: str
) -> None:
    """None is left out as a contradiction, so none depends on the order of the others."""
    config = recipe(name).replace(dataset="made")
    derived = derive_settings(profile, config)
    numbers = [d.value for d in derived if isinstance(d.value, float)]
    assert all(math.isfinite(x) and abs(x) < 1e30 for x in numbers)
    config, used = apply_settings(config, {}, own_settings(name), derived)
    assert config == TrainConfig.from_dict(config.to_dict())
    exist = {d.key for d in derived} & flatten(config.to_dict()).keys()
    assert exist - own_settings(name) == {d.key for d in used}
    if name == "offline":
        losses, found = config.agent.losses, profile.discounted(config.agent.losses.gamma)
        assert config.data.window >= losses.n_step
        if found.spread > NEGLIGIBLE * max(1.0, abs(found.low), abs(found.high)):
            assert losses.target_low < found.low and found.high < losses.target_high
            assert found.spread * losses.reward_multiplier == pytest.approx(10, rel=0.5)


def test_odd_datasets_of_a_service_can_be_looked_at_and_trained_on(
    service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wide vectors, images, episodes of one step, equal rewards, one trajectory, none sealed."""
    monkeypatch.setenv("STEPWELL_URL", service.url)
    monkeypatch.chdir(tmp_path)
    odd = {
        "wide": (make_spec(observation=1500), 25, 10, None),
        "image": (make_spec(image=(16, 16, 3), discrete=3), 25, 10, None),
        "bandit": (make_spec(discrete=3), 60, 1, None),
        "constant": (make_spec(), 60, 10, 1.0),
        "one": (make_spec(), 1, 10, None),
    }
    with service.client() as client:
        for name, (spec, count, length, reward) in odd.items():
            found = [make_trajectory(spec, length=length, seed=i) for i in range(count)]
            if reward is not None:
                equal = np.full(length, reward, np.float32)
                found = [dataclasses.replace(t, rewards=equal) for t in found]
            client.create_dataset(f"odd-{name}", spec)
            client.post(f"odd-{name}", found)
    for name in odd:
        assert recommend([f"odd-{name}", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["updates"]["value"] == 3000
        if name in ("bandit", "constant"):  # nothing of the network is special
            continue
        words = ["offline", "--dataset", f"odd-{name}", "--run", f"odd-{name}", "--updates", "3"]
        code = train([*words, "--device", "cpu", "--data.cache", str(tmp_path / "cache")])
        said = capsys.readouterr()
        assert code == 0, said.err
        assert "finished" in said.out
    with service.client() as client:
        client.create_dataset("odd-empty", make_spec())
    assert recommend(["odd-empty"]) == 2
    assert "no trajectory to learn from" in capsys.readouterr().err
