"""The dataset service: receives trajectories, stores them, and serves them."""
