"""Versions of datasets: named selections that never change (docs/versions.md)."""
