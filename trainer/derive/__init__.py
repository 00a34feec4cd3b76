"""Settings derived from a dataset: its profile, and the rules that read it."""
