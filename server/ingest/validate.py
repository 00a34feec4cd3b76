"""A request body → trajectories that match the dataset, or an error with key, expected, got.

The body must be a valid stream with the dataset's layout (else 422, nothing is stored); each
trajectory in it is then accepted or refused alone. Digests are computed here from the content,
never taken from the sender.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from server.ingest.bulk_validate import GROUP, GROUP_BYTES, SHORT_ROWS, Batch, from_batches
from server.ingest.dataset_registry import RegisteredDataset
from server.problems import ProblemError
from server.storage.shards import Entry
from stepwell.codec import HEADER_KEY, TrajectoryStream, from_batch, is_canonical, shapes_of
from stepwell.errors import CodecError, InvalidData, InvalidTrajectory
from stepwell.messages import Problem
from stepwell.schema import arrow_schema
from stepwell.spaces import EnvSpec, space_to_json
from stepwell.trajectory import Trajectory

MAX_ITEMS = 4096
"""Most trajectories in one body."""


@dataclass(frozen=True, slots=True)
class ValidTrajectory:
    """A valid trajectory, with the digest of its content."""

    trajectory: Trajectory
    digest: str
    message: memoryview | None = None
    """The received bytes, where they can be stored unchanged: one whole Arrow message."""


@dataclass(frozen=True, slots=True)
class RefusedTrajectory:
    """An invalid trajectory; the others of its body are not affected."""

    id: str
    problem: Problem


def read_body(
    data: bytes | memoryview, dataset: RegisteredDataset
) -> Iterator[ValidTrajectory | RefusedTrajectory]:
    """Everything in the body, in order. Raises `ProblemError` (422) if the body itself is bad."""
    try:
        stream = TrajectoryStream(data)
        check_layout(dataset, stream.spec)
        yield from _items(stream, dataset)
    except CodecError as error:
        raise ProblemError(
            422, "invalid_stream", str(error), expected=error.expected, got=error.got
        ) from None


def _items(
    stream: TrajectoryStream, dataset: RegisteredDataset
) -> Iterator[ValidTrajectory | RefusedTrajectory]:
    shapes, count = shapes_of(arrow_schema(dataset.spec)), 0
    for group in _groups(stream.messages()):
        count += len(group)
        if count > MAX_ITEMS:
            raise CodecError("too many trajectories in one body", expected=f"≤ {MAX_ITEMS}")
        together = from_batches(group, dataset.spec) if len(group) > 1 else None
        for place, (batch, metadata, message) in enumerate(group):
            try:
                if together is not None:
                    trajectory = together[place]
                else:
                    trajectory = from_batch(batch, metadata, dataset.spec)
                    trajectory.check(dataset.spec)
            except InvalidTrajectory as error:
                yield RefusedTrajectory(_claimed_id(metadata), problem_of(error))
                continue
            kept = message if is_canonical(batch, metadata, message, shapes) else None
            yield ValidTrajectory(trajectory, trajectory.digest, kept)


def _groups(batches: Iterator[Batch]) -> Iterator[list[Batch]]:
    """Short trajectories in groups that are checked together; every other alone."""
    group: list[Batch] = []
    size = 0
    for one in batches:
        short = one[0].num_rows <= SHORT_ROWS and len(one[2]) <= GROUP_BYTES // 16
        if group and (not short or size + len(one[2]) > GROUP_BYTES or len(group) == GROUP):
            yield group
            group, size = [], 0
        if short:
            group.append(one)
            size += len(one[2])
        else:
            yield [one]
    if group:
        yield group


def entry_of(
    checked: ValidTrajectory, partition: str, now: float, *, seq: int = 0, row_start: int = 0
) -> Entry:
    """The entry of a trajectory that is about to be stored. What is not given is assigned later."""
    trajectory = checked.trajectory
    return Entry(
        header=trajectory.header(),
        digest=checked.digest,
        seq=seq,
        partition=partition,
        total_reward=trajectory.total_reward,
        bytes=trajectory.nbytes,
        created_at=now,
        row_start=row_start,
    )


def problem_of(error: InvalidData) -> Problem:
    return ProblemError(
        422, "invalid_trajectory", str(error), expected=error.expected, got=error.got
    ).problem()


def _claimed_id(metadata: dict[bytes, bytes]) -> str:
    """The id that a refused trajectory gives, for its sender."""
    claimed = json.loads(metadata[HEADER_KEY]).get("id", "")
    return claimed[:64] if isinstance(claimed, str) else ""


def check_layout(dataset: RegisteredDataset, got: EnvSpec) -> None:
    """Raise 422 naming the first key that differs from the registered spec."""
    if got is dataset.spec:
        return
    if got.digest == dataset.spec_digest and dataset.spec.other_names(got) is None:
        return
    where, expected, found = difference(dataset.spec, got)
    raise ProblemError(
        422,
        "schema_mismatch",
        f"{where} differs from the spec of dataset {dataset.name!r}; nothing was stored",
        expected=expected,
        got=found,
    )


def difference(expected: EnvSpec, got: EnvSpec) -> tuple[str, object, object]:
    """(where, expected, got) of the first difference between two layouts."""
    for what in ("observations", "actions", "infos"):
        ours, theirs = getattr(expected, what), getattr(got, what)
        if ours.keys() != theirs.keys():
            return f"{what}: the set of names", sorted(ours), sorted(theirs)
        for key, space in ours.items():
            if space != theirs[key]:
                return f"{what}[{key}]", space_to_json(space), space_to_json(theirs[key])
    if (key := expected.other_names(got)) is not None:
        return f"names[{key}]", list(expected.names[key]), list(got.names[key])
    if expected.roles != got.roles:
        return "roles", dict(expected.roles), dict(got.roles)
    return "action_known", expected.action_known, got.action_known
