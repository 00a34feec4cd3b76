"""What an update learns from: batches of windows, their transitions and masks, packing, noise."""
