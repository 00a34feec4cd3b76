"""The tables of who works, who may, and who did: the rest of the schema that tables.py draws."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Float, Index, Integer, String, Table, Text

from server.index.metadata import metadata

workers = Table(
    "workers",
    metadata,
    Column("id", String(128), primary_key=True),
    Column("role", String(16), nullable=False),
    Column("run", String(128)),
    Column("host", Text, nullable=False, server_default=""),
    Column("pid", BigInteger),
    Column("policy", Text, nullable=False, server_default=""),
    Column("state", String(16), nullable=False),
    Column("counters", Text, nullable=False, server_default="{}"),
    Column("last_error", Text, nullable=False, server_default=""),
    Column("command", String(16), nullable=False, server_default="none"),
    Column("command_at", Float),
    Column("started_at", Float, nullable=False),
    Column("heartbeat_at", Float, nullable=False),
)

launches = Table(
    "launches",
    metadata,
    Column("pk", Integer, primary_key=True),
    Column("id", String(64), nullable=False, unique=True),
    Column("role", String(16), nullable=False),
    Column("recipe", Text, nullable=False, server_default=""),
    Column("args", Text, nullable=False, server_default="{}"),
    Column("count", Integer, nullable=False),
    Column("state", String(16), nullable=False, index=True),
    Column("claimed_by", Text, nullable=False, server_default=""),
    Column("claimed_at", Float),
    Column("error", Text, nullable=False, server_default=""),
    Column("run", Text, nullable=False, server_default=""),
    Column("created_at", Float, nullable=False),
)

jobs = Table(
    "jobs",
    metadata,
    Column("pk", Integer, primary_key=True),
    Column("id", String(64), nullable=False, unique=True),
    Column("kind", String(32), nullable=False),
    Column("state", String(16), nullable=False, index=True),
    Column("progress", Float, nullable=False, server_default="0"),
    Column("message", Text, nullable=False, server_default=""),
    Column("payload", Text, nullable=False, server_default="{}"),  # JSON: the arguments
    Column("result", Text),
    Column("error", Text),  # JSON: a Problem
    Column("created_at", Float, nullable=False),
    Column("started_at", Float),
    Column("finished_at", Float),
)

tokens = Table(
    "tokens",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("name", Text, nullable=False),
    Column("hash", String(64), nullable=False),  # sha256 of the secret
    Column("scopes", Text, nullable=False),  # JSON list
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float),
    Column("last_used_at", Float),
    Column("revoked_at", Float),
)

audit = Table(
    "audit",
    metadata,
    Column("pk", Integer, primary_key=True),
    Column("time", Float, nullable=False),
    Column("who", Text, nullable=False),  # token id, or "local"
    Column("action", String(64), nullable=False),
    Column("subject", Text, nullable=False),
    Column("detail", Text, nullable=False, server_default="{}"),
    Index("ix_audit_action_subject", "action", "subject"),
)
