"""The client of the agent on a server: installs it on the first call, decodes its replies."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from labctl.errors import (
    CommandError,
    LabError,
    LinkLostError,
    TransferError,
)
from labctl.errors.replies import make_error
from labctl.errors.subject import Subject, Text
from labctl.lazy import lazy_imports
from labctl.servers.vendored import read_vendored_files
from labctl.transports import Body, Transport
from labctl.wire.codec import Message, MessageError, encode, from_json
from labctl.wire.verbs import ErrorReply, Opening, Reply, Request, StreamingVerb, Verb

with lazy_imports(__name__):
    import zipfile

MARK = b"\x1elabctl "
# Limits a streaming verb's first reply, and how much of its standard error is kept.
MOST_REPLY_BYTES = 16 * 1024**2
# What `python3 PATH VERB` runs. It exits without the interpreter's cleanup, which takes 5 ms.
ENTRY_POINT = b"""import os, sys, types
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
KEPT = "transferred data is kept and reused"
# A shell's exit codes above this mean a signal.
SIGNALLED = 128


@contextlib.contextmanager
def add_resume_hint(hint: Text) -> Iterator[None]:
    """Add `hint`, the command that resumes the transfer, to an error of the link or the agent."""

    def render(subject: Subject) -> str:
        return f"{hint if isinstance(hint, str) else hint(subject)}   # {KEPT}"

    try:
        yield
    except LinkLostError as error:
        raise LinkLostError(error.what, why=error.why, hint=render) from error
    except TransferError as error:
        if error.hint:
            raise
        raise TransferError(error.what, why=error.why, hint=render) from error
    except CommandError as error:
        if error.code <= SIGNALLED:
            raise
        raise TransferError(
            "the labctl agent on the server was killed",
            why=f"signal {error.code - SIGNALLED}; {error.stderr.strip()[-300:]}".rstrip("; "),
            hint=render,
        ) from error


@functools.cache
def list_program_files() -> tuple[tuple[str, bytes], ...]:
    """List the agent's files as (path, content): the packages `labctl.agent` and `labctl.wire`,
    their entry point, and the vendored packages that they import."""
    home = Path(__file__).parents[1]
    packages = (*_read_sources(home, "agent"), *_read_sources(home, "wire"))
    return (("__main__.py", ENTRY_POINT), *packages, *read_vendored_files())


def _read_sources(home: Path, package: str) -> Iterator[tuple[str, bytes]]:
    """Yield (path, content) of a package's files in a fixed order.

    Every call of the agent reads them, to name its directory. With Path objects, that takes twice
    as long.
    """
    for folder, below, files in os.walk(home / package):
        below.sort()
        inside = os.path.relpath(folder, home)
        for name in sorted(files):
            if name.endswith((".py", ".sh")):
                with open(f"{folder}/{name}", "rb", buffering=0) as file:  # noqa: PTH123
                    yield f"{inside}/{name}", file.read()


@functools.cache
def program_name() -> str:
    """Return the name of the agent's directory on the server, from the hash of its files."""
    digest = hashlib.sha256()
    for path, content in list_program_files():
        digest.update(f"{path} {len(content)}\n".encode() + content)
    return f"remote-{digest.hexdigest()[:16]}"


