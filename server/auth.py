"""Authentication: opaque tokens, their scopes and quotas, and the door that checks them.

    stw_<id>_<secret>      id finds the row; sha256(secret) is compared in constant time

`AuthMiddleware` checks them before a byte of the body is read; rights.py says what a route needs.
The service is open only on loopback, and only while the operator has set no token and none has
been created.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import math
import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass

import anyio.to_thread
import sqlalchemy as sa
import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.body_memory import declared_length
from server.index.db import Database, write_audit
from server.index.tables import tokens
from server.oidc import IdTokens, looks_like_id_token
from server.problems import ProblemError, not_found
from server.quotas import Quotas
from server.rights import LOCAL, OPERATOR, Principal, Right, right_of
from server.settings import Settings
from stepwell.messages import CreateToken, Page, PatchToken, Token

log = structlog.get_logger("stepwell.auth")
USED_INTERVAL = 60.0
"""Seconds between two writes of a token's `last_used_at`; maintenance writes it, no request."""

OPEN = frozenset({"/healthz", "/readyz"})
"""Paths that need no token, for supervisors: without one they return only the status
(routes/health.py)."""

FAILURES, FORGIVEN_EVERY = 20, 3.0
"""Failed authentications that an address may make at once, and the seconds until one expires."""
MAX_ADDRESSES = 1024
"""Most addresses in memory; the one with the oldest failure is dropped first."""


@dataclass(slots=True)
class _Known:
    """A token in memory."""

    token: Token
    hash: str
    saved_at: float | None
    """`last_used_at` in the index; the token's is newer by up to USED_INTERVAL."""
    quotas: Quotas

    def live(self, now: float) -> bool:
        return self.token.expires_at is None or now < self.token.expires_at


