"""`stepwell deliver`: what ended runs keep is sent by a command, without training on."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from amago_model import Agent
from stepwell.errors import ServiceUnreachable
from stepwell.testing import make_spec
from trainer.data.fields import spaces_of
from trainer.deliver import main as deliver
from trainer.delivery import take_folder
from trainer.errors import TrainerError
from trainer.metrics import MetricLog
from trainer.publish import Publisher
from trainer.recipes import bc
from trainer.run_log import RunLog


def test_what_an_ended_run_keeps_is_sent(client, tmp_path, capsys):
    """Metrics, log lines and policies of a run that ended during an outage, by a command."""
    agent = Agent(bc().agent, spaces_of(make_spec()))
    away = SimpleNamespace(url=client.url)

    def down(*_: object, **__: object) -> None:
        raise ServiceUnreachable("away")

    for name in ("log_metrics", "publish_policy", "patch_run", "run_log"):
        setattr(away, name, down)
    client.create_run("kept", "train")
    home = tmp_path / "kept"
    metrics = MetricLog(home, away, "kept", every=0.01)
    metrics.log(3, {"loss": 0.5})
    run_log = RunLog(home, away, "kept", every=0.01)
    run_log.write("it was dark")
    publisher = Publisher(home / "policies", away, "kept", every=0.01)
    publisher.publish(agent, 3, {"run": "kept"}, {})
    for part in (metrics, run_log, publisher):
        assert not part.close(0.0)
    words = [str(home), "--url", client.url, "--timeout", "60"]
    with pytest.raises(TrainerError, match="not the folder of a training run"):
        deliver(words)
    (home / "run.json").write_text(json.dumps({"name": "kept"}))
    with take_folder(home, "kept"), pytest.raises(TrainerError, match="used by process"):
        deliver(words)
    assert deliver(words) == 0
    assert "kept: " in (said := capsys.readouterr().out) and ", 0 B left" in said
    assert client.metrics("kept", ["loss"])["loss"].values == [0.5]
    assert "it was dark" in client.run_log("kept")
    assert client.policy_bytes("kept").data == (home / "policies/3.safetensors").read_bytes()
    assert deliver([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {"run": "kept", "sent": 0, "unsent": 0, "trouble": ""}
    ]


def test_it_says_what_is_left_and_why(tmp_path, capsys):
    (tmp_path / "run.json").write_text('{"name": "r"}')
    (tmp_path / "metrics.jsonl").write_text('{"key": "loss", "step": 1, "value": 1, "time": 2}\n')
    assert deliver([str(tmp_path), "--url", "http://127.0.0.1:9", "--timeout", "0.5"]) == 1
    said = capsys.readouterr()
    assert "r: 0 B sent" in said.out and "stepwell deliver: metrics: " in said.err
