"""Uploaded files (D4RL HDF5, npz): parsed in a sandboxed process, stored as shards."""
