"""Background forwards, each held by its own process.

`start_background_forward` starts that process, which outlives the terminal: `python -m
labctl.services.background_forwards ID`. Its specification is sent on standard input, so that no
token is in argv. Records of forwards do not contain tokens either.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from labctl.config.reader import find_nearest
from labctl.decoding import decode_json
from labctl.errors import ConnectError, LabError, NotFoundError
from labctl.errors.replies import as_reply, decode_reply
from labctl.events import Event, Note, PolicyReporter, Reporter, SilentReporter
from labctl.model import Forward, Value
from labctl.retry import poll_until
from labctl.servers.agent import AgentClient
from labctl.services.port_forward import (
    EndedForwardError,
    Forwarding,
    ForwardSpec,
    Refresh,
    build_url,
)
from labctl.services.services import ensure_service, is_served
from labctl.transports.openssh import OpenSshTransport
from labctl.wire.codec import MessageError, encode
from labctl.wire.services import BackgroundForwardReply, ServiceRequest
from labctl.wire.verbs import ErrorReply

if TYPE_CHECKING:
    from labctl.state import State

_MODULE = "labctl.services.background_forwards"


class BackgroundForwardSpec(Value, frozen=True, kw_only=True):
    """A background forward.

    `request` restarts the service after the server lost it. `refresh_argv` is a command (without
    secrets) that rewrites the server's ssh_config after its address may have changed, and prints
    the lab's status. `reopen_argv`, if any, opens the forward again once the lab has another
    server.
    """

    forward: ForwardSpec
    log_path: str
    request: ServiceRequest | None = None
    refresh_argv: tuple[str, ...] = ()
    reopen_argv: tuple[str, ...] = ()


class RefreshedServer(Value, frozen=True):
    id: str = ""


class RefreshedStatus(Value, frozen=True):
    """What the holder of a forward reads of the lab's status."""

    server: RefreshedServer | None = None


