"""Students who sign in at their institution: a provider that tells the truth, and some that lie."""

from __future__ import annotations

import hmac
import json
import threading
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from joserfc import jwk, jwt
from joserfc.util import urlsafe_b64encode
from service_proxy_bed import Campus, ServiceVisitor, serve_bed

from labctl.errors import UsageError
from labctl.web.http_server import StudentSettings
from labctl.web.institution_sign_in import read_secret
from labctl.web.student_access import BEGIN, DONE

import dashboard_bed  # isort: skip  # service_proxy_bed adds its folder

CLIENT, SECRET = "labs", "the-clients-secret"
UNSET = object()


@cache
def make_key(name: str) -> Any:
    """Make a key once for all tests, since it takes a quarter of a second."""
    return jwk.RSAKey.generate_key(2048, {"kid": "1"})


def sign_with_public_key(header: dict[str, Any], claims: dict[str, Any], key: Any) -> str:
    """Make a token that needs no secret: unsigned, or signed with the public key as the secret."""
    parts = [urlsafe_b64encode(json.dumps(one).encode()) for one in (header, claims)]
    message = b".".join(parts)
    digest = "sha256" if header["alg"] == "HS256" else ""
    secret = key.as_pem(private=False)
    signature = hmac.digest(secret, message, digest) if digest else b""
    return b".".join([message, urlsafe_b64encode(signature)]).decode()


@dataclass
class Institution:
    """An OpenID Connect provider. `claims` replace those of its tokens; None leaves one out.

    `attack` is the header of tokens that this provider would not make. `token` replaces its token.
    `algorithms` is what its metadata say.
    """

    issuer: str = ""
    key: Any = field(default_factory=lambda: make_key("its own"))
    other_key: Any = field(default_factory=lambda: make_key("another"))
    claims: dict[str, Any] = field(default_factory=dict)
    forged: bool = False
    attack: dict[str, Any] | None = None
    token: object = UNSET
    token_header: dict[str, Any] = field(default_factory=dict)
    algorithms: list[str] = field(default_factory=lambda: ["RS256"])
    down: bool = False
    codes: dict[str, dict[str, str]] = field(default_factory=dict)
    token_requests: list[dict[str, str]] = field(default_factory=list)

    def authorize(self, address: str) -> str:
        """What the browser is sent back to after the person has signed in."""
        query = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(address).query))
        assert query["scope"] == "openid email"
        assert query["code_challenge_method"] == "S256"
        code = f"code-{len(self.codes)}"
        self.codes[code] = query
        back = urllib.parse.urlencode({"code": code, "state": query["state"]})
        return f"{urllib.parse.urlsplit(query['redirect_uri']).path}?{back}"

    def make_token(self, code: str) -> str:
        now = int(time.time())
        claims = {
            "iss": self.issuer, "aud": CLIENT, "sub": "7", "iat": now, "exp": now + 300,
            "nonce": self.codes[code]["nonce"], "email": "Lovelace@example.edu",
            "email_verified": True, **self.claims,
        }  # fmt: skip
        claims = {name: value for name, value in claims.items() if value is not None}
        if self.attack is not None:
            return sign_with_public_key(self.attack, claims, self.key)
        key = self.other_key if self.forged else self.key
        return jwt.encode({"alg": "RS256", "kid": "1", **self.token_header}, claims, key)

    async def answer(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        status, body = 200, {}
        if self.down:
            status = 503
        elif scope["path"] == "/.well-known/openid-configuration":
            body = {
                "issuer": self.issuer, "authorization_endpoint": f"{self.issuer}/authorize",
                "token_endpoint": f"{self.issuer}/token", "jwks_uri": f"{self.issuer}/jwks",
                "id_token_signing_alg_values_supported": self.algorithms,
            }  # fmt: skip
        elif scope["path"] == "/jwks":
            body = {"keys": [self.key.as_dict(private=False)]}
        else:
            form = dict(urllib.parse.parse_qsl((await receive())["body"].decode()))
            self.token_requests.append(form)
            body = {
                "access_token": "x", "token_type": "bearer",
                "id_token": self.make_token(form["code"]) if self.token == UNSET else self.token,
            }  # fmt: skip
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})


