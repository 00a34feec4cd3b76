"""Uploaded files (D4RL HDF5, npz): parsed in a confined child, stored as shards."""
