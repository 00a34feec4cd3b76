"""Workers and their commands, launches, tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stepwell import messages
from stepwell._client.transport import Transport, request, segment
from stepwell.messages import Launch, Token, Worker

ROLES = ("train", "collect", "evaluate")


class Workers(Transport):
    """Part of `Client`."""

    def heartbeat(self, worker_id: str, **fields: Any) -> Worker:
        """Report as a worker; the answer's `command` says what somebody wants of it.

        `fields` of PutWorker. Not retried: the next heartbeat is the retry.
        """
        body = request(messages.PutWorker, **fields)
        return self.ask(Worker, "PUT", _worker(worker_id), body=body, retry=False)

    def workers(self) -> list[Worker]:
        pages = self.pages(messages.WorkerPage, "/v1/workers")
        return [worker for page in pages for worker in page.items]

    def command(self, worker_id: str, command: str) -> Worker:
        """pause, resume, drain or stop: picked up with the worker's next heartbeat."""
        return self.ask(
            Worker,
            "POST",
            f"{_worker(worker_id)}/command",
            body=request(messages.PostCommand, command=command),
            idempotent=True,
        )

    # --- launches ---------------------------------------------------------------------------

    def create_launch(
        self,
        role: str,
        recipe: str = "",
        args: Mapping[str, Any] | None = None,
        count: int = 1,
    ) -> Launch:
        """Ask for work to be started by a launcher on some machine."""
        body = request(
            messages.CreateLaunch, role=role, recipe=recipe, args=dict(args or {}), count=count
        )
        return self.ask(Launch, "POST", "/v1/launches", body=body)

    def launches(self, *, role: str | None = None, state: str | None = None) -> list[Launch]:
        """All, or those of one role or state; newest first."""
        pages = self.pages(messages.LaunchPage, "/v1/launches", {"role": role, "state": state})
        return [launch for page in pages for launch in page.items]

    def launch(self, launch_id: str) -> Launch:
        return self.ask(Launch, "GET", _launch(launch_id))

    def cancel_launch(self, launch_id: str) -> None:
        self.call("DELETE", _launch(launch_id))

    def claim_launch(self, worker: str, roles: Sequence[str] = ROLES) -> Launch | None:
        """Take the oldest waiting launch of these roles, or None."""
        body = request(messages.ClaimLaunch, worker=worker, roles=list(roles))
        return self.ask(messages.Claimed, "POST", "/v1/launches/claim", body=body).launch

    def patch_launch(self, launch_id: str, **fields: Any) -> Launch:
        """The claiming launcher's report; `fields` of PatchLaunch."""
        body = request(messages.PatchLaunch, **fields)
        return self.ask(Launch, "PATCH", _launch(launch_id), body=body)

    # --- tokens -----------------------------------------------------------------------------

    def create_token(
        self, name: str, scopes: Sequence[str], expires_in: float | None = None
    ) -> Token:
        """A new token; its secret is in `token`, now and never again."""
        body = request(messages.CreateToken, name=name, scopes=list(scopes), expires_in=expires_in)
        return self.ask(Token, "POST", "/v1/tokens", body=body)

    def tokens(self) -> list[Token]:
        pages = self.pages(messages.TokenPage, "/v1/tokens")
        return [token for page in pages for token in page.items]

    def revoke_token(self, token_id: str) -> None:
        self.call("DELETE", f"/v1/tokens/{segment(token_id)}")


def _worker(worker_id: str) -> str:
    return f"/v1/workers/{segment(worker_id)}"


def _launch(launch_id: str) -> str:
    return f"/v1/launches/{segment(launch_id)}"
