"""Data for tests: a few episodes with random actions, by a real collector."""

from pathlib import Path
from typing import Any

from collector.collect import collect
from collector.config import CollectConfig


def collect_at_random(service: Any, name: str, env: str, outbox: Path) -> None:
    """Twelve episodes of `env` in a new dataset."""
    config = CollectConfig(
        env=env,
        dataset=name,
        random=True,
        episodes=12,
        envs=3,
        seed=0,
        url=service.url,
        outbox=outbox,
        progress=False,
    )
    collect(config)
