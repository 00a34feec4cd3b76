"""EnvSpec → Arrow schema: the columns in which rows of a trajectory travel and rest.

    obs.<key> … action.<key> … reward terminated truncated is_last [action_known] info.<key> …

One row per observation (trajectory.py draws them). Types, chosen for DuckDB and for size:
    scalars                  their own dtype
    uint8 arrays             fixed-size binary of the raw bytes (Parquet would widen them fourfold)
    bool and MultiBinary     fixed-size list of int8
    every other array        fixed-size list of the dtype, flattened in C order
Shapes are kept in field metadata; `spec_of` reads a whole EnvSpec back from the schema's.
"""

from __future__ import annotations

import functools
import json
import math

import numpy as np
import pyarrow as pa

from stepwell.errors import CodecError
from stepwell.spaces import DEFAULT_ACTION, EnvSpec, Space

FORMAT = 1
"""Format version of requests and shards. Readers accept every older and refuse every newer one."""

MAX_CACHED_SPEC = 16 * 1024
FORMAT_KEY = b"stepwell.format"
SPEC_KEY = b"stepwell.spec"

REWARD, TERMINATED, TRUNCATED, IS_LAST = "reward", "terminated", "truncated", "is_last"
ACTION_KNOWN = "action_known"


@functools.lru_cache(maxsize=256)
def column_names(spec: EnvSpec) -> dict[str, list[tuple[str, str, Space]]]:
    """For "obs", "action" and "info": [(column, key, space)], in order. Not to be changed."""
    # A lone action under the default name is the column `action`.
    alone = list(spec.actions) == [DEFAULT_ACTION]
    return {
        "obs": [(f"obs.{k}", k, s) for k, s in spec.observations.items()],
        "action": [("action" if alone else f"action.{k}", k, s) for k, s in spec.actions.items()],
        "info": [(f"info.{k}", k, s) for k, s in spec.infos.items()],
    }


@functools.lru_cache(maxsize=1024)
def arrow_type(space: Space) -> pa.DataType:
    size = math.prod(space.shape)
    if space.shape == ():
        return pa.bool_() if space.dtype == "bool" else pa.from_numpy_dtype(space.dtype)
    if space.dtype == "uint8":
        return pa.binary(size)
    item = "int8" if space.dtype == "bool" else space.dtype
    return pa.list_(
        pa.field("item", pa.from_numpy_dtype(item), nullable=False), math.prod(space.shape)
    )


@functools.lru_cache(maxsize=256)
def row_bytes(spec: EnvSpec) -> int:
    """Bytes of one row's values, flags (a bit each) left out."""
    spaces = [s for group in column_names(spec).values() for _, _, s in group]
    return 4 + sum(  # 4: the reward
        np.dtype(s.dtype).itemsize * math.prod(s.shape)
        for s in spaces
        if s.shape != () or s.dtype != "bool"
    )


@functools.lru_cache(maxsize=256)
def arrow_schema(spec: EnvSpec) -> pa.Schema:
    """The schema of rows on the wire; its metadata carries FORMAT and the spec."""
    fields: list[pa.Field] = []
    columns = column_names(spec)
    for group in ("obs", "action"):
        for name, _, space in columns[group]:
            fields.append(_field(name, space, nullable=group == "action"))
    fields += [
        pa.field(REWARD, pa.float32(), nullable=True),
        pa.field(TERMINATED, pa.bool_(), nullable=False),
        pa.field(TRUNCATED, pa.bool_(), nullable=False),
        pa.field(IS_LAST, pa.bool_(), nullable=False),
    ]
    if spec.action_known:
        fields.append(pa.field(ACTION_KNOWN, pa.bool_(), nullable=True))
    fields += [_field(name, space, nullable=False) for name, _, space in columns["info"]]
    metadata = {
        FORMAT_KEY: str(FORMAT).encode(),
        SPEC_KEY: json.dumps(spec.to_json(), separators=(",", ":")).encode(),
    }
    return pa.schema(fields, metadata=metadata)


def spec_of(schema: pa.Schema, newest: int = FORMAT) -> EnvSpec:
    """The EnvSpec that a schema was made for. Raises `CodecError` for a foreign schema, and for one
    of a format above `newest`."""
    metadata = schema.metadata or {}
    if FORMAT_KEY not in metadata or SPEC_KEY not in metadata:
        raise CodecError(
            "not a Stepwell stream",
            expected=f"schema metadata {FORMAT_KEY.decode()} and {SPEC_KEY.decode()}",
            got=str(sorted(k.decode(errors="replace") for k in metadata)),
        )
    try:
        version = int(metadata[FORMAT_KEY])
    except ValueError:
        raise CodecError("bad format number", got=repr(metadata[FORMAT_KEY][:40])) from None
    if not 1 <= version <= newest:
        raise CodecError(
            "unknown format",
            expected=f"1 … {newest} (upgrade stepwell to read more)",
            got=str(version),
        )
    written = metadata[SPEC_KEY]
    if len(written) > MAX_CACHED_SPEC:
        return _spec_from(written)
    return _cached_spec_from(written)


def _spec_from(written: bytes) -> EnvSpec:
    try:
        document = json.loads(written)
    except (ValueError, RecursionError) as error:
        raise CodecError(f"the spec in the schema is not JSON: {error}") from None
    return EnvSpec.from_json(document)


# The same few specs come with every body; parsing one costs more than reading a trajectory.
_cached_spec_from = functools.lru_cache(maxsize=256)(_spec_from)


def _field(name: str, space: Space, *, nullable: bool) -> pa.Field:
    metadata = {"shape": json.dumps(list(space.shape)), "dtype": space.dtype}
    return pa.field(name, arrow_type(space), nullable=nullable, metadata=metadata)
