"""The documentation is tested: routes, codes, columns, and every example in it."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import httpx2
import pytest

from stepwell import Box, EnvSpec
from stepwell.testing import make_trajectory
from tests.scripts import run_script

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
GUIDE = sorted((DOCS / "guide").glob("*.md"))
# What FastAPI itself serves, besides the service's routes.
OWN = {"GET /openapi.json", "GET /docs", "GET /docs/oauth2-redirect", "GET /redoc"}


def blocks(name: str, language: str) -> list[str]:
    """The fenced code blocks of a document."""
    text = (REFERENCE / name).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def first_line(block: str) -> str:
    return block.strip().splitlines()[0][:60]


# --- http.md ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(service) -> set[str]:
    document = httpx2.get(f"{service.url}/openapi.json", timeout=60).json()
    return {
        f"{method.upper()} {path}"
        for path, methods in document["paths"].items()
        for method in methods
    } - OWN


@pytest.fixture(scope="module")
def documented() -> set[str]:
    text = (REFERENCE / "http.md").read_text().partition("\n## Rights")[0]
    return set(re.findall(r"^\| `([A-Z]+ /\S*)` \|", text, re.MULTILINE))


def test_every_route_of_the_service_is_documented(served, documented):
    assert len(served) > 40
    assert not served - documented


def test_no_documented_route_is_invented(served, documented):
    known = served | {route.replace("GET ", "HEAD ") for route in served}
    assert not documented - known


def test_every_error_code_is_documented():
    """Codes are promises to programs: one that docs/reference/http.md does not list is a defect."""
    text = (REFERENCE / "http.md").read_text()
    raised: set[str] = set()
    for path in (ROOT / "server").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            values = [a.value for a in node.args[1:2] if isinstance(a, ast.Constant)]
            if name == "ProblemError":
                raised |= {v for v in values if isinstance(v, str)}
    assert len(raised) > 15
    assert not {code for code in raised if f"`{code}`" not in text}


# --- sql.md -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def my_data(service):
    """A dataset as the examples of docs/reference/sql.md expect it."""
    spec = EnvSpec.of(Box((2,)), Box((2,), low=-1.0, high=1.0), env="my-robot")
    client = service.client()
    client.create_dataset("my-data", spec, exist_ok=True)
    sent = [
        make_trajectory(spec, length=10 + i, seed=i, tags=("good",), metrics={"height": i / 2})
        for i in range(4)
    ]
    client.post("my-data", sent, spec=spec, wait_sealed=True)
    return client


@pytest.mark.parametrize("query", blocks("sql.md", "sql"), ids=first_line)
def test_every_sql_example_runs(my_data, query):
    result = my_data.sql(query)
    if "metrics where run" in query or re.search(
        r"(?i)from (policies|evaluations|runs|workers|annotations)", query
    ):
        assert result.columns  # nothing has reported in this test
    else:
        assert result.rows


def test_every_table_and_column_is_documented_and_none_is_invented(my_data):
    text = (REFERENCE / "sql.md").read_text()
    sections = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", text, re.DOTALL | re.MULTILINE))
    tables = {t.name: {c.name for c in t.columns} for t in my_data.query_schema().tables}
    plain = {name: columns for name, columns in tables.items() if not name.startswith('"')}
    assert set(sections) == set(plain)
    for name, columns in plain.items():
        written = set(re.findall(r"`(\w+)`", sections[name]))
        assert columns <= written, f"{name}: {columns - written} undocumented"
    listed = re.findall(r"^\| `(\w+)` \|", sections["trajectories"], re.MULTILINE)
    assert set(listed) == plain["trajectories"]


def test_the_note_on_rows_per_trajectory_is_true(my_data):
    rows, transitions, length = my_data.sql(
        "select count(*), count(*) filter (not is_last), "
        "(select sum(length) from trajectories where dataset = 'my-data') from \"my-data\".steps"
    ).rows[0]
    assert transitions == length
    assert (
        rows
        == length + my_data.sql("select count(*) from trajectories where dataset = 'my-data'").one()
    )


# --- the examples in Python -------------------------------------------------------------------

EXAMPLES = [
    pytest.param(name, block, id=f"{name}: {first_line(block)}")
    for name in (
        *("../../README.md", "own_data.md", "trajectory.md", "versions.md", "annotations.md"),
        *("training.md", "collecting.md", "relabeling.md", "torch.md"),
        *(f"../guide/{path.name}" for path in GUIDE),
    )
    for block in blocks(name, "python")
]


def publish_policy(client, run):
    """An untrained policy for Pendulum-v1, the same one each time."""
    import torch

    from amago_model.acting import ActingPolicy
    from amago_model.config import AgentConfig, Spaces
    from amago_model.policy_file import save_policy
    from collector.envs import make
    from collector.interface import interface_of

    spec = interface_of(make("Pendulum-v1"), "Pendulum-v1").spec
    spaces = Spaces.of_spec(spec.to_json())
    config = AgentConfig.from_dict({"trajectory_encoder": {"kind": "identity"}})
    client.create_run(run, "train", exist_ok=True)
    torch.manual_seed(0)
    client.publish_policy(run, 1_000_000, save_policy(ActingPolicy(config, spaces)))


@pytest.mark.parametrize(("name", "block"), EXAMPLES)
def test_every_python_example_runs(service, tmp_path, monkeypatch, name, block):
    if 'load_policy("first")' in block:
        publish_policy(service.client(), "first")
    script = tmp_path / "example.py"
    script.write_text(block)
    run_script(script, [], monkeypatch, folder=tmp_path, url=service.url)


PAGES = [
    *sorted(DOCS.rglob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    ROOT / "examples" / "README.md",
]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", path.read_text()):
        assert (path.parent / target).exists(), f"{path.name} → {target}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_lines_are_short_enough_to_read(path):
    """Paragraphs, list items and rows of tables; code blocks aside."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    long = [line[:60] for line in text.splitlines() if len(line) > 600]
    assert not long, f"{path.name}: split these into sentences, lists or sections: {long}"


