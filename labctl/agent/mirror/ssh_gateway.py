"""The gateway to a store on an SSH server: the forced command of a lab server's key.

A self-contained file (standard library only, Python 3.8 or newer). `ssh_gateway.py serve DIRECTORY`
runs rrsync if the key starts an rsync: it may only write drafts, named SHA256.SIZE, to
DIRECTORY/.incoming. Otherwise it answers requests, each a line of JSON; bytes follow if "length" is
above 0:

    put   key size sha256 length, bytes  -> done; without bytes it puts a complete draft, or
                                            replies in "rsync" whether rrsync is installed
    get   key offset length              -> size length, bytes
    list  prefix                         -> names
    swap  key expected length, bytes     -> done, if `expected` is the content's hash ("": absent)

An error is {"error": kind, "why": text}: "name", "full", "bad" (hash differs), "missing", "io".
No request removes a file that was put, and neither a key nor a link leads out of DIRECTORY.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Dict, NamedTuple

# It writes drafts only. -no-overwrite would prevent it from resuming a draft.
RRSYNC = ("rrsync", "-wo", "-no-del", "-no-lock", "-munge")
OWN = INCOMING, LOCK = Path(".incoming"), Path(".lock")
MOST_BYTES, MOST_LINE, STALE_S = 64 * 1024 * 1024, 64 * 1024, 3 * 86400
KINDS = {errno.ENOENT: "missing", errno.ENOSPC: "full", errno.EDQUOT: "full"}
KINDS.update({errno.ENAMETOOLONG: "name", errno.ELOOP: "name", errno.ENOTDIR: "name"})


class GatewayError(Exception):
    """An error reply. Its arguments are the error's kind, and why."""


class StoreRequest(NamedTuple):
    """A request as it arrived, with unchecked values."""

    do: Any
    key: Any = None
    sha256: Any = ""
    size: Any = 0
    offset: Any = 0
    length: Any = 0
    expected: Any = ""
    prefix: Any = ""


Reply = Dict[str, object]


def find_path(key: Any) -> Path:
    parts = key.split("/") if isinstance(key, str) else [""]
    has_odd_characters = any(
        ord(c) < 32 or ord(c) == 127 or 0xD800 <= ord(c) < 0xE000 for c in str(key)
    )
    if has_odd_characters or len(parts) > 32 or {"", ".", ".."} & {*parts} or Path(parts[0]) in OWN:
        raise GatewayError("name", f"the key {key!r} leaves its directory")
    path = Path(*parts)
    if Path.cwd() not in path.resolve().parents or (path.exists() and not path.is_file()):
        raise GatewayError("name", f"{key!r} is not a file of this directory")
    return path


def hash_file(path: Path) -> str:
    """Return the file's hash, "" if it does not exist."""
    digest = hashlib.sha256()
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            for block in iter(lambda: file.read(1024 * 1024), b""):
                digest.update(block)
    except FileNotFoundError:
        return ""
    return digest.hexdigest()


def publish_draft(draft: Path, path: Path) -> None:
    """Rename a complete draft to its key, and sync it to disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft.chmod(0o600)
    sync_to_disk(draft)
    draft.replace(path)
    sync_to_disk(path.parent)


def sync_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(content: bytes, path: Path) -> None:
    draft = INCOMING / f"draft-{os.urandom(8).hex()}"
    try:
        draft.write_bytes(content)
        publish_draft(draft, path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            clear_drafts(0)
        raise


def clear_drafts(older_than_s: float) -> None:
    """Remove drafts whose upload was never completed."""
    for draft in INCOMING.iterdir():
        # Another session may publish or remove it at this moment.
        with suppress(FileNotFoundError):
            if time.time() - draft.lstat().st_mtime >= older_than_s and not draft.is_dir():
                draft.unlink()


def put_file(request: StoreRequest, body: bytes) -> Reply:
    path, sha256, size = find_path(request.key), str(request.sha256), int(request.size)
    if body or not size:
        if (len(body), hashlib.sha256(body).hexdigest()) != (size, sha256):
            raise GatewayError("bad", "the content does not match its size and hash")
        write_file(body, path)
    elif hash_file(path) != sha256:
        draft = INCOMING / find_path(f"{sha256}.{size}")
        is_complete = draft.is_file() and draft.stat().st_size >= size
        if not is_complete or hash_file(draft) != sha256:
            if is_complete:
                draft.unlink()
            return {"done": False, "rsync": bool(shutil.which(RRSYNC[0]))}
        publish_draft(draft, path)
    return {"done": True}


def swap_file(request: StoreRequest, body: bytes) -> Reply:
    path = find_path(request.key)
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if hash_file(path) != request.expected:
            return {"done": False}
        write_file(body, path)
    return {"done": True}


def get_part(request: StoreRequest, body: bytes) -> Reply:
    with find_path(request.key).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(int(request.offset))
        content = file.read(min(int(request.length), MOST_BYTES))
    return {"size": size, "length": len(content), "bytes": content}


def list_names(request: StoreRequest, body: bytes) -> Reply:
    prefix = str(request.prefix)
    paths = [Path(top, name) for top, _, files in os.walk(".") for name in files]
    names = sorted(str(path) for path in paths if Path(path.parts[0]) not in OWN)
    return {"names": [name for name in names if name.startswith(prefix)]}


REQUESTS = {"put": put_file, "swap": swap_file, "get": get_part, "list": list_names}


def serve(stream: BinaryIO, out: BinaryIO) -> None:
    """Answer requests until the end of the stream."""
    for line in iter(lambda: stream.readline(MOST_LINE), b""):
        content: object = b""
        try:
            request = StoreRequest(
                **{k: v for k, v in json.loads(line).items() if k in StoreRequest._fields}
            )
            handler = REQUESTS[request.do]
            length = int(request.length) if handler in (put_file, swap_file) else 0
            body = stream.read(length) if 0 <= length <= MOST_BYTES else b""
            if len(body) < length:
                return
            reply = handler(request, body)
            content = reply.pop("bytes", b"")
        except GatewayError as refused:
            reply = dict(zip(("error", "why"), refused.args))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            reply = {"error": "name", "why": f"invalid request ({error!r})"}
        except OSError as error:
            reply = {
                "error": KINDS.get(error.errno or 0, "io"),
                "why": error.strerror or str(error),
            }
        out.write(json.dumps(reply, separators=(",", ":")).encode() + b"\n")
        out.write(content if isinstance(content, bytes) else b"")
        out.flush()


def main(words: list[str]) -> int:
    os.umask(0o077)
    if len(words) != 2 or words[0] != "serve":
        print("usage: ssh_gateway.py serve DIRECTORY", file=sys.stderr)
        return 2
    top = Path(words[1]).expanduser()
    (top / INCOMING).mkdir(parents=True, exist_ok=True)
    os.chdir(top.resolve())
    if os.environ.get("SSH_ORIGINAL_COMMAND", "").startswith("rsync "):
        os.execvp(RRSYNC[0], [*RRSYNC, str(INCOMING.resolve())])
    clear_drafts(STALE_S)
    serve(sys.stdin.buffer, sys.stdout.buffer)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
