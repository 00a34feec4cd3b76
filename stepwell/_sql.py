"""Text of SQL queries."""


def quoted(name: str) -> str:
    """A column or table name as an identifier, whatever characters it has."""
    return '"' + name.replace('"', '""') + '"'


def version_condition(version: str) -> str:
    """The condition over `trajectories` that selects a version, such as "hopper@v3"."""
    named = literal(version)
    return f"id IN (SELECT trajectory FROM version_trajectories WHERE version = {named})"


def literal(text: str) -> str:
    """A SQL string."""
    return "'" + text.replace("'", "''") + "'"
