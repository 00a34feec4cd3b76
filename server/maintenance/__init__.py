"""Background work: compaction, deletion of dead shards, unknown files, scrub, rebuild."""
