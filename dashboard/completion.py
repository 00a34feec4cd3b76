"""Completion and colours of SQL in one of Streamlit's own text areas: a list that follows the
caret, and a copy of the text in colours behind it.

The text area stays the widget: its text is in the URL, tests drive it, and without the scripts it
is a plain editor. docs/reference/dashboard.md says why it is no editor component.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import streamlit as st

KEYWORDS = (
    *("SELECT", "FROM", "WHERE", "GROUP BY", "ORDER BY", "HAVING", "LIMIT", "OFFSET", "DISTINCT"),
    *("AS", "AND", "OR", "NOT", "IN", "IS NULL", "IS NOT NULL", "BETWEEN", "LIKE", "ILIKE"),
    *("EXISTS", "CASE", "WHEN", "THEN", "ELSE", "END", "JOIN", "LEFT JOIN", "ASOF JOIN", "ON"),
    *("USING", "UNION ALL", "WITH", "OVER", "PARTITION BY", "QUALIFY", "FILTER", "ALL", "DESC"),
    *("ASC", "NULLS LAST", "TRUE", "FALSE", "NULL", "EXCLUDE", "USING SAMPLE"),
)
FUNCTIONS = tuple(
    """
    count sum avg min max median stddev var_samp mode quantile_cont arg_max arg_min any_value first
    last list histogram corr covar_samp regr_slope approx_quantile approx_count_distinct bool_and
    bool_or string_agg row_number rank dense_rank lag lead ntile first_value last_value abs sqrt pow
    exp ln log10 floor ceil round sign greatest least coalesce nullif if isnan isfinite cos sin tan
    atan2 list_contains list_sum list_avg list_min list_max list_transform len list_filter list_sort
    list_distinct list_dot_product array_distance unnest range generate_series map_keys map_values
    element_at struct_pack contains starts_with split_part regexp_matches regexp_extract replace
    lower upper concat concat_ws substring length json_extract json_extract_string to_timestamp
    epoch date_trunc strftime octet_length hash md5 typeof cast try_cast
    """.split()
)
MOST_TABLES = 100
"""Datasets whose columns are sent to the browser; those of others come when a query names them."""
CSS = """
[role=listbox] {
  position: fixed; margin: 0; inset: auto; padding: 0.2rem; max-height: 15rem; overflow: auto;
  min-width: 12rem; max-width: min(32rem, calc(100vw - 8px));
  color: var(--st-text-color); background: var(--st-background-color);
  border: 1px solid var(--st-border-color); border-radius: 0.3rem;
  box-shadow: 0 4px 16px rgb(0 0 0 / 25%); font: 0.85rem/1.5 var(--st-code-font, monospace);
}
[role=option] {
  display: flex; gap: 1.5rem; justify-content: space-between; padding: 0 0.5rem; cursor: pointer;
  white-space: nowrap; border-radius: 0.2rem;
}
[role=option]:hover, [role=option][aria-selected=true] {
  background: var(--st-secondary-background-color);
}
[role=option][aria-selected=true] { box-shadow: inset 3px 0 var(--st-primary-color); }
small { font-size: inherit; opacity: 0.75; }
"""
HTML = '<div role="listbox" aria-label="Completions" popover="manual"></div>'
FIELD = re.compile(r'"((?:[^"]|"")*)" ([^",(]*(?:\([^()]*\))?[^",()]*)')


COLOURS = {
    "keyword": "--st-blue-text-color",
    "function": "--st-violet-text-color",
    "string": "--st-green-text-color",
    "name": "--st-yellow-text-color",
    "parameter": "--st-red-text-color",
    "number": "--st-orange-text-color",
    "comment": "--st-gray-text-color",
}
"""Part of a query → the theme's colour, all of which can be read on the background."""


def draw(key: str, tables: Sequence[Any], query: str, dataset: str | None) -> None:
    """Complete in the text area with the key `key`, and colour its text.

    `tables`: those of the schema, each with `name` and `columns`. `dataset`: the one whose steps
    bare `steps` are.
    """
    selector = {"selector": f".st-key-{key} textarea"}
    colours = {**selector, "keywords": KEYWORDS, "colours": COLOURS}
    with st.container(gap=None):  # neither draws anything in its place
        offered = {**selector, "words": words(tables, query, dataset)}
        _component("completion", HTML, CSS)(key=f"{key}_completion", data=offered)
        _component("colours")(key=f"{key}_colours", data=colours)


@cache
def _component(name: str, html: str = "", css: str | None = None) -> Any:
    script = Path(__file__).with_name(f"{name}.js").read_text()
    return st.components.v2.component(f"stepwell_{name}", html=html, css=css, js=script)


def words(tables: Sequence[Any], query: str, dataset: str | None) -> dict[str, Any]:
    """What completion.js chooses from."""
    own = {t.name.removesuffix(".steps")[1:-1]: t for t in tables if t.name.startswith('"')}
    common = [t for t in tables if not t.name.startswith('"')]
    shown = [
        t for number, (name, t) in enumerate(own.items())
        if number < MOST_TABLES or name == dataset or f'"{name}"' in query
    ]  # fmt: skip
    chosen = own.get(dataset or "")
    return {
        "tables": [
            _table(t.name, (chosen or t) if t.name == "steps" else t) for t in [*common, *shown]
        ],
        "datasets": list(own)[:1000],
        "keywords": KEYWORDS,
        "functions": FUNCTIONS,
    }


def _table(name: str, table: Any) -> dict[str, Any]:
    columns = [
        {
            "name": column.name,
            "type": "STRUCT" if column.type.startswith("STRUCT") else column.type,
            "fields": _fields(column.type),
        }
        for column in table.columns
    ]
    return {"name": name, "columns": columns}


def _fields(kind: str) -> list[dict[str, str]]:
    """'STRUCT("x" FLOAT[2], "y" BLOB)' → its fields."""
    if not kind.startswith("STRUCT("):
        return []
    found = FIELD.findall(kind[len("STRUCT(") : -1])
    return [{"name": name.replace('""', '"'), "type": what.strip()} for name, what in found]
