"""The file of a version: the ids and digests of its trajectories, as Parquet, with all else as
metadata. `fsck --rebuild` restores versions from these files alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ValidationError

from server.storage.checksums import Source
from server.storage.store import Store, Stored
from stepwell.messages import Name, VersionStatistics

KEY = b"stepwell.version"
SCHEMA = pa.schema([("trajectory", pa.string()), ("digest", pa.string())])
POINTS = ("version.after_tmp_fsync", "version.after_rename")


class VersionHeader(BaseModel):
    """What describes a version, besides its trajectories."""

    dataset: Name
    name: Name
    digest: str
    parent: Name | None
    condition: str
    include_eval: bool
    description: str
    licence: str
    statistics: VersionStatistics
    created_by: str
    created_at: float


@dataclass(frozen=True, slots=True)
class VersionFile:
    """A version's file as read."""

    header: VersionHeader
    members: dict[str, str]
    """Trajectory → digest of its content."""


class VersionDamaged(ValueError):
    """A file that does not hold what its digest says."""


def digest_of(members: Sequence[tuple[str, str]]) -> str:
    """The digest of a version: docs/reference/versions.md."""
    sha = hashlib.sha256()
    for trajectory, digest in sorted(members):
        sha.update(f"{trajectory} {digest}\n".encode())
    return sha.hexdigest()


def write_version(
    store: Store, name: str, header: VersionHeader, members: Sequence[tuple[str, str]]
) -> Stored:
    columns = list(zip(*sorted(members), strict=True))
    table = pa.table(columns, schema=SCHEMA.with_metadata({KEY: header.model_dump_json()}))
    with store.new("versions", name, points=POINTS) as writer:
        writer.fill(lambda path: pq.write_table(table, path, compression="zstd"))
        return writer.commit()


def read_version(source: Source) -> VersionFile:
    """Raises `VersionDamaged`."""
    try:
        with source.open() as file:
            table = pq.ParquetFile(file).read()
        header = VersionHeader.model_validate_json((table.schema.metadata or {})[KEY])
        pairs = list(zip(*(table[name].to_pylist() for name in SCHEMA.names), strict=True))
        if digest_of(pairs) != header.digest:
            raise VersionDamaged(f"{source.name}: its trajectories differ from its digest")
    except (OSError, pa.ArrowException, KeyError, ValidationError, TypeError) as error:
        raise VersionDamaged(f"{source.name}: {error}") from None
    return VersionFile(header, dict(pairs))
