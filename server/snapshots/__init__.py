"""Frozen selections of trajectories, and their manifests."""