@functools.cache
def build_program() -> bytes:
    """Build a zip of the agent's files, byte for byte reproducible."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in list_program_files():
            info = zipfile.ZipInfo(path, date_time=(2020, 1, 1, 0, 0, 0))
            info.external_attr = 0o644 << 16
            archive.writestr(info, content, compress_type=zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


class AgentClient:
    """The agent on one server. Every call names a verb and sends one JSON object."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    def call(
        self,
        verb: Verb[Request, Reply],
        request: Request | Callable[[], Request],
        *,
        timeout_s: float = 120.0,
    ) -> Reply:
        """Call a verb and return its reply.

        A request that takes long to build can be a function: the agent starts meanwhile.

        Raises the LabError that the agent reports, or CommandError if it exits without a reply.
        """
        stdin = _build_later(request) if callable(request) else _encode_line(request)
        line = _build_line(verb.name)
        result = self.transport.run(line, stdin=stdin, timeout_s=timeout_s, check=False)
        if result.code == NOT_INSTALLED:
            self.install()
            result = self.transport.run(line, stdin=stdin, timeout_s=timeout_s, check=False)
        reply = find_reply(result.stdout.encode())
        if reply is None:
            reply = find_reply(result.stderr.encode())
        reply = require_success(verb.name, reply, result.code, result.stderr)
        return convert_reply(verb.reply, reply)

    def stream(
        self,
        verb: StreamingVerb[Request, Opening, Reply],
        request: Request,
        *,
        on_reply: Callable[[Opening], None],
        on_bytes: Callable[[bytes], None],
        timeout_s: float | None = None,
    ) -> Reply:
        """Call a streaming verb: an opening reply, then bytes as they arrive, then a closing reply.

        Returns the closing reply. If it never comes, the transport raises LinkLostError (the link
        died), or this raises CommandError (the agent died). BusyError after `timeout_s`.
        """
        line, stdin = _build_line(verb.name), _encode_line(request)
        splitter = _ReplyParser(
            lambda reply: on_reply(convert_reply(verb.opening, reply)), on_bytes
        )
        errors = bytearray()

        def add_errors(block: bytes) -> None:
            errors.extend(block)
            del errors[:-MOST_REPLY_BYTES]  # the reply is at the end

        def run() -> int:
            return self.transport.stream(
                line,
                stdin=stdin,
                on_stdout=splitter.feed,
                on_stderr=add_errors,
                timeout_s=timeout_s,
            )

        code = run()
        if code == NOT_INSTALLED:
            self.install()
            code = run()
        stderr = errors.decode(errors="replace")
        reply = require_success(verb.name, find_reply(bytes(errors)), code, stderr)
        return convert_reply(verb.closing, reply)

    def install(self) -> None:
        """Put the agent on the server by rename, and delete versions older than 30 days.

        It is unpacked there: Python caches compiled files for a directory, but not for a zip.
        """
        self.transport.run(
            "set -e; umask 077; "
            f'all="$HOME/.cache/labctl"; here="$all/{program_name()}"; new="$all/new.$$"; '
            'mkdir -p "$all" "$new"; '
            'find "$all" -maxdepth 1 -name "remote-*" -mtime +30 -exec rm -rf {} + ; '
            'cat > "$new.zip"; python3 -m zipfile -e "$new.zip" "$new"; rm -f "$new.zip"; '
            'if [ -d "$here" ]; then rm -rf "$new"; else mv "$new" "$here"; fi',
            stdin=build_program(),
        )


def _encode_line(request: NamedTuple) -> bytes:
    return encode(request).encode() + b"\n"


def _build_later(build: Callable[[], NamedTuple]) -> Body:
    """Return a body that is built when it is first read; a transport reads it for each attempt."""
    line = functools.cache(lambda: _encode_line(build()))
    return lambda: iter((line(),))


def _build_line(verb: str) -> str:
    """Build the shell line for a verb.

    Python starts without the user's settings and packages, which halves its start time.
    """
    path = f"$HOME/.cache/labctl/{program_name()}/__main__.py"
    return f'[ -f "{path}" ] || exit {NOT_INSTALLED}; exec python3 -I -S "{path}" {verb}'


class _ReplyParser:
    """Skips what a login shell prints, parses the marked line, passes on the raw bytes after it."""

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
                raise _make_protocol_error()
            return
        self.found = True
        reply = find_reply(self.head[start : end + 1])
        if reply is None:
            raise _make_protocol_error()
        self.on_reply(reply)
        if rest := self.head[end + 1 :]:
            self.on_bytes(rest)


def find_reply(output: bytes) -> dict[str, Any] | None:
    """Parse the last marked line in some output; None without a complete one."""
    start = output.rfind(MARK)
    if start < 0:
        return None
    try:
        reply = json.loads(output[start + len(MARK) :].split(b"\n", 1)[0])
    except (ValueError, RecursionError):
        return None
    return reply if isinstance(reply, dict) else None


def convert_reply(kind: type[Message], reply: dict[str, Any]) -> Message:
    """Convert a reply to its message; LabError if it is not one."""
    try:
        return from_json(kind, reply)
    except MessageError as error:
        raise _make_protocol_error(str(error)) from None


def _make_protocol_error(why: str = "") -> LabError:
    return LabError(
        "the labctl agent on the server sent a reply that this version does not understand",
        why=why,
        hint="labctl doctor",
    )


def require_success(
    verb: str, reply: dict[str, Any] | None, code: int, stderr: str
) -> dict[str, Any]:
    """Return the reply, or raise the LabError that it reports; CommandError without a reply."""
    if reply is None:
        if code == 127:
            raise CommandError(
                "the server has no python3", code=code, stderr=stderr, hint="labctl doctor"
            )
        raise CommandError(
            f"the labctl agent on the server exited without a reply ({verb}, exit {code})",
            code=code,
            stderr=stderr,
            hint="labctl doctor",
        )
    failure = convert_reply(ErrorReply, reply).error
    if failure is None:
        return reply
    raise make_error(failure)
