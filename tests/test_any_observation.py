"""An image, a sentence and a number through the real thing: collected, trained on, acted by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from amago_model.policy_file import load_policy
from collector.builtin import FIND_BLOCK_ID
from collector.builtin.find_block import COLOURS
from collector.config import EvaluateConfig
from collector.evaluate import run_evaluation
from stepwell import Client
from tests.recording import collect_at_random
from trainer.data import stream
from trainer.main import main as train

TINY = [
    *("--updates", "3", "--data.batch", "4", "--device", "cpu"),
    *("--agent.timestep-encoder.d-hidden", "16", "--agent.timestep-encoder.images.d-output", "8"),
    *("--agent.timestep-encoder.images.augment.share", "0.5"),
    *("--agent.timestep-encoder.images.augment.shift", "1"),
]


def test_a_dict_of_everything_is_collected_trained_on_and_acted_by(
    service: Any,
    client: Client,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("STEPWELL_URL", service.url)
    threads = torch.get_num_threads()
    collect_at_random(service, name, FIND_BLOCK_ID, tmp_path / "outbox")
    client.flush(name)

    # Bytes stay bytes up to the batch, and they are those that were seen.
    select = f"SELECT id FROM trajectories WHERE dataset = '{name}'"
    cache = tmp_path / "cache"
    (batch,) = stream(select, window=5, batch=8, batches=1, client=client, cache=cache)
    kinds = {key: (x.dtype, tuple(x.shape[2:])) for key, x in batch.obs.items()}
    assert kinds == {
        "image": (torch.uint8, (6, 12, 3)),
        "left": (torch.float32, (1,)),
        "mission": (torch.int64, (6,)),
    }
    known = {(0, 0, 0), COLOURS["red"], COLOURS["green"]}
    pixels = np.unique(batch.obs["image"].numpy().reshape(-1, 3), axis=0)
    assert {tuple(pixel) for pixel in pixels.tolist()} == known

    run = f"train-{name}"
    words = ["pixels", "--dataset", name, "--run", run, "--output", str(tmp_path / "runs")]
    assert train([*words, "--data.cache", str(cache), *TINY]) == 0
    said = capfd.readouterr().out
    assert "observations: image: image 6 x 12 x 3, channels last, gridworld; left:" in said
    assert "mission: 6 tokens of 32" in said
    config = client.run(run).config["agent"]["timestep_encoder"]
    assert config["images"]["augment"] == {"share": 0.5, "shift": 1}

    policy = load_policy(client.download_policy(run).data)
    assert policy.config.timestep_encoder.images.d_output == 8
    assert policy.spaces.observations["image"].dtype == "uint8"
    result, _ = run_evaluation(
        EvaluateConfig(
            env=FIND_BLOCK_ID, policy=run, episodes=4, url=service.url, dataset=f"eval-{name}"
        ),
        Console(quiet=True),
    )
    assert len(result.returns) == 4
    torch.set_num_threads(threads)