@pytest.fixture
def institution() -> Iterator[Institution]:
    institution = Institution()
    config = uvicorn.Config(
        institution.answer, port=0, log_level="critical", lifespan="off", interface="asgi3"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    dashboard_bed.wait_until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    institution.issuer = f"http://127.0.0.1:{port}"
    yield institution
    server.should_exit = True
    thread.join(30)


@pytest.fixture
def campus(institution: Institution, tmp_path: Path) -> Iterator[Campus]:
    secret = tmp_path / "secret"
    secret.write_text(f"{SECRET}\n")
    secret.chmod(0o600)
    settings = StudentSettings(
        port=0,
        services_port=0,
        oidc_issuer=institution.issuer,
        oidc_client_id=CLIENT,
        oidc_secret_file=str(secret),
    )
    with serve_bed(dashboard_bed.make(tmp_path), settings=settings) as campus:
        yield campus


def begin(campus: Campus) -> tuple[ServiceVisitor, str]:
    """A browser that was sent to the institution, and the address there."""
    visitor = ServiceVisitor(f"{campus.url}/")
    assert BEGIN in visitor.ask("/sign-in")[2]
    status, headers, _ = visitor.ask(BEGIN)
    assert status == 302
    return visitor, headers["location"]


def come_back(visitor: ServiceVisitor, address: str) -> tuple[int, str]:
    status, _, page = visitor.ask(
        address,
        Sec_Fetch_Site="cross-site",
        Sec_Fetch_Mode="navigate",
        Sec_Fetch_Dest="document",
    )
    return status, page


def test_a_student_signs_in_by_the_address_in_the_roster(
    campus: Campus, institution: Institution
) -> None:
    visitor, address = begin(campus)
    assert address.startswith(f"{institution.issuer}/authorize?")
    assert SECRET not in address
    assert come_back(visitor, institution.authorize(address))[0] == 303
    assert "Ada Lovelace" in visitor.ask("/")[2]
    (request,) = institution.token_requests
    assert request["grant_type"] == "authorization_code"
    assert request["code_verifier"]


@pytest.mark.parametrize(
    "claims",
    [
        {"aud": "another-course"},
        {"aud": "another-course", "azp": CLIENT},
        {"aud": [CLIENT, "another-course"], "azp": "another-course"},
        {"aud": ["another-course", "a-third"]},
        {"iss": "https://evil.example"},
        {"nonce": "of-another-browser"},
        {"nonce": None},
        {"exp": 1},
        {"email_verified": False},
        {"email_verified": None},
        {"email_verified": "true"},
        {"email": None},
        {"email": ["lovelace@example.edu"]},
        {"email": "mallory@example.edu"},
        {"email": ""},
    ],
)
def test_a_token_that_does_not_fit_opens_nothing(
    campus: Campus, institution: Institution, claims: dict[str, Any]
) -> None:
    institution.claims = claims
    visitor, address = begin(campus)
    status, page = come_back(visitor, institution.authorize(address))
    assert status == 403
    assert "Sign in" in page
    assert visitor.ask("/")[0] == 303


def test_a_token_with_another_signature_opens_nothing(
    campus: Campus, institution: Institution
) -> None:
    institution.forged = True
    visitor, address = begin(campus)
    assert come_back(visitor, institution.authorize(address))[0] == 403
    assert visitor.ask("/")[0] == 303


@pytest.mark.parametrize("algorithms", [["RS256"], ["RS256", "HS256", "none"]])
@pytest.mark.parametrize(
    "header",
    [
        {"alg": "none", "kid": "1"},
        {"alg": "none"},
        {"alg": "None"},
        {"alg": "HS256", "kid": "1"},
        {"alg": "HS256"},
        {"alg": "RS256", "kid": "1"},
        {"alg": None},
    ],
)
def test_a_token_signed_with_what_everybody_knows_opens_nothing(
    campus: Campus,
    institution: Institution,
    header: dict[str, Any],
    algorithms: list[str],
) -> None:
    institution.attack = header
    institution.algorithms = algorithms
    visitor, address = begin(campus)
    status, page = come_back(visitor, institution.authorize(address))
    assert (status, "Sign in" in page) == (403, True)
    assert visitor.ask("/")[0] == 303


@pytest.mark.parametrize("token", ["", "a.b.c", "e30.e30.", None, ["x"]])
def test_what_is_no_token_opens_nothing(
    campus: Campus, institution: Institution, token: object
) -> None:
    institution.token = token
    visitor, address = begin(campus)
    assert come_back(visitor, institution.authorize(address))[0] == 403
    assert visitor.ask("/")[0] == 303


def test_a_key_that_the_token_brings_along_is_not_used(
    campus: Campus, institution: Institution
) -> None:
    institution.forged = True
    institution.token_header = {"jwk": institution.other_key.as_dict(private=False)}
    visitor, address = begin(campus)
    assert come_back(visitor, institution.authorize(address))[0] == 403
    institution.token_header = {"jku": f"{institution.issuer}/other-jwks"}
    visitor, address = begin(campus)
    assert come_back(visitor, institution.authorize(address))[0] == 403


def test_a_token_for_an_earlier_sign_in_opens_nothing(
    campus: Campus, institution: Institution
) -> None:
    visitor, address = begin(campus)
    assert come_back(visitor, institution.authorize(address))[0] == 303
    institution.claims = {"nonce": next(iter(institution.codes.values()))["nonce"]}
    for browser in (visitor, ServiceVisitor(f"{campus.url}/")):
        _, headers, _ = browser.ask(BEGIN)
        assert come_back(browser, institution.authorize(headers["location"]))[0] == 403


def test_an_answer_belongs_to_the_browser_that_asked_and_works_once(
    campus: Campus, institution: Institution
) -> None:
    visitor, address = begin(campus)
    back = institution.authorize(address)
    other = ServiceVisitor(f"{campus.url}/")
    assert come_back(other, back)[0] == 403
    assert come_back(begin(campus)[0], back)[0] == 403
    assert come_back(visitor, f"{DONE}?error=access_denied&state=x")[0] == 403
    assert come_back(visitor, DONE)[0] == 403
    assert come_back(visitor, back)[0] == 303
    assert come_back(visitor, back)[0] == 403


def test_two_students_with_one_address_and_one_who_left(
    campus: Campus, institution: Institution
) -> None:
    file = campus.bed.folder.roster_file
    text = file.read_text()
    file.write_text(text.replace("turing@example.edu", "lovelace@example.edu"))
    visitor, address = begin(campus)
    assert come_back(visitor, institution.authorize(address))[0] == 403
    file.write_text(text)
    visitor, address = begin(campus)
    assert come_back(visitor, institution.authorize(address))[0] == 303
    assert visitor.ask("/")[0] == 200
    file.write_text(text.replace("lovelace@example.edu", "ada@example.edu"))
    assert visitor.ask("/")[0] == 303, "the address is another student's by now"
    file.write_text(text.replace("lovelace@example.edu,,a1,yes", "lovelace@example.edu,,a1,no"))
    visitor, address = begin(campus)
    assert come_back(visitor, institution.authorize(address))[0] == 403


@pytest.mark.parametrize("claim", ["", " "])
def test_no_address_is_not_that_of_the_student_who_has_none(
    campus: Campus, institution: Institution, claim: str
) -> None:
    file = campus.bed.folder.roster_file
    file.write_text(file.read_text().replace("lovelace@example.edu", ""))
    institution.claims = {"email": claim}
    visitor, address = begin(campus)
    assert come_back(visitor, institution.authorize(address))[0] == 403
    assert visitor.ask("/")[0] == 303


def test_an_institution_that_does_not_answer_leaves_the_join_file(
    campus: Campus, institution: Institution
) -> None:
    institution.down = True
    visitor = ServiceVisitor(f"{campus.url}/")
    status, _, page = visitor.ask(BEGIN)
    assert status == 502
    assert "does not answer" in page
    assert campus.enter("lovelace").ask("/")[0] == 200


def test_the_secret_is_for_the_keeper_alone(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("x\n")
    file.chmod(0o644)
    with pytest.raises(UsageError, match="other accounts"):
        read_secret(file)
    file.chmod(0o600)
    assert read_secret(file) == "x"
    file.write_text("\n")
    with pytest.raises(UsageError, match="empty"):
        read_secret(file)
