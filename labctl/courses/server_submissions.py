"""Submissions that the keeper makes of the files on students' servers, for the page for students.

A student first asks for a draft, which a process of its own prepares (`submission_worker`). They
see what is in it, and confirm: then exactly this bundle goes to the course's receiver, which
checks, stamps and signs it as it does any other.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from labctl.config import Paths, copy_environment
from labctl.courses.records.folder import CourseFolder
from labctl.courses.submission_worker import BUNDLE, RESULT, PreparedSubmission, SubmissionOrder
from labctl.decoding import decode_json
from labctl.errors import BusyError, DiskFullError, LabError, NotFoundError, PolicyError
from labctl.errors.unexpected import as_lab_error
from labctl.model import Value
from labctl.submissions.receipt import Signed
from labctl.submissions.receiver import RESERVE_BYTES, Receiver
from labctl.submissions.service import PART_BYTES

# Below the course's private directory; what is left there of an earlier keeper is deleted.
DIRECTORY = "submitting"
# How long a draft may be confirmed, and how long its preparation may take.
DRAFT_S, PREPARE_S = 15 * 60.0, 10 * 60.0
# Drafts that are prepared at the same time, and those of one student in WINDOW_S.
MOST_AT_ONCE, MOST_DRAFTS, WINDOW_S = 4, 20, 3600.0
MOST_RESULT_BYTES = 1024**2


class Choice(Value, frozen=True):
    """What a student wants to submit: a run with its lab's code or, without a run, the code."""

    assignment: str
    run: str = ""
    lab_id: str = ""


@dataclass
class Draft:
    """A student's draft. `prepared` is None while it is made; `id` is in the form that confirms.

    `sending` is held while it is submitted; `signed` is its receipt after that.
    """

    choice: Choice
    directory: Path
    id: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    prepared: PreparedSubmission | None = None
    ready_at: float = 0.0
    sending: threading.Lock = field(default_factory=threading.Lock)
    signed: Signed | None = None

    @property
    def is_ready(self) -> bool:
        return self.prepared is not None and not self.prepared.what


