"""`stepwell backup` and `stepwell restore`: copies of a whole data directory."""
