"""Training on dataset@version: always on the same trajectories, and the run says which."""

from __future__ import annotations

import pytest

from stepwell.errors import NotFound
from stepwell.testing import make_spec, make_trajectory
from trainer.config import DataConfig, RatioConfig, TrainConfig
from trainer.data.snapshot import create_snapshot, sql_condition
from trainer.derive.dataset_profile import read_profile
from trainer.errors import SettingError
from trainer.main import main, require_dataset

SPEC = make_spec(env="Tiny-v0")
TINY = [
    *("--data.batch", "8", "--data.window", "8", "--schedule.log-every", "1"),
    *("--agent.timestep-encoder.d-hidden", "16", "--agent.timestep-encoder.d-output", "16"),
    *("--agent.trajectory-encoder.d-model", "16", "--agent.actor.d-hidden", "16"),
    *("--device", "cpu", "--updates", "2"),
]


@pytest.fixture
def version(client, name):
    client.create_dataset(name, SPEC)
    client.post(name, [make_trajectory(SPEC, length=8 + i, seed=i) for i in range(5)])
    client.create_version(name, "v1", where="length > 9")
    client.post(name, [make_trajectory(SPEC, length=20, seed=9)])
    return f"{name}@v1"


def test_a_config_selects_the_trajectories_of_the_version(client, version):
    def trajectories(**options):
        config = TrainConfig(dataset=version, **options)
        return client.snapshot(create_snapshot(client, config, "t")).trajectories

    assert trajectories() == 3
    assert trajectories(where="length < 12 and dataset = '{dataset}'") == 2
    assert trajectories(data=DataConfig(best_share=0.5, best_fraction=0.4)) == 3 + 1
    condition = sql_condition(TrainConfig(dataset=version))
    assert client.sql(f"select count(*) from trajectories where {condition}").one() == 3


def test_settings_are_derived_from_the_version_alone(client, version):
    profile = read_profile(client, TrainConfig(dataset=version))
    assert (profile.trajectories, profile.steps) == (3, 10 + 11 + 12)


@pytest.mark.parametrize(
    "data",
    [
        DataConfig(refresh_every=20),
        DataConfig(wait_for_data=5.0),
        DataConfig(refresh_every=20, ratio=RatioConfig(updates_per_step=1.0)),
    ],
)
def test_what_waits_for_new_data_has_no_effect_on_a_version_and_is_refused(data):
    with pytest.raises(SettingError, match="hopper@v1.*never changes"):
        TrainConfig(dataset="hopper@v1", data=data)
    TrainConfig(dataset="hopper", data=data)


def test_a_missing_version_is_said_before_anything_is_made(service, version, tmp_path, monkeypatch):
    monkeypatch.setenv("STEPWELL_URL", service.url)
    wrong = version.replace("@v1", "@v2")
    with pytest.raises(NotFound, match="there is no version of"):
        require_dataset(TrainConfig(dataset=wrong, output=tmp_path, run="r"))
    require_dataset(TrainConfig(dataset=version, output=tmp_path, run="r"))


def test_a_run_trains_on_the_version_and_says_so(service, client, version, tmp_path, monkeypatch):
    monkeypatch.setenv("STEPWELL_URL", service.url)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run = f"run-{version.split('@')[0]}"
    words = ["offline", "--dataset", version, "--run", run, "--output", str(tmp_path), *TINY]
    assert main(words) == 0
    made = client.run(run)
    assert made.config["dataset"] == version
    snapshot = client.snapshot(made.snapshots[0])
    assert snapshot.trajectories == 3
    assert snapshot.selection["dataset"] == version
