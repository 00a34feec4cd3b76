"""Callers' SQL: guard, pool, and the confined worker processes."""
