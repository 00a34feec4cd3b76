"""A folder of `stepwell export --format parquet` into a dataset: sent trajectory by trajectory."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepwell._export import licence, parquet
from stepwell.client import Client
from stepwell.errors import InvalidData
from stepwell.trajectory import Trajectory

NAMESPACE = uuid.UUID("0d0c4c1e-8a2f-5f0e-b3a5-6a9c3fb7a922")
"""Namespace of the ids of copied trajectories: same dataset and original → same id."""
GROUP_BYTES, GROUP_MOST = 16 << 20, 1000


def send_folder(
    client: Client,
    dataset: str,
    folder: Path,
    *,
    partition: str = "protected",
    create: bool = True,
    env: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """The trajectories under ids that belong to the target dataset; returns the counts, as an
    import's result has them. `progress(done, total)` is called with trajectories."""
    spec, count, trajectories = parquet.read(folder)
    if create:
        spec = replace(spec, env=env or spec.env)
        said = licence.written(folder)
        about = f"Imported (parquet): licence={said}"[:4096] if said else ""
        client.create_dataset(dataset, spec, description=about, exist_ok=True)
    else:
        client.spec(dataset)
    stored, steps, size, done = Counter[str](), 0, 0, 0
    group: list[Trajectory] = []

    def send() -> None:
        nonlocal size, done
        answer = client.post(dataset, group, spec=spec, partition=partition)
        for item in answer.items:
            stored[item.status] += 1
        bad = next((item for item in answer.items if item.status in ("refused", "conflict")), None)
        if bad is not None:
            why = bad.problem.detail if bad.problem else "no reason given"
            raise InvalidData(f"trajectory {bad.id} was not stored ({bad.status}): {why}")
        size, done = 0, done + len(group)
        group.clear()
        if progress is not None:
            progress(done, count)

    for trajectory in trajectories:
        steps += len(trajectory)
        size += trajectory.nbytes
        metadata = replace(trajectory.metadata, env=env or trajectory.metadata.env)
        name = str(uuid.uuid5(NAMESPACE, f"{dataset}/{trajectory.id}"))
        group.append(replace(trajectory, id=name, metadata=metadata))
        if size >= GROUP_BYTES or len(group) == GROUP_MOST:
            send()
    if group:
        send()
    return {
        "dataset": dataset,
        "partition": partition,
        "trajectories": stored["stored"],
        "steps": steps,
        "duplicates": stored["duplicate"],
    }
