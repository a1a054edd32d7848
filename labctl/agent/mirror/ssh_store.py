"""A store on an SSH server, by this server's own ssh and key; ssh_gateway.py runs there.

A large file is first sent as a draft by rsync, which resumes after a cut; a request then puts it
in place.
"""

from __future__ import annotations

import hashlib
import shlex
import shutil
import subprocess
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Iterable, Iterator, Union

from ...wire.codec import MessageError, decode, encode
from ...wire.mirrors import GatewayReply, GetPartRequest, PutFileRequest, StoreConfigRecord
from ...wire.s3 import MOST_READ_BYTES
from ..host.paths import CHUNK
from .store import ChangedError, Progress, StoreError

# bytes: larger files go by rsync, so a lost connection wastes no more than this
PART_BYTES = 8 * 1024 * 1024
# kinds of failure after which nothing else can be sent either
WHOLE = ("full", "io", "cut")
HOST = "labctl-store"
LINK_TIMEOUT_S = 60
GatewayRequest = Union[PutFileRequest, GetPartRequest]


def build_ssh_words(settings: StoreConfigRecord, key: Path, hosts: Path) -> list[str]:
    """Return the ssh command to the store: no user configuration, one key, one pinned host."""
    options = {
        "BatchMode": "yes",
        "IdentitiesOnly": "yes",
        "UserKnownHostsFile": str(hosts),
        "GlobalKnownHostsFile": "/dev/null",
        "HostName": settings.host,
        "HostKeyAlias": HOST,
        "StrictHostKeyChecking": "yes",
        "UpdateHostKeys": "no",
        "ForwardAgent": "no",
        "ConnectTimeout": "10",
        "ServerAliveInterval": "5",
        "ServerAliveCountMax": "3",
        "LogLevel": "ERROR",
    }
    option_words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    return [
        *("ssh", "-F", "none", "-T", "-i", str(key), *option_words),
        *("-p", str(settings.port), "-l", settings.user),
    ]


class MirrorSshStore:
    """A connection, made on the first request and closed by `close` or by an error."""

    def __init__(
        self, settings: StoreConfigRecord, key: Path, hosts: Path, progress: Progress
    ) -> None:
        self.words = build_ssh_words(settings, key, hosts)
        self.folder = key.parent
        self.progress = progress
        self._process: subprocess.Popen[bytes] | None = None

    def send(self, key: str, path: Path, size: int, sha256: str) -> None:
        request = PutFileRequest(key, size, sha256, length=0)
        if size <= PART_BYTES:
            with path.open("rb") as file:
                content = file.read(size)
            if len(content) < size:
                raise ChangedError(path.name)
            self._send_request(request._replace(length=size), [content])
        else:
            reply = self._send_request(request)
            if not reply.done and reply.rsync is None:
                # A gateway of an earlier version accepts a file of any size in one request.
                self._send_request(request._replace(length=size), self._read_blocks(path, size))
            elif not reply.done:
                self._send_draft(request, path, may_rsync=bool(reply.rsync))
        self.progress()

    def _send_draft(self, request: PutFileRequest, path: Path, *, may_rsync: bool) -> None:
        if not may_rsync or not shutil.which("rsync"):
            missing = "rsync on this server" if may_rsync else "rrsync on the store's machine"
            raise StoreError(f"{path.name} is too large to send without {missing}", False)
        name = f"{request.sha256}.{request.size}"
        with self._name_draft(path, request.size, name) as draft:
            self._rsync_draft(draft, path.name)
        if not self._send_request(request).done:
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

    def write(self, key: str, content: bytes) -> None:
        size = len(content)
        sha256 = hashlib.sha256(content).hexdigest()
        self._send_request(PutFileRequest(key, size, sha256, length=size), [content])

    def read(self, key: str) -> bytes | None:
        return self._get(key, 0, MOST_READ_BYTES)

    def fetch(self, key: str, path: Path, size: int) -> None:
        with path.open("wb") as file:
            while True:
                block = self._get(key, file.tell(), min(PART_BYTES, size - file.tell()))
                if block is None:
                    raise StoreError("the store does not have it", False)
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
        """Yield the file under the draft's name; if it has grown, a copy of its first bytes."""
        with tempfile.TemporaryDirectory(prefix="store-", dir=str(self.folder)) as folder:
            draft = Path(folder, name)
            if path.stat().st_size == size:
                draft.symlink_to(path.resolve())
                yield draft
                return
            with draft.open("wb") as target:
                target.writelines(self._read_blocks(path, size))
            yield draft

    def _rsync_draft(self, draft: Path, name: str) -> None:
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
        """Return the bytes; None if the file does not exist."""
        reply = self._send_request(GetPartRequest(key, offset, length))
        if reply.error:
            return None
        assert self._process
        assert self._process.stdout
        if not 0 <= reply.length <= max(length, 0):
            # Whoever runs the store's machine could fill this server's memory and disk.
            raise self._describe_cut(b"the store sent more than was requested")
        content = self._process.stdout.read(reply.length)
        if len(content) < reply.length:
            raise self._describe_cut(b"")
        return content

    def _send_request(self, request: GatewayRequest, blocks: Iterable[bytes] = ()) -> GatewayReply:
        """Return the reply; of the errors only "missing", for a get. StoreError for others."""
        process = self._connect()
        assert process.stdin
        assert process.stdout
        try:
            process.stdin.write(encode(request).encode() + b"\n")
            process.stdin.writelines(blocks)
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = b""
        try:
            reply = decode(GatewayReply, line)
        except MessageError:
            raise self._describe_cut(line) from None
        if reply.error == "missing" and isinstance(request, GetPartRequest):
            return reply
        if reply.error == "bad":  # the bytes do not match the hash
            raise ChangedError(request.key)
        if reply.error:
            what = "the store is full" if reply.error == "full" else "the store refused"
            raise StoreError(f"{what}: {reply.why}", reply.error in WHOLE)
        return reply

    def _connect(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                [*self.words, "--", HOST],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        return self._process

    def _describe_cut(self, line: bytes) -> StoreError:
        """Return an error with ssh's last message, once ssh has ended."""
        message, process = "", self._process
        if process and process.stderr:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
            message = process.stderr.read().decode(errors="replace").strip()[-300:]
        self.close()
        message = message or line.decode(errors="replace").strip()[-300:] or "the connection ended"
        return StoreError(f"cannot reach the store: {message}")
