"""Data that nothing can be learned from ends a run in words that name it, not the step size."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from amago_model import InputNormConfig, TimestepEncoderConfig
from stepwell import Box, EnvSpec
from stepwell.testing import make_trajectory
from trainer import nan_diagnostics
from trainer.config import DataConfig, OptimizerConfig, ScheduleConfig
from trainer.learner import Learner, TrainingDiverged
from trainer.loop import RunInfo, train
from trainer.recipes import recipe

LENGTH, ROW = 6, 4
SPEC = EnvSpec.of({"speed": Box((2,), "float64")}, Box((1,), low=-1.0, high=1.0))


@pytest.fixture
def spoilt(fake):
    """A service with eight trajectories; row 4 of number 5 holds `value` in a column."""

    def make(column: str, value: float):
        service = fake(SPEC)
        name = service.add_shard(
            [make_trajectory(SPEC, length=LENGTH, seed=seed) for seed in range(8)]
        )
        # Behind the contract's back, which refuses NaN.
        table = pq.read_table(service.path(name))
        index = table.column_names.index(column)
        values = table[column].to_pylist()
        row = 5 * (LENGTH + 1) + ROW
        values[row] = [*values[row][:-1], value] if isinstance(values[row], list) else value
        field = table.schema.field(index)
        pq.write_table(
            table.set_column(index, field, pa.array(values, field.type)), service.path(name)
        )
        return service

    return make


def run(service, folder, *, whiten: bool, log_every: int = 50) -> None:
    config = recipe("bc").replace(derive="off")
    rows = TimestepEncoderConfig(
        d_hidden=8, d_output=8, input_norm=InputNormConfig() if whiten else None
    )
    config = config.replace(
        dataset="fake",
        run="spoilt",
        device="cpu",
        output=folder,
        updates=60,
        agent=config.agent.replace(timestep_encoder=rows),
        data=DataConfig(batch=8, window=4, padding="both", cache=folder / "cache"),
        optimizer=OptimizerConfig(max_bad_updates=3),
        schedule=ScheduleConfig(log_every=log_every),
    )
    train(config, service, RunInfo(), lambda _: None)


@pytest.mark.parametrize(
    ("column", "value", "whiten", "says"),
    [
        ("obs.speed", np.nan, True, f"observation 'speed' is nan at step {ROW} of"),
        ("obs.speed", -np.inf, False, f"observation 'speed' is -inf at step {ROW} of"),
        ("obs.speed", 1e200, True, f"observation 'speed' is 1e\\+200 at step {ROW} of"),
        ("reward", np.nan, True, f"the reward is nan at step {ROW} of"),
        ("action", np.nan, False, f"the action is nan at step {ROW} of"),
    ],
)
def test_a_bad_number_is_named_with_its_trajectory(spoilt, tmp_path, column, value, whiten, says):
    service = spoilt(column, value)
    culprit = service.trajectories()[5].id
    with pytest.raises(TrainingDiverged, match=says) as caught:
        run(service, tmp_path, whiten=whiten)
    said = str(caught.value)
    assert said.count(culprit) == 2 and f"""--where "id <> '{culprit}'\"""" in said
    assert "learning_rate" not in said


@pytest.mark.parametrize("log_every", [50, 1])
def test_updates_of_a_gpu_are_checked_when_the_next_is_on_its_way(
    spoilt, tmp_path, monkeypatch, caplog, log_every
):
    """Nobody waits for an update before the next one was asked for, but where its numbers are
    shown; and a bad one is told with the samples that were its own."""
    told: list[tuple[str, int]] = []
    real_update, real_check = Learner.update, Learner.check_finite

    def update(self, number, batch, **options):
        self.defers_check = True
        told.append(("update", number))
        return real_update(self, number, batch, **options)

    def check(self, number, result):
        told.append(("check", number))
        return real_check(self, number, result)

    monkeypatch.setattr(Learner, "update", update)
    monkeypatch.setattr(Learner, "check_finite", check)
    service = spoilt("reward", np.nan)
    culprit = service.trajectories()[5].id
    with pytest.raises(TrainingDiverged, match=f"the reward is nan at step {ROW} of.*{culprit}"):
        run(service, tmp_path, whiten=False, log_every=log_every)
    order = [number for what, number in told if what == "check"]
    assert order == list(range(len(order)))
    lag = {
        number: told.index(("check", number)) > told.index(("update", number + 1))
        for number in order[:-1]
    }
    assert set(lag.values()) == {log_every == 50}
    named = [r.getMessage() for r in caplog.records if "its windows" in r.getMessage()]
    assert len(named) == 3 and all(culprit in line for line in named)


@pytest.mark.parametrize("found", [None, ["the reward is nan at step 1 of b", "b"]])
def test_every_process_says_what_one_of_them_found(monkeypatch, found):
    """A process whose own samples are sound blames the step size only if all others' are, too."""
    monkeypatch.setattr(nan_diagnostics, "bad_number", lambda _: None)
    loaded = SimpleNamespace(ids=["a@0"])
    world = SimpleNamespace(is_main=True, all_gather=lambda mine: [mine, found])
    nan_diagnostics.explain_skip(1, loaded, world, None)  # skipped, and training goes on
    says = "lower the step size" if found is None else "--where \"id <> 'b'\""
    with pytest.raises(TrainingDiverged, match=says):
        nan_diagnostics.explain_skip(1, loaded, world, TrainingDiverged("lower the step size"))


@pytest.mark.parametrize("dtype", ["bool", "uint8", "uint16", "uint32", "int64"])
def test_whole_numbers_are_never_to_blame(dtype: str) -> None:
    """torch has no absolute value of some of these."""
    seen = torch.ones(1, 3, 2).to(getattr(torch, dtype))
    batch = SimpleNamespace(
        mask=torch.ones(1, 2, dtype=torch.bool),
        obs={"lamp": seen},
        timestep_mask=torch.ones(1, 3, dtype=torch.bool),
        prev_reward=torch.zeros(1, 3),
        prev_action=torch.zeros(1, 3, dtype=torch.int64),
        previous_known=torch.ones(1, 3, dtype=torch.bool),
    )
    assert nan_diagnostics.bad_number(SimpleNamespace(batch=batch)) is None
