"""What runs by itself: compaction, deletion of dead shards, orphans, scrub, rebuild."""
