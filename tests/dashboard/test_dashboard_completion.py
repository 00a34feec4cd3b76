"""Completion in the SQL console: which words are offered where, and that all of them are SQL."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import duckdb
import pytest

import dashboard
from dashboard import completion
from stepwell import Box, Client, Discrete, EnvSpec
from tests.dashboard.conftest import Page, no_traceback

SCRIPT = Path(dashboard.__file__).with_name("completion.js")
SPEC = EnvSpec.of({"vector": Box((2,)), "cam/left": Box((4, 4), dtype="uint8", low=0, high=255)},
                  Discrete(3), env="Toy-v0")  # fmt: skip


@pytest.fixture
def tables(client: Client, name: str) -> Any:
    client.create_dataset(name, SPEC)
    client.create_dataset(f"{name}-2", EnvSpec.of(Box((1,)), Discrete(2)))
    return client.query_schema().tables


def offers(words: dict[str, Any], *texts: str) -> list[list[str]]:
    """The texts that completion.js would insert, with the caret at each `|`."""
    program = (
        f"import {{ complete }} from {json.dumps(SCRIPT.as_uri())};"
        f"const words = {json.dumps(words)}; const out = [];"
        f"for (const text of {json.dumps(texts)}) {{ const at = text.indexOf('|');"
        "out.push(complete(text.replace('|', ''), at, words).items.map((i) => i.insert)); }"
        "console.log(JSON.stringify(out));"
    )
    found: list[list[str]] = run_script(program)
    return found


def run_script(program: str) -> Any:
    """What a JavaScript program prints, which is JSON."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed, which runs scripts of pages outside of a browser")
    command = [node, "--experimental-default-type=module", "--input-type=module", "-e", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_parts_of_a_query_have_colours() -> None:
    cases: dict[str, list[list[str]]] = {
        "": [],
        "select x": [["keyword", "select"]],
        "'it''s' -- no 'text": [["string", "'it''s'"], ["comment", "-- no 'text"]],
        '"a \'b" /* open': [["name", '"a \'b"'], ["comment", "/* open"]],
        "'open\nselect 1": [["string", "'open\nselect 1"]],
        "avg (x1) IN (1e-3)": [["function", "avg"], ["keyword", "IN"], ["number", "1e-3"]],
        "é ü=$n_1": [["parameter", "$n_1"]],
    }
    module = json.dumps(SCRIPT.with_name("colours.js").as_uri())
    keywords = [word for words in completion.KEYWORDS for word in words.split()]
    found = run_script(
        f"import {{ tokens }} from {module};"
        f"const keywords = new Set({json.dumps(keywords)});"
        f"const texts = {json.dumps(list(cases))};"
        "console.log(JSON.stringify(texts.map((text) => tokens(text, keywords))));"
    )
    for (text, coloured), parts in zip(cases.items(), found, strict=True):
        assert [part for part in parts if part[0]] == coloured, text
        assert "".join(part for _, part in parts) == text, "nothing is lost, and nothing twice"
        assert {kind for kind, _ in coloured} <= set(completion.COLOURS)


def test_columns_tables_functions_and_datasets_are_offered_where_they_fit(
    tables: Any, name: str
) -> None:
    mine = f'"{name}".steps'
    words = completion.words(tables, "", name)
    (plain, alias, table, field, steps, dataset, other, comment, number, quoted, cte) = offers(
        words,
        "SELECT len| FROM trajectories",
        "SELECT t.le| FROM trajectories AS t",
        f"SELECT t FROM {name[:6]}|",
        f"SELECT obs.| FROM {mine}",
        f'SELECT t FROM "{name}".|',
        f"SELECT 1 FROM trajectories WHERE dataset = '{name[:6]}|'",
        "SELECT 1 FROM trajectories WHERE env = 'len|",
        "SELECT 1 -- len|",
        "SELECT 12|",
        f'SELECT t FROM "{name[:6]}|',
        "SELECT x.rew| FROM steps x WHERE 'a -- ''b' <> ''",
    )
    assert plain[0] == "length" and "len(" in plain and "LEFT JOIN" not in plain
    assert alias == ["length"]
    assert mine in table
    assert sorted(field) == ['"cam/left"', "vector"], (
        "fields of a struct, quoted where they must be"
    )
    assert steps == ["steps"]
    assert f"'{name}" in dataset, "without the quote that stands there already"
    assert other == comment == number == []
    assert mine in quoted
    assert cte == ["reward"]


def test_every_word_offered_is_known_to_duckdb() -> None:
    known = {
        row[0] for row in duckdb.sql("SELECT function_name FROM duckdb_functions()").fetchall()
    }
    grammar = {"if", "coalesce", "nullif", "cast", "try_cast"}
    assert set(completion.FUNCTIONS) - known - grammar == set()
    listed = {row[0] for row in duckdb.sql("SELECT keyword_name FROM duckdb_keywords()").fetchall()}
    words = {word.lower() for keyword in completion.KEYWORDS for word in keyword.split()}
    assert words - listed == set()


def test_columns_need_no_quotes_but_those_that_get_them(client: Client, tables: Any) -> None:
    for table in tables:
        if not table.name.endswith("steps"):
            names = [c.name if re.fullmatch(r"[a-z_]\w*", c.name) else f'"{c.name}"'
                     for c in table.columns]  # fmt: skip
            client.sql(f"SELECT {', '.join(names)} FROM {table.name} LIMIT 0")


def test_of_very_many_datasets_only_some_columns_are_sent(tables: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(completion, "MOST_TABLES", 0)
    own = next(t for t in tables if t.name.startswith('"'))
    name = own.name.removesuffix(".steps").strip('"')
    found = completion.words(tables, "", None)
    assert name in found["datasets"] and own.name not in [t["name"] for t in found["tables"]]
    found = completion.words(tables, f"SELECT * FROM {own.name}", None)
    assert own.name in [t["name"] for t in found["tables"]]
    # Bare `steps` has the columns of the dataset that the page says.
    (common,) = [t for t in tables if t.name == "steps"]
    for chosen, table in ((name, own), (None, common)):
        (steps,) = [t for t in completion.words(tables, "", chosen)["tables"]
                    if t["name"] == "steps"]  # fmt: skip
        assert [c["name"] for c in steps["columns"]] == [c.name for c in table.columns]


def test_the_console_draws_it(service: Any, name: str, page: Page) -> None:
    drawn = page("console", service.url)
    no_traceback(drawn)
    assert drawn.text_area(key="q").value
    list_, colours = (str(one.proto) for one in drawn.get("bidi_component"))
    assert "trajectories" in list_ and "--st-blue-text-color" in colours
    assert ".st-key-q textarea" in list_ and ".st-key-q textarea" in colours
