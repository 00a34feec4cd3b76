"""`stepwell datasets ratio`: what each trainer keeps, and how to change it."""

from __future__ import annotations

import pytest

from stepwell import Client
from stepwell.messages import SampleRatio
from stepwell.testing import make_spec
from workbench.commands.datasets import main


def test_a_new_ratio_replaces_both_unless_the_lower_is_named(
    client: Client, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPWELL_URL", client.url)
    client.create_dataset(name, make_spec())
    ratio = SampleRatio(samples_per_insert=4.0, buffer=50.0, min_samples_per_insert=1.0)
    client.report_samples(name, "r", 0, ratio)
    assert main(["ratio", name]) == 0 and "1 … 4" in capsys.readouterr().out

    def changed(*words: str) -> tuple[float, float]:
        assert main(["ratio", name, "r", *words]) == 0
        (found,) = client.consumers(name)
        return found.ratio.least, found.ratio.samples_per_insert

    assert changed("--samples-per-insert", "8", "--min-samples-per-insert", "2") == (2.0, 8.0)
    assert changed("--buffer", "60") == (2.0, 8.0)
    assert changed("--samples-per-insert", "0.5") == (0.5, 0.5)
