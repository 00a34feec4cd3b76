"""Tokens over HTTP, for admins; server/rights.py says what a token may do."""

from __future__ import annotations

from fastapi import APIRouter

from server.service import Caller, ServiceDep
from stepwell.messages import CreateToken, Page, PatchToken, Token

router = APIRouter(prefix="/v1/tokens", tags=["tokens"])


@router.post("", status_code=201)
def create_token(service: ServiceDep, body: CreateToken, caller: Caller) -> Token:
    """Only this response contains the secret. After the first token, all callers need one."""
    return service.auth.create(body, caller)


@router.get("")
def list_tokens(service: ServiceDep) -> Page[Token]:
    """Without secrets, newest first; without revoked tokens."""
    return service.auth.page()


@router.patch("/{token_id}")
def change_token(service: ServiceDep, token_id: str, body: PatchToken, caller: Caller) -> Token:
    """Change its quotas; they hold from the next request on."""
    return service.auth.change(token_id, body, caller)


@router.delete("/{token_id}", status_code=204)
def revoke_token(service: ServiceDep, token_id: str, caller: Caller) -> None:
    service.auth.revoke(token_id, caller)
