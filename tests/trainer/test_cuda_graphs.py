"""Updates that are recorded and replayed make the same steps as updates that are not.

Without a GPU a recorder stands in that calls the update again with what it was recorded with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor

from amago_model import Agent, AgentConfig, ConfigError, GRUConfig, register
from amago_model.data.batch import Batch
from amago_model.runtime.cuda_graphs import WARM_UP
from benchmarks.update_sizes import SIZES, make_batch
from tests.amago_model.settings import configured
from trainer.config import OptimizerConfig
from trainer.errors import SettingError
from trainer.learner import Learner

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
SIZE = SIZES["amago1"]
SPACES = SIZE.spaces("continuous")
N = 16


class Repeating:
    """A recorder for a CPU: replays by calling the step again with what it was recorded with."""

    def __init__(self) -> None:
        self.recorded = 0

    def run(self, step: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        return step()

    def record(self, step: Callable[[], dict[str, Tensor]]) -> Callable[[], dict[str, Tensor]]:
        self.recorded += 1
        return step


@pytest.fixture(autouse=True)
def _own_accelerator() -> Iterator[None]:
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def learner(
    config: AgentConfig = SIZE.config,
    *,
    compiling: str = "off",
    precision: str = "no",
    echo: Callable[[str], None] = lambda _: None,
    spaces: Any = SPACES,
    **optimizer: Any,
) -> Learner:
    AcceleratorState._reset_state(True)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=not CUDA, mixed_precision=precision)
    settings = OptimizerConfig(**{"learning_rate": 0.001, "warmup": 5, **optimizer})
    return Learner(
        Agent(config, spaces).to(accelerator.device),
        settings,
        accelerator,
        seed=0,
        updates=N,
        compiling=compiling,
        window=SIZE.window,
        echo=echo,
    )


def batches(spaces: Any = SPACES) -> list[Batch]:
    """Of two lengths, with other numbers each."""
    found = []
    for i in range(N):
        batch = make_batch(SIZE, spaces, 8, seed=i)
        found.append(batch._map(lambda x: x[:, : x.shape[1] - 20]) if i % 4 == 3 else batch)
    return [batch.to(DEVICE) for batch in found]


@dataclasses.dataclass
class Learned:
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    seen: list[dict[str, Tensor]]


def learn(one: Learner, spaces: Any = SPACES) -> Learned:
    before = weights(one)
    seen = [
        one.update(i, batch, detailed=i % 5 == 4).metrics for i, batch in enumerate(batches(spaces))
    ]
    return Learned(before, weights(one), seen)


def weights(one: Learner) -> dict[str, Tensor]:
    return {name: x.detach().double().clone() for name, x in one.agent.named_parameters()}


def size(some: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    return sum(float((some[name] - others[name]).square().sum()) for name in some) ** 0.5


def assert_equal(found: Learned, expected: Learned, *, apart: float = 0.02) -> None:
    """The same losses, and weights that are apart by at most this share of what was learned:
    AdamW makes whole steps of gradients that are zero up to rounding."""
    assert size(found.before, expected.before) == 0
    for one, other in zip(found.seen, expected.seen, strict=True):
        assert one.keys() == other.keys()
        for name in [name for name in one if name.startswith("loss/")]:
            torch.testing.assert_close(one[name], other[name], rtol=apart, atol=apart)
    assert size(found.after, expected.after) <= apart * size(expected.before, expected.after)


def test_repeated_updates_take_their_batch_noise_and_learning_rate_from_outside() -> None:
    plain = learner()
    expected = learn(plain)
    repeated, recorder = learner(), Repeating()
    repeated.use_graphs(recorder, required=True)
    assert_equal(learn(repeated), expected)
    assert recorder.recorded == 3  # two lengths, and one of them in detail


def test_a_bad_update_changes_nothing_when_it_is_repeated() -> None:
    one = learner()
    one.use_graphs(Repeating(), required=True)
    one.defers_check = True
    first, *others = batches()
    for i in range(WARM_UP + 2):
        one.update(i, first)
    before = {name: x.clone() for name, x in one.agent.named_parameters()}
    bad = dataclasses.replace(first, prev_reward=first.prev_reward * float("nan"))
    assert one.update(9, bad).skipped
    torch.testing.assert_close(dict(one.agent.named_parameters()), before, rtol=0, atol=0)


def test_what_cannot_be_recorded_runs_as_it_is_and_says_why_once() -> None:
    class Never(Repeating):
        def record(self, step: Any) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    expected, said = learn(learner()), list[str]()
    one = learner()
    one.use_graphs(Never(), required=False, echo=said.append)
    assert_equal(learn(one), expected)
    assert len(said) == 1 and "not permitted" in said[0] and "more" not in said[0]
    one = learner()
    one.use_graphs(Never(), required=True)
    with pytest.raises(ConfigError, match="compile: .*not permitted.*Set compile to 'off'"):
        learn(one)


@pytest.mark.skipif(CUDA, reason="there is a GPU")
def test_graphs_are_refused_without_a_gpu_and_auto_has_none() -> None:
    assert learner(compiling="auto").graphs is None
    with pytest.raises(SettingError, match="compile: CUDA graphs.*the device is cpu"):
        learner(compiling="graphs")


NO_DROPOUT = {"dropout_ff": 0.0, "dropout_emb": 0.0}
CONFIGS: dict[str, Callable[[], AgentConfig]] = {
    "amago1": lambda: SIZE.config,
    "amago3": lambda: SIZES["amago3"].config,
    "transformer": lambda: configured(SIZES["small"].config, trajectory_encoder=NO_DROPOUT),
    "gru": lambda: configured(SIZE.config, trajectory_encoder=GRUConfig()),
    "batch_norm": lambda: configured(
        SIZE.config, losses={"filter": {"batch_norm": True}, "dpg_normalization": "mean_abs_q"}
    ),
    "lagged": lambda: configured(
        SIZE.config, losses={"lagged_critics": True, "targets_before_step": True}
    ),
    "iql": lambda: configured(SIZE.config, losses={"value_expectile": 0.7}),
    "multitask": lambda: configured(SIZE.config, algorithm="multitask"),
}


@pytest.mark.skipif(not CUDA, reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("action", ["continuous", "discrete"])
@pytest.mark.parametrize("name", CONFIGS)
def test_graphs_make_the_same_updates_on_a_gpu(name: str, action: str, precision: str) -> None:
    config, spaces, said = CONFIGS[name](), SIZE.spaces(action), list[str]()
    plain = learn(learner(config, precision=precision, spaces=spaces), spaces)
    one = learner(config, compiling="graphs", precision=precision, spaces=spaces, echo=said.append)
    assert_equal(learn(one, spaces), plain, apart=0.05 if precision == "no" else 0.5)
    assert not said


@pytest.mark.skipif(not CUDA, reason="CUDA graphs need a GPU")
def test_each_replay_draws_its_own_dropout() -> None:
    dropout = {"dropout_ff": 0.5, "dropout_emb": 0.5}
    config = configured(SIZES["small"].config, trajectory_encoder=dropout)
    first = learn(learner(config, compiling="graphs"))
    assert_equal(learn(learner(config, compiling="graphs")), first, apart=0.05)
    one, batch = learner(config, compiling="graphs", learning_rate=1e-12), batches()[0]
    losses = {float(one.update(i, batch).metrics["loss/total"]) for i in range(8, 16)}
    assert len(losses) == 8


@pytest.mark.skipif(not CUDA, reason="CUDA graphs need a GPU")
def test_a_loss_that_reads_the_device_runs_without_a_graph() -> None:
    @register("loss", "reads-the-device")
    def reading(agent: Any, inputs: Any) -> Tensor:
        total = inputs.transitions.state_t.square().mean()
        return total * 0.0 if total.item() > 1e9 else total

    config = configured(SIZE.config, custom={"losses": ("reads-the-device",)})
    said = list[str]()
    expected = learn(learner(config))
    assert_equal(learn(learner(config, compiling="auto", echo=said.append)), expected)
    assert said and "reads from the device" in said[0]
    with pytest.raises(ConfigError, match="compile"):
        learn(learner(config, compiling="graphs"))
