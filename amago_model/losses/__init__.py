"""TD targets, advantage filters and losses, mostly as functions of tensors and settings."""
