"""Callers' SQL: guard, pool, and the sandboxed worker processes."""
