"""Sign-in with the institution's OpenID Connect, matched to the roster by e-mail address."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx2
from authlib.integrations.starlette_client import OAuth, OAuthError
from fastapi import Request
from fastapi.responses import Response
from joserfc.errors import JoseError

from labctl.errors import ConnectError, LabError, PolicyError, UsageError
from labctl.model import Value
from labctl.web.student_access import DONE

MOST_SECRET_BYTES = 4096
TIMEOUT_S = 15.0
ALGORITHMS = "id_token_signing_alg_values_supported"
# Signatures that only the provider can make. Metadata may also name HMAC, whose secret could be
# confused with the public key, and `none`.
ASYMMETRIC = frozenset({
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA",
})  # fmt: skip


class OpenIdSettings(Value, frozen=True):
    """The provider's issuer (an https address), and the client that is registered there.

    `secret_file` has the client's secret in its first line.
    """

    issuer: str
    client_id: str
    secret_file: str


class InstitutionSignIn:
    """The authorization code flow with PKCE. Starlette's session keeps its state in between.

    `notify` gets what staff must know to correct the settings.
    """

    def __init__(self, settings: OpenIdSettings, url: str, notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._issuer = settings.issuer.rstrip("/")
        self._client_id = settings.client_id
        self._callback = url + DONE
        self._client = OAuth().register(
            "institution",
            server_metadata_url=f"{self._issuer}/.well-known/openid-configuration",
            client_id=settings.client_id,
            client_secret=read_secret(Path(settings.secret_file)),
            client_kwargs={
                "scope": "openid email",
                "code_challenge_method": "S256",
                "timeout": TIMEOUT_S,
                "trust_env": False,
            },
        )

    async def begin(self, request: Request) -> Response:
        """Send the browser to the institution."""
        try:
            response: Response = await self._client.authorize_redirect(request, self._callback)
        except (httpx2.HTTPError, RuntimeError, KeyError, ValueError) as error:
            raise self._make_connect_error(error) from error
        return response

    async def finish(self, request: Request) -> str:
        """Return the verified e-mail address of the person who comes back, in lower case.

        PolicyError for an answer that does not belong to this browser or this course's client.
        """
        options = {
            "iss": {"essential": True, "value": self._issuer},
            "aud": {"essential": True, "value": self._client_id},
        }
        try:
            metadata = await self._client.load_server_metadata()
            metadata[ALGORITHMS] = sorted(ASYMMETRIC & set(metadata.get(ALGORITHMS) or ()))
            token = await self._client.authorize_access_token(request, claims_options=options)
        # The last two: authlib does not check the types in the institution's JSON.
        except (OAuthError, JoseError, TypeError, AttributeError) as error:
            self._notify(f"a sign-in at {self._issuer} was refused: {error}")
            raise PolicyError(
                "the institution's answer is not valid", why="try again from the sign-in page"
            ) from error
        except (httpx2.HTTPError, RuntimeError, KeyError, ValueError) as error:
            raise self._make_connect_error(error) from error
        claims = token.get("userinfo") or {}
        email = claims.get("email")
        if not isinstance(email, str) or claims.get("email_verified") is not True:
            raise PolicyError(
                "the institution did not confirm an e-mail address",
                why="the course knows its students by that address",
            )
        return email.strip().lower()

    def _make_connect_error(self, error: Exception) -> LabError:
        self._notify(f"{self._issuer} does not answer: {error!r}")
        return ConnectError(
            "the institution's sign-in does not answer",
            why="try again in a few minutes, or sign in with your join file",
        )


def read_secret(file: Path) -> str:
    """Return the secret in a file that only its owner can read."""
    try:
        if file.stat().st_mode & 0o077:
            raise UsageError(f"{file} can be read by other accounts", hint=f"chmod 600 {file}")
        secret = file.read_bytes()[:MOST_SECRET_BYTES].decode().partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read", why=str(error)) from error
    if not secret:
        raise UsageError(f"{file} is empty", why="its first line must be the client's secret")
    return secret
