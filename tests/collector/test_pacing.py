"""Collectors wait for the slowest trainer that lives, counting what they have played since."""

from __future__ import annotations

from typing import Any

from collector.pacing import Pacing
from stepwell.messages import Consumer, SampleRatio


class Service:
    """Answers with `found`."""

    def __init__(self) -> None:
        self.found: list[Consumer] = []

    def with_options(self, **_: Any) -> Service:
        return self

    def consumers(self, name: str) -> list[Consumer]:
        assert name == "d"
        return self.found


def consumer(name: str, inserted: int, until: int, alive: bool = True) -> Consumer:
    return Consumer(
        dataset="d",
        name=name,
        ratio=SampleRatio(samples_per_insert=1, buffer=9),
        samples=3,
        inserted=inserted,
        samples_until=5,
        inserts_until=until,
        may_sample=True,
        may_insert=inserted < until,
        alive=alive,
        created_at=0.0,
        updated_at=0.0,
    )


def test_the_slowest_living_trainer_is_waited_for() -> None:
    service, steps = Service(), [100]
    pacing = Pacing(service, "d", lambda: steps[0])  # type: ignore[arg-type]
    pacing.close()  # asked by hand from here on
    pacing._ask()
    assert not pacing.ahead and not pacing.full, "no trainer keeps a ratio"
    service.found = [
        consumer("dead", 50, 20, alive=False),
        consumer("fast", 50, 90),
        consumer("slow", 50, 60),
    ]
    pacing._ask()
    assert not pacing.ahead
    steps[0] = 109
    assert not pacing.ahead
    steps[0] = 110
    assert pacing.ahead.startswith("slow has drawn 3 samples of 50 steps"), "10 more were permitted"
    assert not pacing.full, "the service has not received them"
    service.found = [consumer("slow", 60, 60)]
    pacing._ask()
    assert pacing.full and pacing.ahead
    service.found = []
    pacing._ask()
    assert not pacing.ahead and not pacing.full
