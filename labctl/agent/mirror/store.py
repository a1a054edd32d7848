"""The lab's store, from its server: what was agreed on, and the way to it.

`.labctl/store.json` of a lab holds {"url", "mirror_s", and for a store on an SSH server "host",
"port", "user", "directory"}; its key and the pinned host key lie beside it. Keys of a store begin
below the lab's own prefix, which is all that this server can reach.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any, Callable, Protocol

from ..host.paths import lab_dir, read_json, write_json, write_text
from ..program import PROGRAM
from ..reply import Failure, reply_of
from .boto3_python import LACKING, find_python, has_boto3, provide_python

CONFIG, KEY, HOSTS = "store.json", "store-key", "store-hosts"
LONG_S = 6 * 3600.0
PROBE = ".labctl-probe"
Progress = Callable[[], None]


class StoreError(Exception):
    """Something did not get to the store, or from it. `whole`: nothing else will just now."""

    def __init__(self, why: str, whole: bool = True) -> None:
        super().__init__(why)
        self.whole = whole


class ChangedError(StoreError):
    """The file was changed while it was sent: no fault of the store, and sent the next time."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} changed while it was sent", False)


class Store(Protocol):
    """Below one lab's prefix. Everything may raise StoreError."""

    def send(self, key: str, path: Path, size: int, sha256: str) -> None:
        """The first `size` bytes of `path`; the store has said that it has what was hashed."""

    def put(self, key: str, content: bytes) -> None: ...

    def read(self, key: str) -> bytes | None:
        """None where there is none, or where this server may not know."""

    def fetch(self, key: str, path: Path, size: int) -> None:
        """At most the first `size` bytes, to a new file; hashes are compared by who asked."""

    def close(self) -> None: ...


def config(root: Path) -> dict[str, Any]:
    """What was agreed on for the lab in this directory; {} where it has no store."""
    return read_json(root / ".labctl" / CONFIG)


def prefix(lab: str, lab_id: str) -> str:
    return f"{lab}-{lab_id}"


def open_store(root: Path, lab: str, lab_id: str, progress: Progress = lambda: None) -> Store:
    """The store of the lab in `root`. Nothing is connected yet."""
    about = config(root)
    if about.get("url", "").startswith("s3://"):
        from .s3_store import S3Store

        return S3Store(about["url"], prefix(lab, lab_id), progress)
    if about.get("url", "").startswith("ssh://"):
        from .ssh_store import SshStore

        own = root / ".labctl"
        return SshStore(about, own / KEY, own / HOSTS, progress)
    raise Failure("missing", f"{lab} has no store", "", "store: in lab.yaml, then labctl up")


def prepare(request: dict[str, Any]) -> dict[str, Any]:
    """Note what the client says of the store ("url" "" for none), and have what it needs here.

    Replies "public_key" of a key pair that never leaves this server, where the store is on an SSH
    server, and "lacks": what is missing, "" where nothing is.
    """
    own = lab_dir(request["lab"], request["lab_id"]) / ".labctl"
    url = request["url"]
    if not url:
        for name in (CONFIG, KEY, f"{KEY}.pub", HOSTS):
            if (own / name).exists():
                (own / name).unlink()
        return {"public_key": "", "lacks": ""}
    kept = ("url", "mirror_s", "host", "port", "user", "directory")
    reply = {"public_key": "", "lacks": ""}
    if url.startswith("s3://"):
        reply["lacks"] = "" if provide_python() else LACKING
    else:
        write_text(own / HOSTS, f"labctl-store {request['host_key']}\n", 0o600)
        reply["public_key"], reply["lacks"] = _key(own / KEY)
    write_json(own / CONFIG, {key: request[key] for key in kept if key in request}, 0o600)
    return reply


def _key(path: Path) -> tuple[str, str]:
    """(public half, what is missing)."""
    if not shutil.which("ssh-keygen") or not shutil.which("ssh"):
        return "", "the server has no ssh program"
    if not path.exists():
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "labctl", "-f", str(path)]
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        if done.returncode:
            return "", f"no key could be made: {done.stderr.strip()[-300:]}"
    return " ".join(path.with_name(f"{KEY}.pub").read_text().split()[:2]), ""


def able(url: str) -> bool:
    """Whether this very process can speak to such a store."""
    return not url.startswith("s3://") or has_boto3()


def elsewhere(verb: str, request: dict[str, Any]) -> dict[str, Any]:
    """The verb again, in a Python that has boto3."""
    import json

    python = find_python()
    if not python:
        raise Failure("store", "results cannot go to S3", LACKING, "labctl doctor")
    done = subprocess.run(
        [python, str(PROGRAM), verb],
        input=json.dumps(request) + "\n",
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )
    return reply_of(verb, done.stdout, done.stderr)


def probe(request: dict[str, Any]) -> dict[str, Any]:
    """Write a small object and read it back; Failure "store" says why that cannot be."""
    root = lab_dir(request["lab"], request["lab_id"])
    url = config(root).get("url", "")
    if not able(url):
        return elsewhere("store-probe", request)
    store = open_store(root, request["lab"], request["lab_id"])
    try:
        store.put(PROBE, b"")
        if store.read(PROBE) != b"":
            raise StoreError("what was written cannot be read back")
    except StoreError as error:
        raise Failure("store", f"{url} cannot be used", str(error)) from None
    finally:
        store.close()
    return {}
