"""`stepwell compare` whole: killed, interrupted, continued, with a run that fails."""

import contextlib
import io
import json
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from stepwell import Box, Client, EnvSpec, cli
from stepwell.testing import wait_until
from tests.scripts import status_of
from workbench.analysis.comparison import TABLE_SQL
from workbench.analysis.confidence_intervals import bootstrap_grouped_mean

SPEC = EnvSpec.of(Box((3,)), Box((1,), low=-2.0, high=2.0), env="Pendulum-v1")
NAME = "tiny"
TWO_POLICIES = ("--set", "bc.schedule.publish_every=3")
RUNS = [f"{NAME}-{recipe}-{seed}" for recipe in ("bc", "bc10") for seed in (0, 1)]


class Comparison:
    """Starts `stepwell compare` on a tiny dataset, in a folder of its own."""

    def __init__(self, url: str, folder: Path):
        self.url, self.folder, self.report = url, folder, folder / "report.json"

    def words(self, *words: str, env: str = "Pendulum-v1", name: str = NAME) -> list[str]:
        command = ["compare", "tiny-data", "--env", env, "--name", name, "--url", self.url]
        command += ["--json", str(self.report), "--updates", "5", "--episodes", "2"]
        return [*command, "--jobs", "2", "--nice", "0", *words]

    def start(self, *words: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", "stepwell.cli", *self.words(*words)],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self, *words: str, **options: str) -> tuple[int, str]:
        """Run it in this process, to its end."""
        said = io.StringIO()
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(said),
        ):
            patch.chdir(self.folder)
            status = status_of(cli.main, self.words(*words, **options))
        return status, said.getvalue()

    def log(self, job: str, name: str = NAME) -> str:
        path = self.folder / "comparisons" / name / "logs" / f"{job}.log"
        return path.read_text() if path.exists() else ""


@pytest.fixture(scope="module")
def service_client(service) -> Iterator[Client]:
    with Client(service.url) as client:
        client.create_dataset("tiny-data", SPEC)
        rng = np.random.default_rng(0)
        for _ in range(10):
            client.add(
                "tiny-data",
                obs=rng.normal(size=(21, 3)).astype(np.float32),
                actions=rng.uniform(-2, 2, (20, 1)).astype(np.float32),
                rewards=rng.normal(size=20).astype(np.float32),
                terminated=False,
                env="Pendulum-v1",
            )
        client.flush("tiny-data")
        yield client


@pytest.fixture(scope="module")
def comparison(service, service_client: Client, tmp_path_factory) -> Comparison:
    return Comparison(service.url, tmp_path_factory.mktemp("compare"))


