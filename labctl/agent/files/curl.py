"""HTTPS by the curl program, which verifies certificates, follows redirects and knows proxies.

An address may hold a signature that opens what it names. So it goes to curl on standard input: any
account of the server can read a command line.
"""

from __future__ import annotations

import ipaddress
import shutil
import subprocess
import urllib.parse
from contextlib import contextmanager, suppress
from io import BufferedReader
from typing import Iterator, NamedTuple

from ..host.paths import CHUNK
from ..reply import Failure

IDLE_S = 30
MOST_HEADER_BYTES = 64 * 1024
REDIRECTS = "10"
OPTIONS = [
    "--disable",  # must be the first: no settings of the account's
    *("--config", "-"),
    *("--silent", "--show-error", "--globoff", "--path-as-is"),
    *("--include", "--suppress-connect-headers", "--no-buffer"),
    *("--location", "--max-redirs", REDIRECTS, "--proto-redir", "=https"),
    *("--connect-timeout", str(IDLE_S), "--speed-limit", "1", "--speed-time", str(IDLE_S)),
    *("--user-agent", "labctl", "--header", "Accept-Encoding: identity"),
]
# curl's exit codes (its manual, "Exit codes"). The last two groups end a connection that was made.
REFUSED_PROTOCOL, UNKNOWN_HOST = 1, 6
BROKEN = (16, 18, 52, 55, 56, 92)


class BrokenError(Exception):
    """The connection broke off; what arrived before is good."""


class StatusError(Exception):
    """An answer without the file."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"{status} {reason}")
        self.status = status


class Head(NamedTuple):
    status: int
    reason: str
    headers: dict[str, str]

    @property
    def is_passed_over(self) -> bool:
        """Whether curl goes on to another answer after this one."""
        return self.status < 200 or (300 <= self.status < 400 and "location" in self.headers)


class Answer:
    """The file, or from an offset on the rest of it (status 206)."""

    def __init__(self, head: Head, process: subprocess.Popen[bytes]) -> None:
        self.status = head.status
        self.headers = head.headers
        self._process = process

    def read(self) -> bytes:
        """Some bytes, b"" once all have come; BrokenError."""
        block = _stream(self._process).read1(CHUNK)
        if not block:
            code, message = _end(self._process)
            if code:
                raise BrokenError(message)
        return block


def check_address(address: str) -> None:
    """https:// alone, but for http:// to this very machine."""
    parts = urllib.parse.urlsplit(address)
    plain = parts.scheme == "http" and _is_loopback(parts.hostname or "")
    if not plain and (parts.scheme != "https" or not parts.hostname):
        raise _refuse_address(address)


def _refuse_address(address: str) -> Failure:
    return Failure(
        "usage",
        f"data cannot be fetched from {address!r}",
        "only https:// and s3:// are safe from being changed on the way",
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextmanager
def open_address(address: str, headers: dict[str, str], offset: int = 0) -> Iterator[Answer]:
    """Get a file, from `offset` on. Redirects are followed to https:// alone.

    StatusError where the server refuses, BrokenError where it hangs up, otherwise a Failure.
    """
    check_address(address)
    with _start(address, headers, offset) as process:
        try:
            head = _read_head(address, process)
            if head.status not in (200, 206):
                raise StatusError(head.status, head.reason)
            yield Answer(head, process)
        finally:
            process.kill()


def _start(address: str, headers: dict[str, str], offset: int) -> subprocess.Popen[bytes]:
    program = shutil.which("curl")
    if not program:
        what = "the server has no curl, which fetches data"
        raise Failure("missing", what, "", "labctl ssh -- sudo apt-get install curl")
    protocols = "=http,https" if address.startswith("http:") else "=https"
    words = [program, *OPTIONS, "--proto", protocols]
    if offset:
        words += ["--continue-at", str(offset)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe)
    settings = [("url", address), *(("header", f"{name}: {headers[name]}") for name in headers)]
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # its exit code says why
        process.stdin.write("".join(_quote(*one) for one in settings).encode())
        process.stdin.close()
    return process


def _quote(option: str, value: str) -> str:
    """A line of a file of curl's settings."""
    value = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "").replace("\r", "")
    return f'{option} = "{value}"\n'


def _read_head(address: str, process: subprocess.Popen[bytes]) -> Head:
    """The first answer after all redirects."""
    location = ""
    head = _next_head(_stream(process))
    while head and head.is_passed_over:
        location = head.headers.get("location", location)
        head = _next_head(_stream(process))
    if head:
        return head
    code, message = _end(process)
    host = urllib.parse.urlsplit(address).hostname
    if code in BROKEN:
        raise BrokenError(message)
    if code == REFUSED_PROTOCOL:
        raise _refuse_address(urllib.parse.urljoin(address, location))
    if code == UNKNOWN_HOST:
        what = f"the server cannot resolve the name {host}"
        hint = f"check the address; labctl ssh -- getent hosts {host}"
        raise Failure("link", what, message, hint)
    raise Failure("link", f"the server cannot reach {host}", message, "labctl push")


def _next_head(stream: BufferedReader) -> Head | None:
    """The next answer's status and headers; None where no whole one comes."""
    first = stream.readline(MOST_HEADER_BYTES).decode("latin-1").split(None, 2)
    if len(first) < 2 or not first[0].startswith("HTTP/") or not first[1].isdigit():
        return None
    headers: dict[str, str] = {}
    for line in iter(lambda: stream.readline(MOST_HEADER_BYTES), b""):
        name, _, value = line.decode("latin-1").partition(":")
        if not line.strip():
            return Head(int(first[1]), " ".join(first[2:]).strip(), headers)
        headers[name.strip().lower()] = value.strip()
    return None


def _stream(process: subprocess.Popen[bytes]) -> BufferedReader:
    assert isinstance(process.stdout, BufferedReader)
    return process.stdout


def _end(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    """curl's exit code, and what it said."""
    assert process.stderr is not None
    said = process.stderr.read().decode(errors="replace").strip()
    return process.wait(), said or f"curl ended with {process.returncode}"
