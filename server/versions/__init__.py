"""Versions of datasets: named selections that never change (docs/reference/versions.md)."""
