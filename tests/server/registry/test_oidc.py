"""ID tokens: accepted from the issuer's keys alone. The issuer is a server of this test."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from starlette.testclient import TestClient

from server import oidc
from server.settings import Settings
from tests.server.registry.conftest import opened

AUDIENCE = "stepwell"
KEY, OTHER = (rsa.generate_private_key(public_exponent=65537, key_size=2048) for _ in range(2))


class Issuer(BaseHTTPRequestHandler):
    """A discovery document and the public half of KEY."""

    asked = 0

    def do_GET(self) -> None:
        url = f"http://127.0.0.1:{self.server.server_port}"
        if self.path == "/.well-known/openid-configuration":
            document: Any = {"issuer": url, "jwks_uri": f"{url}/keys"}
        else:
            Issuer.asked += 1
            public = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(KEY.public_key()))
            secret = {"kty": "oct", "kid": "secret", "k": "c2VjcmV0"}
            document = {"keys": [public | {"kid": "one", "use": "sig"}, secret]}
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def issuer() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Issuer)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join(240)


SCOPES = {"ada@example.org": ["admin"], "*@example.org": ["read"], "sub:robot": ["train"]}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory, issuer: str) -> Iterator[TestClient]:
    folder = tmp_path_factory.mktemp("oidc") / "data"
    yield from opened(folder, oidc_issuer=issuer, oidc_audience=AUDIENCE, oidc_scopes=SCOPES)


def claims(issuer: str, **changes: Any) -> dict[str, Any]:
    now = int(time.time())
    body = {
        "iss": issuer, "aud": AUDIENCE, "sub": "1", "iat": now, "exp": now + 600,
        "email": "ada@example.org", "email_verified": True,
    }  # fmt: skip
    return {k: v for k, v in {**body, **changes}.items() if v is not None}


def signed(issuer: str, key: Any = KEY, kid: str = "one", alg: str = "RS256", **c: Any) -> str:
    return jwt.encode(claims(issuer, **c), key, algorithm=alg, headers={"kid": kid})


def status(app: TestClient, token: str, path: str = "/v1/tokens") -> int:
    return app.get(path, headers={"authorization": f"Bearer {token}"}).status_code


def test_people_have_the_scopes_of_their_verified_address_or_subject(
    app: TestClient, issuer: str
) -> None:
    assert app.get("/v1/runs").status_code == 401, "an issuer closes the door"
    assert status(app, signed(issuer)) == 200
    bob = signed(issuer, email="Bob@Example.org")
    assert (status(app, bob), status(app, bob, "/v1/runs")) == (403, 200)
    robot = signed(issuer, sub="robot", email=None)
    assert status(app, robot, "/v1/runs") == 200
    claimed = signed(issuer, email_verified=False)
    assert status(app, claimed) == 403, "an address that nobody verified is no address"
    assert status(app, signed(issuer, email="eve@example.com"), "/v1/runs") == 403
    assert status(app, signed(issuer, sub="ada@example.org", email=None)) == 403
    made = {"name": "x", "scopes": ["read"]}
    head = {"authorization": f"Bearer {signed(issuer)}"}
    own = app.post("/v1/tokens", json=made, headers=head).json()["token"]
    assert status(app, own, "/v1/runs") == 200, "Stepwell's own tokens work beside"
    (entry,) = app.get("/v1/audit", headers=head).json()["items"]
    assert entry["who"] == "oidc:ada@example.org"


def unsigned(issuer: str) -> str:
    return jwt.encode(claims(issuer), None, algorithm="none", headers={"kid": "one"})


def by_public_key(issuer: str) -> str:
    """The classic confusion: the public key as the secret of an HMAC."""
    return jwt.encode(claims(issuer), "x" * 64, algorithm="HS256", headers={"kid": "one"})


@pytest.mark.parametrize(
    "make",
    [
        lambda i: signed(i, iss="https://login.example.com"),
        lambda i: signed(i, aud="another"),
        lambda i: signed(i, aud=None),
        lambda i: signed(i, exp=int(time.time()) - 60),
        lambda i: signed(i, exp=None),
        lambda i: signed(i, sub=None),
        lambda i: signed(i, nbf=int(time.time()) + 600),
        lambda i: signed(i, key=OTHER),
        lambda i: signed(i, kid="two"),
        lambda i: signed(i, key="secret" * 8, kid="secret", alg="HS256"),
        by_public_key,
        unsigned,
        lambda i: signed(i)[:-6] + "AAAAAA",
        lambda i: "a.b.c",
        lambda i: f"{signed(i)}{'x' * oidc.LONGEST_TOKEN}",
    ],
    ids=[
        *("issuer", "audience", "no audience", "expired", "for ever", "nobody", "not yet"),
        *("another key", "unknown kid", "secret key", "hmac", "none", "signature", "words", "long"),
    ],
)
def test_every_other_token_is_refused(
    app: TestClient, issuer: str, make: Callable[[str], str]
) -> None:
    assert status(app, signed(issuer)) == 200
    assert status(app, make(issuer)) == 401


def test_unknown_keys_do_not_make_the_service_ask_each_time(
    start_app: Callable[..., TestClient], issuer: str
) -> None:
    app = start_app(oidc_issuer=issuer, oidc_audience=AUDIENCE, oidc_scopes=SCOPES)
    before = Issuer.asked
    for number in range(5):
        status(app, signed(issuer, kid=f"k{number}"))
    assert Issuer.asked == before + 1


def test_without_the_issuer_nobody_is_let_in(start_app: Callable[..., TestClient]) -> None:
    nobody = "http://127.0.0.1:9"
    app = start_app(oidc_issuer=nobody, oidc_audience=AUDIENCE, oidc_scopes=SCOPES)
    answer = app.get("/v1/runs", headers={"authorization": f"Bearer {signed(nobody)}"})
    assert (answer.status_code, answer.json()["code"]) == (503, "issuer_unreachable")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"oidc_audience": ""}, "oidc_audience"),
        ({"oidc_issuer": "http://login.example.org"}, "https"),
        ({"oidc_scopes": {"*": ["everything"]}}, "everything"),
    ],
)
def test_a_dangerous_configuration_is_refused(tmp_path: Any, changes: Any, says: str) -> None:
    fine = {"oidc_issuer": "https://login.example.org", "oidc_audience": "a", "oidc_scopes": {}}
    with pytest.raises(ValueError, match=says):
        Settings(data=tmp_path, **{**fine, **changes})
