"""How an update runs: torch.compile, gradient accumulation, the optimiser step and memory."""
