"""The history of the index's schema (Alembic); `stepwell db upgrade` applies it."""
