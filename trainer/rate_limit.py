"""The ratio of drawn samples to collected steps (data.ratio), kept together with the service.

A thread reports how many windows were drawn, and learns how many may be (SampleRatio in
stepwell/messages.py). Between two reports, an update compares two integers. Collectors read the
same numbers, so whichever side is ahead waits for the other.
"""

from __future__ import annotations

import contextlib

from stepwell._background import BackgroundLoop
from stepwell._wording import pluralize
from stepwell.client import Client
from stepwell.errors import NotFound, StepwellError
from stepwell.messages import Consumer, SampleRatio
from trainer.config import TrainConfig

POLL = 0.5
"""Seconds between two reports."""


def sample_ratio(config: TrainConfig) -> SampleRatio:
    """The ratio of data.ratio, in windows per step, with its default buffer."""
    ratio = config.data.ratio
    assert ratio is not None
    per_insert = ratio.per_insert(config.data.batch)
    buffer = ratio.buffer or max(1.0, 1000 * per_insert, 2.0 * config.data.batch)
    low = ratio.min_updates_per_step
    return SampleRatio(
        samples_per_insert=per_insert,
        buffer=buffer,
        min_size=ratio.min_size,
        min_samples_per_insert=None if low is None else low * config.data.batch,
    )


class RateLimiter:
    """Says whether an update may draw its batch. On rank 0 only.

    `update` is the number of updates made so far. With `keep`, a ratio that the service has for
    this run stays, for instance one that was changed while the run was on; else that of the config
    is set. While the service is unreachable, updates continue up to the last answer's limit.
    """

    def __init__(self, client: Client, config: TrainConfig, update: int, *, keep: bool) -> None:
        self._client, self._config, self.update = client.with_options(timeout=5.0), config, update
        self._ratio = sample_ratio(config)
        self._set = not keep
        self._answer: Consumer | None = None
        with contextlib.suppress(StepwellError):
            self._report()
        self._loop = BackgroundLoop(
            "ratio",
            self._report,
            every=POLL,
            at_once=False,
            longest_wait=5.0,
            expected=(StepwellError,),
        ).start()

    def may_draw(self) -> bool:
        """Whether the next update may draw its batch now."""
        answer, batch = self._answer, self._config.data.batch
        return answer is not None and (self.update + 1) * batch <= answer.samples_until

    @property
    def reason(self) -> str:
        """Why the next update may not draw."""
        answer = self._answer
        if answer is None:
            return self._loop.trouble or "the service has not answered yet"
        ratio = answer.ratio
        if answer.inserted < ratio.min_size:
            return (
                f"{answer.inserted:,} of {pluralize(ratio.min_size, 'step is', 'steps are')} there "
                "(data.ratio.min_size)"
            )
        return (
            f"{pluralize(answer.inserted, 'step was', 'steps were')} collected, and "
            f"{ratio.samples_per_insert:g} samples per step allow {answer.samples_until:,}, less "
            "than one more batch (data.ratio)"
        )

    def metrics(self) -> dict[str, float]:
        """The ratio so far, counted since the run began to keep it."""
        answer = self._answer
        if answer is None:
            return {}
        return {
            "ratio/samples_ahead": self.update * self._config.data.batch - answer.samples_until,
            "ratio/inserted_steps": answer.inserted,
            "ratio/samples_per_insert": answer.ratio.samples_per_insert,
        }

    def close(self) -> None:
        """Stop, and let collectors continue without this run."""
        self._loop.stop(5.0)
        with contextlib.suppress(StepwellError):  # the service forgets it after a while
            self._client.delete_consumer(self._config.dataset, self._config.run)

    def _report(self) -> None:
        samples = self.update * self._config.data.batch
        name, run = self._config.dataset, self._config.run
        if not self._set:
            try:
                self._answer = self._client.report_samples(name, run, samples)
                return
            except NotFound:
                pass  # never registered, or the service has lost its index
        self._answer = self._client.report_samples(name, run, samples, self._ratio)
        self._set = False
