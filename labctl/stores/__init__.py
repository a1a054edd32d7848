"""Stores: where results are mirrored, one prefix for each lab, read and written from here.

`s3.py` is a bucket (with the person's own AWS credentials), `ssh.py` a directory on an SSH server
(through the person's own login). agent/mirror/store_index.py describes their content. Neither can
remove anything. Constructing a store never touches the network.

May import: servers and the layers below.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from labctl.errors import TransferError, UsageError
from labctl.lazy import lazy_imports
from labctl.model import Endpoint, Value

with lazy_imports(__name__):
    import hashlib

    from labctl.stores import s3, ssh


class StoreContext(Value, frozen=True):
    """What a store may use of this machine and the user's settings.

    `connect` takes an Endpoint and returns a Transport; `settle_host_key` returns the Endpoint with
    a key to pin, confirmed by the user if it is new; `resolve_alias` resolves a host by the user's
    own ssh_config. `profile` is one of ~/.aws/config. `gateway` is the program that serves a store
    on an SSH server (agent/mirror/ssh_gateway.py), `keys` the one that grants access.
    """

    connect: Callable[[Endpoint], Any]
    settle_host_key: Callable[[Endpoint], Endpoint]
    resolve_alias: Callable[[str], Endpoint]
    gateway: bytes
    keys: bytes
    user: str = ""
    profile: str = ""


class LabStore(Protocol):
    """One lab's prefix. Keys are relative to it, with `/`.

    ConnectError if the store cannot be reached, CredentialsError or DeniedError if it denies access
    to this user, DiskFullError if it is full, TransferError for anything else.
    """

    url: str

    def read(self, key: str) -> bytes | None:
        """Read the whole content; None if the key does not exist."""

    def write(self, key: str, data: bytes) -> None:
        """Write the content. When this returns, the store has verified its hash."""

    def fetch(self, key: str, path: Path, size: int, sha256: str) -> None:
        """Write the first `size` bytes to `path`, by rename and only if they have this hash.

        NotFoundError if the key does not exist, TransferError if size or hash differ.
        """

    def swap(self, key: str, data: bytes, expected: bytes | None) -> bool:
        """Write if the current content is `expected` (None: the key does not exist).

        Returns False otherwise. Of several concurrent calls with different data, one returns True.
        """


def open_store(url: str, prefix: str, context: StoreContext) -> LabStore:
    """Open the store at `url`, below `prefix` ("<lab>-<lab id>")."""
    if url.startswith("s3://"):
        return s3.S3LabStore(url, prefix, context)
    if url.startswith("ssh://"):
        return ssh.SshLabStore(url, prefix, context)
    raise UsageError(
        f"{url!a} is not a valid store", hint="set store: s3://... or ssh://... in lab.yaml"
    )


def write_verified(path: Path, size: int, sha256: str, write: Callable[[Path], None]) -> None:
    """Let `write` fill a draft of `path`, verify its first `size` bytes, and rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.arriving")
    try:
        write(draft)
        with draft.open("r+b") as file:
            file.truncate(min(size, draft.stat().st_size))
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != sha256 or draft.stat().st_size != size:
            raise TransferError(
                f"{path.name} in the store does not match the store's index",
                hint="labctl pull   # from the server, while it exists",
            )
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
