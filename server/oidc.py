"""ID tokens of an OpenID Connect provider, as bearer tokens of people.

    STEPWELL_OIDC_ISSUER=https://login.example.org     STEPWELL_OIDC_AUDIENCE=stepwell
    STEPWELL_OIDC_SCOPES='{"ada@example.org": ["admin"], "*@example.org": ["read", "sql"]}'

Only asymmetric signatures by a key that the issuer publishes count. Who matches no entry of the
scopes is known, and may do nothing.
"""

from __future__ import annotations

import fnmatch
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import httpx2
import structlog

from server.problems import ProblemError

if TYPE_CHECKING:
    import jwt

log = structlog.get_logger("stepwell.oidc")

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "ES256", "ES384", "EdDSA")
KEY_TYPES = ("RSA", "EC", "OKP")
LEEWAY = 30.0
"""Seconds by which the clocks of issuer and service may differ."""
FETCH_EVERY = 60.0
"""Seconds between two looks for keys, whatever unknown keys callers name."""
KEYS_SECONDS = 3600.0
"""A key that the issuer has withdrawn is trusted no longer than this."""
TIMEOUT = 5.0
LONGEST_TOKEN = 16_384


def looks_like_id_token(text: str) -> bool:
    """Three parts with dots between them; Stepwell's own tokens have none."""
    return text.count(".") == 2 and not text.startswith("stw_")


class IdTokens:
    """Verifies ID tokens. Thread-safe; `verify` may wait for the issuer: not for an event loop."""

    def __init__(self, issuer: str, audience: str, scopes: Mapping[str, Sequence[str]]):
        self._issuer, self._audience, self._scopes = issuer, audience, scopes
        self._keys: dict[str, jwt.PyJWK] = {}
        self._fetched = -FETCH_EVERY
        self._lock = threading.Lock()

    def verify(self, token: str) -> tuple[str, tuple[str, ...]]:
        """Whose it is, and what they may. Raises `ProblemError` 401, or 503 without the issuer."""
        import jwt

        try:
            if len(token) > LONGEST_TOKEN:
                raise jwt.InvalidTokenError("it is too long")
            header = jwt.get_unverified_header(token)
            if header.get("alg") not in ALGORITHMS:
                raise jwt.InvalidAlgorithmError(f"its signature is of {header.get('alg')!r}")
            claims: dict[str, Any] = jwt.decode(
                token,
                self._key(str(header.get("kid", ""))),
                algorithms=list(ALGORITHMS),
                audience=self._audience,
                issuer=self._issuer,
                leeway=LEEWAY,
                options={"require": ["exp", "iss", "aud", "sub"]},
            )
        except jwt.PyJWTError as error:
            raise ProblemError(
                401,
                "unauthorized",
                f"the ID token is not valid: {error}",
                expected=f"one that {self._issuer} gave to {self._audience}, not expired",
                headers={"www-authenticate": "Bearer"},
            ) from None
        return self._principal(claims)

    def _principal(self, claims: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
        """By the e-mail address if the issuer has verified it, else by the subject alone."""
        subject = str(claims["sub"])
        verified = claims.get("email_verified") is True
        email = str(claims.get("email", "")).lower() if verified else ""
        found: list[str] = []
        for pattern, scopes in self._scopes.items():
            if pattern == f"sub:{subject}" or (
                email and fnmatch.fnmatchcase(email, pattern.lower())
            ):
                found += scopes
        return f"oidc:{email or subject}", tuple(dict.fromkeys(found))

    def _key(self, kid: str) -> jwt.PyJWK:
        import jwt

        with self._lock:
            age = time.monotonic() - self._fetched
            if (kid not in self._keys and age >= FETCH_EVERY) or age >= KEYS_SECONDS:
                self._fetch()
            if kid not in self._keys:
                raise jwt.InvalidKeyError("its key is not one of the issuer's")
            return self._keys[kid]

    def _fetch(self) -> None:
        import jwt

        self._fetched = time.monotonic()
        try:
            with httpx2.Client(timeout=TIMEOUT, follow_redirects=False) as client:
                place = f"{self._issuer.rstrip('/')}/.well-known/openid-configuration"
                document = client.get(place).raise_for_status().json()
                if document["issuer"] != self._issuer:
                    raise ValueError(f"it calls itself {document['issuer']!r}")
                keys = client.get(document["jwks_uri"]).raise_for_status().json()["keys"]
            self._keys = {
                str(key["kid"]): jwt.PyJWK(key)
                for key in keys
                if key.get("kty") in KEY_TYPES and "kid" in key
            }
        except (httpx2.HTTPError, ValueError, KeyError, TypeError, jwt.PyJWTError) as error:
            self._keys = {}
            log.error("the keys of the OIDC issuer cannot be read", error=str(error)[:300])
            raise ProblemError(
                503,
                "issuer_unreachable",
                "the keys of the OIDC issuer cannot be read, so no ID token can be checked",
                expected=f"{self._issuer} with /.well-known/openid-configuration",
                headers={"Retry-After": str(int(FETCH_EVERY))},
            ) from None
