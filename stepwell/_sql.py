"""Text of SQL queries."""


def quoted(name: str) -> str:
    """A column or table name as an identifier, whatever characters it has."""
    return '"' + name.replace('"', '""') + '"'
