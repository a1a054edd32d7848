"""The door: how a student's forced command reaches the keeper's process, and its socket there.

The command holds no credentials and knows no flow: it carries lines to the keeper and back. Where
no keeper runs it says so; handing in needs none.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec

from labctl.config import Paths
from labctl.courses.invitation import enrol
from labctl.courses.keys import Keys
from labctl.courses.records.folder import CourseFolder
from labctl.courses.requests import MOST_LINE_BYTES, Desk, welcome
from labctl.errors import BusyError, LabError, UsageError
from labctl.errors.replies import as_reply
from labctl.model import Value
from labctl.state.locks import hold_lock
from labctl.transports.ssh_client import runtime_dir


class _Enrol(Value, frozen=True, forbid_unknown_fields=True):
    do: Literal["enrol"]
    public_key: str


# Students that are connected at the same time.
AT_ONCE = 256
IDLE_S = 600.0
ACCEPT_PAUSE_S = 0.5


def socket_path(course_id: str) -> Path:
    return runtime_dir() / f"course-{course_id}"


@contextlib.contextmanager
def only_keeper(folder: CourseFolder, places: Paths) -> Iterator[None]:
    """Be this course's keeper here; BusyError says who is it already."""
    lock = places.state_dir / "courses" / folder.id
    try:
        with hold_lock(lock, "labctl course serve", wait_s=2.0):
            yield
    except BusyError as error:
        if not error.holder:
            raise
        raise BusyError(
            f"a keeper of {folder.config.name} runs here already",
            why=error.holder,
            hint="labctl course status",
        ) from None


def relay(
    course_id: str,
    student: str,
    source: BinaryIO,
    sink: BinaryIO,
    alive: Callable[[], None] = lambda: None,
) -> None:
    """Carry one student's requests to the keeper, and its answers back, until there are no more."""
    try:
        wire = socket.socket(socket.AF_UNIX)
        wire.connect(str(socket_path(course_id)))
    except OSError:
        wire.close()
        say(sink, _closed())
        return
    with wire, wire.makefile("rwb") as keeper:
        keeper.write(msgspec.json.encode(student) + b"\n")
        while line := source.readline(MOST_LINE_BYTES):
            alive()
            try:
                keeper.write(line if line.endswith(b"\n") else line + b"\n")
                keeper.flush()
                said = keeper.readline()
            except OSError:
                said = b""
            if not said:
                say(sink, _closed())
                return
            sink.write(said)
            sink.flush()


def enrolment(
    folder: CourseFolder, student: str, line: bytes, keys: Keys, now: float
) -> dict[str, Any]:
    """The reply to the one request of an invitation: {"do": "enrol", "public_key": ...}."""
    try:
        asked = msgspec.json.decode(line, type=_Enrol)
        told = welcome(folder, student)  # what is wrong with the course is found before
        enrol(folder, student, asked.public_key, keys, now)
    except msgspec.MsgspecError:
        return as_reply(UsageError("this is no request"))
    except LabError as error:
        return as_reply(error)
    return {"version": 1, "joined": told}


class Door:
    """The keeper's socket. Students' commands come to it as this user; nobody else can."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.path = socket_path(desk.folder.id)
        self._slots = threading.BoundedSemaphore(AT_ONCE)
        self._listener = socket.socket(socket.AF_UNIX)
        self._closed = threading.Event()

    def __enter__(self) -> Door:
        """Open. The caller is the `only_keeper`: what lies there is of one that has died."""
        self.path.unlink(missing_ok=True)
        self._listener.bind(str(self.path))
        self.path.chmod(0o600)
        self._listener.listen(AT_ONCE)
        threading.Thread(target=self._accept, name="door", daemon=True).start()
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
                continue  # this machine has no descriptor left at this moment
            if not self._slots.acquire(blocking=False):
                wire.close()
                continue
            threading.Thread(target=self._serve, args=(wire,), daemon=True).start()

    def _serve(self, wire: socket.socket) -> None:
        wire.settimeout(IDLE_S)
        try:
            with wire, wire.makefile("rwb") as student, contextlib.suppress(OSError):
                name = msgspec.json.decode(student.readline(MOST_LINE_BYTES), type=str)
                while line := student.readline(MOST_LINE_BYTES):
                    student.write(msgspec.json.encode(self.desk.answer(name, line)) + b"\n")
                    student.flush()
        except msgspec.MsgspecError:
            return  # not one of ours
        finally:
            self._slots.release()


def _closed() -> LabError:
    return BusyError(
        "the course's keeper does not run now",
        why="your server, its runs and its watchdog go on without it; labctl submit works",
        hint="try again in some minutes, or tell your instructor",
    )


def say(sink: BinaryIO, error: LabError) -> None:
    """Answer with an error, as a student's labctl reads it."""
    sink.write(msgspec.json.encode(as_reply(error)) + b"\n")
    sink.flush()