@pytest.fixture(scope="module")
def finished(comparison: Comparison, service_client: Client) -> tuple[Comparison, str]:
    """Killed while it trains, then interrupted, then run to its end. What the last one printed."""
    words = ("--recipes", "bc,bc10", "--seeds", "0-1", *TWO_POLICIES)
    process = comparison.start(*words)
    wait_until(lambda: "recipe bc" in comparison.log(RUNS[0]), 120, what="training", pause=0.05)
    process.kill()  # its children live on
    process.communicate()
    process = comparison.start(*words)
    wait_until(lambda: children(process), 120, what="a child", pause=0.05)
    started = children(process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 130, output
    assert "the same command continues" in output
    assert not [child for child in started if child.is_running()]
    status, output = comparison.finish(*words)
    assert status == 0, output
    assert " of 5 updates, 2 at a time: about " in output.partition(" trained, ")[0]
    return comparison, output


def children(process: subprocess.Popen) -> list[psutil.Process]:
    """Its trainers and evaluations."""
    found = []
    for child in psutil.Process(process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "--run" in child.cmdline():
                found.append(child)
    return found


@pytest.mark.long
def test_a_comparison_continues_after_a_kill_and_an_interrupt(finished, service_client: Client):
    """Nothing is done twice: each policy has one score; the run whose parent was killed was not
    started again beside its orphan."""
    comparison, _ = finished
    assert comparison.log(RUNS[0]).count("$ stepwell train") == 1
    runs = {run.name: run for run in service_client.runs() if f"comparison:{NAME}" in run.tags}
    trained = {name for name, run in runs.items() if run.kind == "train"}
    assert trained == set(RUNS)
    assert set(runs) - trained == {f"{name}-eval-5" for name in RUNS} | {f"{NAME}-random"}
    assert {runs[name].status for name in RUNS} == {"finished"}
    for name in RUNS:
        (score,) = service_client.evaluations(run=f"{name}-eval-5")
        assert score.policy == f"{name}/5" and score.seeds == [900_000, 900_001]


def test_table_json_sql_and_picture_agree(finished, service_client: Client):
    comparison, output = finished
    report = json.loads(comparison.report.read_text())
    rows = {row["recipe"]: row for row in report["rows"]}
    assert list(rows) == ["bc", "bc10", "random", "data"]
    query = TABLE_SQL.replace("NAME", NAME, 1)
    means = {row[0]: row[1:3] for row in service_client.sql(query, timeout=60)}
    for recipe in ("bc", "bc10"):
        returns = [
            service_client.evaluations(policy=f"{NAME}-{recipe}-{seed}/5")[0].returns
            for seed in (0, 1)
        ]
        expected = bootstrap_grouped_mean(returns)
        row = rows[recipe]
        assert row["interval"]["low"] == pytest.approx(expected.low)
        assert row["mean"] == pytest.approx(np.mean(returns))
        assert tuple(means[recipe]) == (2, pytest.approx(row["mean"]))
        assert f"{row['mean']:.5g}" in output
    data = "select \"return\" from trajectories where dataset = 'tiny-data' and purpose = 'train'"
    returns = sorted(row[0] for row in service_client.sql(data, timeout=60))
    assert rows["data"]["mean"] == pytest.approx(np.mean(returns))
    # Ten values: the middle half is those at 3 … 6, and half of those at 2 and 7.
    middle = (sum(returns[3:7]) + (returns[2] + returns[7]) / 2) / 5
    assert rows["data"]["iqm"] == pytest.approx(middle) and rows["data"]["episodes"] == 10
    ET.parse(comparison.folder / "comparisons" / NAME / "comparison.svg")


def test_a_run_that_fails_is_reported_and_the_others_stay(finished, service_client: Client):
    """A further recipe, none of whose data exists, and now every policy: of what has been scored,
    nothing is scored again."""
    comparison, _ = finished
    before = [e.policy for e in service_client.evaluations()]
    words = ("--recipes", "bc,recall", "--set", "recall.where=length < 0", "--seeds", "0")
    status, output = comparison.finish(*words, *TWO_POLICIES, "--every-policy")
    assert status == 1, output
    assert "failed: recall, seed 0: 422 empty_selection" in output
    report = json.loads(comparison.report.read_text())
    rows = {row["recipe"]: row for row in report["rows"]}
    assert rows["bc"]["seeds"] == 2 and rows["bc10"]["seeds"] == 2
    assert rows["recall"]["mean"] is None and "empty_selection" in rows["recall"]["problems"][0]
    after = [e.policy for e in service_client.evaluations()]
    assert sorted(after) == sorted([*before, f"{NAME}-bc-0/3"])
    points = {(point["recipe"], point["updates"]): point for point in report["curves"]}
    assert {key: point["seeds"] for key, point in points.items()} == {
        ("bc", 3): 1,
        ("bc", 5): 2,
        ("bc10", 5): 2,
    }
    assert points["bc", 5]["interval"]["value"] == rows["bc"]["mean"]
    ET.parse(comparison.folder / "comparisons" / NAME / "comparison-curves.svg")
    # What another command asked for and lacks is told, and does not fail this one.
    words = ("--recipes", "bc", "--seeds", "0,1", "--episodes", "3")
    status, output = comparison.finish(*words, *TWO_POLICIES)
    assert status == 0 and "failed: bc10, seed 0: not evaluated" in output, output


@pytest.mark.parametrize(
    ("words", "options", "said"),
    [
        (["--recipes", "bcc"], {}, "the nearest known one is 'bc'"),
        (["--recipes", "bc"], {"name": "other", "env": "CartPole-v1"}, "does not fit dataset"),
        (["--recipes", "bc10", "--updates", "9"], {}, "updates = 5, now it is 9"),
        (["--recipes", "bc"], {"env": "CartPole-v1"}, "evaluates in Pendulum-v1"),
        (["--url", "http://127.0.0.1:9"], {}, "no service at"),
    ],
)
def test_what_cannot_work_is_refused_before_any_training(finished, words, options, said):
    comparison, _ = finished
    status, output = comparison.finish(*words, **options)
    assert status in (1, 2) and said in output
    assert "Traceback" not in output
    assert comparison.log("other-bc-0", "other") == ""


def test_further_seeds_are_not_mixed_with_those_on_other_data(finished, service_client: Client):
    """The last test here: the dataset grows."""
    comparison, _ = finished
    service_client.add(
        "tiny-data",
        obs=np.zeros((21, 3), np.float32),
        actions=np.zeros((20, 1), np.float32),
        rewards=np.zeros(20, np.float32),
        terminated=False,
        env="Pendulum-v1",
    )
    status, output = comparison.finish("--recipes", "bc", "--seeds", "0-2", *TWO_POLICIES)
    assert status == 2 and "1 trajectory was added to tiny-data after run tiny-bc" in output
    assert "tiny-bc-2 would learn from other data" in output
    status, output = comparison.finish("--recipes", "bc,bc10", "--seeds", "0-1", *TWO_POLICIES)
    assert status == 0, "nothing new is trained"
