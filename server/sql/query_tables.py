"""The tables of one query, created in the SQL worker from the service's catalog."""

from __future__ import annotations

from typing import Any

from stepwell._sql import literal, quoted

RESERVED = frozenset({"main", "memory", "temp", "system", "information_schema", "pg_catalog", "q"})
"""Schema names that DuckDB reserves: for such a dataset set `dataset` in the request."""


def merged(known: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The catalog after these changes (server/sql/catalog.py)."""
    if changes["whole"]:
        return changes
    gone = set(changes["gone"])
    datasets = {n: entry for n, entry in known["datasets"].items() if n not in gone}
    return {
        "tables": {**known["tables"], **changes["tables"]},
        # Sorted by name, as all at once are: the first of equals gives `steps` its columns.
        "datasets": dict(sorted((datasets | changes["datasets"]).items())),
        "lost": changes["lost"],
        "common": changes["common"],
    }


def make_tables(
    connection: Any,
    wanted: frozenset[tuple[str, str]],
    catalog: dict[str, Any],
    request: dict[str, Any],
    *,
    numbered: bool = False,
    only_steps: frozenset[str] | None = None,
) -> list[dict[str, Any]]:
    """Create the tables that the query names, allow exactly their files, then lock the settings.

    `numbered`: the `id` of a trajectory is its `_pk`, so that text is neither read nor joined.
    `only_steps`: datasets of which bare `steps` can return rows (dataset_filter.py); None for all.
    Returns the damaged files that are left out of the steps that it names, and what the index lost.
    """
    names = {name for schema, name in wanted if schema in ("", "main")}
    schemas = {schema for schema, name in wanted if name == "steps"} - RESERVED
    dataset = request.get("dataset")
    bare = "steps" in names
    tables = {t: v for t, v in catalog["tables"].items() if t in names}
    chosen = {
        name: entry
        for name, entry in catalog["datasets"].items()
        if name in schemas
        or (bare and name == dataset)
        or (bare and dataset is None and (only_steps is None or name in only_steps))
    }
    if chosen or request["form"] == "rows" or "annotations" in tables:
        # First: annotations are those of living trajectories.
        tables = {"trajectories": catalog["tables"]["trajectories"], **tables}
    files = [file for entry in (*tables.values(), *chosen.values()) for file in entry["files"]]
    connection.execute(f"SET allowed_paths = [{', '.join(map(_stored, files))}]")
    for name, entry in tables.items():
        connection.execute(f"CREATE VIEW _all_{name} AS {_table_sql(entry)}")
        columns = [quoted(c[0]) for c in entry["columns"] if not c[0].startswith("_")]
        where = ""
        if name == "trajectories":
            columns = ["_pk AS id" if numbered and c == '"id"' else c for c in columns]
            where = where_dataset(request.get("only"))
        elif name == "annotations":
            where = " WHERE trajectory IN (SELECT id FROM _all_trajectories)"
        connection.execute(
            f"CREATE VIEW {name} AS SELECT {', '.join(columns)} FROM _all_{name}{where}"
        )
    # A view opens its files: none is created for datasets that only the bare `steps` reads.
    one_by_one = [name for name in chosen if name in schemas or name == dataset]
    views = {name: f"_steps_{number}" for number, name in enumerate(one_by_one)}
    for name in views:
        connection.execute(f"CREATE VIEW {views[name]} AS {_steps_sql(chosen[name])}")
        if name in schemas:
            connection.execute(f"CREATE SCHEMA {quoted(name)}")
            connection.execute(
                f"CREATE VIEW {quoted(name)}.steps AS SELECT * FROM main.{views[name]}"
            )
    if bare:
        if dataset in views:
            bare_steps = f"SELECT * FROM {views[dataset]}"
        else:
            possible = chosen.keys() if only_steps is None else chosen.keys() & only_steps
            bare_steps = _bare_steps([chosen[name] for name in sorted(possible)], catalog)
        connection.execute(f"CREATE VIEW steps AS {bare_steps}")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    left_out = {
        (name, file): count for name, entry in chosen.items() for file, count in entry["excluded"]
    }
    for table, missing in catalog["lost"].items():
        for name, file, count in missing:
            asked = table in names if table != "steps" else name in schemas
            if asked or (table == "steps" and bare and dataset in (None, name)):
                left_out[name, file] = count
    return [
        {"dataset": name, "file": file, "trajectories": count}
        for (name, file), count in left_out.items()
    ]


def _table_sql(entry: dict[str, Any]) -> str:
    columns = entry["columns"]
    if not entry["files"]:
        return _empty(columns)
    names = ", ".join(quoted(name) for name, _ in columns)
    return f"SELECT {names} FROM read_parquet([{', '.join(map(_stored, entry['files']))}])"


def _steps_sql(entry: dict[str, Any]) -> str:
    """Rows of the shards whose trajectory is alive, joined by file name and number in the file.

    DuckDB takes the first file's number of rows for that of every file. So the first must have the
    most: where steps seem to be fewer than trajectories, the join holds them all in memory.
    """
    if not entry["files"]:
        return _empty([(name, kind) for name, kind, _ in entry["columns"]])
    columns = ", ".join(f"{expr} AS {quoted(name)}" for name, _, expr in entry["columns"])
    files = ", ".join(map(_stored, entry["files"]))
    return (
        f"SELECT {columns} FROM read_parquet([{files}], filename = '_file') AS s"
        " JOIN _all_trajectories AS t ON s._file = t._file AND s.traj_idx = t.traj_idx"
    )


def _bare_steps(chosen: list[dict[str, Any]], catalog: dict[str, Any]) -> str:
    """Steps of `chosen`, with the columns that all datasets with data have in common."""
    common = _common_columns(catalog)
    full = [entry for entry in chosen if entry["files"]]
    if not full:
        return _empty(common)
    full.sort(key=lambda entry: -entry["most_rows"])
    # One scan of all files, not one per dataset: a GROUP BY takes megabytes for every scan.
    scans: dict[tuple[str, ...], list[str]] = {}
    for entry in full:
        columns = {(name, kind): expr for name, kind, expr in entry["columns"]}
        scans.setdefault(tuple(columns[c] for c in common), []).extend(entry["files"])
    return " UNION ALL ".join(
        _steps_sql(
            {
                "files": files,
                "columns": [(*c, expr) for c, expr in zip(common, exprs, strict=True)],
            }
        )
        for exprs, files in scans.items()
    )


def _common_columns(catalog: dict[str, Any]) -> list[tuple[str, str]]:
    """In the order of the dataset whose first shard has the most rows."""
    full = [entry for entry in catalog["datasets"].values() if entry["files"]]
    if not full:
        return [(name, kind) for name, kind in catalog["common"]]
    first = max(full, key=lambda entry: entry["most_rows"])
    columns = [(name, kind) for name, kind, _ in first["columns"]]
    # Most datasets have one of a few layouts.
    layouts = {tuple((name, kind) for name, kind, _ in entry["columns"]) for entry in full}
    return [column for column in columns if all(column in layout for layout in layouts)]


def where_dataset(only: str | None) -> str:
    """Restricts a selection for one dataset to that dataset's trajectories."""
    return f" WHERE dataset = {literal(only)}" if only else ""


def _empty(columns: list[Any]) -> str:
    typed = ", ".join(f"CAST(NULL AS {kind}) AS {quoted(name)}" for name, kind in columns)
    return f"SELECT {typed} WHERE false"


def _stored(file: str) -> str:
    return literal(f"stored://{file}")  # equals `_file` of a trajectory
