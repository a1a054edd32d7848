"""Stores: where results are mirrored, one prefix for each lab, read and written from here.

`s3.py` is a bucket (with the person's own AWS credentials), `ssh.py` a directory on an SSH server
(through the person's own login). agent/mirror/store_index.py describes their content. Neither can
remove anything. Constructing a store never touches the network.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from labctl.errors import UsageError
from labctl.model import Endpoint, Value


class Surroundings(Value, frozen=True):
    """What a store may know of the machine and the user.

    `connect` takes an Endpoint and returns a Transport; `settle_host_key` returns the Endpoint with
    a key to pin, confirmed by the user where nobody knows it; `resolve_alias` tells what the user's
    own ssh_config says of a host. `profile` is one of ~/.aws/config. `gateway` is the program that
    serves a store on an SSH server (agent/mirror/ssh_gateway.py), `keys` the one that lets in.
    """

    connect: Callable[[Endpoint], Any]
    settle_host_key: Callable[[Endpoint], Endpoint]
    resolve_alias: Callable[[str], Endpoint]
    gateway: bytes
    keys: bytes
    user: str = ""
    profile: str = ""


class Store(Protocol):
    """One lab's prefix. Keys are relative to it, with `/`.

    ConnectError where the store cannot be reached now, CredentialsError or DeniedError where it
    does not let this user, DiskFullError where it is full, TransferError for anything else.
    """

    url: str

    def read(self, key: str) -> bytes | None:
        """The whole content; None where there is none."""

    def write(self, key: str, data: bytes | Path) -> None:
        """The store has checked the bytes by their hash when this returns."""

    def fetch(self, key: str, path: Path, size: int, sha256: str) -> None:
        """The first `size` bytes to `path`, by rename and only if they have this hash.

        NotFoundError where there is none, TransferError where it is not what was promised.
        """

    def names(self, prefix: str = "") -> list[str]:
        """The keys that begin so, sorted."""

    def swap(self, key: str, data: bytes, expected: bytes | None) -> bool:
        """Write where the content is `expected` (None: where there is none), else change nothing.

        Of several who try at once with data of their own each, one is told True.
        """


def open_store(url: str, prefix: str, around: Surroundings) -> Store:
    """The store at `url`, below `prefix` ("<lab>-<lab id>")."""
    if url.startswith("s3://"):
        from labctl.stores.s3 import S3Store

        return S3Store(url, prefix, around)
    if url.startswith("ssh://"):
        from labctl.stores.ssh import SshStore

        return SshStore(url, prefix, around)
    raise UsageError(f"{url!a} is no store", hint="store: s3://... or ssh://... in lab.yaml")


def staged(path: Path, size: int, sha256: str, write: Callable[[Path], None]) -> None:
    """Have `write` fill a file beside `path`, check its first bytes, and rename it into place."""
    import hashlib

    from labctl.errors import TransferError

    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.arriving")
    try:
        write(draft)
        with draft.open("r+b") as file:
            file.truncate(min(size, draft.stat().st_size))
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != sha256 or draft.stat().st_size != size:
            raise TransferError(
                f"{path.name} is not in the store as its index promises",
                hint="labctl pull   # from the server, while it is there",
            )
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
