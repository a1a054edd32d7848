"""The door of a store on an SSH server: put, get, look, list and swap below one directory.

A file of its own, standard library only, Python 3.8 or newer: labctl copies it to the store's
account. `store_door.py serve DIRECTORY` speaks on standard input and output until that ends; as a
forced command in authorized_keys it is all that a lab server's key can do there. Nothing in it
removes what was put, follows a link or leaves DIRECTORY.

A request is a line of JSON, and so is a reply; bytes follow where a "length" says so:

    look  key [size sha256]                      -> size sha256 (of what is there), staged
    put   key size sha256 offset length, bytes   -> done; parts arrive one after another
    get   key offset length                      -> size length, bytes
    list  prefix                                 -> names
    swap  key expected length, bytes             -> done, where the content's hash is `expected`
                                                    ("" for nothing there)

A failure is {"error": kind, "why": text}: "name", "full", "bad" (not as promised), "busy", "io".
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import stat
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Dict, Iterator, Optional

Asked = Dict[str, Any]
Reply = Optional[Dict[str, Any]]
CHUNK = 1024 * 1024
MOST_LINE = 64 * 1024
MOST_SWAP = 1024 * 1024
INCOMING, LOCK = ".incoming", ".lock"
STALE_S = 3 * 86400
SHA256 = re.compile(r"[0-9a-f]{64}")
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Refused(Exception):
    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


def parts_of(key: Any) -> list[str]:
    """The names in a key; Refused where it could mean anything but a file below the directory."""
    if not isinstance(key, str) or not 0 < len(key.encode("utf-8", "replace")) <= 1024:
        raise Refused("name", "a key has 1 to 1024 bytes")
    parts = key.split("/")
    if len(parts) > 32:
        raise Refused("name", "a key has at most 32 parts")
    for part in parts:
        odd = any(ord(c) < 32 or ord(c) == 127 or 0xD800 <= ord(c) < 0xE000 for c in part)
        if part in ("", ".", "..") or odd or len(part.encode("utf-8", "replace")) > 255:
            raise Refused("name", f"the key {key!r} leaves its directory")
    if parts[0] in (INCOMING, LOCK):
        raise Refused("name", f"{parts[0]!r} is the store's own")
    return parts


class Store:
    """Everything below one directory, reached through open directories: no link is followed."""

    def __init__(self, directory: str) -> None:
        Path(directory).mkdir(mode=0o700, parents=True, exist_ok=True)
        self.top = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with suppress(FileExistsError):
            os.mkdir(INCOMING, 0o700, dir_fd=self.top)
        self.incoming = os.open(INCOMING, DIRECTORY, dir_fd=self.top)
        self._clear()

    def _clear(self) -> None:
        """Parts of files whose rest never came."""
        with os.scandir(self.incoming) as entries:
            old = [e.name for e in entries if time.time() - written_s(e) > STALE_S]
        for name in old:
            with suppress(OSError):
                os.unlink(name, dir_fd=self.incoming)

    @contextmanager
    def folder(self, parts: list[str], make: bool) -> Iterator[int]:
        """The open directory that holds the key's last name; FileNotFoundError without `make`."""
        here = os.dup(self.top)
        try:
            for part in parts[:-1]:
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(part, 0o700, dir_fd=here)
                inner = os.open(part, DIRECTORY, dir_fd=here)
                os.close(here)
                here = inner
            yield here
        finally:
            os.close(here)

    @contextmanager
    def opened(self, key: str) -> Iterator[BinaryIO]:
        """The key's file; FileNotFoundError where there is none, Refused where it is no file."""
        parts = parts_of(key)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with self.folder(parts, False) as folder:
            descriptor = os.open(parts[-1], flags, dir_fd=folder)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise Refused("name", f"{key!r} is not a file")
            yield file

    def hashed(self, key: str) -> tuple[int, str]:
        """(size, sha256), or (-1, "") where there is none."""
        try:
            with self.opened(key) as file:
                return os.fstat(file.fileno()).st_size, sha256_of(file)
        except FileNotFoundError:
            return -1, ""

    def place(self, name: str, key: str) -> None:
        """Rename what is whole in INCOMING to its key, and have the disk know."""
        parts = parts_of(key)
        with self.folder(parts, True) as folder:
            os.rename(name, parts[-1], src_dir_fd=self.incoming, dst_dir_fd=folder)
            os.fsync(folder)

    # What a request asks for. `source` and `sink` are where bytes come from and go to.

    def look(self, asked: Asked, source: Source, sink: Sink) -> Reply:
        size, sha256 = self.hashed(asked["key"])
        staged = 0
        if asked.get("sha256"):
            with suppress(FileNotFoundError):
                staged = os.lstat(staging_name(asked), dir_fd=self.incoming).st_size
        return {"size": size, "sha256": sha256, "staged": staged}

    def put(self, asked: Asked, source: Source, sink: Sink) -> Reply:
        parts_of(asked["key"])
        name, offset = staging_name(asked), int(asked["offset"])
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(name, flags, 0o600, dir_fd=self.incoming)
        with os.fdopen(descriptor, "r+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Refused("busy", "another connection is sending this file") from None
            if os.fstat(descriptor).st_size < offset:
                raise Refused("bad", "the beginning of this file is not here")
            os.ftruncate(descriptor, offset)
            file.seek(offset)
            try:
                source.copy_to(file)
                file.flush()
                if file.tell() < int(asked["size"]):
                    return {"done": False}
                os.fsync(descriptor)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    with suppress(OSError):
                        os.unlink(name, dir_fd=self.incoming)
                raise
            file.seek(0)
            size = os.fstat(descriptor).st_size
            if size != int(asked["size"]) or sha256_of(file) != asked["sha256"]:
                os.unlink(name, dir_fd=self.incoming)
                raise Refused("bad", "it did not arrive as promised")
            self.place(name, asked["key"])
        return {"done": True}

    def get(self, asked: Asked, source: Source, sink: Sink) -> Reply:
        with self.opened(asked["key"]) as file:
            size = os.fstat(file.fileno()).st_size
            offset = int(asked["offset"])
            length = max(0, min(int(asked["length"]), size - offset))
            file.seek(offset)
            sink.head({"size": size, "length": length})
            sink.copy_from(file, length)
        return None

    def list(self, asked: Asked, source: Source, sink: Sink) -> Reply:
        prefix = str(asked.get("prefix", ""))
        above, _, last = prefix.rpartition("/")
        parts = [*(parts_of(above) if above else []), last]
        names = []
        with suppress(FileNotFoundError, NotADirectoryError), self.folder(parts, False) as folder:
            start = "/".join(parts[:-1])
            for root, folders, files, _ in os.fwalk(".", dir_fd=folder, follow_symlinks=False):
                below = "/".join(filter(None, [start, root[2:]]))
                folders.sort()
                for name in files:
                    key = f"{below}/{name}" if below else name
                    if key.startswith(prefix) and key.split("/")[0] not in (INCOMING, LOCK):
                        names.append(key)
        return {"names": sorted(names)}

    def swap(self, asked: Asked, source: Source, sink: Sink) -> Reply:
        parts_of(asked["key"])
        if int(asked["length"]) > MOST_SWAP:
            raise Refused("name", f"what is swapped has at most {MOST_SWAP} bytes")
        content = source.all()
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(LOCK, flags, 0o600, dir_fd=self.top), "r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self.hashed(asked["key"])[1] != asked["expected"]:
                return {"done": False}
            name = "swap-" + os.urandom(8).hex()
            flags |= os.O_EXCL
            with os.fdopen(os.open(name, flags, 0o600, dir_fd=self.incoming), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            self.place(name, asked["key"])
        return {"done": True}


def staging_name(asked: Asked) -> str:
    if not SHA256.fullmatch(str(asked["sha256"])) or not 0 <= int(asked["size"]) < 2**50:
        raise Refused("name", "a file is announced by its size and SHA-256")
    return f"{asked['sha256']}.{int(asked['size'])}"


def written_s(entry: os.DirEntry[str]) -> float:
    try:
        return entry.stat(follow_symlinks=False).st_mtime
    except FileNotFoundError:
        return time.time()


def sha256_of(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    while True:
        block = file.read(CHUNK)
        if not block:
            return digest.hexdigest()
        digest.update(block)


class Source:
    """The bytes that follow a request. They are read to their end whatever becomes of them."""

    def __init__(self, stream: BinaryIO, length: int) -> None:
        self.stream = stream
        self.left = length

    def block(self) -> bytes:
        block = self.stream.read(min(CHUNK, self.left)) if self.left else b""
        if self.left and not block:
            raise EOFError
        self.left -= len(block)
        return block

    def copy_to(self, file: BinaryIO) -> None:
        while self.left:
            file.write(self.block())

    def all(self) -> bytes:
        blocks = []
        while self.left:
            blocks.append(self.block())
        return b"".join(blocks)

    def drain(self) -> None:
        while self.left:
            self.block()


class Sink:
    def __init__(self, stream: BinaryIO) -> None:
        self.stream = stream

    def head(self, reply: dict[str, Any]) -> None:
        self.stream.write(json.dumps(reply, separators=(",", ":")).encode() + b"\n")
        self.stream.flush()

    def copy_from(self, file: BinaryIO, length: int) -> None:
        """Exactly so many: zeros where the file has shrunk, which no hash will match."""
        while length > 0:
            block = file.read(min(CHUNK, length)) or bytes(min(CHUNK, length))
            self.stream.write(block)
            length -= len(block)
        self.stream.flush()


def serve(directory: str, stream: BinaryIO, out: BinaryIO) -> None:
    """Answer requests until there are no more."""
    store: Store | None = None
    sink = Sink(out)
    while True:
        line = stream.readline(MOST_LINE)
        if not line:
            return
        try:
            asked = json.loads(line)
            source = Source(stream, max(0, int(asked["length"])) if asked["do"] in SENDING else 0)
        except (ValueError, KeyError, TypeError):
            sink.head({"error": "name", "why": "this is no request"})
            return
        try:
            store = store or Store(directory)
            reply = answered(store, asked, source, sink)
            source.drain()
        except EOFError:
            return
        except OSError as error:
            reply = {"error": KINDS.get(error.errno or 0, "io"), "why": str(error)}
            source.drain()
        if reply is not None:
            sink.head(reply)


def answered(store: Store, asked: Asked, source: Source, sink: Sink) -> Reply:
    """The reply to one request; None where it has been given."""
    deeds = {
        "look": store.look,
        "put": store.put,
        "get": store.get,
        "list": store.list,
        "swap": store.swap,
    }
    try:
        if asked["do"] not in deeds:
            raise Refused("name", f"{asked['do']!r} cannot be asked here")
        return deeds[asked["do"]](asked, source, sink)
    except Refused as refused:
        return {"error": refused.kind, "why": str(refused)}
    except FileNotFoundError:
        return {"error": "missing", "why": "it is not there"}
    except (KeyError, TypeError, ValueError) as error:
        return {"error": "name", "why": f"the request is not understood ({error!r})"}
    except BrokenPipeError:
        raise EOFError from None
    except OSError as error:
        return {"error": KINDS.get(error.errno or 0, "io"), "why": error.strerror or str(error)}


SENDING = ("put", "swap")
KINDS = {errno.ENOSPC: "full", errno.EDQUOT: "full", errno.ELOOP: "name", errno.ENOTDIR: "name"}


def main(words: list[str]) -> int:
    os.umask(0o077)
    if len(words) != 2 or words[0] != "serve":
        print("store_door.py serve DIRECTORY", file=sys.stderr)
        return 2
    serve(str(Path(words[1]).expanduser()), sys.stdin.buffer, sys.stdout.buffer)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
