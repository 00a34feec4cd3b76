"""Export a policy as a torch.export program, which acts without Stepwell.

    program = torch.export.load("policy.pt2")
    act = program.module()
    (obs, action, reward, time, *memory), _ = program.example_inputs    # as an episode begins
    action, *memory = act(obs, action, reward, time, *memory)           # its first step

`obs` is a dict of arrays with a leading dimension of 1, `action` and `reward` those of the last
step, `time` the number of steps since the episode began.
"""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from amago_model.acting import ActingPolicy


class _Step(nn.Module):
    """One step, with the hidden state as separate tensors."""

    def __init__(self, policy: ActingPolicy, hidden: Any, sample: bool) -> None:
        super().__init__()
        self.policy, self._hidden, self._sample = policy, hidden, sample

    def forward(
        self,
        obs: dict[str, Tensor],
        prev_action: Tensor,
        prev_reward: Tensor,
        time_idx: Tensor,
        *memory: Tensor,
    ) -> tuple[Tensor, ...]:
        # `step` of a memory writes in place; the program must not change its arguments.
        hidden = _rebuild(self._hidden, iter([tensor.clone() for tensor in memory]))
        action, hidden = self.policy.act(
            obs, prev_action, prev_reward, time_idx, hidden, sample=self._sample
        )
        return action, *_tensors(hidden)


def export_policy(policy: ActingPolicy, *, sample: bool = False) -> bytes:
    """The bytes of a file "….pt2" with the program of one step in one environment.

    With `sample`, the program samples actions; else it takes the most probable ones.
    """
    policy = copy.deepcopy(policy).eval().requires_grad_(False)
    device = next(policy.parameters()).device
    hidden, space = policy.initial_hidden(1, device), policy.spaces
    obs = {
        key: torch.zeros((1, *space.observations[key].shape), device=device).to(
            getattr(torch, space.observations[key].dtype)
        )
        for key in space.keys("policy") + space.keys("mask")
    }
    dtype = torch.float32 if space.action.kind == "continuous" else torch.int64
    action = torch.zeros((1, *space.action.array_shape), dtype=dtype, device=device)
    reward, time = torch.zeros(1, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    step = _Step(policy, hidden, sample)
    inputs = (obs, action, reward, time, *_tensors(hidden))
    step(*inputs)  # constants are made and kept outside of the trace
    with torch.no_grad(), warnings.catch_warnings():
        # torch's GRU keeps its weights in a list, too, which export replaces and restores.
        warnings.filterwarnings("ignore", "The tensor attributes .*_flat_weights", UserWarning)
        program = torch.export.export(step, inputs)
    file = io.BytesIO()
    torch.export.save(program, file)
    return file.getvalue()


def _tensors(hidden: Any) -> list[Tensor]:
    """The tensors of a hidden state, in order."""
    if hidden is None:
        return []
    if isinstance(hidden, Tensor):
        return [hidden]
    parts = hidden
    if is_dataclass(hidden):
        parts = [getattr(hidden, field.name) for field in fields(hidden)]
    return [tensor for part in parts for tensor in _tensors(part)]


def _rebuild(hidden: Any, tensors: Iterator[Tensor]) -> Any:
    """A hidden state like `hidden`, of other tensors."""
    if hidden is None:
        return None
    if isinstance(hidden, Tensor):
        return next(tensors)
    if is_dataclass(hidden):
        kind: Any = type(hidden)
        parts = {f.name: _rebuild(getattr(hidden, f.name), tensors) for f in fields(hidden)}
        return kind(**parts)
    return tuple(_rebuild(part, tensors) for part in hidden)
