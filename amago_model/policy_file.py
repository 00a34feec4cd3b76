"""Policy files: weights in safetensors, with config, spaces and metadata in the header.

    header metadata   {"stepwell_policy": "5",                  the format number
                       "policy": {"config", "spaces", "step", "versions", "extra"} as JSON}
    tensors           the state dict of an ActingPolicy: encoders, their statistics, actor
            agent.*   what else of an agent `get_values` needs: critics and their statistics. Acting
                      ignores them. Files of format 4 and of agents without critics have none

Loading never unpickles. The tensor sizes expected by the config are compared with those in the file
before memory is allocated, so an untrusted file cannot cause a huge allocation.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors import torch as safetensors

import amago_model
from amago_model.acting import ActingPolicy
from amago_model.agent import Agent, make_agent
from amago_model.config import AgentConfig, Spaces
from amago_model.errors import AmagoError, PolicyFileError, UnregisteredError

FORMAT = 5
"""Version of the format."""
READABLE = ("4", "5")
"""Earlier versions have other names of settings and tensors."""
_AGENT = "agent."
_FORMAT_KEY, _POLICY_KEY = "stepwell_policy", "policy"
_MAX_HEADER = 100_000_000  # the limit of safetensors


def save_policy(
    policy: ActingPolicy | Agent, *, step: int = 0, extra: dict[str, Any] | None = None
) -> bytes:
    """Serialise a policy to the bytes of a policy file.

    Args:
        policy: a policy; or an agent, whose policy and critics are saved, with averaged weights if
            it has `ema_decay`. Weights are copied to the CPU.
        step: number of training updates of this policy.
        extra: additional JSON metadata, such as commit, snapshot ids and run name.
    """
    more: dict[str, torch.Tensor] = {}
    if isinstance(policy, Agent):
        weights = policy.published_weights()
        more = {_AGENT + name: weights[name] for name in _critic_tensors(policy)}
        policy = policy.policy
        acting = {name: weights[f"policy.{name}"] for name in policy.state_dict()}
    else:
        acting = policy.state_dict()
    description = {
        "config": policy.config.to_dict(),
        "spaces": policy.spaces.to_dict(),
        "step": step,
        "versions": {"amago_model": amago_model.__version__, "torch": str(torch.__version__)},
        "extra": extra or {},
    }
    metadata = {_FORMAT_KEY: str(FORMAT), _POLICY_KEY: json.dumps(description, sort_keys=True)}
    tensors = {**acting, **more}
    tensors = {k: v.detach().to("cpu").contiguous() for k, v in tensors.items()}
    return _sorted_header(safetensors.save(tensors, metadata=metadata))


def load_policy(
    source: bytes | str | os.PathLike[str], device: torch.device | str = "cpu"
) -> ActingPolicy:
    """Load a policy from the bytes or the path of a policy file, in evaluation mode.

    Its attribute `metadata` has the keys format, step, versions and extra.

    Raises:
        PolicyFileError: the bytes are not a policy file, are damaged, have another format version,
            do not match their config, or need a custom module that is not registered.
        OSError: the path cannot be read.
    """
    with _damage_named():
        policy, _ = _load(source)
    return policy.to(device).eval().requires_grad_(False)


def load_agent(source: bytes | str | os.PathLike[str], device: torch.device | str = "cpu") -> Agent:
    """Load a policy with its critics, as an agent for `get_values`, in evaluation mode.

    Networks that only training needs are copies of others: the agent cannot be trained further.

    Raises:
        PolicyFileError: as `load_policy`, and for a file without critics.
        OSError: the path cannot be read.
    """
    with _damage_named():
        policy, found = _load(source)
        if not found:
            raise PolicyFileError(_no_critics(policy))
        with torch.device("meta"):
            _check_tensors(_critic_tensors(make_agent(policy.config, policy.spaces)), found)
        with torch.random.fork_rng(devices=[]):
            agent = make_agent(policy.config, policy.spaces)
        agent.load_state_dict(found, strict=False)
        agent.policy.load_state_dict(policy.state_dict())
    agent.policy.metadata = policy.metadata
    assert agent.critics is not None
    for copy in (agent.critics.target, agent.critics.lagged):
        if copy is not None and (copy is agent.critics.lagged or not _needs_target(agent)):
            copy.load_state_dict(agent.critics.online.state_dict())
    return agent.to(device).eval().requires_grad_(False)


def _load(source: bytes | str | os.PathLike[str]) -> tuple[ActingPolicy, dict[str, torch.Tensor]]:
    """The policy of a file, and its tensors of `_critic_tensors`."""
    data = source if isinstance(source, bytes) else Path(source).read_bytes()
    metadata = _read_metadata(data)
    found = metadata.get(_FORMAT_KEY)
    if found is None:
        raise PolicyFileError(
            f"not a policy file: its metadata has no {_FORMAT_KEY!r} (keys: {sorted(metadata)}); "
            "expected a file written by save_policy"
        )
    if found not in READABLE:
        raise PolicyFileError(
            f"expected policy format {' or '.join(READABLE)}, got {found} (names of settings and "
            "tensors differ); load it with the Stepwell version that wrote it, or publish the "
            "policy again"
        )
    description = json.loads(metadata[_POLICY_KEY])
    config = AgentConfig.from_dict(description["config"])
    spaces = Spaces.from_dict(description["spaces"])
    acting, more = {}, {}
    for name, tensor in safetensors.load(data).items():
        if name.startswith(_AGENT):
            more[name.removeprefix(_AGENT)] = tensor
        else:
            acting[name] = tensor
    with torch.device("meta"):  # no memory, no random draws
        policy = ActingPolicy(config, spaces)
    _check_tensors(policy.state_dict(), acting)
    policy.load_state_dict(acting, assign=True)
    policy.metadata = {"format": int(found)} | {
        k: description.get(k) for k in ("step", "versions", "extra")
    }
    return policy, more


@contextlib.contextmanager
def _damage_named() -> Iterator[None]:
    """Raises PolicyFileError for all that a file with other content than it should have causes."""
    try:
        yield
    except UnregisteredError as error:
        raise PolicyFileError(f"this policy needs a custom module: {error}") from error
    except (KeyError, TypeError, json.JSONDecodeError, SafetensorError, AmagoError) as error:
        if isinstance(error, PolicyFileError):
            raise
        raise PolicyFileError(f"damaged policy file: {type(error).__name__}: {error}") from error


def _critic_tensors(agent: Agent) -> dict[str, torch.Tensor]:
    """What `get_values` needs besides the policy; empty for an agent without critics."""
    if agent.critics is None:
        return {}
    without = ["policy.", "target_actor.", "critics.lagged.", "average."]
    if not _needs_target(agent):
        without.append("critics.target.")
    return {k: v for k, v in agent.state_dict().items() if not k.startswith(tuple(without))}


def _needs_target(agent: Agent) -> bool:
    """Whether advantages are those of the target critics (value_expectile)."""
    return agent.critics is not None and agent.critics.state_value is not None


def _no_critics(policy: ActingPolicy) -> str:
    if policy.config.critic is None:
        return (
            "this policy's agent has no critics (agent.critic = false), so there are no values; "
            "take a policy that was trained with critics"
        )
    return (
        f"this policy file has no critics (format {policy.metadata['format']}; policies have them "
        f"from format {FORMAT} on): resume its run for some updates, or train again, and take the "
        "policy that is published then"
    )


def _sorted_header(data: bytes) -> bytes:
    """Sort the keys of the header, so that equal policies have equal bytes.

    safetensors writes its metadata in a random order that differs between processes.
    """
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    text = json.dumps(header, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # keep the tensors aligned
    return len(text).to_bytes(8, "little") + text + data[end:]


def _read_metadata(data: bytes) -> dict[str, str]:
    """Read the metadata of the safetensors header: 8 bytes of little-endian length, then JSON."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(len(data) - 8, _MAX_HEADER):
        raise PolicyFileError(
            f"not a policy file, or truncated: {len(data)} bytes do not contain the whole "
            "safetensors header; download or write the file again"
        )
    try:
        metadata = json.loads(data[8 : 8 + length]).get("__metadata__", {})
        if not isinstance(metadata, dict):
            raise TypeError("metadata is not a map")
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise PolicyFileError(
            f"not a policy file: it does not start with a safetensors header ({error}); "
            "expected a file written by save_policy"
        ) from error
    return metadata


def _check_tensors(
    expected: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]
) -> None:
    if missing := sorted(expected.keys() - tensors.keys()):
        raise PolicyFileError(f"damaged policy file: tensors are missing: {missing}")
    if unknown := sorted(tensors.keys() - expected.keys()):
        raise PolicyFileError(f"damaged policy file: tensors not in its config: {unknown}")
    for name, want in expected.items():
        got = tensors[name]
        if got.shape != want.shape or got.dtype != want.dtype:
            raise PolicyFileError(
                f"damaged policy file: for {name} its config expects {list(want.shape)} "
                f"{want.dtype}, got {list(got.shape)} {got.dtype}"
            )
