"""Every setting of the service, with its default. Set by option or by STEPWELL_<NAME>."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from stepwell.messages import SCOPE

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
JSON_WEIGHT = 32
"""Bytes of memory for each byte of JSON: measured 31 for a body that consists of small objects,
parsed and validated."""


class Settings(BaseSettings):
    """Frozen. Sizes are in bytes, times in seconds."""

    model_config = SettingsConfigDict(env_prefix="STEPWELL_", extra="ignore", frozen=True)

    data: Path
    """Directory that holds everything: index, segments, shards, policies, videos. Created if
    missing."""
    host: str = "127.0.0.1"
    """Address to listen on. Any address but loopback requires a token."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0 picks a free one and prints it."""
    token: SecretStr | None = None
    """The operator's token (all scopes). Without a token, loopback needs no authentication."""
    oidc_issuer: str = ""
    """Issuer of ID tokens that are accepted besides tokens; https, or http on loopback."""
    oidc_audience: str = ""
    """The client id for which the issuer gives ID tokens to people of this service."""
    oidc_scopes: dict[str, list[str]] = {}
    """JSON: verified e-mail address (* stands for any characters) or sub:SUBJECT → scopes."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names, besides loopback and `host`, that requests may use for this service."""
    allowed_origins: tuple[str, ...] = ()
    """Additional web origins (scheme://host:port) that browsers may call from."""
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
    max_video: int = 64 * MIB
    """Largest video of an evaluated episode."""
    body_memory: int = 512 * MIB
    """Memory for all request bodies together, held from before the first byte is read until the
    response; an eighth is reserved for small ones. JSON counts 32 times, uploads to a file 3 MiB.
    Beyond it a request waits 3 s and then fails with 429."""
    answer_memory: int = 256 * MIB
    """Memory for all answers that are being made or sent, held from before the first byte is made;
    an eighth is reserved for small ones. A file counts 320 KiB. Beyond it an answer waits 3 s and
    then fails with 429."""
    body_timeout: float = 30.0
    """Timeout of a body that receives no bytes; a third of it while other requests wait."""

    # ingest
    seal_bytes: int = 32 * MIB
    """A segment of this size is sealed into shards."""
    seal_idle: float = 2.0
    """A segment is sealed when it has received nothing for this long."""
    seal_age: float = 10.0
    """A segment is sealed when its first record is this old."""
    min_free: int = 64 * MIB
    """Refuse ingest (507) when the disk has less than this left."""

    # shards and maintenance
    shard_bytes: int = 128 * MIB
    """Uncompressed size at which a shard is closed."""
    shard_grace: float = 900.0
    """How long a retired shard is kept for readers without a lease."""
    compact_after: float = 60.0
    """Shards younger than this are not compacted."""
    maintenance_interval: float = 5.0
    """Seconds between rounds of retention, compaction and sweeping; 0 turns them off."""
    mirror_interval: float = 60.0
    """Seconds between rounds that keep the SQL tables up to date for the next start; 0 turns them
    off."""
    scrub_rate: int = 32 * MIB
    """Background verification of stored files, in bytes per second; 0 turns it off."""
    scrub_days: float = 7.0
    """Days between two verifications of the same file."""
    snapshot_days: float = 30.0
    """A snapshot is deleted after this long without a lease, unless a run names it."""
    tombstone_days: float = 30.0
    """A retry of an evicted trajectory is recognised for this long."""

    # SQL
    sql_workers: int = Field(default=3, ge=0)
    """Processes that run callers' queries, the third and later ones started when first needed; one
    more runs the service's own (snapshots)."""
    sql_queue: int = Field(default=8, ge=1)
    """Queries that may wait for a worker; more fail with 429."""
    sql_per_caller: int = Field(default=4, ge=1)
    """Running and waiting queries of one caller, and as many long ones; more fail with 429."""
    sql_memory: int = 1344 * MIB
    """Memory of all SQL workers together, and of their results until they are delivered."""
    sql_max_timeout: float = 60.0
    """Longest deadline that a request may set."""
    sql_max_bytes: int = 64 * MIB
    """Largest result; a sixteenth of sql_memory if that is smaller."""

    # imports
    import_memory: int = 4 * GIB
    """Address space of the sandboxed process that parses an upload."""
    import_seconds: float = 1800.0
    """Longest run time of that process."""

    @field_validator("token")
    @classmethod
    def _a_blank_token_is_none(cls, token: SecretStr | None) -> SecretStr | None:
        """STEPWELL_TOKEN= in a compose file counts as set, but no client can present it."""
        return token if token is not None and token.get_secret_value().strip() else None

    @model_validator(mode="after")
    def _an_issuer_is_complete(self) -> Self:
        if not self.oidc_issuer:
            return self
        if not self.oidc_audience:
            raise ValueError(
                "oidc_audience: required with oidc_issuer, else tokens that people"
                " gave to other programs would be accepted"
            )
        at = urlsplit(self.oidc_issuer)
        if at.scheme != "https" and at.hostname not in ("127.0.0.1", "localhost", "::1"):
            raise ValueError(f"oidc_issuer: expected https://…, got {self.oidc_issuer}")
        wrong = {
            s for scopes in self.oidc_scopes.values() for s in scopes if not re.fullmatch(SCOPE, s)
        }
        if wrong:
            raise ValueError(f"oidc_scopes: unknown scopes {', '.join(sorted(wrong))}")
        return self

    @model_validator(mode="after")
    def _the_largest_body_fits(self) -> Self:
        """A larger body would be refused with 429 indefinitely."""
        for name, size in (
            ("max_body", self.max_body),
            ("max_json", JSON_WEIGHT * self.max_json),
        ):
            least = -(-size * 8 // 7)  # an eighth is reserved for small bodies
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
