"""Causal attention over a sliding window: one interface, several back-ends."""
