"""`stepwell fsck`: the index compared with the files."""
