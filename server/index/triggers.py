"""What the index itself refuses, whoever asks: triggers of SQLite, made by migrations.

Nothing protected is lost, and no file that something living needs is given up.
"""

from __future__ import annotations

TRIGGERS: dict[str, str] = {
    # The system never deletes what is protected: not by quota, compaction, or a bug. Demotion is an
    # admin's act, and the audit row must be written before it, in the same transaction.
    "protected_update": """
        CREATE TRIGGER protected_update BEFORE UPDATE ON trajectories
        WHEN OLD.partition = 'protected' AND (
            NEW.state = 'evicted'
            OR (NEW.partition <> 'protected' AND NOT EXISTS (
                SELECT 1 FROM audit WHERE action = 'demote' AND subject = OLD.id)))
        BEGIN SELECT RAISE(ABORT, 'protected trajectories are never evicted'); END
    """,
    "protected_delete": """
        CREATE TRIGGER protected_delete BEFORE DELETE ON trajectories
        WHEN OLD.partition = 'protected'
        BEGIN SELECT RAISE(ABORT, 'protected trajectories are never deleted'); END
    """,
    # REPLACE deletes without firing the trigger above.
    "protected_replace": """
        CREATE TRIGGER protected_replace BEFORE INSERT ON trajectories
        WHEN EXISTS (SELECT 1 FROM trajectories WHERE id = NEW.id AND partition = 'protected')
            OR EXISTS (SELECT 1 FROM trajectories WHERE pk = NEW.pk AND partition = 'protected')
            OR EXISTS (SELECT 1 FROM trajectories
                WHERE dataset_pk = NEW.dataset_pk AND seq = NEW.seq AND partition = 'protected')
        BEGIN SELECT RAISE(ABORT, 'protected trajectories are never replaced'); END
    """,
    # A row is no use without its file: one that anything living needs is never given up.
    "living_shard": """
        CREATE TRIGGER living_shard BEFORE UPDATE OF state ON shards
        WHEN NEW.state IN ('retired', 'deleting', 'deleted') AND EXISTS (
            SELECT 1 FROM trajectories WHERE shard_pk = OLD.pk AND state <> 'evicted')
        BEGIN SELECT RAISE(ABORT, 'a shard that living trajectories need is never given up'); END
    """,
    "living_segment": """
        CREATE TRIGGER living_segment BEFORE UPDATE OF state ON segments
        WHEN NEW.state = 'consumed' AND EXISTS (
            SELECT 1 FROM trajectories WHERE segment_pk = OLD.pk AND state <> 'evicted')
        BEGIN SELECT RAISE(ABORT, 'a segment that living trajectories need is never given up'); END
    """,
}
"""By name; a test asserts that they exist after every migration."""
