"""TD targets, filters and losses: free functions from tensors and settings to tensors."""
