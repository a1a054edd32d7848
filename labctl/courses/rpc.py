"""The RPC between a student's forced command and the keeper's process, over a local socket.

The command holds no credentials and knows no flow: it relays lines to the keeper and back. If no
keeper runs, it replies so; submitting works without one.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from labctl.config import Paths
from labctl.courses.invitation import enroll
from labctl.courses.keys import AuthorizedKeys
from labctl.courses.publish import describe_course
from labctl.courses.records.folder import CourseFolder
from labctl.courses.requests import MOST_LINE_BYTES, RequestHandler
from labctl.decoding import decode_json
from labctl.errors import BusyError, LabError, UsageError
from labctl.errors.replies import as_reply
from labctl.keeper.scheduler import hold_alone
from labctl.transports.ssh_client import runtime_dir
from labctl.wire.codec import MessageError, encode
from labctl.wire.keeper import ENROLL, EnrollReply, EnrollRequest
from labctl.wire.line_requests import convert_request

# Students connected at the same time.
AT_ONCE = 256
IDLE_S = 600.0
ACCEPT_PAUSE_S = 0.5


def socket_path(course_id: str) -> Path:
    return runtime_dir() / f"course-{course_id}"


@contextlib.contextmanager
def hold_keeper_lock(folder: CourseFolder, places: Paths) -> Iterator[None]:
    """Hold the lock of this course's only keeper; BusyError names the process that has it."""
    lock = places.state_dir / "courses" / folder.id
    already = f"a keeper of {folder.config.name} is already running here"
    with hold_alone(lock, "labctl course serve", already=already, hint="labctl course status"):
        yield


def relay(
    course_id: str,
    student: str,
    source: BinaryIO,
    sink: BinaryIO,
    alive: Callable[[], None] = lambda: None,
) -> None:
    """Relay one student's requests to the keeper, and its replies back, until the input ends."""
    try:
        wire = socket.socket(socket.AF_UNIX)
        wire.connect(str(socket_path(course_id)))
    except OSError:
        wire.close()
        send_error(sink, _make_not_running_error())
        return
    with wire, wire.makefile("rwb") as keeper:
        keeper.write(msgspec.json.encode(student) + b"\n")
        while line := source.readline(MOST_LINE_BYTES):
            alive()
            try:
                keeper.write(line if line.endswith(b"\n") else line + b"\n")
                keeper.flush()
                reply = keeper.readline()
            except OSError:
                reply = b""
            if not reply:
                send_error(sink, _make_not_running_error())
                return
            sink.write(reply)
            sink.flush()


def answer_enrollment(
    folder: CourseFolder, student: str, line: bytes, keys: AuthorizedKeys, now: float
) -> str:
    """Reply to the one request of an invitation: {"do": "enrol", "public_key": ...}."""
    try:
        request = _parse_enrollment(line)
        # Raises before the key is enrolled if the course is broken.
        description = describe_course(folder, student)
        enroll(folder, student, request.public_key, keys, now)
    except LabError as error:
        return encode(as_reply(error))
    return encode(EnrollReply(description))


def _parse_enrollment(line: bytes) -> EnrollRequest:
    try:
        body = json.loads(line)
        if not isinstance(body, dict) or body.get("do") != ENROLL.name or "student" in body:
            raise MessageError("not an enrollment")
        return convert_request(ENROLL, body)
    except (ValueError, RecursionError):
        raise UsageError("this is not a valid request") from None


class RpcServer:
    """The keeper's socket. Students' commands connect to it as this user; nobody else can."""

    def __init__(self, request_handler: RequestHandler) -> None:
        self.request_handler = request_handler
        self.path = socket_path(request_handler.folder.id)
        self._slots = threading.BoundedSemaphore(AT_ONCE)
        self._listener = socket.socket(socket.AF_UNIX)
        self._closed = threading.Event()

    def __enter__(self) -> RpcServer:
        """Listen.

        The caller holds `hold_keeper_lock`, so a socket found here is a dead keeper's.
        """
        self.path.unlink(missing_ok=True)
        self._listener.bind(str(self.path))
        self.path.chmod(0o600)
        self._listener.listen(AT_ONCE)
        threading.Thread(target=self._accept, name="rpc", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                wire, _ = self._listener.accept()
            except OSError:
                if self._closed.wait(ACCEPT_PAUSE_S):
                    return
                continue  # this machine has no file descriptor left at the moment
            if not self._slots.acquire(blocking=False):
                wire.close()
                continue
            threading.Thread(target=self._serve, args=(wire,), daemon=True).start()

    def _serve(self, wire: socket.socket) -> None:
        wire.settimeout(IDLE_S)
        try:
            with wire, wire.makefile("rwb") as student, contextlib.suppress(OSError):
                name = decode_json(student.readline(MOST_LINE_BYTES), str)
                while line := student.readline(MOST_LINE_BYTES):
                    student.write(self.request_handler.answer(name, line) + b"\n")
                    student.flush()
        except msgspec.MsgspecError:
            return  # not a labctl client
        finally:
            self._slots.release()


def _make_not_running_error() -> LabError:
    return BusyError(
        "the course's keeper is not running",
        why="your server, its runs and its watchdog continue without it; labctl submit works",
        hint="try again in a few minutes, or tell your instructor",
    )


def send_error(sink: BinaryIO, error: LabError) -> None:
    """Reply with an error, in the form that a student's labctl reads."""
    sink.write(encode(as_reply(error)).encode() + b"\n")
    sink.flush()