class ServerSubmissions:
    """The drafts of all students of a course, at most one of each. Safe for several threads.

    `course` is the course's folder. `run_worker` prepares an order, which may take minutes.
    """

    def __init__(
        self,
        path: Path,
        paths: Paths,
        run_worker: Callable[[SubmissionOrder], PreparedSubmission] | None = None,
        now: Callable[[], float] = time.monotonic,
        notify: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.course = path
        self._paths = paths
        self._workers = WorkerProcesses()
        self._run_worker = run_worker or self._workers.run
        self._now = now
        self._notify = notify
        self._lock = threading.Lock()
        self._drafts: dict[str, Draft] = {}
        # student -> when they asked for drafts
        self._requests: dict[str, deque[float]] = {}
        folder = CourseFolder(path)
        self._receiver = Receiver(folder.drop)
        self._directory = folder.private / DIRECTORY
        shutil.rmtree(self._directory, ignore_errors=True)

    def close(self) -> None:
        """End the preparations; nothing of them counts."""
        self._workers.end_all()

    def find(self, student: str, assignment: str) -> Draft | None:
        """Return the student's draft for this assignment, until it is submitted or expires."""
        with self._lock:
            self._delete_expired()
            draft = self._drafts.get(student)
        if draft is None or draft.signed or draft.choice.assignment != assignment:
            return None
        return draft

    def begin(self, student: str, seat: str, choice: Choice) -> None:
        """Begin to prepare a draft, which replaces an earlier one. A second click does nothing.

        PolicyError if the assignment is closed, or if the student asked for too many; BusyError
        while one of theirs, or too many of others, are being prepared.
        """
        rules = self._receiver.load_rules(choice.assignment)
        if not self._receiver.standing(rules.name, student).accepted:
            raise PolicyError(
                f"{rules.name} accepts no submissions any more", why="ask your instructor"
            )
        with self._lock:
            self._delete_expired()
            if self._is_preparing(student, choice):
                return
            self._require_allowed(student)
            self._require_space(rules.max_size)
            self._delete(student)
            draft = Draft(choice, self._directory / secrets.token_hex(8))
            draft.directory.mkdir(mode=0o700, parents=True)
            self._drafts[student] = draft
            self._requests.setdefault(student, deque()).append(self._now())
        order = SubmissionOrder(
            course=str(self.course),
            paths={name: str(getattr(self._paths, name)) for name in Paths.__struct_fields__},
            seat=seat,
            student=student,
            assignment=choice.assignment,
            directory=str(draft.directory),
            lab_id=choice.lab_id,
            run=choice.run,
        )
        work = threading.Thread(
            target=self._prepare, args=(draft, order), name="submission", daemon=True
        )
        work.start()

    def submit(self, student: str, assignment: str, draft_id: str) -> Signed:
        """Submit a draft that the student has seen; return its receipt, also a second time.

        NotFoundError if this draft is no longer the student's; the receiver's errors otherwise.
        """
        with self._lock:
            self._delete_expired()
            draft = self._drafts.get(student)
            if (
                draft is None
                or draft.prepared is None
                or not draft.is_ready
                or draft.choice.assignment != assignment
                or not secrets.compare_digest(draft.id.encode(), draft_id.encode())
            ):
                raise _make_replaced_error()
        with draft.sending:
            if draft.signed is None:
                bundle = draft.directory / BUNDLE
                draft.signed = self._send(student, assignment, draft.prepared.sha256, bundle)
                shutil.rmtree(draft.directory, ignore_errors=True)
            return draft.signed

    def _send(self, student: str, assignment: str, sha256: str, bundle: Path) -> Signed:
        try:
            size = bundle.stat().st_size
        except OSError:
            raise _make_replaced_error() from None
        begun = self._receiver.begin(assignment, student, sha256, size)
        if isinstance(begun, Signed):
            return begun
        with bundle.open("rb") as file:
            offset = file.seek(begun)
            while part := file.read(PART_BYTES):
                self._receiver.write(assignment, student, sha256, size, offset, part)
                offset += len(part)
        return self._receiver.finish(assignment, student, sha256, size)

    def _prepare(self, draft: Draft, order: SubmissionOrder) -> None:
        try:
            prepared = self._run_worker(order)
        except Exception as error:
            problem = as_lab_error(error, self._notify)
            prepared = PreparedSubmission(what=problem.what, why=problem.why)
        with self._lock:
            draft.prepared, draft.ready_at = prepared, self._now()

    def _is_preparing(self, student: str, choice: Choice) -> bool:
        own = self._drafts.get(student)
        return own is not None and own.prepared is None and own.choice == choice

    def _require_allowed(self, student: str) -> None:
        open_drafts = [draft for draft in self._drafts.values() if draft.prepared is None]
        own = self._drafts.get(student)
        if own is not None and (own.prepared is None or own.sending.locked()):
            raise BusyError("your files are being collected or sent", why="wait until that is done")
        if len(open_drafts) >= MOST_AT_ONCE:
            raise BusyError("many students submit now", why="try again in a minute")
        requests = self._requests.get(student, deque())
        while requests and requests[0] < self._now() - WINDOW_S:
            requests.popleft()
        if len(requests) >= MOST_DRAFTS:
            raise PolicyError("you have collected your files too often", why="try again in an hour")

    def _require_space(self, most_bytes: int) -> None:
        """DiskFullError unless code, run, bundle and its upload fit on the disk."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if shutil.disk_usage(self._directory).free < 4 * most_bytes + RESERVE_BYTES:
            raise DiskFullError("the course's disk is full", why="tell your instructor")

    def _delete_expired(self) -> None:
        for student, draft in list(self._drafts.items()):
            is_old = draft.prepared is not None and draft.ready_at < self._now() - DRAFT_S
            if is_old and not draft.sending.locked():
                self._delete(student)

    def _delete(self, student: str) -> None:
        draft = self._drafts.pop(student, None)
        if draft is not None:
            shutil.rmtree(draft.directory, ignore_errors=True)


class WorkerProcesses:
    """The processes that prepare drafts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._ended = False

    def run(self, order: SubmissionOrder) -> PreparedSubmission:
        """Run one, for at most PREPARE_S. LabError if it ends without a result."""
        with self._lock:
            if self._ended:
                raise BusyError("the keeper is ending", why="try again in a minute")
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "labctl.courses.submission_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                env=copy_environment() | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
            self._running.add(process)
        try:
            process.communicate(msgspec.json.encode(order), timeout=PREPARE_S)
        except subprocess.TimeoutExpired:
            raise LabError(
                "your files could not be collected in time",
                why=f"this may take {PREPARE_S / 60:.0f} minutes",
            ) from None
        finally:
            _kill(process)
            with self._lock:
                self._running.discard(process)
        return _read_result(Path(order.directory) / RESULT)

    def end_all(self) -> None:
        with self._lock:
            self._ended = True
            running = list(self._running)
        for process in running:
            _kill(process)


def _make_replaced_error() -> NotFoundError:
    return NotFoundError(
        "this is no longer what you would submit", why="look at it again, then submit"
    )


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process, and the programs that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read_result(file: Path) -> PreparedSubmission:
    try:
        with file.open("rb") as result:
            data = result.read(MOST_RESULT_BYTES + 1)
        return decode_json(data, PreparedSubmission)
    except (OSError, msgspec.MsgspecError):
        raise LabError(
            "your files could not be collected",
            why="the process that checks them ended before it was done",
        ) from None
