"""Forwards: one or several of this process, and those that a process of their own keeps.

`run_detached` starts that process, which outlives the terminal: `python -m
labctl.services.forwards ID`, with what it should do on standard input, so that no token is in argv.
What is recorded holds no token either.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec

from labctl import errors
from labctl.errors import ConnectError, LabError, NotFoundError
from labctl.events import Note, Silent
from labctl.model import Forward, Service, Value
from labctl.servers.agent import Remote
from labctl.services.forward import FATAL, Forwarding, ForwardSpec, Refresh, url_of
from labctl.services.services import ServiceRequest, ensure_service

__all__ = [
    "DetachedSpec",
    "ForwardSpec",
    "Forwarding",
    "list_forwards",
    "run_detached",
    "stop_forward",
    "url_of",
]

_MODULE = "labctl.services.forwards"


class DetachedSpec(Value, frozen=True, kw_only=True):
    """A forward that a process of its own keeps.

    `request` starts the service again after the server lost it. `refresh_argv` is a command (no
    secrets) that rewrites the server's ssh_config where its address may have changed.
    """

    forward: ForwardSpec
    log_path: str
    request: ServiceRequest | None = None
    refresh_argv: tuple[str, ...] = ()


class Record(Protocol):
    """Where detached forwards are written down (`labctl.state.State`)."""

    def save_forward(self, forward: Forward) -> None: ...

    def forwards(self, server_id: str | None = None) -> list[Forward]: ...

    def drop_forward(self, forward_id: str) -> None: ...


def run_detached(spec: DetachedSpec, record: Record) -> Forward:
    """Have a process of its own keep the forward; the one that there is already, if it lives.

    The Forward's `url` has the token; what is recorded has not.
    """
    wanted = spec.forward
    for known in list_forwards(record, wanted.server_id):
        if known.service == wanted.service.name and wanted.local_port in (0, known.local_port):
            return msgspec.structs.replace(known, url=url_of(wanted.service, known.local_port))
    Path(spec.log_path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    forward_id = secrets.token_hex(4)
    child = subprocess.Popen(
        [sys.executable, "-m", _MODULE, forward_id],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with child:
        to, back = child.stdin, child.stdout
        if to is None or back is None:
            raise RuntimeError("the process has no pipes")
        to.write(msgspec.json.encode(spec) + b"\n")
        to.flush()
        reply = msgspec.json.decode(back.readline() or b"{}")
        if "pid" not in reply:
            raise _told(reply)
        port = int(reply["local_port"])
        forward = Forward(
            id=forward_id,
            server_id=wanted.server_id,
            service=wanted.service.name,
            local_port=port,
            remote_port=wanted.service.port,
            url=url_of(wanted.service, port, token=False),
            pid=int(reply["pid"]),
            created_at=time.time(),
        )
        record.save_forward(forward)
        # Only now does it go on without us: a forward that nobody wrote down ends with us.
        to.write(b"kept\n")
        to.flush()
    return msgspec.structs.replace(forward, url=url_of(wanted.service, port))


def _told(reply: dict[str, Any]) -> LabError:
    kind = getattr(errors, reply.get("kind", ""), LabError)
    what = reply.get("what", "the process that keeps the forward ended at once")
    made = kind if kind in (*FATAL, NotFoundError, ConnectError) else LabError
    error: LabError = made(what, why=reply.get("why", ""), hint=reply.get("hint", ""))
    return error


def list_forwards(record: Record, server_id: str | None = None) -> list[Forward]:
    """The detached forwards that live; those that died are dropped from the record."""
    living = []
    for forward in record.forwards(server_id):
        if is_ours(forward):
            living.append(forward)
        else:
            record.drop_forward(forward.id)
    return living


def stop_forward(record: Record, which: str, server_id: str | None = None) -> list[Forward]:
    """End the detached forwards with this id or service name, or "all"; those that were ended.

    NotFoundError where a named one is not there. No other process is touched.
    """
    found = [
        forward
        for forward in list_forwards(record, server_id)
        if which in ("all", forward.id, forward.service)
    ]
    if not found and which != "all":
        raise NotFoundError(f"there is no forward {which}", hint="labctl forward --list")
    for forward in found:
        for number, patience_s in ((signal.SIGTERM, 8.0), (signal.SIGKILL, 2.0)):
            deadline = time.monotonic() + patience_s
            with contextlib.suppress(ProcessLookupError):
                if is_ours(forward):
                    os.kill(forward.pid, number)
            while is_ours(forward) and time.monotonic() < deadline:
                time.sleep(0.05)
        record.drop_forward(forward.id)
    return found


def is_ours(forward: Forward) -> bool:
    """Whether the recorded process is still the one that keeps this forward.

    Its command line has the forward's random id, so a pid that was used again does not pass.
    """
    if forward.pid <= 1:
        return False
    words = Path(f"/proc/{forward.pid}/cmdline")
    if Path("/proc/self/cmdline").exists():
        try:
            line = words.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            return False
    else:
        asked = ["ps", "-ww", "-o", "command=", "-p", str(forward.pid)]
        line = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
    return f"{_MODULE} {forward.id}" in line


class _Log:
    """A Reporter that writes notes into a file."""

    def __init__(self, path: str) -> None:
        self._file = os.fdopen(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600), "w")

    def emit(self, event: object) -> None:
        if isinstance(event, Note):
            self._file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {event.text}\n")
            self._file.flush()

    def ask(self, decision: object) -> bool:
        return False


def _refresher(spec: DetachedSpec) -> Refresh:
    def refresh() -> Service:
        if spec.refresh_argv:
            done = subprocess.run(
                spec.refresh_argv, stdin=subprocess.DEVNULL, capture_output=True, check=False
            )
            if done.returncode != 0:
                raise ConnectError(
                    "the server's address could not be asked for", hint="labctl doctor"
                )
        if spec.request is None:
            return spec.forward.service
        from labctl.transports.openssh import OpenSshTransport

        forward = spec.forward
        transport = OpenSshTransport(
            Path(forward.config), forward.server_id, forward.endpoint, master=False
        )
        return ensure_service(Remote(transport), spec.request, Silent())

    return refresh


@contextlib.contextmanager
def _ending_on_sigterm(forwarding: Forwarding) -> Iterator[None]:
    def end(*_: object) -> None:
        raise SystemExit(0)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        forwarding.close()
        signal.signal(signal.SIGTERM, before)


def main() -> int:
    """Keep one forward: its DetachedSpec as a line of JSON on standard input, an answer back."""
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=DetachedSpec)
    if os.fork():
        # Whoever started us need not wait for, or reap, the process that stays.
        os._exit(0)
    os.setsid()
    os.chdir("/")
    forwarding = Forwarding(spec.forward, _Log(spec.log_path), _refresher(spec))
    with _ending_on_sigterm(forwarding):
        try:
            forwarding.open()
        except LabError as error:
            body = {"kind": type(error).__name__, "what": error.what}
            _answer({**body, "why": error.why, "hint": error.hint})
            return error.exit_code
        _answer({"pid": os.getpid(), "local_port": forwarding.local_port})
        if sys.stdin.buffer.readline() != b"kept\n":
            return 1
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nothing, number)
        forwarding.wait()
    return 0


def _answer(body: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(1, msgspec.json.encode(body) + b"\n")


if __name__ == "__main__":
    sys.exit(main())
