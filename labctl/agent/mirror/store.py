"""The lab's store, as its server uses it: the settings and the connection.

`.labctl/store.json` of a lab holds a `StoreConfigRecord`; the key to a store on an SSH server and
the pinned host key are beside it. Keys of a store are relative to the lab's own prefix, which is
all that this server can reach.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Callable, Protocol

from ...wire.codec import MessageError, from_json, to_json
from ...wire.mirrors import (
    PROBE_STORE,
    PrepareStoreReply,
    PrepareStoreRequest,
    StoreConfigRecord,
)
from ...wire.verbs import CONFIG_FILE, UP_COMMAND, Empty, LabRequest, Reply, Request, Verb
from ..host.paths import lab_dir, read_json, write_json, write_text
from ..program import PROGRAM, call_program
from ..reply import Failure
from .boto3_python import LACKING, find_python, has_boto3, provide_python

CONFIG, KEY, HOSTS = "store.json", "store-key", "store-hosts"
LONG_S = 6 * 3600.0
PROBE = ".labctl-probe"
ADD_STORE = ("add store: to ", CONFIG_FILE, ", then:\n", UP_COMMAND)
Progress = Callable[[], None]


class StoreError(Exception):
    """A failed transfer to or from the store. `whole`: the store cannot be used at all now."""

    def __init__(self, why: str, whole: bool = True) -> None:
        super().__init__(why)
        self.whole = whole


class ChangedError(StoreError):
    """The file changed while it was sent. Not the store's fault: the next pass sends it."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} changed while it was sent", False)


class MirrorStore(Protocol):
    """The lab's prefix in a store. Every method may raise StoreError."""

    def send(self, key: str, path: Path, size: int, sha256: str) -> None:
        """Send the first `size` bytes of `path`; the store confirms their hash."""

    def write(self, key: str, content: bytes) -> None: ...

    def read(self, key: str) -> bytes | None:
        """Return the content; None if absent, or if this server is not allowed to know."""

    def fetch(self, key: str, path: Path, size: int) -> None:
        """Write at most the first `size` bytes to a new file; the caller compares hashes."""

    def close(self) -> None: ...


def read_config(root: Path) -> StoreConfigRecord:
    """Return the store's settings for the lab in this directory, with `url` "" without a store."""
    try:
        return from_json(StoreConfigRecord, read_json(root / ".labctl" / CONFIG))
    except MessageError:
        return StoreConfigRecord()


def build_prefix(lab: str, lab_id: str) -> str:
    return f"{lab}-{lab_id}"


def open_store(root: Path, lab: str, lab_id: str, progress: Progress = lambda: None) -> MirrorStore:
    """Return the store of the lab in `root`, without connecting yet."""
    settings = read_config(root)
    if settings.url.startswith("s3://"):
        from .s3_store import MirrorS3Store

        return MirrorS3Store(settings.url, build_prefix(lab, lab_id), progress)
    if settings.url.startswith("ssh://"):
        from .ssh_store import MirrorSshStore

        meta = root / ".labctl"
        return MirrorSshStore(settings, meta / KEY, meta / HOSTS, progress)
    raise Failure("missing", f"{lab} has no store", "", ADD_STORE)


def prepare(request: PrepareStoreRequest) -> PrepareStoreReply:
    """Record the store's settings, and install what it needs."""
    meta = lab_dir(request.lab, request.lab_id) / ".labctl"
    if not request.url:
        for name in (CONFIG, KEY, f"{KEY}.pub", HOSTS):
            if (meta / name).exists():
                (meta / name).unlink()
        return PrepareStoreReply("", "")
    if request.url.startswith("s3://"):
        reply = PrepareStoreReply("", "" if provide_python() else LACKING)
    else:
        write_text(meta / HOSTS, f"labctl-store {request.host_key}\n", 0o600)
        reply = PrepareStoreReply(*_provide_key(meta / KEY))
    config = StoreConfigRecord(
        request.url, request.mirror_s, request.host, request.port, request.user, request.directory
    )
    write_json(meta / CONFIG, to_json(config, drop_defaults=True), 0o600)
    return reply


def _provide_key(path: Path) -> tuple[str, str]:
    """Return (the public key, what is missing or "")."""
    if not shutil.which("ssh-keygen") or not shutil.which("ssh"):
        return "", "the server has no ssh or ssh-keygen"
    if not path.exists():
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "labctl", "-f", str(path)]
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        if done.returncode:
            return "", f"ssh-keygen failed: {done.stderr.strip()[-300:]}"
    return " ".join(path.with_name(f"{KEY}.pub").read_text().split()[:2]), ""


def can_use_store(url: str) -> bool:
    """Return whether this process can use such a store."""
    return not url.startswith("s3://") or has_boto3()


def rerun_with_boto3(verb: Verb[Request, Reply], request: Request) -> Reply:
    """Run the verb again in a Python that has boto3."""
    python = find_python()
    if not python:
        raise Failure("store", "results cannot be sent to S3", LACKING, "labctl doctor")
    return call_program([python, str(PROGRAM)], verb, request, LONG_S)


def check_store(store: MirrorStore) -> None:
    """Write a small object and read it back. StoreError if that does not work."""
    store.write(PROBE, b"")
    if store.read(PROBE) != b"":
        raise StoreError("a test object was written but could not be read back")


def probe(request: LabRequest) -> Empty:
    """Write a small object and read it back. Failure (store) if that does not work."""
    root = lab_dir(request.lab, request.lab_id)
    url = read_config(root).url
    if not can_use_store(url):
        return rerun_with_boto3(PROBE_STORE, request)
    store = open_store(root, request.lab, request.lab_id)
    try:
        check_store(store)
    except StoreError as error:
        raise Failure("store", f"cannot use the store {url}", str(error)) from None
    finally:
        store.close()
    return Empty()
