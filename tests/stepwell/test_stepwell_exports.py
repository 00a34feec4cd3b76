"""What `import stepwell` is: light, and exactly what its __all__ lists."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import stepwell
from stepwell import cli

ROOT = Path(stepwell.__file__).parents[1]
HEAVY = [
    "torch",
    "fastapi",
    "starlette",
    "sqlalchemy",
    "duckdb",
    "gymnasium",
    "streamlit",
    "pandas",
]


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return {name.split(".")[0] for name in done.stdout.split()}


def test_importing_stepwell_is_light():
    """The words alone bring numpy and little else; the client brings Arrow and HTTP."""
    loaded = modules_after("import stepwell")
    assert not loaded & {*HEAVY, "pyarrow", "httpx2", "pydantic", "rich"}
    assert "numpy" in loaded


@pytest.mark.parametrize(
    "statement",
    [
        "from stepwell import Client, Outbox",
        "import stepwell.testing",
        "import stepwell.cli",
        "import workbench.commands.sql, workbench.commands.imports, workbench.commands.status",
    ],
)
def test_nothing_in_the_sdk_loads_anything_heavy(statement):
    assert not modules_after(statement) & set(HEAVY)


def test_the_command_line_loads_nothing_until_a_command_is_chosen():
    assert not modules_after("import stepwell.cli") & {"pyarrow", "httpx2", "pydantic", "rich"}


def test_all_is_sorted_and_honest():
    """Every listed name is there, and every public class or function of the package is listed."""
    assert stepwell.__all__ == sorted(stepwell.__all__)
    for name in stepwell.__all__:
        assert getattr(stepwell, name).__name__ == name
    public = {
        name
        for name, value in vars(stepwell).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__.startswith("stepwell")
    }
    assert public <= set(stepwell.__all__)
    assert set(stepwell.__all__) <= set(dir(stepwell))


def test_every_error_is_exported_and_drawn():
    from stepwell import errors

    tree = {n for n, v in vars(errors).items() if inspect.isclass(v) and issubclass(v, Exception)}
    assert tree <= set(stepwell.__all__)
    assert all(name in (errors.__doc__ or "") for name in tree)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="Clinet"):
        stepwell.Clinet  # noqa: B018


def test_the_version_is_the_package_s():
    assert stepwell.__version__.count(".") == 2


def test_each_command_of_the_sdk_can_be_loaded():
    """A table of strings is only as good as the names in it."""
    import importlib

    for name, command in cli.COMMANDS.items():
        module, function = command.target.split(":")
        if not command.extra:
            assert callable(getattr(importlib.import_module(module), function)), name
        assert (ROOT / f"{module.replace('.', '/')}.py").parent.is_dir(), name
