"""Internals of `stepwell run`."""
