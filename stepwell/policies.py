"""`load_policy`: a published policy, ready to act, in five lines of a program of one's own."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Protocol

from stepwell.client import Client
from stepwell.errors import InvalidData, StepwellError


class Policy(Protocol):
    """Plays one environment (amago_model/player.py)."""

    sample: bool
    """Whether actions are samples instead of the most probable ones; it may be changed."""

    def reset(self) -> None:
        """Begin an episode."""
        ...

    def act(self, obs: Any, reward: float = 0.0) -> Any:
        """The action for an observation, and the reward of the step before it."""
        ...

    def export(self) -> bytes:
        """A program of torch.export, which acts without Stepwell (docs/reference/collecting.md)."""
        ...


def load_policy(
    reference: str | Path,
    *,
    client: Client | None = None,
    sample: bool = False,
    seed: int = 0,
    device: str = "cpu",
) -> Policy:
    """Load a policy to act with. Needs torch: `pip install 'stepwell[collector]'`.

        policy = stepwell.load_policy("demo:best")
        obs, _ = env.reset()
        policy.reset()
        reward, done = 0.0, False
        while not done:
            obs, reward, terminated, truncated, _ = env.step(policy.act(obs, reward))
            done = terminated or truncated

    Args:
        reference: RUN, RUN:VERSION or RUN:ALIAS (a "/" will do, too) of the service; or a Path to a
            file that a trainer wrote.
        client: the service; by default that of STEPWELL_URL and STEPWELL_TOKEN.
        sample: sample actions instead of taking the most probable ones.
        seed: of the samples.
        device: torch device.

    Raises:
        NotFound: there is no such run or policy.
        InvalidData: it is not a policy.
        OSError: the file cannot be read.
    """
    try:
        models = importlib.import_module("amago_model")
        players = importlib.import_module("amago_model.player")
    except ModuleNotFoundError as error:
        raise StepwellError(
            f"load_policy needs torch ({error.name} is not installed): "
            "pip install 'stepwell[collector]'"
        ) from None
    data: str | Path | bytes = reference
    if not isinstance(reference, Path):
        run, which = split_reference(reference)
        if client is not None:
            found = client.download_policy(run, which)
        else:
            with Client() as own:
                found = own.download_policy(run, which)
        assert found is not None, "without an ETag the file is always sent"
        data = found.data
    try:
        policy = models.load_policy(data, device=device)
    except models.AmagoError as error:
        raise InvalidData(f"{reference}: {error}") from error
    player: Policy = players.Player(policy, sample=sample, seed=seed, device=device)
    return player


def split_reference(reference: str) -> tuple[str, str]:
    """ "run", "run/7", "run/best" or "run:best" → (run, version or alias; "latest" by default).

    Raises `InvalidData` for other texts.
    """
    run, _, which = reference.replace(":", "/", 1 if "/" not in reference else 0).partition("/")
    if not run or "/" in which:
        raise InvalidData(
            "policy reference", expected="RUN, RUN:VERSION or RUN:ALIAS", got=repr(reference)
        )
    return run, which or "latest"
