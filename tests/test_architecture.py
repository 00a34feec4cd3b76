"""The rules of the house: who loads what, in fresh interpreters, and where packages lie."""

import ast
import importlib
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

import amago_model
import stepwell

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = [
    "amago_model",
    "collector",
    "dashboard",
    "migrations",
    "server",
    "stepwell",
    "trainer",
    "workbench",
]

FORBIDDEN = {
    "stepwell": ["torch", "fastapi", "sqlalchemy", "duckdb", "gymnasium", "streamlit", "workbench"],
    "stepwell.client": ["torch", "fastapi", "sqlalchemy", "duckdb", "gymnasium", "workbench"],
    "amago_model": [
        "torch",
        "pyarrow",
        "httpx2",
        "gymnasium",
        "accelerate",
        "stepwell",
    ],
    "server.app": ["torch", "gymnasium", "amago_model", "streamlit"],
    "dashboard.api": ["torch", "gymnasium", "amago_model", "duckdb", "server"],
    # The compiler takes longer to import than everything else of a process that acts.
    "amago_model.agent": [
        "torch._dynamo",
        "pyarrow",
        "httpx2",
        "gymnasium",
        "accelerate",
        "stepwell",
    ],
    # A wrong name is said before torch and environments load.
    "trainer.main": ["torch", "accelerate", "gymnasium", "fastapi", "sqlalchemy", "streamlit"],
    "collector.main": ["torch", "gymnasium"],
    "trainer.loop": ["torch._dynamo", "gymnasium", "fastapi", "sqlalchemy", "streamlit"],
    "collector.collect": ["fastapi", "sqlalchemy", "duckdb", "streamlit", "accelerate"],
    "collector.evaluate": ["fastapi", "sqlalchemy", "duckdb", "streamlit", "accelerate"],
}
TOGETHER = [
    ["stepwell", "stepwell.client"],
    ["amago_model", "amago_model.agent", "collector.collect", "collector.evaluate"],
    ["collector.main", "trainer.main", "trainer.loop"],
    ["server.app"],
    ["dashboard.api"],
]
"""Imported one after the other by one interpreter: what one loads, those after it may load, too."""


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_lie_in_this_repository(package: str) -> None:
    """A stray package of the same name on the path would be imported instead of ours."""
    module = importlib.import_module(package)
    assert module.__file__ is not None
    assert Path(module.__file__).resolve().is_relative_to(ROOT)


@pytest.mark.parametrize("modules", TOGETHER, ids=" ".join)
def test_importing_a_part_loads_nothing_it_must_not(modules: list[str]) -> None:
    """import-linter reads the source; this sees what really gets loaded, also through others."""
    code = "import sys\n" + "".join(
        f"import {module}\n"
        f"print({module!r}, *sorted(set({FORBIDDEN[module]!r}) & set(sys.modules)))\n"
        for module in modules
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == modules
    # Nor does it greet anybody. Streamlit complains where there is no browser.
    assert done.stderr == "" or modules == ["dashboard.api"]


def test_every_part_is_imported() -> None:
    assert sorted(sum(TOGETHER, [])) == sorted(FORBIDDEN)


def test_all_that_the_agent_offers_can_be_had() -> None:
    """What needs torch is loaded when it is asked for, by a table that could go stale."""
    assert set(amago_model.__all__) <= set(dir(amago_model))
    for name in amago_model.__all__:
        assert getattr(amago_model, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = amago_model.Nothing


def test_there_is_one_version() -> None:
    """Told by what is installed, nowhere written twice."""
    installed = importlib.metadata.version("stepwell")
    assert stepwell.__version__ == amago_model.__version__ == installed
    written = [path for path in sources() if f'"{installed}"' in path.read_text()]
    assert written == []


def sources() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def test_no_error_disappears_unseen() -> None:
    """Whoever catches everything hands the error on, or says beside it why it may be dropped."""
    dropped = []
    for path in sources():
        text = path.read_text()
        if "Exception" not in text and "except:" not in text:
            continue
        lines = text.splitlines()
        for handler in ast.walk(ast.parse(text)):
            if isinstance(handler, ast.ExceptHandler) and _catches_everything(handler):
                inside = [node for line in handler.body for node in ast.walk(line)]
                passed_on = any(
                    isinstance(node, ast.Raise)
                    or (isinstance(node, ast.Name) and node.id == handler.name)
                    for node in inside
                )
                excused = re.search(r"# noqa: [A-Z0-9, ]+ \W*[a-z]", lines[handler.lineno - 1])
                if handler.type is None or not (passed_on or excused):
                    dropped.append(f"{path.relative_to(ROOT)}:{handler.lineno}")
    assert dropped == []


def _catches_everything(handler: ast.ExceptHandler) -> bool:
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    names = {kind.id for kind in types if isinstance(kind, ast.Name)}
    return handler.type is None or bool(names & {"Exception", "BaseException"})


def test_no_sleep_of_a_test_stands_for_an_event() -> None:
    """A busy machine takes longer than anybody thought: `stepwell.testing.wait_until` asks until it
    is so. What only spreads work over time says so: "# a moment: why"."""
    slept = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        text = path.read_text()
        if "sleep" not in text:
            continue
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call) or "# a moment: " in lines[node.lineno - 1]:
                continue
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else ""
            name = function.id if isinstance(function, ast.Name) else name
            if name == "sleep" and ast.unparse(node) != "asyncio.sleep(0)":
                slept.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert slept == []


def test_every_top_level_folder_is_in_the_readme() -> None:
    """A newcomer finds each folder in the README's table, and none that is not there."""
    readme = (ROOT / "README.md").read_text()
    tracked = {
        p.name
        for p in ROOT.iterdir()
        if p.is_dir() and not p.name.startswith(".") and (p / "__init__.py").exists()
    } | {"tests", "docs", "examples", "benchmarks", "migrations"}
    missing = [name for name in sorted(tracked) if f"`{name}/`" not in readme]
    assert missing == []


def test_no_environment_variable_is_invented() -> None:
    """A misspelt or renamed one is ignored silently: a test or a benchmark would prove nothing."""
    from server.settings import Settings

    others = "URL TOKEN OUTBOX PARENT FAILPOINT DEBUG OPENAPI_EXAMPLES"
    proofs = "BACKUPS FIRST_TRY FLIPS FLOORS INDEX_FLIPS KILLS SEED SCREENSHOTS SESSIONS"
    words = f"{others} {proofs}".split()
    known = {f"STEPWELL_{name.upper()}" for name in (*Settings.model_fields, *words)}
    for folder in ("tests", "benchmarks", "docs", "examples", "stepwell", "collector", "trainer"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".md"):
                named = set(re.findall(r"\bSTEPWELL_[A-Z_]*[A-Z]\b", path.read_text()))
                assert named <= known, f"{path.relative_to(ROOT)}: {sorted(named - known)}"
