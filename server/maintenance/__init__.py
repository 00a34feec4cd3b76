"""Background work: compaction, deletion of dead shards, orphans, scrub, rebuild."""
