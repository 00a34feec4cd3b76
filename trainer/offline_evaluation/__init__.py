"""Values of policies and trajectories from stored data, without an environment."""
