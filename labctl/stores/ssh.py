"""A store in a directory of an SSH server, through the person's own login and the door program."""

from __future__ import annotations

import hashlib
import json
import re
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from labctl.errors import (
    CommandError,
    DiskFullError,
    LabError,
    NotFoundError,
    TransferError,
    UsageError,
)
from labctl.model import Endpoint
from labctl.shell import command
from labctl.stores import Surroundings, staged

PART_BYTES = 8 * 1024 * 1024
MOST_READ_BYTES = 64 * 1024 * 1024
NOT_INSTALLED = 97
FOLDER = ".local/share/labctl"


class SshStore:
    def __init__(self, url: str, prefix: str, around: Surroundings) -> None:
        self.url = url
        self._around = around
        self._prefix = prefix
        parts = urllib.parse.urlsplit(url)
        place = parts.path.rstrip("/")
        self._top = place[1:] if place.startswith("/~/") else place
        self._parts = parts
        self._transport: Any = None
        self._endpoint: Endpoint | None = None
        digest = hashlib.sha256(around.door).hexdigest()[:16]
        self._door = f"{FOLDER}/store-door-{digest}.py"

    def endpoint(self) -> Endpoint:
        """The way there with its host key pinned, as the user's own ssh_config would have it."""
        if self._endpoint is None:
            found = self._around.resolve_alias(self._parts.hostname or "")
            port, user = self._parts.port or found.port, self._parts.username or found.user
            # Another port is another sshd, whose key may be another.
            known = found.host_key if port == found.port else ""
            given = msgspec.structs.replace(found, port=port, user=user, host_key=known)
            self._endpoint = self._around.settle_host_key(given)
        return self._endpoint

    def admit(self, lab: str, key: str) -> str:
        """Let `key`, in place of the one that `lab` had, use this prefix; its directory's path."""
        self._install()
        place = f"{self._top}/{self._prefix}"
        return self._keys("admit", f"~/{self._door}", place, lab, key).strip()

    def forget(self, lab: str) -> None:
        """The lab's key is let in no longer. What it wrote stays."""
        self._keys("forget", lab)

    def read(self, key: str) -> bytes | None:
        try:
            return self._get(key, 0, MOST_READ_BYTES)[1]
        except NotFoundError:
            return None

    def write(self, key: str, data: bytes | Path) -> None:
        size = len(data) if isinstance(data, bytes) else data.stat().st_size
        about = {"do": "put", "key": key, "size": size, "sha256": _sha256(data)}
        offset = 0
        while True:
            part = _part(data, offset)
            asked = {**about, "offset": offset, "length": len(part)}
            if self._ask(asked, part)[0]["done"]:
                return
            offset += len(part)
            if not part:
                raise TransferError(
                    f"{key} changed while it was sent", hint="labctl pull   # again"
                )

    def fetch(self, key: str, path: Path, size: int, sha256: str) -> None:
        def bring(draft: Path) -> None:
            with draft.open("wb") as file:
                while (left := size - file.tell()) > 0:
                    block = self._get(key, file.tell(), min(left, PART_BYTES))[1]
                    if not block:
                        break
                    file.write(block)
            if size == 0:
                self._get(key, 0, 0)

        staged(path, size, sha256, bring)

    def names(self, prefix: str = "") -> list[str]:
        return list(self._ask({"do": "list", "prefix": prefix})[0]["names"])

    def swap(self, key: str, data: bytes, expected: bytes | None) -> bool:
        known = "" if expected is None else hashlib.sha256(expected).hexdigest()
        asked = {"do": "swap", "key": key, "expected": known, "length": len(data)}
        return bool(self._ask(asked, data)[0]["done"])

    def _get(self, key: str, offset: int, length: int) -> tuple[int, bytes]:
        """(size of the whole, the bytes)."""
        reply, body = self._ask({"do": "get", "key": key, "offset": offset, "length": length})
        if len(body) != reply["length"]:
            raise TransferError(
                f"{key} broke off on its way from {self.url}", hint="labctl pull   # again"
            )
        return int(reply["size"]), body

    def _ask(self, asked: dict[str, Any], body: bytes = b"") -> tuple[dict[str, Any], bytes]:
        """(reply, bytes after it)."""
        line = json.dumps(asked, separators=(",", ":")).encode() + b"\n"
        said = self._served(line + body)
        head, _, rest = said.partition(b"\n")
        try:
            reply: dict[str, Any] = json.loads(head)
        except ValueError:
            raise TransferError(
                f"{self.url} does not answer as a store does",
                why=said[:300].decode("ascii", "replace"),
                hint="labctl config   # store: an account that labctl may log in to",
            ) from None
        if "error" in reply:
            raise self._refused(asked.get("key", ""), reply)
        return reply, rest

    def _refused(self, key: str, reply: dict[str, str]) -> LabError:
        why = reply["why"]
        if reply["error"] == "missing":
            return NotFoundError(f"{key!a} is not in {self.url}", why=why)
        if reply["error"] == "full":
            return DiskFullError(f"{self.url} is full", why=why)
        return TransferError(f"{self.url} refuses {key!a}", why=why)

    def _served(self, stdin: bytes) -> bytes:
        """The door's output for one input; the door is installed on first need."""
        line = (
            f'cd && [ -f "{self._door}" ] || exit {NOT_INSTALLED}; '
            f'exec python3 -I -S "{self._door}" serve {_quoted(f"{self._top}/{self._prefix}")}'
        )
        code, out, said = self._stream(line, stdin)
        if code == NOT_INSTALLED:
            self._install()
            code, out, said = self._stream(line, stdin)
        if code:
            raise self._failed(code, said)
        return out

    def _install(self) -> None:
        line = (
            f'set -e; umask 077; cd; mkdir -p {FOLDER}; [ -f "{self._door}" ] || '
            f'{{ cat > "{self._door}.$$"; mv "{self._door}.$$" "{self._door}"; }}'
        )
        code, _, said = self._stream(line, self._around.door)
        if code:
            raise self._failed(code, said)

    def _keys(self, *words: str) -> str:
        line = command("python3", "-I", "-S", "-", *words).render()
        code, out, said = self._stream(line, self._around.keys)
        if code:
            raise self._failed(code, said)
        return out.decode()

    def _failed(self, code: int, said: str) -> LabError:
        if code == 127:
            return CommandError(f"{self.url}: there is no python3", code=code, stderr=said)
        return CommandError(f"{self.url} cannot be used", code=code, stderr=said)

    def _stream(self, line: str, stdin: bytes) -> tuple[int, bytes, str]:
        if self._transport is None:
            self._transport = self._around.connect(self.endpoint())
        out, err = bytearray(), bytearray()
        keep: Callable[[bytes], None] = err.extend
        code = self._transport.stream(line, stdin=stdin, on_stdout=out.extend, on_stderr=keep)
        return int(code), bytes(out), err.decode(errors="replace")


def _part(data: bytes | Path, offset: int) -> bytes:
    if isinstance(data, bytes):
        return data[offset : offset + PART_BYTES]
    with data.open("rb") as file:
        file.seek(offset)
        return file.read(PART_BYTES)


def _sha256(data: bytes | Path) -> str:
    if isinstance(data, bytes):
        return hashlib.sha256(data).hexdigest()
    with data.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _quoted(place: str) -> str:
    """For the shell, and no more than a path (the door itself knows `~/`)."""
    if not re.fullmatch(r"[A-Za-z0-9._/+@~,=-]+", place):
        raise UsageError(
            f"{place!a} cannot be the directory of a store", hint="labctl config   # store"
        )
    return f"'{place}'"
