"""The write path: validate, segments, commit, seal, evict."""
