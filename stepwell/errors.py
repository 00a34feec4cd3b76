"""The exception hierarchy. Every error that Stepwell raises is a `StepwellError`.

StepwellError
├── InvalidData                 data refused before it left this process (also a ValueError)
│   ├── InvalidTrajectory       violates a rule of trajectory.py
│   ├── InvalidSpace            an invalid space or env spec
│   └── CodecError              bytes that are not trajectories of this format
├── ServiceError                the service returned an error; contains its problem document
│   ├── BadRequest              400, 415, 422   the request or its data is wrong; do not retry
│   ├── Unauthorized            401, 403        no token, or one without the scope
│   ├── NotFound                404
│   ├── Gone                    410             an expired snapshot or an evicted trajectory
│   ├── Conflict                409             exists already, with other content
│   ├── TooLarge                413
│   ├── Busy                    408, 429, 503   try again after `retry_after` seconds
│   ├── StorageFull             507
│   └── ServiceFault            any other 5xx   a defect of the service; see its log
├── ServiceUnreachable          no answer at all: not running, wrong address, network
├── OutboxError                 the local queue on disk cannot be used
│   └── OutboxInUse             by this process: another process or dataset uses it
├── Undelivered                 the service has not accepted everything; the rest is on disk
└── JobFailed                   an awaited job failed, was cancelled, or timed out

try:
    client.upload("my-data", "hopper.hdf5")
except stepwell.ServiceError as error:
    print(error.code, error.expected, error.got)
"""

from __future__ import annotations

from typing import Any


class StepwellError(Exception):
    """Base of every error that Stepwell raises on purpose."""

    exit_status = 1
    """Exit status of a command that fails with this error; 2 means a wrong command line or input,
    for which a retry does not help."""


class InvalidData(StepwellError, ValueError):
    """Data refused locally. `expected` and `got` describe the expected and the actual value."""

    exit_status = 2  # for input from a user; subclasses below cover data from programs

    def __init__(self, message: str, *, expected: str | None = None, got: str | None = None):
        detail = message
        if expected is not None:
            detail += f"; expected {expected}"
        if got is not None:
            detail += f"; got {got}"
        super().__init__(detail)
        self.expected = expected
        self.got = got


class InvalidTrajectory(InvalidData):
    """A trajectory violates a rule; an invalid trajectory is never constructed."""

    exit_status = 1


class InvalidSpace(InvalidData):
    """An invalid space or env spec."""

    def within(self, where: str) -> InvalidSpace:
        """The same of a named space."""
        named = InvalidSpace(f"{where}: {self}")
        named.expected, named.got = self.expected, self.got
        return named


class CodecError(InvalidData):
    """Bytes that do not decode as trajectories: truncated, foreign, or of an unknown format."""

    exit_status = 1


class ServiceError(StepwellError):
    """The service returned an error. `problem` is the RFC 9457 document of the response."""

    def __init__(self, problem: dict[str, Any], *, retry_after: float | None = None):
        self.problem = problem
        self.status: int = int(problem.get("status", 0))
        self.code: str = str(problem.get("code", "unknown"))
        self.detail: str = str(problem.get("detail") or problem.get("title") or "")
        self.expected: Any = problem.get("expected")
        self.got: Any = problem.get("got")
        self.retry_after = retry_after
        text = f"{self.status} {self.code}: {self.detail}"
        if self.expected is not None:
            text += f"; expected {self.expected}"
        if self.got is not None:
            text += f"; got {self.got}"
        super().__init__(text)


class BadRequest(ServiceError):
    """The request or its data is wrong; a retry does not help."""


class Unauthorized(ServiceError):
    """No token, an unknown one, or one without the needed scope."""


class NotFound(ServiceError):
    """No object has this name or id."""


class Gone(ServiceError):
    """The object existed but was removed: an expired snapshot, an evicted trajectory."""


class Conflict(ServiceError):
    """The object exists with other content, or its state does not allow the request."""


class TooLarge(ServiceError):
    """The body is larger than the service accepts; the limit is in `expected`."""


class Busy(ServiceError):
    """Try again after `retry_after` seconds; the client does so for up to `retry_for` seconds."""


class StorageFull(ServiceError):
    """The service has no disk space left and stored nothing."""


class ServiceFault(ServiceError):
    """A defect of the service; see its log."""


class ServiceUnreachable(StepwellError):
    """The service did not respond at its address."""


class OutboxError(StepwellError):
    """The local queue of unsent trajectories cannot be read or written."""


class OutboxInUse(OutboxError):
    """Another process uses this outbox, or it holds trajectories for another dataset."""


class Undelivered(StepwellError):
    """The work is done, but the service has not accepted all of its results. The message states
    what is undelivered, why, where it is stored and how to send it."""


class JobFailed(StepwellError):
    """An awaited job failed, was cancelled, or timed out. `job` is its last state."""

    def __init__(self, message: str, job: Any = None):
        super().__init__(message)
        self.job = job


NOT_OWNER = "not_owner"
"""Code of the 403 for an object that was made with another token."""

_BY_STATUS: dict[int, type[ServiceError]] = {
    400: BadRequest,
    401: Unauthorized,
    403: Unauthorized,
    404: NotFound,
    408: Busy,
    409: Conflict,
    410: Gone,
    413: TooLarge,
    415: BadRequest,
    422: BadRequest,
    429: Busy,
    503: Busy,
    507: StorageFull,
}


def from_problem(problem: dict[str, Any], *, retry_after: float | None = None) -> ServiceError:
    """Return the exception for the status of a problem document."""
    status = int(problem.get("status", 0))
    fallback = ServiceFault if status >= 500 else BadRequest
    return _BY_STATUS.get(status, fallback)(problem, retry_after=retry_after)
