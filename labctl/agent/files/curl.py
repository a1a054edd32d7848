"""HTTPS by the curl program, which verifies certificates, follows redirects and supports proxies.

An address may contain a signature that grants access. It is passed to curl on standard input,
since every account of the server can read command lines.
"""

from __future__ import annotations

import ipaddress
import shutil
import subprocess
import urllib.parse
from contextlib import contextmanager, suppress
from io import BufferedReader
from typing import Iterator, NamedTuple

from ...wire.verbs import PUSH_COMMAND, HintPart
from ..host.paths import CHUNK
from ..reply import Failure

IDLE_S = 30
# the next step after a broken transfer
RESUME = (PUSH_COMMAND, "   # resumes where it stopped")
MOST_HEADER_BYTES = 64 * 1024
REDIRECTS = "10"
OPTIONS = [
    "--disable",  # must be first: ignores the account's .curlrc
    *("--config", "-"),
    *("--silent", "--show-error", "--globoff", "--path-as-is"),
    *("--include", "--suppress-connect-headers", "--no-buffer"),
    *("--location", "--max-redirs", REDIRECTS, "--proto-redir", "=https"),
    *("--connect-timeout", str(IDLE_S), "--speed-limit", "1", "--speed-time", str(IDLE_S)),
    *("--user-agent", "labctl", "--header", "Accept-Encoding: identity"),
]
# curl's exit codes (its manual, "Exit codes"). BROKEN: the connection was made, then ended early.
REFUSED_PROTOCOL, UNKNOWN_HOST, UNTRUSTED_CERTIFICATE = 1, 6, 60
BROKEN = (16, 18, 52, 55, 56, 92)


class BrokenError(Exception):
    """The connection broke off; the bytes that arrived before are good."""


class StatusError(Exception):
    """A response without the file."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"{status} {reason}")
        self.status = status


class Head(NamedTuple):
    status: int
    reason: str
    headers: dict[str, str]

    @property
    def is_passed_over(self) -> bool:
        """Whether curl follows this response by another one."""
        return self.status < 200 or (300 <= self.status < 400 and "location" in self.headers)


class CurlResponse:
    """The response body: the file, or the rest of it from an offset on (status 206)."""

    def __init__(self, head: Head, process: subprocess.Popen[bytes]) -> None:
        self.status = head.status
        self.headers = head.headers
        self._process = process

    def read(self) -> bytes:
        """Read some bytes; b"" at the end. BrokenError if the connection breaks off."""
        block = _stream(self._process).read1(CHUNK)
        if not block:
            code, message = _wait_for_exit(self._process)
            if code:
                raise BrokenError(message)
        return block


def check_address(address: str) -> None:
    """Allow only https://, and http:// to this machine itself. Failure (usage) otherwise."""
    parts = urllib.parse.urlsplit(address)
    is_local_http = parts.scheme == "http" and _is_loopback(parts.hostname or "")
    if not is_local_http and (parts.scheme != "https" or not parts.hostname):
        raise _make_address_error(address)


def _make_address_error(address: str) -> Failure:
    return Failure(
        "usage",
        f"cannot fetch data from {address!r}",
        "only https:// and s3:// protect data from changes in transit",
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextmanager
def open_address(address: str, headers: dict[str, str], offset: int = 0) -> Iterator[CurlResponse]:
    """Get a file from `offset` on, following redirects to https:// only.

    StatusError if the server refuses, BrokenError if it hangs up, otherwise a Failure.
    """
    check_address(address)
    with _start(address, headers, offset) as process:
        try:
            head = _read_head(address, process)
            if head.status not in (200, 206):
                raise StatusError(head.status, head.reason)
            yield CurlResponse(head, process)
        finally:
            process.kill()


def _start(address: str, headers: dict[str, str], offset: int) -> subprocess.Popen[bytes]:
    program = shutil.which("curl")
    if not program:
        what = "the server has no curl, which is needed to fetch data"
        raise Failure("missing", what, "", HintPart("ssh", "sudo apt-get install curl"))
    protocols = "=http,https" if address.startswith("http:") else "=https"
    words = [program, *OPTIONS, "--proto", protocols]
    if offset:
        words += ["--continue-at", str(offset)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe)
    settings = [("url", address), *(("header", f"{name}: {headers[name]}") for name in headers)]
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # curl's exit code gives the reason
        process.stdin.write("".join(_quote(*setting) for setting in settings).encode())
        process.stdin.close()
    return process


def _quote(option: str, value: str) -> str:
    """Return a line for curl's config file."""
    value = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "").replace("\r", "")
    return f'{option} = "{value}"\n'


def _read_head(address: str, process: subprocess.Popen[bytes]) -> Head:
    """Return the head of the first response after all redirects."""
    location = ""
    head = _next_head(_stream(process))
    while head and head.is_passed_over:
        location = head.headers.get("location", location)
        head = _next_head(_stream(process))
    if head:
        return head
    code, message = _wait_for_exit(process)
    host = urllib.parse.urlsplit(address).hostname
    if code in BROKEN:
        raise BrokenError(message)
    if code == REFUSED_PROTOCOL:
        raise _make_address_error(urllib.parse.urljoin(address, location))
    if code == UNKNOWN_HOST:
        what = f"the server cannot resolve the name {host}"
        hint = ("check the address:\n", HintPart("ssh", f"getent hosts {host}"))
        raise Failure("link", what, message, hint)
    if code == UNTRUSTED_CERTIFICATE:
        what = f"the server does not trust the certificate of {host}"
        # The lines after the first one are curl's advice on its own options.
        why = message.splitlines()[0]
        port = urllib.parse.urlsplit(address).port or 443
        show = HintPart("ssh", f"curl -sSI https://{host}:{port}")
        raise Failure("policy", what, why, ("check the address:\n", show))
    raise Failure("link", f"the server cannot reach {host}", message, PUSH_COMMAND)


def _next_head(stream: BufferedReader) -> Head | None:
    """Read the next response's status and headers; None if they are incomplete."""
    status_line = stream.readline(MOST_HEADER_BYTES).decode("latin-1").split(None, 2)
    if (
        len(status_line) < 2
        or not status_line[0].startswith("HTTP/")
        or not status_line[1].isdigit()
    ):
        return None
    headers: dict[str, str] = {}
    for line in iter(lambda: stream.readline(MOST_HEADER_BYTES), b""):
        name, _, value = line.decode("latin-1").partition(":")
        if not line.strip():
            return Head(int(status_line[1]), " ".join(status_line[2:]).strip(), headers)
        headers[name.strip().lower()] = value.strip()
    return None


def _stream(process: subprocess.Popen[bytes]) -> BufferedReader:
    assert isinstance(process.stdout, BufferedReader)
    return process.stdout


def _wait_for_exit(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    """Return curl's exit code and error message."""
    assert process.stderr is not None
    message = process.stderr.read().decode(errors="replace").strip()
    return process.wait(), message or f"curl ended with {process.returncode}"
