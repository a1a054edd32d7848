"""The receiver's directory: submissions are accepted, stamped, signed and never changed.

    signing-key, signing-key.pub       the key pair; assignments name the public key
    assignments/NAME.yaml              the rules, as students have them
    extensions/NAME.json               each student's extension in seconds
    grace.json                         each assignment's grace period in seconds
    pauses.json                        stretches of Unix time that do not count as late
    incoming/NAME/STUDENT/SHA256.SIZE  what has arrived so far
    submissions/NAME/STUDENT/0001/     bundle.tar and receipt.json
    feedback/NAME/STUDENT.json         what a student may read of their grade
    receipts.jsonl                     every receipt, in order

The caller knows the student; it is never part of the student's own request. Nothing here returns,
replaces or removes a bundle.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from labctl.config.scalars import parse_name
from labctl.decoding import decode_json
from labctl.errors import (
    ConfigError,
    DiskFullError,
    NotFoundError,
    PolicyError,
    TransferError,
    UsageError,
)
from labctl.lazy import lazy_imports
from labctl.model import Value
from labctl.submissions import feedback, receipt
from labctl.submissions.assignment import (
    Assignment,
    DeadlineStatus,
    Pauses,
    judge,
    load_assignment,
)
from labctl.submissions.examination import examine_confined
from labctl.submissions.feedback import Feedback
from labctl.submissions.intake import Arrived, Expected, check_arrived, stamp
from labctl.submissions.receipt import Receipt, Signed
from labctl.text import bytes_text

with lazy_imports(__name__):
    import filelock

KEY = "signing-key"
LOG = "receipts.jsonl"
# Not in an assignment's file: earlier versions of students' labctl refuse unknown keys there.
GRACE, PAUSES = "grace.json", "pauses.json"
BUNDLE, RECEIPT = "bundle.tar", "receipt.json"
# For one student and one assignment.
MOST_SUBMISSIONS = 100
AGAIN = "labctl submit"
# Bytes that stay free on the receiver's disk.
RESERVE_BYTES = 256 * 1024 * 1024


class Hello(Value, frozen=True):
    """What a student learns before submitting. `now` is the receiver's clock.

    `free_days` are the late days without a penalty over the term, and `free_days_left` those that
    the student's earlier assignments did not use.
    """

    student: str
    now: int
    rules: DeadlineStatus
    due: str
    late: int
    penalty: int
    max_bytes: int
    receiver: str
    # This student's submissions of this assignment so far.
    number: int
    grace_s: int = 0
    free_days: int = 0
    free_days_left: int = 0


class Receiver:
    """The directory of one receiver. Several processes may use it at the same time."""

    def __init__(self, directory: Path, now: Callable[[], float] = time.time) -> None:
        self.directory = directory
        self.now = now

    @property
    def key(self) -> Path:
        return self.directory / KEY

    def init(self) -> str:
        """Create the directory and its signing key, if missing; return the public key."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in ("assignments", "extensions", "incoming", "submissions"):
            (self.directory / name).mkdir(exist_ok=True, mode=0o700)
        return receipt.make_signing_key(self.key)

    def read_public_key(self) -> str:
        """Return the public key that verifies this receiver's receipts."""
        return receipt.read_public_key(self.key)

    def assignment_file(self, name: str) -> Path:
        """Return the path of an assignment's rules. It may not exist."""
        return self.directory / "assignments" / f"{check_name(name)}.yaml"

    def load_rules(self, name: str) -> Assignment:
        """Return an assignment's rules; NotFoundError if this receiver does not have it."""
        file = self.assignment_file(name)
        if not file.is_file():
            names = sorted(path.stem for path in file.parent.glob("*.yaml"))
            raise NotFoundError(
                f"there is no assignment {name}",
                why=f"the receiver has {', '.join(names) or 'no assignments yet'}",
                hint="labctl submit --assignment FILE   # the file from your instructor",
            )
        rules = load_assignment(file)
        if rules.name != name:
            raise ConfigError(f"{file} belongs to another assignment, {rules.name}")
        return rules

    def extensions(self, name: str) -> dict[str, int]:
        """Return each student's extension of the due time, in seconds."""
        file = self.directory / "extensions" / f"{check_name(name)}.json"
        try:
            return decode_json(file.read_bytes(), dict[str, int])
        except FileNotFoundError:
            return {}

    def extend(self, name: str, student: str, seconds: int) -> None:
        """Extend a student's due time by these seconds; 0 revokes the extension."""
        self.load_rules(name)
        with self._lock(self.directory / "extensions"):
            extensions = {**self.extensions(name), check_name(student): seconds}
            file = self.directory / "extensions" / f"{name}.json"
            draft = file.with_suffix(".new")
            draft.write_bytes(
                msgspec.json.encode({key: value for key, value in extensions.items() if value})
            )
            draft.replace(file)

    def grace_s(self, name: str) -> int:
        """Return an assignment's grace period: 0 unless `set_grace` was called."""
        return self._grace_periods().get(name, 0)

    def set_grace(self, name: str, seconds: int) -> None:
        """Set an assignment's grace period, which its file does not have."""
        if self.grace_s(name) == seconds:
            return
        with self._lock(self.directory / "extensions"):
            periods = {**self._grace_periods(), check_name(name): seconds}
            file = self.directory / GRACE
            draft = file.with_suffix(".new")
            draft.write_bytes(msgspec.json.encode(periods))
            draft.replace(file)

    def _grace_periods(self) -> dict[str, int]:
        try:
            data = (self.directory / GRACE).read_bytes()
        except FileNotFoundError:
            return {}
        return decode_json(data, dict[str, int])

    def read_pauses(self) -> Pauses:
        """Return the stretches of time that do not count as late, set with `set_pauses`."""
        try:
            data = (self.directory / PAUSES).read_bytes()
        except FileNotFoundError:
            return ()
        return decode_json(data, tuple[tuple[int, int], ...])

    def set_pauses(self, pauses: Pauses) -> None:
        """Set the stretches of time that do not count as late, in all assignments."""
        if tuple(self.read_pauses()) == tuple(pauses):
            return
        with self._lock(self.directory / "extensions"):
            draft = (self.directory / PAUSES).with_suffix(".new")
            draft.write_bytes(msgspec.json.encode(pauses))
            draft.replace(self.directory / PAUSES)

    def standing(self, name: str, student: str, at: float | None = None) -> DeadlineStatus:
        """Judge a student's submission at Unix time `at`, by default now."""
        return judge(
            self.load_rules(name),
            self.now() if at is None else at,
            self.extensions(name).get(student, 0),
            self.grace_s(name),
            self.read_pauses(),
        )

    def receipts(self, name: str, student: str) -> list[Signed]:
        """Return the student's receipts, in order."""
        folder = self._submissions_path(name, student)
        paths = sorted(folder.glob(f"[0-9]*/{RECEIPT}"))
        return [receipt.decode(path.read_bytes()) for path in paths]

    def judge_receipt(self, accepted: Receipt) -> DeadlineStatus:
        """Judge a submission by its arrival time and the extension that counts now.

        The receipt itself keeps what was true when it was signed.
        """
        return self.standing(accepted.assignment, accepted.student, accepted.received_at)

    def feedback(self, name: str, student: str) -> Feedback | None:
        """Return the feedback released to a student, or None before the release."""
        return feedback.read(self.feedback_file(name, student))

    def release_feedback(self, name: str, student: str, found: Feedback | None) -> None:
        """Release this feedback to a student; None withdraws it."""
        feedback.write(self.feedback_file(name, student), found)

    def students(self, name: str) -> list[str]:
        """List the students who have submitted."""
        folder = self.directory / "submissions" / check_name(name)
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []

    def hello(self, name: str, student: str) -> Hello:
        """Return what a student learns before submitting."""
        rules = self.load_rules(name)
        return Hello(
            student=check_name(student),
            now=int(self.now()),
            rules=self.standing(name, student),
            due=str(rules.due or ""),
            late=rules.late,
            penalty=rules.penalty,
            max_bytes=rules.max_size,
            receiver=self.read_public_key(),
            number=len(self.receipts(name, student)),
            grace_s=self.grace_s(name),
        )

    def begin(
        self, name: str, student: str, sha256: str, size: int, at: float | None = None
    ) -> int | Signed:
        """Start or continue an upload; return its bytes so far, or its receipt if it is repeated.

        `at` is the time of arrival, if another clock measured it. Whatever the rules or the disk do
        not allow is refused now, before any byte is sent.
        """
        rules = self.load_rules(name)
        staged = self._upload_path(name, student, sha256, size)
        staged.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._lock(staged.parent):
            if (earlier := self._find_repeated(name, student, sha256)) is not None:
                return earlier
            self._require_permitted(rules, name, student, size, at)
            for other in staged.parent.iterdir():
                if other != staged and not other.name.startswith("."):
                    other.unlink()
            arrived = staged.stat().st_size if staged.exists() else 0
            self._require_space(student, size - arrived)
            staged.touch(mode=0o600)
        return arrived

    def _require_permitted(
        self, rules: Assignment, name: str, student: str, size: int, at: float | None
    ) -> None:
        """PolicyError if the rules allow no upload of this size now."""
        if size > rules.max_size:
            raise PolicyError(
                f"the bundle is too large: {size:,} bytes",
                why=f"{name} accepts at most {rules.max_size:,} bytes",
                hint="labctl submit --dry-run   # lists the sizes",
            )
        self._check_open(name, student, self.now() if at is None else at)
        if len(self.receipts(name, student)) >= MOST_SUBMISSIONS:
            raise PolicyError(
                f"{student} has submitted {name} {MOST_SUBMISSIONS} times",
                hint="labctl submit --receipts   # lists them; then ask your instructor",
            )

    def _require_space(self, student: str, missing_bytes: int) -> None:
        """DiskFullError if the disk, or the student's share of it, has no room for the rest."""
        free = shutil.disk_usage(self.directory).free - missing_bytes
        if free < RESERVE_BYTES:
            raise DiskFullError(
                "the receiver's disk is full",
                why="tell your instructor",
                hint="labctl submit   # again, once there is space",
            )
        if free < (used_bytes := self._count_bytes(student)):
            raise DiskFullError(
                f"the receiver's disk has no more space for {student}",
                why=f"their submissions take {bytes_text(used_bytes)}, more than is left",
                hint="submit a smaller checkpoint, or tell your instructor",
            )

    def write(
        self, name: str, student: str, sha256: str, size: int, offset: int, part: bytes
    ) -> int:
        """Add a part to a started upload; return the bytes here after it."""
        staged = self._upload_path(name, student, sha256, size)
        if offset < 0 or offset + len(part) > size:
            raise TransferError("more arrived than was announced", hint=AGAIN)
        with self._lock(staged.parent), _open_upload(staged) as file:
            arrived = os.fstat(file.fileno()).st_size
            if offset > arrived:
                raise TransferError("the start of this bundle has not arrived", hint=AGAIN)
            file.seek(offset)
            file.write(part)
            file.flush()
            os.fsync(file.fileno())
            # The time of the last byte by the receiver's clock is the submission time.
            os.utime(file.fileno(), (self.now(), self.now()))
        return max(arrived, offset + len(part))

    def finish(
        self, name: str, student: str, sha256: str, size: int, at: float | None = None
    ) -> Signed:
        """Accept a complete upload: check, stamp and sign it.

        `at` is when it was complete, if another clock measured it. PolicyError if the assignment is
        closed, TransferError if the bundle is not acceptable; the upload is deleted then.
        """
        staged = self._upload_path(name, student, sha256, size)
        with self._lock(staged.parent):
            if (earlier := self._find_repeated(name, student, sha256)) is not None:
                return earlier
            if not staged.exists() or staged.stat().st_size != size:
                raise TransferError("not all of the bundle has arrived", hint=AGAIN)
            moment = staged.stat().st_mtime if at is None else at
            try:
                self._check_open(name, student, moment)
                check_arrived(staged, sha256)
                expected = Expected(name, self.load_rules(name).course, student)
                examined = examine_confined(staged, expected, self.directory / "incoming")
            except (PolicyError, TransferError):
                staged.unlink()
                raise
            standing = self.standing(name, student, moment)
            number = len(self.receipts(name, student)) + 1
            arrived = Arrived(student, size, sha256)
            accepted = stamp(self.load_rules(name), standing, number, moment, examined, arrived)
            signed = receipt.sign(accepted, self.key)
            self._store_submission(name, student, staged, signed)
        return signed

    def check(self, name: str) -> Iterator[tuple[Receipt | str, str]]:
        """Check all submissions; yield each receipt (its path if invalid) and the problem or ""."""
        public = self.read_public_key()
        for student in self.students(name):
            for folder in sorted(self._submissions_path(name, student).glob("[0-9]*")):
                try:
                    verified = receipt.verify(
                        receipt.decode((folder / RECEIPT).read_bytes()), public
                    )
                    with (folder / BUNDLE).open("rb") as file:
                        digest = hashlib.file_digest(file, "sha256").hexdigest()
                except PolicyError as error:
                    yield str(folder), error.why
                    continue
                except OSError as error:
                    yield str(folder), f"{error.strerror}"
                    continue
                whose = (verified.assignment, verified.student, f"{verified.number:04}")
                problem = ""
                if whose != (name, student, folder.name):
                    problem = "the receipt belongs to another submission"
                if digest != verified.bundle_sha256:
                    problem = "the bundle was changed after it was signed for"
                yield verified, problem

    def find_bundle(self, name: str, student: str, number: int = 0) -> Path:
        """Return the path of a submission's bundle, by default the last; NotFoundError if none."""
        folders = sorted(self._submissions_path(name, student).glob("[0-9]*"))
        chosen = [path for path in folders if not number or int(path.name) == number]
        if not chosen:
            raise NotFoundError(
                f"{student} has not submitted {name}",
                hint=f"labctl receive list {shlex.quote(str(self.directory))} {name}",
            )
        return chosen[-1] / BUNDLE

    def _check_open(self, name: str, student: str, at: float) -> None:
        standing = self.standing(name, student, at)
        if not standing.accepted:
            raise PolicyError(
                f"{name} closed on {self.load_rules(name).format_time(standing.closes_at or 0)}",
                why="this submission was not accepted; earlier ones stay as they are",
                hint="ask your instructor for an extension",
            )

    def _store_submission(self, name: str, student: str, staged: Path, signed: Signed) -> None:
        """Store the bundle and its receipt, both with one rename."""
        folder = self._submissions_path(name, student)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = staged.parent / f".taken-{os.getpid()}"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(mode=0o700)
        os.link(staged, draft / BUNDLE)
        (draft / BUNDLE).chmod(0o400)
        _write_synced(draft / RECEIPT, receipt.encode(signed))
        draft.rename(folder / f"{signed.receipt.number:04}")
        _sync_folder(folder)
        with (self.directory / LOG).open("ab") as log:
            log.write(msgspec.json.encode(signed) + b"\n")
            log.flush()
            os.fsync(log.fileno())
        staged.unlink()

    def _find_repeated(self, name: str, student: str, sha256: str) -> Signed | None:
        """Return the receipt of the student's last submission if it was this bundle."""
        receipts = self.receipts(name, student)
        return receipts[-1] if receipts and receipts[-1].receipt.bundle_sha256 == sha256 else None

    def _count_bytes(self, student: str) -> int:
        """Return the bytes of all that the student has submitted.

        No student may use more of the disk than is still free, so that repeated submissions do not
        take the others' space.
        """
        places = (self.directory / "submissions").glob(f"*/{check_name(student)}/*/{BUNDLE}")
        return sum(place.stat().st_size for place in places)

    def feedback_file(self, name: str, student: str) -> Path:
        """Return the file of a student's feedback, which exists once it is released."""
        return self.directory / "feedback" / check_name(name) / f"{check_name(student)}.json"

    def _submissions_path(self, name: str, student: str) -> Path:
        return self.directory / "submissions" / check_name(name) / check_name(student)

    def _upload_path(self, name: str, student: str, sha256: str, size: int) -> Path:
        if not re.fullmatch("[0-9a-f]{64}", sha256) or not 0 < size < 2**50:
            raise UsageError("a bundle must be announced with its size and SHA-256")
        folder = self.directory / "incoming" / check_name(name) / check_name(student)
        return folder / f"{sha256}.{size}"

    @contextmanager
    def _lock(self, folder: Path) -> Iterator[None]:
        """Let one process in at a time; a cut connection may still finish its last request."""
        if not folder.is_dir():
            raise TransferError("this bundle was not announced", hint=AGAIN)
        # Not state.locks, which writes a note: on a full disk that would fail before the receiver
        # can say so.
        with filelock.FileLock(folder / ".lock", mode=0o600, fallback_to_soft=False):
            yield


def check_name(name: str) -> str:
    """Return the name if it can be a directory's; UsageError for anything else."""
    try:
        return parse_name(name)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _open_upload(staged: Path) -> BinaryIO:
    try:
        return os.fdopen(os.open(staged, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC), "r+b")
    except FileNotFoundError:
        raise TransferError("this bundle was not announced", hint=AGAIN) from None


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
