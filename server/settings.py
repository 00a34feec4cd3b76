"""Every setting of the service, with its default. Set by option or by STEPWELL_<NAME>."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
JSON_WEIGHT = 32
"""Bytes of memory for each byte of JSON: measured 31 when all of it is small objects, parsed and
validated."""


class Settings(BaseSettings):
    """Immutable once the service runs. Sizes are bytes, times are seconds."""

    model_config = SettingsConfigDict(env_prefix="STEPWELL_", extra="ignore", frozen=True)

    data: Path
    """Directory that holds everything: index, segments, shards, policies. Created if missing."""
    host: str = "127.0.0.1"
    """Address to listen on. Any but loopback needs a token."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0 picks a free one, which is printed."""
    token: SecretStr | None = None
    """The operator's token (all scopes). Without one, loopback is open."""
    allowed_hosts: tuple[str, ...] = ()
    """Names, besides loopback and `host`, that requests may address this service by."""
    allowed_origins: tuple[str, ...] = ()
    """Web origins (scheme://host:port) that browsers may call from, besides the service's own."""
    log_level: str = "info"
    """debug, info, warning or error."""

    # requests
    max_body: int = 64 * MIB
    """Largest body of a POST of trajectories."""
    max_json: int = 8 * MIB
    """Largest body of every other request that is not an upload."""
    max_upload: int = 8 * GIB
    """Largest offline dataset uploaded for import."""
    max_policy: int = 1 * GIB
    """Largest policy file."""
    body_memory: int = 512 * MIB
    """Memory for all bodies together, from before their first byte is read until they are answered;
    an eighth is kept for small ones. JSON counts 32 times, uploads to a file 3 MiB. Beyond it: a
    wait of 3 s, then 429."""
    body_timeout: float = 30.0
    """A body that stands still for so long is given up; after a third of it while others wait."""

    # ingest
    seal_bytes: int = 32 * MIB
    """A segment of this size is sealed into shards."""
    seal_idle: float = 2.0
    """A segment is sealed when nothing has come for so long."""
    seal_age: float = 10.0
    """A segment is sealed when its first record is so old, whatever comes."""
    min_free: int = 64 * MIB
    """Refuse ingest (507) when the disk has less than this left."""

    # shards and maintenance
    shard_bytes: int = 128 * MIB
    """Uncompressed size at which a shard is closed."""
    shard_grace: float = 900.0
    """A retired shard is kept for so long, for readers without a lease."""
    compact_after: float = 60.0
    """Shards younger than this are left alone."""
    maintenance_interval: float = 5.0
    """Seconds between rounds of retention, compaction and sweeping; 0 turns them off."""
    scrub_rate: int = 32 * MIB
    """Stored files are read and verified in the background at so many bytes a second; 0: never."""
    scrub_days: float = 7.0
    """Each of them again after so many days."""
    snapshot_days: float = 30.0
    """A snapshot is deleted after so long without a lease, unless a run names it."""
    tombstone_days: float = 30.0
    """A retry of an evicted trajectory is recognised for so long."""

    # SQL
    sql_workers: int = Field(default=2, ge=0)
    """Child processes that run callers' queries; one more runs the service's own (snapshots)."""
    sql_queue: int = Field(default=8, ge=1)
    """Queries that may wait for a worker; beyond, 429."""
    sql_per_caller: int = Field(default=4, ge=1)
    """Queries that one caller may have running and waiting; beyond, 429."""
    sql_memory: int = 1 * GIB
    """Memory of all SQL workers together, and of their answers until they are delivered."""
    sql_max_timeout: float = 60.0
    """Longest deadline a request may ask for."""
    sql_max_bytes: int = 64 * MIB
    """Largest result, which a sixteenth of sql_memory may make smaller."""

    # imports
    import_memory: int = 4 * GIB
    """Address space of the confined child that parses an upload."""
    import_seconds: float = 1800.0
    """Longest time it may take."""

    @field_validator("token")
    @classmethod
    def _a_blank_token_is_none(cls, token: SecretStr | None) -> SecretStr | None:
        """STEPWELL_TOKEN= in a compose file would count as set, and no client could present it."""
        return token if token is not None and token.get_secret_value().strip() else None

    @model_validator(mode="after")
    def _the_largest_body_fits(self) -> Self:
        """Or it would be answered 429 for ever."""
        for name, size in (
            ("max_body", self.max_body),
            ("max_json", JSON_WEIGHT * self.max_json),
        ):
            least = -(-size * 8 // 7)  # an eighth is for small bodies
            if self.body_memory < least:
                raise ValueError(
                    f"body_memory = {self.body_memory} cannot hold one body of {name} ="
                    f" {getattr(self, name)} bytes; set STEPWELL_BODY_MEMORY to at least {least},"
                    f" or STEPWELL_{name.upper()} to less"
                )
        return self

    @property
    def index_file(self) -> Path:
        return self.data / "index.sqlite"

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the service."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