def start_background_forward(spec: BackgroundForwardSpec, record: State) -> Forward:
    """Start a background forward, or return the one that already runs.

    The returned `url` contains the token; the record does not.
    """
    wanted = spec.forward
    if running := _find_running(record, wanted):
        return msgspec.structs.replace(running, url=build_url(wanted.service, running.local_port))
    Path(spec.log_path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    forward_id = secrets.token_hex(4)
    child = subprocess.Popen(
        [sys.executable, "-m", _MODULE, forward_id],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with child:
        request_pipe, reply_pipe = child.stdin, child.stdout
        if request_pipe is None or reply_pipe is None:
            raise RuntimeError("the process has no pipes")
        request_pipe.write(msgspec.json.encode(spec) + b"\n")
        request_pipe.flush()
        reply = _read_reply(reply_pipe)
        port = reply.local_port
        forward = Forward(
            id=forward_id,
            server_id=wanted.server_id,
            service=wanted.service.name,
            local_port=port,
            remote_port=wanted.service.port,
            url=build_url(wanted.service, port, token=False),
            pid=reply.pid,
            created_at=time.time(),
        )
        record.save_forward(forward)
        # Until this line the process ends with this one: a forward without a record never stays.
        request_pipe.write(b"kept\n")
        request_pipe.flush()
    return msgspec.structs.replace(forward, url=build_url(wanted.service, port))


def _find_running(record: State, wanted: ForwardSpec) -> Forward | None:
    """Find a background forward of this service whose port is `wanted.local_port`, or any for 0."""
    for running in list_forwards(record, wanted.server_id):
        if running.service == wanted.service.name and wanted.local_port in (0, running.local_port):
            return running
    return None


def _read_reply(pipe: IO[bytes]) -> BackgroundForwardReply:
    """Read the reply of the process that holds a forward; raises the error that it reports."""
    try:
        return decode_reply(BackgroundForwardReply, pipe.readline())
    except MessageError as error:
        what = "the process of the background forward ended at once"
        raise LabError(what, why=str(error), hint="labctl forward") from error


def list_forwards(record: State, server_id: str | None = None) -> list[Forward]:
    """List the running background forwards, and drop the records of those that have ended."""
    living = []
    for forward in record.list_forwards(server_id):
        if is_ours(forward):
            living.append(forward)
        else:
            record.drop_forward(forward.id)
    return living


def find_forwards(
    record: State, names: Sequence[str] = (), server_ids: Collection[str] | None = None
) -> list[Forward]:
    """Find running background forwards: all, or those whose id or service is in `names`.

    With `server_ids`, only forwards to these servers; an id is unique and finds any forward.
    NotFoundError if a name finds none.
    """
    living = list_forwards(record)
    ours = [one for one in living if server_ids is None or one.server_id in server_ids]
    if not names:
        return ours
    chosen: dict[str, Forward] = {}
    for name in names:
        matches = [one for one in ours if one.service == name]
        matches = matches or [one for one in living if one.id == name]
        if not matches:
            raise _make_unknown_error(name, ours, living)
        chosen |= {one.id: one for one in matches}
    return list(chosen.values())


def _make_unknown_error(
    name: str, ours: Sequence[Forward], living: Sequence[Forward]
) -> NotFoundError:
    if any(one.service == name for one in living):
        return NotFoundError(
            f"there is no forward {name}",
            why="only other labs have one",
            hint="labctl forward --list",
        )
    near = find_nearest(name, [text for one in ours for text in (one.service, one.id)])
    return NotFoundError(
        f"there is no forward {name}" + (f"; did you mean {near}?" if near else ""),
        why="" if living else "no forward is open in the background",
        hint=f"labctl forward --stop {near}" if near else "labctl forward --list",
    )


def stop_forward(record: State, forward: Forward) -> None:
    """End the process that holds a background forward, and its record. Touches no other process."""
    for number, patience_s in ((signal.SIGTERM, 8.0), (signal.SIGKILL, 2.0)):
        with contextlib.suppress(ProcessLookupError):
            if is_ours(forward):
                os.kill(forward.pid, number)
        if poll_until(lambda: not is_ours(forward), pause_s=0.05, deadline_s=patience_s):
            break
    record.drop_forward(forward.id)


def is_ours(forward: Forward) -> bool:
    """Whether the recorded process still holds this forward.

    Its command line contains the forward's random id, so that a reused pid does not match.
    """
    if forward.pid <= 1:
        return False
    cmdline = Path(f"/proc/{forward.pid}/cmdline")
    if Path("/proc/self/cmdline").exists():
        try:
            line = cmdline.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            return False
    else:
        ps_words = ["ps", "-ww", "-o", "command=", "-p", str(forward.pid)]
        line = subprocess.run(ps_words, capture_output=True, text=True, check=False).stdout
    return f"forwards {forward.id}" in line  # the module had other names in earlier versions


def _make_file_reporter(path: str) -> Reporter:
    """Return a Reporter that writes notes into a file, and answers no."""
    descriptor = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)

    def show(event: Event) -> None:
        if isinstance(event, Note):
            line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {event.text}\n"
            os.write(descriptor, line.encode(errors="replace"))

    return PolicyReporter(show)


def _make_refresh(spec: BackgroundForwardSpec, get_port: Callable[[], int]) -> Refresh:
    """Return what finds the server again. `get_port` returns the forward's local port."""

    def refresh() -> ForwardSpec:
        forward = spec.forward
        if spec.refresh_argv:
            server = _read_server(_run(spec.refresh_argv, "refresh the server's address"))
            if spec.reopen_argv and server is not None and server.id != forward.server_id:
                _reopen(spec, server.id, get_port())
                raise EndedForwardError(f"the forward leads to the new server {server.id}")
        if spec.request is None:
            return forward
        transport = OpenSshTransport(
            Path(forward.config), forward.server_id, forward.endpoint, master=False
        )
        service = ensure_service(AgentClient(transport), spec.request, SilentReporter())
        return msgspec.structs.replace(forward, service=service)

    return refresh


def _reopen(spec: BackgroundForwardSpec, server_id: str, port: int) -> None:
    """Open the forward again at the new server, which has another ssh_config.

    `labctl forward` starts the service there first, but not what `labctl serve` starts:
    EndedForwardError if the new server does not have it.
    """
    try:
        _run((*spec.reopen_argv, "--port", str(port)), "open the forward again")
    except NotFoundError:
        if not is_served(spec.forward.service.name):
            raise
        raise EndedForwardError(
            f"the forward ends, because it does not run on the new server {server_id}; "
            "labctl serve starts it there"
        ) from None


def _read_server(status: bytes) -> RefreshedServer | None:
    """Read the server in the lab's status; ConnectError for what another labctl has printed."""
    try:
        return decode_json(status, RefreshedStatus).server
    except msgspec.MsgspecError as error:
        raise ConnectError(
            "cannot read the lab's status", why=str(error), hint="labctl status --refresh"
        ) from None


def _run(argv: Sequence[str], what: str) -> bytes:
    """Run labctl and return its output; NotFoundError or ConnectError if it fails."""
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode == NotFoundError.exit_code:
        raise NotFoundError(f"cannot {what}", hint="labctl status --refresh")
    if done.returncode != 0:
        raise ConnectError(f"cannot {what}", hint="labctl status --refresh")
    return done.stdout


@contextlib.contextmanager
def _close_on_sigterm(forwarding: Forwarding) -> Iterator[None]:
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
    """Hold one forward: read its BackgroundForwardSpec as JSON from stdin, and write a reply."""
    spec = decode_json(sys.stdin.buffer.readline(), BackgroundForwardSpec)
    if os.fork():
        # The starting process need not wait for the process that stays, or reap it.
        os._exit(0)
    os.setsid()
    os.chdir("/")
    refresh = _make_refresh(spec, lambda: forwarding.local_port)
    forwarding = Forwarding(spec.forward, _make_file_reporter(spec.log_path), refresh)
    with _close_on_sigterm(forwarding):
        try:
            forwarding.open()
        except LabError as error:
            _send(as_reply(error))
            return error.exit_code
        _send(BackgroundForwardReply(pid=os.getpid(), local_port=forwarding.local_port))
        if sys.stdin.buffer.readline() != b"kept\n":
            return 1
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        with contextlib.suppress(LabError):  # its text is in the log
            forwarding.wait()
    return 0


def _send(reply: BackgroundForwardReply | ErrorReply) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(1, encode(reply).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
