"""Keys: which host key to trust, and the key pair that labctl logs in with."""

from __future__ import annotations

import base64
import contextlib
import os
from pathlib import Path

from labctl.commands.ssh import known_hosts_name
from labctl.config.identity import replace_file
from labctl.errors import HostKeyError, LabError, PolicyError
from labctl.events import Question, Reporter
from labctl.lazy import lazy_imports
from labctl.model import Endpoint

with lazy_imports(__name__):
    import hashlib
    import subprocess
    import tempfile

    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ed25519

_KEY_TYPES = (
    "ssh-ed25519",
    "ecdsa-sha2-nistp256",
    "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521",
    "ssh-rsa",
)


def fingerprint(host_key: str) -> str:
    """Return the "SHA256:..." of a public key line, as ssh-keygen -l shows it."""
    digest = hashlib.sha256(base64.b64decode(host_key.split()[1])).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def find_known_key(name: str, files: tuple[Path, ...]) -> str:
    """Find the host key for `name` ("host", "[host]:port") in the user's known_hosts files.

    "" without one. HostKeyError if a key of that name is revoked.
    """
    keys: list[str] = []
    for path in files:
        if not path.is_file():
            continue
        for line in _find_known_hosts_lines(name, path):
            words = line.split()
            if words[0] == "@revoked":
                raise HostKeyError(
                    f"the host key of {name} is revoked",
                    why=f"{path} says so",
                    hint="labctl doctor",
                )
            if not words[0].startswith("@") and len(words) >= 3 and words[1] in _KEY_TYPES:
                keys.append(f"{words[1]} {words[2]}")
    return min(keys, key=lambda key: _KEY_TYPES.index(key.split()[0]), default="")


def _find_known_hosts_lines(name: str, path: Path) -> list[str]:
    """Find lines with ssh-keygen, which can read hashed names; none if it is not installed."""
    try:
        result = subprocess.run(
            ["ssh-keygen", "-F", name, "-f", str(path)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except FileNotFoundError:
        return []
    return [line for line in result.stdout.splitlines() if line and not line.startswith("#")]


def confirm_host_key(endpoint: Endpoint, host_key: str, reporter: Reporter) -> None:
    """Have the user compare the fingerprint; PolicyError unless they confirm it."""
    name = known_hosts_name(endpoint.host, endpoint.port)
    kind = host_key.split()[0]
    decision = Question(
        question=f"labctl has never seen {name}. Is this its host key?",
        detail=f"{kind} {fingerprint(host_key)}",
    )
    if not reporter.confirm(decision):
        raise PolicyError(
            f"the host key of {name} is not confirmed",
            why=f"it presents {kind} {fingerprint(host_key)}",
            hint="compare this with what the server's owner says, then run the command again, "
            f"or connect once with:\nssh -p {endpoint.port} {endpoint.user}@{endpoint.host}",
        )


def ensure_key_pair(path: Path) -> str:
    """Create an ed25519 key pair at `path` (0600, OpenSSH format) and `path`.pub, if missing.

    Returns the public line. An existing key stays; two processes at the same time get the same
    key.
    """
    public = path.with_name(path.name + ".pub")
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        private_text = _new_private_key()
        descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(private_text)
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)
        finally:
            Path(draft).unlink()
    line = _read_public_line(path)
    if not public.exists() or public.read_text() != line + "\n":
        replace_file(public, (line + "\n").encode(), mode=0o644)
    return line


def _new_private_key() -> bytes:
    return ed25519.Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )


def _read_public_line(path: Path) -> str:
    try:
        private = serialization.load_ssh_private_key(path.read_bytes(), password=None)
    except ValueError as error:
        raise LabError(
            f"{path} is not a private key that labctl can use",
            why=str(error),
            hint=f"move it away (mv {path} {path}.old) and run the command again",
        ) from error
    public = private.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    return f"{public.decode()} labctl"
