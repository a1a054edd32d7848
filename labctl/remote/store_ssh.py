"""A store on an SSH server, by this server's own ssh and key: it opens store_door.py."""

from __future__ import annotations

import hashlib
import json
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from .place import CHUNK, sha256_of
from .store import ChangedError, Progress, StoreError

PART = 8 * 1024 * 1024
"""What is sent between two answers; a cut link costs no more than this."""
WHOLE = ("full", "io", "cut")
MOST_READ = 64 * 1024 * 1024


def words(about: dict[str, Any], key: Path, hosts: Path) -> list[str]:
    """The ssh that leads to the store's door: no configuration, one key, one pinned host."""
    options = {
        "BatchMode": "yes",
        "IdentitiesOnly": "yes",
        "UserKnownHostsFile": str(hosts),
        "GlobalKnownHostsFile": "/dev/null",
        "HostKeyAlias": "labctl-store",
        "StrictHostKeyChecking": "yes",
        "UpdateHostKeys": "no",
        "ForwardAgent": "no",
        "ConnectTimeout": "10",
        "ServerAliveInterval": "5",
        "ServerAliveCountMax": "3",
        "LogLevel": "ERROR",
    }
    said = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    place = ["-p", str(about["port"]), "-l", about["user"], "--", about["host"]]
    return ["ssh", "-F", "none", "-T", "-i", str(key), *said, *place]


class SshStore:
    """One connection, made on the first request and ended by `close` or by an error."""

    def __init__(self, about: dict[str, Any], key: Path, hosts: Path, progress: Progress) -> None:
        self.words = words(about, key, hosts)
        self.progress = progress
        self._process: subprocess.Popen[bytes] | None = None

    def send(self, key: str, path: Path, size: int, sha256: str) -> None:
        offset = 0
        about = {"key": key, "size": size, "sha256": sha256}
        if size > PART:
            there = self._ask({"do": "look", **about})
            if (there["size"], there["sha256"]) == (size, sha256):
                if sha256_of(path, size) != sha256:
                    raise ChangedError(path.name)
                return
            offset = there["staged"] if there["staged"] < size else 0
        with path.open("rb") as file:
            file.seek(offset)
            while True:
                part = file.read(min(PART, size - offset))
                if len(part) < min(PART, size - offset):
                    raise ChangedError(path.name)
                asked = {"do": "put", **about, "offset": offset, "length": len(part)}
                done = self._ask(asked, part)["done"]
                offset += len(part)
                self.progress()
                if done or offset >= size:
                    return

    def put(self, key: str, content: bytes) -> None:
        size = len(content)
        known = {"size": size, "sha256": hashlib.sha256(content).hexdigest()}
        self._ask({"do": "put", "key": key, **known, "offset": 0, "length": size}, content)

    def read(self, key: str) -> bytes | None:
        asked = {"do": "get", "key": key, "offset": 0, "length": MOST_READ}
        reply = self._ask(asked, missing=True)
        if "length" not in reply:
            return None
        return b"".join(self._bytes(reply["length"]))

    def fetch(self, key: str, path: Path, size: int) -> None:
        reply = self._ask({"do": "get", "key": key, "offset": 0, "length": size}, missing=True)
        if "length" not in reply:
            raise StoreError("it is not in the store", False)
        with path.open("wb") as file:
            for block in self._bytes(reply["length"]):
                file.write(block)
                self.progress()

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

    def _ask(self, asked: dict[str, Any], body: bytes = b"", missing: bool = False) -> Any:
        process = self._connected()
        assert process.stdin
        assert process.stdout
        try:
            process.stdin.write(json.dumps(asked).encode() + b"\n" + body)
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
            raise ChangedError(asked["key"])
        if "error" in reply:
            whole = reply["error"] in WHOLE
            said = "the store is full" if reply["error"] == "full" else "the store refuses"
            raise StoreError(f"{said}: {reply['why']}", whole)
        return reply

    def _bytes(self, length: int) -> Any:
        assert self._process
        assert self._process.stdout
        while length > 0:
            block = self._process.stdout.read(min(CHUNK, length))
            if not block:
                raise self._cut(b"")
            length -= len(block)
            yield block

    def _connected(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                self.words,
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
