"""The gateway to a store on an SSH server: the forced command of a lab server's key.

`ssh_gateway.py serve DIRECTORY` (Python 3.8 or newer, standard library only) answers PutFileRequest
and GetPartRequest (wire/mirrors.py). For an rsync, it runs rrsync, which may only write drafts to
.incoming. Nothing removes a file that was put, and no key or link leads out of DIRECTORY.
"""

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
from typing import Any, BinaryIO, Dict

# It writes drafts only. -no-overwrite would prevent it from resuming a draft.
RRSYNC = ("rrsync", "-wo", "-no-del", "-no-lock", "-munge")
OWN = INCOMING, LOCK = Path(".incoming"), Path(".lock")
OWN_DRAFT = INCOMING / f"draft-{os.urandom(8).hex()}"
MOST_BYTES, MOST_LINE, STALE_S = 64 * 1024 * 1024, 64 * 1024, 3 * 86400
KINDS = {errno.ENOENT: "missing", errno.ENOSPC: "full", errno.EDQUOT: "full"}
KINDS.update({errno.ENAMETOOLONG: "name", errno.ELOOP: "name", errno.ENOTDIR: "name"})


def find_path(key: str) -> Path:
    parts, path = key.split("/"), Path(key)
    is_printable = min(key.encode()) >= 32 and "\x7f" not in key
    is_plain = len(parts) <= 32 and not {"", ".", ".."} & {*parts} and Path(parts[0]) not in OWN
    is_inside = is_printable and is_plain and Path.cwd() in path.resolve().parents
    if not is_inside or (path.exists() and not path.is_file()):
        raise ValueError(f"the key {key!r} does not name a file in this directory")
    return path


def hash_file(path: Path) -> str:
    """Return the hash of a file, and flush the file to the disk."""
    digest = hashlib.sha256()
    with os.fdopen(os.open(path, os.O_NOFOLLOW), "rb") as file:
        while block := file.read(1024 * 1024):
            digest.update(block)
        os.fsync(file.fileno())
    return digest.hexdigest()


def clear_drafts(older_than_s: float) -> None:
    """Remove drafts that were not completed; another session may publish them at this moment."""
    for draft in INCOMING.iterdir():
        with suppress(OSError):
            if time.time() - draft.lstat().st_mtime >= older_than_s:
                draft.unlink()


def put_file(request: Dict[str, Any], body: bytes) -> Dict[str, Any]:
    path, sha256, size = find_path(request["key"]), str(request["sha256"]), int(request["size"])
    draft, expected = INCOMING / find_path(f"{sha256}.{size}"), request.get("expected")
    if body or not size:
        draft = OWN_DRAFT
        draft.write_bytes(body)
        if (len(body), hash_file(draft)) != (size, sha256):
            return {"error": "bad", "why": "the content does not match its size and hash"}
    elif path.exists() and hash_file(path) == sha256:
        return {"done": True}
    elif not draft.is_file() or draft.stat().st_size < size:
        return {"done": False, "rsync": bool(shutil.which(RRSYNC[0]))}
    elif hash_file(draft) != sha256:
        draft.unlink()
        return {"done": False, "rsync": True}
    draft.chmod(0o600)
    path.parent.mkdir(parents=True, exist_ok=True)
    with LOCK.open("w") as lock:
        # For every put: nothing may replace the file between a swap's check and its write.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if expected is not None and expected != (hash_file(path) if path.exists() else ""):
            return {"done": False}
        draft.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)
    return {"done": True}


def serve(stream: BinaryIO, out: BinaryIO) -> None:
    while line := stream.readline(MOST_LINE):
        content = b""
        try:
            request = json.loads(line)
            do, length = request["do"], max(0, int(request["length"]))
            if do == "get":
                with find_path(request["key"]).open("rb") as file:
                    file.seek(int(request["offset"]))
                    content = file.read(min(length, MOST_BYTES))
                reply: Dict[str, Any] = {"length": len(content)}
            elif do == "put":
                if len(body := stream.read(min(length, MOST_BYTES))) < length:
                    break
                reply = put_file(request, body)
            else:
                raise ValueError("requests are put and get")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            reply = {"error": "name", "why": f"invalid request: {error}"}
        except OSError as error:
            reply = {"error": KINDS.get(error.errno or 0, "io"), "why": str(error)}
            clear_drafts(0 if reply["error"] == "full" and length else STALE_S)
        out.write(json.dumps(reply).encode() + b"\n" + content)
        out.flush()


if __name__ == "__main__":
    os.umask(0o077)
    Path(sys.argv[2], INCOMING).mkdir(parents=True, exist_ok=True)
    os.chdir(sys.argv[2])
    if os.environ.get("SSH_ORIGINAL_COMMAND", "").startswith("rsync "):
        os.execvp(RRSYNC[0], [*RRSYNC, str(INCOMING.resolve())])
    clear_drafts(STALE_S)
    serve(sys.stdin.buffer, sys.stdout.buffer)
    OWN_DRAFT.unlink(missing_ok=True)
