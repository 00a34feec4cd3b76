"""The learner with a compiler (that changes nothing) around its agent, and in half precision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.utils._python_dispatch import TorchDispatchMode

from amago_model import make_agent
from amago_model.runtime import compiling
from benchmarks.update_sizes import SIZES, make_batch
from trainer.config import OptimizerConfig
from trainer.learner import Learner

SIZE = SIZES["amago1"]
SPACES = SIZE.spaces("continuous")


@pytest.fixture(autouse=True)
def _own_accelerator() -> Iterator[None]:
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def _learner(precision: str = "no", compiling: str = "off", accumulate: int = 1) -> Learner:
    AcceleratorState._reset_state(True)
    torch.manual_seed(0)
    agent = make_agent(SIZE.config, SPACES)
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    optimizer = OptimizerConfig(learning_rate=0.001, accumulate=accumulate)
    return Learner(agent, optimizer, accelerator, seed=0, updates=2, compiling=compiling)


def _learned(precision: str = "no", compiling: str = "off"):  # type: ignore[no-untyped-def]
    learner = _learner(precision, compiling)
    batch = make_batch(SIZE, SPACES, 8)
    seen = [learner.update(i, batch, detailed=i == 0).metrics for i in range(2)]
    return learner.agent.state_dict(), seen


def test_a_compiled_learner_learns_the_same(monkeypatch) -> None:
    plain, losses = _learned()
    compiled = []
    monkeypatch.setattr(compiling, "compile_obstacle", lambda _: None)
    monkeypatch.setattr(
        compiling.torch, "compile", lambda forward, **_: compiled.append(forward) or forward
    )
    state, seen = _learned(compiling="on")
    assert len(compiled) == 1
    torch.testing.assert_close(state, plain, rtol=0, atol=0)
    torch.testing.assert_close(seen, losses, rtol=0, atol=0)
    _learned(compiling="auto")
    assert len(compiled) == 1


def test_half_precision_learns_nearly_the_same_in_whole_weights() -> None:
    plain, losses = _learned()
    state, seen = _learned(precision="bf16")
    for metrics, expected in zip(seen, losses, strict=True):
        assert float(metrics["loss/total"]) == pytest.approx(float(expected["loss/total"]), rel=0.1)
    assert not torch.equal(seen[1]["loss/total"], losses[1]["loss/total"])
    assert all(x.dtype == plain[name].dtype for name, x in state.items())


class Products(TorchDispatchMode):
    """The types in which matrices are multiplied, by whoever does it."""

    def __init__(self) -> None:
        super().__init__()
        self.types: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        if func.overloadpacket.__name__ in ("mm", "addmm", "bmm", "baddbmm"):
            self.types.add(out.dtype)
        return out


@pytest.mark.parametrize(("asked", "computed"), [("bf16", torch.bfloat16), ("no", torch.float32)])
def test_every_pass_multiplies_in_the_type_that_was_asked_for(asked, computed) -> None:
    """Looking for statistics, losses and gradients; what acts afterwards has whole weights."""
    learner, batch = _learner(asked, accumulate=2), make_batch(SIZE, SPACES, 8)
    with Products() as learning:
        learner.update(0, batch)
    assert learning.types == {computed}
    policy, obs = learner.agent.policy.eval(), {k: x[:, 0] for k, x in batch.obs.items()}
    rows = batch.prev_action[:, 0], batch.prev_reward[:, 0], batch.time_idx[:, 0]
    with Products() as acting:
        policy.act(obs, *rows, policy.initial_hidden(len(batch.mask)))
    assert acting.types == {torch.float32}
    with torch.autocast("cpu", torch.bfloat16), Products() as hasty:
        policy.act(obs, *rows, policy.initial_hidden(len(batch.mask)))
    assert hasty.types == {torch.bfloat16}
