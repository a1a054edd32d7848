"""A store in a directory of an SSH server, through the user's own login and ssh_gateway.py."""

from __future__ import annotations

import hashlib
import re
import urllib.parse
from collections.abc import Callable, Iterator
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
from labctl.wire.mirrors import (
    GatewayReply,
    GetPartRequest,
    ListNamesRequest,
    PutFileRequest,
    SwapFileRequest,
)

PART_BYTES = 8 * 1024 * 1024
NOT_INSTALLED, FULL = 97, 98
FOLDER = ".local/share/labctl"
FULL_HINT = "labctl config   # shows the store; free space there, then run the same command again"
Body = bytes | Callable[[], Iterator[bytes]]
GatewayRequest = PutFileRequest | GetPartRequest | SwapFileRequest | ListNamesRequest


class SshLabStore:
    def __init__(self, url: str, prefix: str, around: StoreContext) -> None:
        self.url = url
        self._around = around
        parts = urllib.parse.urlsplit(url)
        self._directory = _check_directory(f"{parts.path.rstrip('/')}/{prefix}".removeprefix("/~/"))
        self._parts = parts
        self._transport: Any = None
        self._endpoint: Endpoint | None = None
        digest = hashlib.sha256(around.gateway).hexdigest()[:16]
        self._gateway = f"{FOLDER}/store-gateway-{digest}.py"

    def endpoint(self) -> Endpoint:
        """Resolve the address by the user's own ssh_config, and pin its host key."""
        if self._endpoint is None:
            alias = self._around.resolve_alias(self._parts.hostname or "")
            port, user = self._parts.port or alias.port, self._parts.username or alias.user
            # Another port is another sshd, which may have another key.
            host_key = alias.host_key if port == alias.port else ""
            endpoint = msgspec.structs.replace(alias, port=port, user=user, host_key=host_key)
            self._endpoint = self._around.settle_host_key(endpoint)
        return self._endpoint

    def grant_access(self, lab: str, key: str) -> str:
        """Give `key` access to this prefix, replacing the lab's earlier key; return its path."""
        self._install()
        return self._keys("admit", f"~/{self._gateway}", self._directory, lab, key).strip()

    def revoke_access(self, lab: str) -> None:
        """Revoke the access of the lab's key. What it wrote stays."""
        self._keys("forget", lab)

    def read(self, key: str) -> bytes | None:
        content = b""
        try:
            while True:
                size, block = self._get(key, len(content), PART_BYTES)
                content += block
                if not block or len(content) >= size:
                    return content
        except NotFoundError:
            return None

    def write(self, key: str, data: bytes | Path) -> None:
        size = len(data) if isinstance(data, bytes) else data.stat().st_size
        sha256 = _hash(data)
        request = PutFileRequest(key, size, sha256, length=0)
        if isinstance(data, bytes):
            self._request(request._replace(length=size), data)
            return
        if size:
            self._send_draft(data, f"{sha256}.{size}", size)
        if not self._request(request)[0].done:
            raise TransferError(
                f"{key} changed while it was being sent", hint="labctl pull   # again"
            )

    def fetch(self, key: str, path: Path, size: int, sha256: str) -> None:
        def download(draft: Path) -> None:
            with draft.open("wb") as file:
                while True:
                    wanted = min(size - file.tell(), PART_BYTES)
                    block = self._get(key, file.tell(), wanted)[1]
                    file.write(block)
                    if not block or file.tell() >= size:
                        return

        write_verified(path, size, sha256, download)

    def list_keys(self, prefix: str = "") -> list[str]:
        return list(self._request(ListNamesRequest(prefix))[0].names)

    def swap(self, key: str, data: bytes, expected: bytes | None) -> bool:
        digest = "" if expected is None else hashlib.sha256(expected).hexdigest()
        return self._request(SwapFileRequest(key, len(data), digest), data)[0].done

    def _send_draft(self, data: Path, name: str, size: int) -> None:
        folder = f"{self._directory}/.incoming"
        line = (
            f"umask 077; cd && mkdir -p -- '{folder}' && cd -- '{folder}' || exit; "
            f"cat > {name} && exit; rm -f {name}; free=$(df -Pk . | awk 'NR == 2 {{ print $4 }}'); "
            f'[ "$free" -gt {size // 1024} ] || exit {FULL}; exit 1'
        )
        code, _, err = self._stream(line, _blocks(data))
        if code == FULL:
            raise DiskFullError(
                f"{self.url} is full",
                why=f"{data.name} has {size} bytes",
                hint=FULL_HINT,
            )
        if code:
            raise self._make_command_error(code, err)

    def _get(self, key: str, offset: int, length: int) -> tuple[int, bytes]:
        """Read a part of a file; return (size of the whole file, the bytes)."""
        reply, body = self._request(GetPartRequest(key, offset, length))
        if len(body) != reply.length:
            raise TransferError(
                f"the download of {key} from {self.url} was interrupted",
                hint="labctl pull   # again",
            )
        return reply.size, body

    def _request(self, request: GatewayRequest, body: bytes = b"") -> tuple[GatewayReply, bytes]:
        """Send a request to the gateway; return (reply, the bytes that follow it)."""
        line = encode(request).encode() + b"\n"
        output = self._serve(line + body)
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
            key = "" if isinstance(request, ListNamesRequest) else request.key
            raise self._to_error(key, reply)
        return reply, rest

    def _to_error(self, key: str, reply: GatewayReply) -> LabError:
        why = reply.why
        if reply.error == "missing":
            return NotFoundError(f"{self.url} does not contain {key!a}", why=why)
        if reply.error == "full":
            return DiskFullError(f"{self.url} is full", why=why, hint=FULL_HINT)
        return TransferError(f"{self.url} refused {key!a}", why=why)

    def _serve(self, stdin: bytes) -> bytes:
        """Run the gateway on one input and return its output; installs it if needed."""
        line = (
            f"cd && [ -f '{self._gateway}' ] || exit {NOT_INSTALLED}; "
            f"exec python3 -I -S '{self._gateway}' serve '{self._directory}'"
        )
        code, out, err = self._stream(line, stdin)
        if code == NOT_INSTALLED:
            self._install()
            code, out, err = self._stream(line, stdin)
        if code:
            raise self._make_command_error(code, err)
        return out

    def _install(self) -> None:
        path = self._gateway
        self._run(
            f"set -e; umask 077; cd; mkdir -p {FOLDER}; [ -f '{path}' ] || "
            f"{{ cat > '{path}'.$$; mv '{path}'.$$ '{path}'; }}",
            self._around.gateway,
        )

    def _keys(self, *words: str) -> str:
        line = command("python3", "-I", "-S", "-", *words).render()
        return self._run(f"cd && exec {line}", self._around.keys).decode()

    def _run(self, line: str, stdin: Body) -> bytes:
        code, out, err = self._stream(line, stdin)
        if code:
            raise self._make_command_error(code, err)
        return out

    def _make_command_error(self, code: int, err: str) -> LabError:
        if code == 127:
            return CommandError(f"{self.url}: python3 is not installed", code=code, stderr=err)
        return CommandError(f"{self.url} cannot be used", code=code, stderr=err)

    def _stream(self, line: str, stdin: Body) -> tuple[int, bytes, str]:
        if self._transport is None:
            self._transport = self._around.connect(self.endpoint())
        out, err = bytearray(), bytearray()
        keep: Callable[[bytes], None] = err.extend
        code = self._transport.stream(line, stdin=stdin, on_stdout=out.extend, on_stderr=keep)
        return int(code), bytes(out), err.decode(errors="replace")


def _blocks(path: Path) -> Callable[[], Iterator[bytes]]:
    def read_blocks() -> Iterator[bytes]:
        with path.open("rb") as file:
            while block := file.read(PART_BYTES):
                yield block

    return read_blocks


def _hash(data: bytes | Path) -> str:
    if isinstance(data, bytes):
        return hashlib.sha256(data).hexdigest()
    with data.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_directory(directory: str) -> str:
    """Check a directory, relative to the home directory or absolute, that a shell command uses."""
    if not re.fullmatch(r"[A-Za-z0-9._/+@~,=-]+", directory):
        raise UsageError(
            f"{directory!a} is not a valid directory of a store",
            hint="labctl config   # check store",
        )
    return directory
