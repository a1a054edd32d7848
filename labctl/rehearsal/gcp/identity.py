"""The key of a simulated service account, with which Google's SDK signs its requests.

The SDK reads the key file as any other: it signs a JSON Web Token itself for Compute Engine, and
fetches a token from `token_uri` for other APIs.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from labctl.model import Value

TOKEN_S = 3600


class ServiceAccountKey(Value, frozen=True):
    """A key file as Google's console makes it."""

    project_id: str
    private_key: str
    client_email: str
    token_uri: str
    private_key_id: str = "rehearsal"
    client_id: str = "1"
    type: str = "service_account"
    universe_domain: str = "googleapis.com"


class TokenReply(Value, frozen=True):
    access_token: str
    expires_in: int = TOKEN_S
    token_type: str = "Bearer"


class ServiceAccount:
    """The service account of a rehearsal. `path` is its key file."""

    def __init__(self, directory: Path, project: str, url: str) -> None:
        self.path = directory / "service-account.json"
        self.email = f"labctl@{project}.iam.gserviceaccount.com"
        self._tokens: set[str] = set()
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        pem = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        document = ServiceAccountKey(
            project_id=project,
            private_key=pem.decode(),
            client_email=self.email,
            token_uri=f"{url}/token",
        )
        self.path.touch(0o600)
        self.path.write_bytes(msgspec.json.encode(document))

    def issue_token(self) -> TokenReply:
        token = secrets.token_urlsafe(24)
        self._tokens.add(token)
        return TokenReply(access_token=token)

    def is_valid(self, token: str) -> bool:
        """Whether a token is one of this rehearsal, or was signed by the SDK.

        Signatures are not checked: anybody on this machine may use the rehearsal.
        """
        return token in self._tokens or token.count(".") == 2
