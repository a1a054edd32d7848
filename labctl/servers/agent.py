"""Calling the program on the server: installed on first need, answers and failures as values."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from labctl.errors import (
    CommandError,
    DiskFullError,
    EngineError,
    LabError,
    LinkLostError,
    NotFoundError,
    PolicyError,
    TransferError,
    UsageError,
)
from labctl.servers.vendored import read_vendored_files
from labctl.transports import Body, Transport

MARK = b"\x1elabctl "
# Of a streaming verb's first reply, and of what is kept of its standard error.
MOST_REPLY_BYTES = 16 * 1024**2
# What `python3 PATH VERB` runs. Nothing is left to be tidied up at the end, which takes 5 ms.
DOOR = b"""import os, sys, types
here = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, here)
# The packages below are labctl's, whatever else of that name the machine has.
sys.modules["labctl"] = types.ModuleType("labctl")
sys.modules["labctl"].__path__ = [here]
from labctl.agent.entrypoint import main
code = main()
sys.stdout.flush()
sys.stderr.flush()
os._exit(code)
"""
NOT_INSTALLED = 97
KEPT = "what has arrived is kept and used"
# A shell's exit codes above this stand for a signal.
SIGNALLED = 128
KINDS: dict[str, type[LabError]] = {
    "usage": UsageError,
    "policy": PolicyError,
    "missing": NotFoundError,
    "engine": EngineError,
    "disk": DiskFullError,
    "link": TransferError,
}


@contextlib.contextmanager
def resumable(hint: str) -> Iterator[None]:
    """A transfer that `hint` takes up again: says so where the link or the program there ends."""
    try:
        yield
    except LinkLostError as error:
        raise LinkLostError(error.what, why=error.why, hint=f"{hint}  ({KEPT})") from error
    except TransferError as error:
        if error.hint:
            raise
        raise TransferError(error.what, why=error.why, hint=f"{hint}  ({KEPT})") from error
    except CommandError as error:
        if error.code <= SIGNALLED:
            raise
        raise TransferError(
            "labctl's program on the server was ended",
            why=f"signal {error.code - SIGNALLED}; {error.stderr.strip()[-300:]}".rstrip("; "),
            hint=f"{hint}  ({KEPT})",
        ) from error


@functools.cache
def files() -> tuple[tuple[str, bytes], ...]:
    """(path, content) of all that lies on the server: the packages `labctl.agent` and
    `labctl.wire`, their door, and what they import of others."""
    home = Path(__file__).parents[1]
    kept = [
        path
        for package in ("agent", "wire")
        for path in sorted((home / package).rglob("*"))
        if path.suffix in (".py", ".sh")
    ]
    packages = tuple((str(path.relative_to(home)), path.read_bytes()) for path in kept)
    return (("__main__.py", DOOR), *packages, *read_vendored_files())


@functools.cache
def program_name() -> str:
    """What the program is called on the server, from the hash of its files."""
    digest = hashlib.sha256()
    for path, content in files():
        digest.update(f"{path} {len(content)}\n".encode() + content)
    return f"remote-{digest.hexdigest()[:16]}"


def program() -> bytes:
    """A zip of the program's files, byte for byte reproducible."""
    import zipfile  # only where it is installed

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in files():
            info = zipfile.ZipInfo(path, date_time=(2020, 1, 1, 0, 0, 0))
            info.external_attr = 0o644 << 16
            archive.writestr(info, content, compress_type=zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


class Remote:
    """The program on one server. Every call names its verb and carries one JSON object."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    def call(
        self,
        verb: str,
        request: dict[str, Any],
        *,
        body: Callable[[], Iterator[bytes]] | None = None,
        timeout_s: float = 120.0,
    ) -> dict[str, Any]:
        """The reply of an answering verb. `body` follows the request's line on standard input."""
        head = json.dumps(request, separators=(",", ":")).encode() + b"\n"
        stdin: Body = head if body is None else lambda: chain((head,), body())
        line = _line(verb)
        result = self.transport.run(line, stdin=stdin, timeout_s=timeout_s, check=False)
        if result.code == NOT_INSTALLED:
            self.install()
            result = self.transport.run(line, stdin=stdin, timeout_s=timeout_s, check=False)
        reply = find_reply(result.stdout.encode())
        if reply is None:
            reply = find_reply(result.stderr.encode())
        return checked(verb, reply, result.code, result.stderr)

    def stream(
        self,
        verb: str,
        request: dict[str, Any],
        *,
        on_reply: Callable[[dict[str, Any]], None],
        on_bytes: Callable[[bytes], None],
    ) -> dict[str, Any]:
        """A streaming verb: its first reply, then bytes as they come; returns the closing reply.

        A closing reply that never came (the link died) is a LinkLostError from the transport, or
        a CommandError when the program itself died.
        """
        stdin = json.dumps(request, separators=(",", ":")).encode() + b"\n"
        splitter = _Splitter(on_reply, on_bytes)
        errors = bytearray()

        def said(block: bytes) -> None:
            errors.extend(block)
            del errors[:-MOST_REPLY_BYTES]  # the reply is the last of it

        code = self.transport.stream(
            _line(verb), stdin=stdin, on_stdout=splitter.feed, on_stderr=said
        )
        if code == NOT_INSTALLED:
            self.install()
            code = self.transport.stream(
                _line(verb), stdin=stdin, on_stdout=splitter.feed, on_stderr=said
            )
        return checked(verb, find_reply(bytes(errors)), code, errors.decode(errors="replace"))

    def install(self) -> None:
        """Put the program on the server by rename, and drop earlier versions of it.

        It is unpacked there: Python keeps what it compiled of a directory, never of a zip.
        """
        self.transport.run(
            "set -e; umask 077; "
            f'all="$HOME/.cache/labctl"; here="$all/{program_name()}"; new="$all/new.$$"; '
            'mkdir -p "$all" "$new"; '
            'find "$all" -maxdepth 1 -name "remote-*" -mtime +30 -exec rm -rf {} + ; '
            'cat > "$new.zip"; python3 -m zipfile -e "$new.zip" "$new"; rm -f "$new.zip"; '
            'if [ -d "$here" ]; then rm -rf "$new"; else mv "$new" "$here"; fi',
            stdin=program(),
        )


def _line(verb: str) -> str:
    """Python alone, without the user's settings and packages: that halves its start."""
    path = f"$HOME/.cache/labctl/{program_name()}/__main__.py"
    return f'[ -f "{path}" ] || exit {NOT_INSTALLED}; exec python3 -I -S "{path}" {verb}'


class _Splitter:
    """Drops what a login shell printed, finds the marked line, hands on the raw bytes after it."""

    def __init__(
        self, on_reply: Callable[[dict[str, Any]], None], on_bytes: Callable[[bytes], None]
    ) -> None:
        self.on_reply = on_reply
        self.on_bytes = on_bytes
        self.head = b""
        self.found = False

    def feed(self, block: bytes) -> None:
        if self.found:
            self.on_bytes(block)
            return
        self.head += block
        start = self.head.find(MARK)
        end = self.head.find(b"\n", start)
        if start < 0 or end < 0:
            if len(self.head) > MOST_REPLY_BYTES:
                raise _senseless()
            return
        self.found = True
        reply = find_reply(self.head[start : end + 1])
        if reply is None:
            raise _senseless()
        self.on_reply(reply)
        if rest := self.head[end + 1 :]:
            self.on_bytes(rest)


def find_reply(output: bytes) -> dict[str, Any] | None:
    """The last marked line in some output; None where there is none, or only the half of one."""
    start = output.rfind(MARK)
    if start < 0:
        return None
    try:
        found = json.loads(output[start + len(MARK) :].split(b"\n", 1)[0])
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _senseless() -> LabError:
    return LabError("the server's program gives no answer that labctl knows", hint="labctl doctor")


def checked(verb: str, reply: dict[str, Any] | None, code: int, stderr: str) -> dict[str, Any]:
    """The reply, or the LabError that it stands for."""
    if reply is None:
        if code == 127:
            raise CommandError(
                "the server has no python3", code=code, stderr=stderr, hint="labctl doctor"
            )
        raise CommandError(
            f"the server's program ended without an answer ({verb}, exit {code})",
            code=code,
            stderr=stderr,
            hint="labctl doctor",
        )
    error = reply.get("error")
    if error is None:
        return reply
    kind = KINDS.get(error["kind"], LabError)
    raise kind(error["what"], why=error["why"], hint=error["hint"])
