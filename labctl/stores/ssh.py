"""A store in a directory of an SSH server, through the user's own login and ssh_gateway.py.

Every request sends the gateway along with it, so the gateway always has the version of this
labctl. Only the lab's server uses the one that `grant_access` installs.
"""

from __future__ import annotations

import hashlib
import re
import urllib.parse
from collections.abc import Iterator
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
from labctl.stores import StoreContext, write_verified
from labctl.wire.codec import MessageError, decode, encode
from labctl.wire.mirrors import GatewayReply, GetPartRequest, PutFileRequest
from labctl.wire.s3 import MOST_READ_BYTES

PART_BYTES = 8 * 1024 * 1024
FULL_HINT = "labctl config   # shows the store; free space there, then run the same command again"
SIZE_HINT = "labctl config   # check store: something else has written to it"


class SshLabStore:
    def __init__(self, url: str, prefix: str, context: StoreContext) -> None:
        self.url = url
        self._context = context
        self._parts = urllib.parse.urlsplit(url)
        path = f"{self._parts.path.rstrip('/')}/{prefix}"
        self._directory = _check_directory(path.removeprefix("/~/"))
        self._transport: Any = None
        self._endpoint: Endpoint | None = None

    def endpoint(self) -> Endpoint:
        """Resolve the address by the user's own ssh_config, and pin its host key."""
        if self._endpoint is None:
            alias = self._context.resolve_alias(self._parts.hostname or "")
            port, user = self._parts.port or alias.port, self._parts.username or alias.user
            # Another port is another sshd, which may have another key.
            host_key = alias.host_key if port == alias.port else ""
            endpoint = msgspec.structs.replace(alias, port=port, user=user, host_key=host_key)
            self._endpoint = self._context.settle_host_key(endpoint)
        return self._endpoint

    def grant_access(self, lab: str, key: str) -> None:
        """Give `key` access to this prefix, replacing the lab's earlier key."""
        gateway = self._context.gateway
        self._run_program(self._context.keys, "admit", self._directory, lab, key, stdin=gateway)

    def revoke_access(self, lab: str) -> None:
        """Revoke the access of the lab's key. What it wrote stays."""
        self._run_program(self._context.keys, "forget", lab)

    def read(self, key: str) -> bytes | None:
        content = bytearray()
        try:
            for part in self._read_parts(key):
                content += part
                if len(content) > MOST_READ_BYTES:
                    why = f"{key} has more than {MOST_READ_BYTES // 1024**2} MiB"
                    what = f"{self.url} has a file that is too large to read"
                    raise TransferError(what, why=why, hint=SIZE_HINT)
        except NotFoundError:
            return None
        return bytes(content)

    def write(self, key: str, data: bytes) -> None:
        self._put_file(key, data, expected=None)

    def fetch(self, key: str, path: Path, size: int, sha256: str) -> None:
        def write_draft(draft: Path) -> None:
            with draft.open("wb") as file:
                for part in self._read_parts(key):
                    file.write(part)
                    if file.tell() >= size:
                        return

        write_verified(path, size, sha256, write_draft)

    def swap(self, key: str, data: bytes, expected: bytes | None) -> bool:
        return self._put_file(key, data, "" if expected is None else _hash(expected))

    def _put_file(self, key: str, data: bytes, expected: str | None) -> bool:
        size = len(data)
        request = PutFileRequest(key, size, _hash(data), length=size, expected=expected)
        return self._send_request(request, data)[0].done

    def _read_parts(self, key: str) -> Iterator[bytes]:
        offset = 0
        while True:
            reply, part = self._send_request(GetPartRequest(key, offset, PART_BYTES))
            if len(part) != reply.length:
                raise TransferError(
                    f"the download of {key} from {self.url} was interrupted",
                    hint="labctl pull   # again",
                )
            yield part
            offset += len(part)
            if len(part) < PART_BYTES:
                return

    def _send_request(
        self, request: PutFileRequest | GetPartRequest, body: bytes = b""
    ) -> tuple[GatewayReply, bytes]:
        """Send a request to the gateway; return (reply, the bytes that follow it)."""
        stdin = encode(request).encode() + b"\n" + body
        output = self._run_program(self._context.gateway, "serve", self._directory, stdin=stdin)
        head, _, rest = output.partition(b"\n")
        try:
            reply = decode(GatewayReply, head)
        except MessageError:
            raise TransferError(
                f"{self.url} sent an unexpected reply",
                why=output[:300].decode("ascii", "replace"),
                hint="labctl config   # check store: it needs an account with a plain shell",
            ) from None
        if reply.error:
            raise self._make_error(request.key, reply)
        return reply, rest

    def _make_error(self, key: str, reply: GatewayReply) -> LabError:
        if reply.error == "missing":
            return NotFoundError(f"{self.url} does not contain {key!a}", why=reply.why)
        if reply.error == "full":
            return DiskFullError(f"{self.url} is full", why=reply.why, hint=FULL_HINT)
        return TransferError(f"{self.url} refused {key!a}", why=reply.why)

    def _run_program(self, program: bytes, *words: str, stdin: bytes = b"") -> bytes:
        """Run a Python program there, which arrives before its own input; return its output."""
        if self._transport is None:
            self._transport = self._context.connect(self.endpoint())
        loader = f"import sys; exec(sys.stdin.buffer.read({len(program)}))"
        line = command("python3", "-I", "-S", "-c", loader, *words).render()
        out, err = bytearray(), bytearray()
        code = self._transport.stream(
            f"cd && exec {line}",
            stdin=program + stdin,
            on_stdout=out.extend,
            on_stderr=err.extend,
        )
        if code:
            problem = "has no python3" if code == 127 else "cannot be used"
            raise CommandError(
                f"{self.url} {problem}",
                code=code,
                stderr=err.decode(errors="replace"),
                hint="labctl config   # check store: its account needs a plain shell and python3",
            )
        return bytes(out)


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _check_directory(directory: str) -> str:
    """Check a directory, relative to the home directory or absolute, that a shell command uses."""
    if not re.fullmatch(r"[A-Za-z0-9._/+@~,=-]+", directory):
        raise UsageError(
            f"{directory!a} is not a valid directory of a store",
            hint="labctl config   # check store",
        )
    return directory
