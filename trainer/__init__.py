"""Learning: snapshots of the service become windows, windows become updates, updates a policy."""