@pytest.mark.parametrize("path", GUIDE, ids=lambda path: path.name)
def test_pages_of_the_guide_are_short(path):
    words = len(path.read_text().split())
    assert words <= 1500, f"{path.name} has {words} words; move details to docs/reference/"


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_anchor_is_a_heading_of_its_page(path):
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", path.read_text()):
        page = path.parent / target if target else path
        assert anchor in anchors(page), f"{path.name} → {target}#{anchor}"


def test_the_paths_that_the_readme_names_exist():
    """Above all where each promise is tested."""
    for target in re.findall(r"`([a-z_]+/(?:[a-z_]+/)*)`", (ROOT / "README.md").read_text()):
        assert (ROOT / target).is_dir(), target


def defined(path: Path) -> set[str]:
    """Functions, classes and their methods of a file: "f", "C", "C.m"."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (*functions, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{m.name}" for m in node.body if isinstance(m, functions)}
    return found


def test_every_function_that_the_architecture_names_exists():
    """The lists of `file.py:function` that data passes are true to the code."""
    named = re.findall(r"`([\w/]+\.py):([\w.]+)`", (DOCS / "architecture.md").read_text())
    assert len(named) > 10
    assert not [f"{file}:{name}" for file, name in named if name not in defined(ROOT / file)]


def test_no_command_is_invented():
    """Every `stepwell …` in the documents is a command that exists."""
    from stepwell.cli import COMMANDS

    for path in PAGES:
        for command in re.findall(
            r"(?:^    |`|&& )stepwell ([a-z]+)", path.read_text(), re.MULTILINE
        ):
            assert command in COMMANDS, f"{path.name}: stepwell {command}"


SETTINGS = [("train",), ("collect",), ("evaluate",)]


def command_lines() -> dict[tuple[str, ...], dict[str, str]]:
    """(command[, action]) → {option: page} of every indented command line in the documents."""
    actions = ("datasets", "versions", "trajectories", "runs", "workers")
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for path in PAGES:
        text = re.sub(r"\\\n\s*", " ", path.read_text())
        text = text.replace("accelerate launch -m trainer.main", "stepwell train")
        for line in re.findall(r"^    (?:.*&& )?stepwell (.*)$", text, re.MULTILINE):
            words = shlex.split(line, comments=True)
            command = tuple(words[: 2 if words[0] in actions else 1])
            for option in (w.split("=")[0] for w in words if w.startswith("--")):
                # `stepwell run` passes settings on: --train.updates is --updates of `train`.
                part, _, rest = option.removeprefix("--").partition(".")
                passed_on = command == ("run",) and rest and (part,) in SETTINGS
                of, name = ((part,), f"--{rest}") if passed_on else (command, option)
                found.setdefault(of, {})[name] = path.name
            found.setdefault(command, {})
    return found


@pytest.mark.parametrize("command", command_lines(), ids=" ".join)
def test_no_option_is_invented(command, capsys):
    """What a page tells people to type is an option of that command."""
    from stepwell import cli

    with pytest.raises(SystemExit):
        cli.main([*command, "--help-all" if command in SETTINGS else "--help"])
    known = set(re.findall(r"--[a-z][a-z0-9.-]*", capsys.readouterr().out)) | {"--config"}
    invented = {o: page for o, page in command_lines()[command].items() if o not in known}
    assert not invented


@pytest.mark.parametrize("block", blocks("training.md", "toml"), ids=first_line)
def test_every_config_file_of_a_trainer_is_accepted(block, tmp_path):
    from trainer.options import resolve

    (tmp_path / "x.toml").write_text(block)
    config = resolve(["offline", "--config", str(tmp_path / "x.toml")]).config
    assert config.updates == 2000 or len(config.sources) == 2


@pytest.mark.parametrize("block", blocks("collecting.md", "toml"), ids=first_line)
def test_every_config_file_of_a_collector_is_accepted(block, tmp_path):
    from collector.config import CollectConfig, parse

    (tmp_path / "x.toml").write_text(block)
    argv = ["--config", str(tmp_path / "x.toml"), "--env", "E", "--dataset", "d", "--policy", "p"]
    assert parse(CollectConfig, argv, "x").epsilon.start == 0.2


def test_every_recipe_is_documented():
    from trainer.recipes import RECIPES

    text = (REFERENCE / "training.md").read_text()
    assert not {name for name in RECIPES if f"`{name}`" not in text}


def test_every_relabeler_and_its_fields_are_documented():
    from trainer.data.relabel import registered

    text = (REFERENCE / "relabeling.md").read_text()
    for name, kind in registered().items():
        if kind.__module__.startswith("trainer."):
            assert f"### `{name}`" in text
            assert not {field for field in kind.model_fields if f"`{field}`" not in text}


@pytest.mark.parametrize("block", blocks("relabeling.md", "toml"), ids=first_line)
def test_every_config_file_of_relabelers_is_accepted(block, tmp_path):
    from trainer.data.relabel import make_relabelers
    from trainer.options import resolve

    (tmp_path / "x.toml").write_text(block)
    config = resolve(["offline", "--config", str(tmp_path / "x.toml")]).config
    assert make_relabelers(config.data.relabel)


# --- rights -----------------------------------------------------------------------------------


def test_the_table_of_rights_is_that_of_the_code():
    """To write it again: python -m server.rights --write"""
    from server.rights import DOCUMENT, RIGHTS, with_table

    text = DOCUMENT.read_text()
    assert text == with_table(text)
    for right in RIGHTS:
        assert f"| `{right.method} {right.path}` |" in text.partition("## Rights")[2]


def test_every_counted_action_is_documented():
    """docs/reference/http.md names the actions that have one row a day, and no other."""
    counted = set()
    for path in (ROOT / "server").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "count_audit":
                action = node.args[2]
                names = ast.walk(action) if not isinstance(action, ast.Name) else ()
                counted |= {n.value for n in names if isinstance(n, ast.Constant)}
    counted |= {"run.change", "run.heartbeat"}
    section = (
        (REFERENCE / "http.md").read_text().partition("## The audit log")[2].partition("\n## ")[0]
    )
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert set(re.findall(r"`(\w+\.\w+)`", " ".join(rows))) == counted
