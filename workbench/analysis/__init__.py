"""Findings, scores and origins, computed from what the service answers; no command and no page."""
