"""One trajectory of a shard, as the service sends it."""

from __future__ import annotations

from server.storage.checksums import Source
from server.storage.steps import arrow_parts, shard_steps
from stepwell.codec import decode
from stepwell.trajectory import Trajectory


def read_trajectory(source: Source, traj_idx: int) -> Trajectory:
    with shard_steps(source, traj_idx) as steps:
        (found,) = decode(b"".join(arrow_parts(steps)))[1]
    return found
