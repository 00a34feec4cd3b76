"""The data of an update: batches of windows, transitions and masks, packing, noise."""
