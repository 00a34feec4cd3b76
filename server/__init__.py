"""The dataset service: takes in trajectories, keeps them, answers for them."""
