"""A robot's old machine against today's service: `make floors`.

Collectors, and whatever else uses `stepwell` without the service, are to work with Python 3.10 and
the oldest packages that pyproject.toml allows. The venv of these takes a minute and gigabytes, so
`make test` checks only that nothing newer is named in the code (`make lint`).
"""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import torch

from amago_model.acting import ActingPolicy
from amago_model.config import AgentConfig, Spaces
from amago_model.policy_file import save_policy
from collector.envs import make
from collector.interface import interface_of
from stepwell import Client

PYTHON = os.environ.get("STEPWELL_FLOORS", "")
ROOT = Path(__file__).parents[1]
ENV = "CartPole-v1"
RECORD = """
import sys, gymnasium, numpy, pyarrow
from collector.record import record
env = record(gymnasium.make(sys.argv[2]), sys.argv[1])
for seed in range(3):
    env.reset(seed=seed)
    ended = False
    while not ended:
        *_, terminated, truncated, _ = env.step(env.action_space.sample())
        ended = terminated or truncated
env.close()
print(sys.version_info[1], numpy.__version__, pyarrow.__version__)
"""

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="STEPWELL_FLOORS names no old Python: make floors"),
    pytest.mark.timeout(1800),
]


def oldest() -> list[str]:
    """The requirements of a collector at their lower bounds; torch as everywhere, as its older
    wheels bring CUDA."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = project["dependencies"] + extras["agent"] + extras["collector"]
    found = []
    for line in lines:
        bound = re.match(r"([A-Za-z0-9_-]+)>=([0-9.]+)", line)
        if bound and bound[1] != "torch":
            found.append(f"{bound[1]}=={bound[2]}")
    return found


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with the oldest packages."""
    folder = tmp_path_factory.mktemp("floors")
    subprocess.run([PYTHON, "-m", "venv", folder / "venv"], check=True)
    (folder / "oldest.txt").write_text("\n".join(oldest()))
    torch_pin = next(
        line for line in (ROOT / "constraints.txt").read_text().split() if "torch==" in line
    )
    python = folder / "venv" / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, torch_pin], check=True)
    subprocess.run([*pip, "-c", folder / "oldest.txt", f"{ROOT}[collector]"], check=True)
    return python


def run(old: Path, folder: Path, url: str, *words: str) -> str:
    # Not in the checkout, which would be imported in place of what is installed.
    variables = {**os.environ, "STEPWELL_URL": url, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [old, *words], cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_an_old_machine_records_collects_and_evaluates(
    service, client: Client, name: str, old: Path, tmp_path: Path
) -> None:
    said = run(old, tmp_path, service.url, "-c", RECORD, name, ENV)
    minor, numpy, pyarrow = said.split()
    used, bounds = [f"numpy=={numpy}.", f"pyarrow=={pyarrow}."], [f"{x}." for x in oldest()]
    assert all(any(one.startswith(bound) for bound in bounds) for one in used), (used, bounds)
    assert minor == "10" or "3.10" not in PYTHON
    assert client.dataset(name).fifo.trajectories == 3

    client.create_run(f"{name}-run", "train", config={"dataset": name})
    spaces = Spaces.of_spec(interface_of(make(ENV), ENV).spec.to_json())
    small = {"timestep_encoder": {"kind": "any", "d_hidden": 16, "d_output": 16}}
    torch.manual_seed(0)
    policy = save_policy(ActingPolicy(AgentConfig.from_dict(small), spaces), step=100)
    client.publish_policy(f"{name}-run", 1, policy)

    stepwell = ("-m", "stepwell.cli")
    run(old, tmp_path, service.url, *stepwell, "collect", "--env", ENV, "--dataset", name,
        "--policy", f"{name}-run", "--envs", "2", "--vectorization", "async",
        "--episodes", "4")  # fmt: skip
    assert client.dataset(name).fifo.trajectories == 7
    run(old, tmp_path, service.url, *stepwell, "evaluate", "--env", ENV, "--policy",
        f"{name}-run:1", "--episodes", "3")  # fmt: skip
    (scored,) = client.evaluations(env=ENV, policy=f"{name}-run/1")
    assert len(scored.returns) == 3