class TokenStore:
    """All unrevoked tokens, in memory: no other process changes them."""

    def __init__(self, db: Database, settings: Settings):
        self._db = db
        self._settings = settings
        self.id_tokens = (
            IdTokens(settings.oidc_issuer, settings.oidc_audience, settings.oidc_scopes)
            if settings.oidc_issuer
            else None
        )
        with db.read() as c:
            rows = c.execute(sa.select(tokens).where(tokens.c.revoked_at.is_(None))).mappings()
            self._known = {
                row["id"]: _Known(
                    Token(**row), row["hash"], row["last_used_at"], Quotas.of(dict(row))
                )
                for row in rows
            }

    @property
    def required(self) -> bool:
        """Whether callers must present a token. Expired tokens count, so expiry opens no access."""
        return (
            self._settings.token is not None
            or self.id_tokens is not None
            or bool(self._known)
            or bool(self._db.lost.of("tokens"))  # damage opens no access
            or not self._settings.loopback
        )

    def authenticate(self, authorization: str | None) -> Principal:
        """The caller of an Authorization header. Raises 401."""
        if not self.required:
            return LOCAL
        if not authorization:
            raise _unauthorized("this service requires a token: set STEPWELL_TOKEN")
        kind, _, presented = authorization.partition(" ")
        presented = presented.strip()
        if kind.lower() != "bearer" or not presented:
            raise _unauthorized("the Authorization header is not of the form: Bearer TOKEN")
        if self._is_operator(presented):
            return OPERATOR
        return self._by_secret(presented)

    def id_token(self, authorization: str | None) -> str:
        """The ID token of an Authorization header; "" if it has none, or no issuer is known."""
        if self.id_tokens is None or authorization is None:
            return ""
        kind, _, presented = authorization.partition(" ")
        is_one = kind.lower() == "bearer" and looks_like_id_token(presented.strip())
        return presented.strip() if is_one and not self._is_operator(presented.strip()) else ""

    def _is_operator(self, presented: str) -> bool:
        operator = self._settings.token
        return operator is not None and hmac.compare_digest(
            presented.encode(), operator.get_secret_value().encode()
        )

    def _by_secret(self, presented: str) -> Principal:
        prefix, _, rest = presented.partition("_")
        token_id, _, secret = rest.partition("_")
        known = self._known.get(token_id)
        # An unknown id is compared too, so that response times do not reveal which ids exist.
        match = hmac.compare_digest(_hash(secret), known.hash if known else _hash(""))
        if prefix != "stw" or known is None or not match:
            raise _unauthorized("the token is unknown or was revoked")
        now = time.time()
        if not known.live(now):
            raise _unauthorized("the token has expired; request a new one")
        known.token.last_used_at = now
        return Principal(token_id, tuple(known.token.scopes))

    def quotas(self, principal: Principal) -> Quotas | None:
        """Return the quotas of a token; others, such as people with ID tokens, have none."""
        known = self._known.get(principal.who)
        return None if known is None else known.quotas

    def authorise(self, principal: Principal, method: str, path: str) -> Right:
        """The right of the route. Raises 403 unless the caller has one of its scopes."""
        right = right_of(method, path)
        if principal.may_any(right.scopes):
            return right
        raise ProblemError(
            403,
            "forbidden",
            f"the token may not {method} {path}" + f"; {right.advice}" * bool(right.advice),
            expected="one of " + ", ".join(right.scopes),
            got=", ".join(principal.scopes),
        )

    def create(self, body: CreateToken, who: str) -> Token:
        """Create a token; only this response contains its secret."""
        if not self.required and "admin" not in body.scopes:
            raise ProblemError(
                409,
                "conflict",
                "the first token makes authentication mandatory, so it must be able to manage the"
                " others",
                expected="the scope admin among its scopes",
                got=", ".join(body.scopes),
            )
        now = time.time()
        secret = secrets.token_urlsafe(32)
        token = Token(
            id=secrets.token_hex(6),
            name=body.name,
            scopes=list(dict.fromkeys(body.scopes)),
            created_at=now,
            expires_at=None if body.expires_in is None else now + body.expires_in,
            **_limits(body),
        )
        values = token.model_dump(exclude={"token"})
        with self._db.write() as c:
            c.execute(sa.insert(tokens).values(hash=_hash(secret), **values))
            noted = {name: limit for name, limit in _limits(body).items() if limit is not None}
            write_audit(
                c, who, "token.create", token.id, name=token.name, scopes=token.scopes, **noted
            )
        unused = {"bytes_used": 0.0, "bytes_used_at": now}
        self._known[token.id] = _Known(token, _hash(secret), None, Quotas.of(values | unused))
        return token.model_copy(update={"token": f"stw_{token.id}_{secret}"})

    def change(self, token_id: str, body: PatchToken, who: str) -> Token:
        """Change the quotas of a token; they hold from the next request on."""
        known = self._known.get(token_id)
        if known is None:
            raise not_found("token", token_id)
        given = body.model_dump(exclude_unset=True)
        if given:
            with self._db.write() as c:
                c.execute(sa.update(tokens).where(tokens.c.id == token_id).values(**given))
                write_audit(c, who, "token.change", token_id, **given)
            known.token = known.token.model_copy(update=given)
            known.quotas.requests.limit = known.token.requests_per_minute
            known.quotas.bytes.limit = known.token.bytes_per_day
        return known.token

    def page(self) -> Page[Token]:
        """All tokens, newest first, on one page: a service has dozens, not thousands."""
        found = [known.token for known in list(self._known.values())]
        return Page[Token](items=sorted(found, key=lambda token: token.created_at, reverse=True))

    def revoke(self, token_id: str, who: str) -> None:
        """Revoke a token. Raises 409 if no admin token would remain."""
        if token_id not in self._known:
            raise not_found("token", token_id)
        others = [known for id_, known in list(self._known.items()) if id_ != token_id]
        now = time.time()
        managed = any("admin" in known.token.scopes and known.live(now) for known in others)
        # On loopback the last of all may go, and opens the service; elsewhere it would lock it.
        needed = bool(others) or (not self._settings.loopback and self.id_tokens is None)
        if needed and not managed and self._settings.token is None:
            raise ProblemError(
                409,
                "conflict",
                "this is the last token that may manage the others; revoke them first, or create"
                " another with the scope admin",
            )
        with self._db.write() as c:
            c.execute(
                sa.update(tokens).where(tokens.c.id == token_id).values(revoked_at=time.time())
            )
            write_audit(c, who, "token.revoke", token_id)
        self._known.pop(token_id, None)

    def save_last_used(self, every: float = USED_INTERVAL) -> None:
        """Write each `last_used_at` that is `every` seconds newer than the one in the index."""
        due = [
            (known, used)
            for known in list(self._known.values())
            if (used := known.token.last_used_at) is not None
            and used != known.saved_at
            and used - (known.saved_at or 0.0) >= every
        ]
        if not due:
            return
        with self._db.write() as c:
            for known, used in due:
                where = tokens.c.id == known.token.id
                spent = {"bytes_used": known.quotas.bytes.now(), "bytes_used_at": time.time()}
                c.execute(sa.update(tokens).where(where).values(last_used_at=used, **spent))
        for known, used in due:
            known.saved_at = used

    def close(self) -> None:
        try:
            self.save_last_used(every=0.0)
        except sa.exc.DBAPIError as error:
            log.warning("the last use of tokens was not saved", error=str(error.orig))


