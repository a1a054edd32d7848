"""A store on an SSH server, by this server's own ssh and key: it speaks to ssh_gateway.py.

A large file goes ahead as a draft, by rsync, which goes on after a cut; a request then puts it.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import subprocess
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Iterable, Iterator

from ..host.paths import CHUNK
from .store import ChangedError, Progress, StoreError

# A larger file goes by rsync; a cut link costs no more than this.
PART_BYTES = 8 * 1024 * 1024
MOST_READ_BYTES = 64 * 1024 * 1024
# Kinds of failure after which nothing else can be sent either.
WHOLE = ("full", "io", "cut")
HOST = "labctl-store"
LINK_TIMEOUT_S = 60


def ssh_words(about: dict[str, Any], key: Path, hosts: Path) -> list[str]:
    """The ssh that leads to the store: no configuration, one key, one pinned host."""
    options = {
        "BatchMode": "yes",
        "IdentitiesOnly": "yes",
        "UserKnownHostsFile": str(hosts),
        "GlobalKnownHostsFile": "/dev/null",
        "HostName": about["host"],
        "HostKeyAlias": HOST,
        "StrictHostKeyChecking": "yes",
        "UpdateHostKeys": "no",
        "ForwardAgent": "no",
        "ConnectTimeout": "10",
        "ServerAliveInterval": "5",
        "ServerAliveCountMax": "3",
        "LogLevel": "ERROR",
    }
    given = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    return [
        *("ssh", "-F", "none", "-T", "-i", str(key), *given),
        *("-p", str(about["port"]), "-l", about["user"]),
    ]


class SshStore:
    """One connection, made on the first request and ended by `close` or by an error."""

    def __init__(self, about: dict[str, Any], key: Path, hosts: Path, progress: Progress) -> None:
        self.words = ssh_words(about, key, hosts)
        self.folder = key.parent
        self.progress = progress
        self._process: subprocess.Popen[bytes] | None = None

    def send(self, key: str, path: Path, size: int, sha256: str) -> None:
        request = {"do": "put", "key": key, "size": size, "sha256": sha256, "offset": 0}
        if size <= PART_BYTES:
            with path.open("rb") as file:
                content = file.read(size)
            if len(content) < size:
                raise ChangedError(path.name)
            self._ask({**request, "length": size}, [content])
        else:
            reply = self._ask({**request, "length": 0})
            if not reply["done"] and "rsync" not in reply:
                # A lab that an earlier version let in: its program takes any file at once.
                self._ask({**request, "length": size}, self._read_blocks(path, size))
            elif not reply["done"]:
                self._send_draft(request, path, may_rsync=reply["rsync"])
        self.progress()

    def _send_draft(self, request: dict[str, Any], path: Path, *, may_rsync: bool) -> None:
        if not may_rsync or not shutil.which("rsync"):
            where = "on this server" if may_rsync else "on the store's machine"
            raise StoreError(
                f"{path.name} is large, and there is no rsync with rrsync {where}", False
            )
        name = f"{request['sha256']}.{request['size']}"
        with self._name_draft(path, request["size"], name) as draft:
            self._copy(draft, path.name)
        if not self._ask({**request, "length": 0})["done"]:
            raise ChangedError(path.name)

    def _read_blocks(self, path: Path, size: int) -> Iterator[bytes]:
        with path.open("rb") as file:
            while size > 0:
                block = file.read(min(CHUNK, size))
                if not block:
                    self.close()
                    raise ChangedError(path.name)
                size -= len(block)
                self.progress()
                yield block

    def put(self, key: str, content: bytes) -> None:
        size = len(content)
        about = {"size": size, "sha256": hashlib.sha256(content).hexdigest()}
        self._ask({"do": "put", "key": key, **about, "offset": 0, "length": size}, [content])

    def read(self, key: str) -> bytes | None:
        return self._get(key, 0, MOST_READ_BYTES)

    def fetch(self, key: str, path: Path, size: int) -> None:
        with path.open("wb") as file:
            while True:
                block = self._get(key, file.tell(), min(PART_BYTES, size - file.tell()))
                if block is None:
                    raise StoreError("it is not in the store", False)
                file.write(block)
                self.progress()
                if not block or file.tell() >= size:
                    return

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):
                if pipe:
                    pipe.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stderr:
            process.stderr.close()

    @contextmanager
    def _name_draft(self, path: Path, size: int, name: str) -> Iterator[Path]:
        """The file under the draft's name; one that has grown as a copy of its first bytes."""
        with tempfile.TemporaryDirectory(prefix="store-", dir=str(self.folder)) as folder:
            draft = Path(folder, name)
            if path.stat().st_size == size:
                draft.symlink_to(path.resolve())
                yield draft
                return
            with draft.open("wb") as target:
                target.writelines(self._read_blocks(path, size))
            yield draft

    def _copy(self, draft: Path, name: str) -> None:
        options = [
            "--append-verify",
            "--copy-links",
            f"--timeout={LINK_TIMEOUT_S}",
            "-e",
            shlex.join(self.words),
        ]
        words = ["rsync", *options, "--", str(draft), f"{HOST}:"]
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
        while True:
            with suppress(subprocess.TimeoutExpired):
                stderr = process.communicate(timeout=1)[1].decode(errors="replace").strip()
                break
            self.progress()
        if process.returncode:
            why = f"rsync could not send {name} ({process.returncode}): {stderr[:300]}"
            raise StoreError(why, False)

    def _get(self, key: str, offset: int, length: int) -> bytes | None:
        """None where there is no such file."""
        request = {"do": "get", "key": key, "offset": offset, "length": length}
        reply = self._ask(request, missing=True)
        if "length" not in reply:
            return None
        assert self._process
        assert self._process.stdout
        content = self._process.stdout.read(reply["length"])
        if len(content) < reply["length"]:
            raise self._cut(b"")
        return content

    def _ask(
        self, request: dict[str, Any], blocks: Iterable[bytes] = (), missing: bool = False
    ) -> Any:
        process = self._connected()
        assert process.stdin
        assert process.stdout
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.writelines(blocks)
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = b""
        try:
            reply = json.loads(line)
        except ValueError:
            raise self._cut(line) from None
        if missing and reply.get("error") == "missing":
            return reply
        if reply.get("error") == "bad":  # its bytes are not those that were hashed
            raise ChangedError(request["key"])
        if "error" in reply:
            whole = reply["error"] in WHOLE
            told = "the store is full" if reply["error"] == "full" else "the store refuses"
            raise StoreError(f"{told}: {reply['why']}", whole)
        return reply

    def _connected(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                [*self.words, "--", HOST],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        return self._process

    def _cut(self, line: bytes) -> StoreError:
        """What ssh says of it, once it has ended."""
        said, process = "", self._process
        if process and process.stderr:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
            said = process.stderr.read().decode(errors="replace").strip()[-300:]
        self.close()
        said = said or line.decode(errors="replace").strip()[-300:] or "the connection ended"
        return StoreError(f"the store cannot be reached: {said}")
