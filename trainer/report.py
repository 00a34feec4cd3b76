"""Who hears of a run: its row, heartbeats, metrics and policies at the service; the screen.

Rank 0 alone; on other ranks every method does nothing. An absent service delays, and never stops.
"""

from __future__ import annotations

import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from amago_model.agent import Agent
from stepwell._files import whole_file
from stepwell.client import Client
from stepwell.errors import Conflict, ServiceUnreachable, StepwellError
from stepwell.failpoints import failpoint
from trainer.config import TrainConfig, to_json
from trainer.metrics import Heartbeat, MetricLog
from trainer.processes import World
from trainer.publish import Publisher
from trainer.views import Data

log = logging.getLogger(__name__)
GO, PAUSE, STOP = 0, 1, 2


@dataclass(frozen=True)
class RunInfo:
    """What the run's row says besides its config."""

    origins: dict[str, str] = field(default_factory=dict)
    git_commit: str = ""
    command: str = ""


class Report:
    """Run row, heartbeat, metrics and policies: on rank 0, and nothing at all elsewhere."""

    def __init__(
        self,
        config: TrainConfig,
        client: Client | None,
        info: RunInfo,
        home: Path,
        world: World,
        say: Callable[[str], None],
    ):
        self.config, self.client, self.info, self.home = config, client, info, home
        self.world, self.say = world, say
        self.update, self.error, self._state = 0, "", "running"
        self._newest: dict[str, float] = {}
        self._said = 0.0
        self._ended = False

    def open(self, data: Data, *, resumed: bool) -> None:
        if self.client is None:
            return
        self.home.mkdir(parents=True, exist_ok=True)
        row: dict[str, Any] = {
            "config": {**to_json(self.config), "origins": self.info.origins},
            "seed": self.config.seed,
            "git_commit": self.info.git_commit,
            "host": self.world.host,
            "snapshots": data.snapshots,
            "command": self.info.command,
        }
        claim = _claim(self.home)
        row["config"]["claim"] = claim
        try:
            # The folder says whether a run of this name is ours to take up, or somebody else's.
            self._create(row, claim, resumed)
            failpoint("run.after_create")
            if resumed:
                self.client.patch_run(self.config.run, status="running")
        except ServiceUnreachable as error:
            if not resumed:
                raise
            log.warning("the service is away; the run goes on without it: %s", error)
        with whole_file(self.home / "run.json") as file:
            file.write(json.dumps({"name": self.config.run, **row}, indent=1).encode())
        failpoint("run.after_note")
        self.metrics = MetricLog(self.home, self.client, self.config.run)
        self.publisher = Publisher(self.home / "policies", self.client, self.config.run)
        fields = {
            "role": "train",
            "run": self.config.run,
            "host": self.world.host,
            "pid": os.getpid(),
            "state": "running",
        }
        self.heartbeat = Heartbeat(self.client, f"train-{self.config.run}", fields, self._counters)
        self.snapshots(data)

    def _create(self, row: dict[str, Any], claim: str, resumed: bool) -> None:
        assert self.client is not None
        try:
            self.client.create_run(self.config.run, "train", exist_ok=resumed, **row)
        except Conflict:
            # Ours after all, if a life of this run died between making the row and noting it.
            if (self.client.run(self.config.run).config or {}).get("claim") != claim:
                raise

    @property
    def wish(self) -> int:
        """What somebody asks of this run through the service."""
        if self.client is None:
            return GO
        return {"stop": STOP, "drain": STOP, "pause": PAUSE}.get(self.heartbeat.command, GO)

    def log(self, update: int, values: Mapping[str, float]) -> None:
        if self.client is None:
            return
        self._newest = dict(values)
        self.metrics.log(update, values)
        last = update == self.config.updates
        if time.monotonic() - self._said > 2.0 or last:
            self._said = time.monotonic()
            self.say(
                f"update {update}/{self.config.updates}  loss {values.get('loss/total', 0.0):.4g}"
                f"  {values['progress/updates_per_second']:.1f} updates/s"
            )

    def publish(self, agent: Agent, update: int, data: Data) -> int:
        if self.client is not None:
            metadata = {
                "run": self.config.run,
                "snapshot": data.views[-1].manifest.snapshot,
                "git_commit": self.info.git_commit,
            }
            self.publisher.publish(agent, update, metadata, {"training": to_json(self.config)})
        return update

    def snapshots(self, data: Data) -> None:
        if self.client is None:
            return
        spoiled = sorted(set().union(*data.left_out))
        changes: dict[str, Any] = {"snapshots": data.snapshots}
        if spoiled:
            changes["notes"] = f"left out, unreadable: {', '.join(spoiled)}"
            changes["tags"] = ["unreadable-shards"]
        try:
            self.client.patch_run(self.config.run, **changes)
        except StepwellError as error:
            log.warning("the run's row does not know the new snapshot yet: %s", error)

    def say_state(self, state: str) -> None:
        if self.client is not None and state != self._state:
            self._state = state
            self.heartbeat.say(state=state)

    def close(self, status: str) -> None:
        if self.client is None or self._ended or not hasattr(self, "heartbeat"):
            return
        self._ended = True
        patience = self.config.schedule.farewell
        delivered = self.metrics.close(patience)
        delivered = self.publisher.close(patience) and delivered
        state = {"finished": "stopped", "stopped": "stopped"}.get(status, "failed")
        self.heartbeat.close(state=state, last_error=self.error[:20_000])
        try:
            self.client.patch_run(self.config.run, status=status, error=self.error[:20_000] or None)
        except StepwellError as error:
            log.warning("the run's row does not say yet that it %s: %s", status, error)
        if not delivered:
            log.warning("not all was delivered; run the same command again once the service is up")

    def _counters(self) -> dict[str, float]:
        rate = self._newest.get("progress/updates_per_second", 0.0)
        return {"updates": float(self.update), "updates_per_second": rate}


def _claim(home: Path) -> str:
    """A random word that this folder alone knows, by which it finds its own row again."""
    path = home / "claim"
    if not path.exists():
        with whole_file(path) as file:
            file.write(uuid.uuid4().hex.encode())
    return path.read_text()