class FailedTokenLimiter:
    """Limits failed authentications per client address, in constant memory.

    A valid token always passes, whatever else its address sends, so a client cannot lock out others
    behind the same address. The limit does not protect secrets (they have 256 random bits); it
    bounds work and log lines.
    """

    def __init__(self) -> None:
        self._until: OrderedDict[str, float] = OrderedDict()
        """Address → when all of its failures have expired."""

    def count(self, address: str) -> float:
        """Count a failure; returns the seconds until the next is allowed, 0.0 below the limit."""
        now = time.monotonic()
        until = max(self._until.get(address, now), now) + FORGIVEN_EVERY
        wait = until - now - FAILURES * FORGIVEN_EVERY
        if wait <= 0:
            self._until[address] = until
            self._until.move_to_end(address)
            if len(self._until) > MAX_ADDRESSES:
                self._until.popitem(last=False)
            if wait > -FORGIVEN_EVERY:  # logged once, not for each that follows
                log.warning(
                    "many invalid tokens from one address; if it belongs to one of your clients,"
                    " give it a valid token",
                    address=address,
                )
        return max(0.0, wait)


class AuthMiddleware:
    """Pure ASGI: responds to an unauthorised caller before the body is read or parsed."""

    def __init__(self, app: ASGIApp):
        self.app = app
        self._failed = FailedTokenLimiter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        book: TokenStore = scope["app"].state.service.auth
        header = next((v for k, v in scope["headers"] if k == b"authorization"), None)
        is_open = scope["path"] in OPEN
        counted: _Counted | None = None
        try:
            given = None if header is None else header.decode("latin-1")
            if book.id_tokens is not None and (id_token := book.id_token(given)):
                # It may wait for the issuer's keys.
                who, scopes = await anyio.to_thread.run_sync(book.id_tokens.verify, id_token)
                principal = Principal(who, scopes)
            else:
                principal = book.authenticate(given)
            state = scope.setdefault("state", {})
            state["principal"] = principal
            if not is_open:
                quotas = book.quotas(principal)
                if quotas is not None:
                    quotas.admit(declared_length(scope))
                    receive = counted = _Counted(scope, receive, quotas)
                state["right"] = book.authorise(principal, scope["method"], scope["path"])
        except ProblemError as error:
            wait = 0.0
            if error.status == 401 and header is not None:
                wait = self._failed.count(address_of(scope))
            if not is_open:
                if counted is not None:
                    counted.give_back()
                refusal = _too_many(wait) if wait else error
                # The body was not read, so the connection cannot carry another request.
                refusal.headers["connection"] = "close"
                await refusal.response()(scope, receive, send)
                return
        try:
            await self.app(scope, receive, send)
        finally:
            if counted is not None:
                counted.give_back()


class _Counted:
    """`receive` of a request whose body was counted as declared: what does not come is given
    back."""

    def __init__(self, scope: Scope, receive: Receive, quotas: Quotas):
        self._receive, self._quotas = receive, quotas
        self._left = declared_length(scope) or 0

    async def __call__(self) -> Message:
        message = await self._receive()
        self._left -= len(message.get("body", b""))
        return message

    def give_back(self) -> None:
        if self._left > 0:
            self._quotas.bytes.add(-self._left)


def address_of(scope: Scope) -> str:
    """The unit that is limited: an IPv4 address, or the first 64 bits of an IPv6 address."""
    host = (scope.get("client") or ("unknown",))[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return str(host)[:64]
    if address.version == 6:
        return str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))
    return str(address)


def _limits(body: CreateToken) -> dict[str, int | None]:
    return {name: getattr(body, name) for name in PatchToken.model_fields}


def _too_many(wait: float) -> ProblemError:
    return ProblemError(
        429,
        "too_many_failed_tokens",
        "the token is invalid, as were many before it from this address; a valid token is accepted"
        " at any time",
        expected="Authorization: Bearer stw_…",
        headers={"Retry-After": str(math.ceil(wait))},
    )


def _unauthorized(detail: str) -> ProblemError:
    return ProblemError(
        401,
        "unauthorized",
        detail,
        expected="Authorization: Bearer stw_…",
        headers={"www-authenticate": "Bearer"},
    )


def _hash(secret: str) -> str:
    # 256 random bits need no slow hash: they cannot be guessed.
    return hashlib.sha256(secret.encode()).hexdigest()
