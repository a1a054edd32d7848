"""The receiver's directory: what is taken in, stamped and signed, and never changed afterwards.

    signing-key, signing-key.pub       the receiver's pair; assignments name the public half
    assignments/NAME.yaml              the rules, as students have them
    extensions/NAME.json               seconds that a student has more
    incoming/NAME/STUDENT/SHA256.SIZE  what has arrived so far
    submissions/NAME/STUDENT/0001/     bundle.tar and receipt.json
    feedback/NAME/STUDENT.json         what a student may read of their grade
    receipts.jsonl                     every receipt, in order

Who the student is, the caller knows and the student does not say. Nothing here gives a bundle back,
replaces or removes one.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from labctl.config.scalars import parse_name
from labctl.errors import (
    ConfigError,
    DiskFullError,
    NotFoundError,
    PolicyError,
    TransferError,
    UsageError,
)
from labctl.model import Value
from labctl.submissions import feedback, receipt
from labctl.submissions.assignment import Assignment, Standing, judge, load_assignment
from labctl.submissions.examination import examine_confined
from labctl.submissions.feedback import Feedback
from labctl.submissions.intake import Arrived, Expected, check_arrived, stamp
from labctl.submissions.receipt import Receipt, Signed

KEY = "signing-key"
LOG = "receipts.jsonl"
BUNDLE, RECEIPT = "bundle.tar", "receipt.json"
# Of one student for one assignment.
MOST_SUBMISSIONS = 100
AGAIN = "labctl submit"
# What is left free on the receiver's disk.
RESERVE_BYTES = 256 * 1024 * 1024


class Hello(Value, frozen=True):
    """What a student may know before handing in. `now` is the receiver's clock."""

    student: str
    now: int
    rules: Standing
    due: str
    late: int
    penalty: int
    max_bytes: int
    receiver: str
    # How many submissions of this assignment there are from this student.
    number: int


class Receiver:
    """One directory. Several processes may work on it at once."""

    def __init__(self, directory: Path, now: Callable[[], float] = time.time) -> None:
        self.directory = directory
        self.now = now

    @property
    def key(self) -> Path:
        return self.directory / KEY

    def init(self) -> str:
        """Make the directory and its signing key; the public half. Repeated, nothing changes."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in ("assignments", "extensions", "incoming", "submissions"):
            (self.directory / name).mkdir(exist_ok=True, mode=0o700)
        return receipt.make_signing_key(self.key)

    def public(self) -> str:
        return receipt.public_of(self.key)

    def assignment_file(self, name: str) -> Path:
        return self.directory / "assignments" / f"{checked(name)}.yaml"

    def rules(self, name: str) -> Assignment:
        """An assignment's rules; NotFoundError where this receiver has none of that name."""
        file = self.assignment_file(name)
        if not file.is_file():
            known = sorted(path.stem for path in file.parent.glob("*.yaml"))
            raise NotFoundError(
                f"there is no assignment {name}",
                why=f"the receiver takes in {', '.join(known) or 'nothing yet'}",
                hint="labctl submit --assignment FILE   # the one that your instructor gave",
            )
        found = load_assignment(file)
        if found.name != name:
            raise ConfigError(f"{file} is of another assignment, {found.name}")
        return found

    def extensions(self, name: str) -> dict[str, int]:
        """Student -> seconds after the due time that still count as in time."""
        file = self.directory / "extensions" / f"{checked(name)}.json"
        try:
            return msgspec.json.decode(file.read_bytes(), type=dict[str, int])
        except FileNotFoundError:
            return {}

    def extend(self, name: str, student: str, seconds: int) -> None:
        """Give a student that much after the due time; 0 takes it back."""
        self.rules(name)
        with self._locked(self.directory / "extensions"):
            known = {**self.extensions(name), checked(student): seconds}
            file = self.directory / "extensions" / f"{name}.json"
            draft = file.with_suffix(".new")
            draft.write_bytes(msgspec.json.encode({key: s for key, s in known.items() if s}))
            draft.replace(file)

    def standing(self, name: str, student: str, at: float | None = None) -> Standing:
        return judge(
            self.rules(name),
            self.now() if at is None else at,
            self.extensions(name).get(student, 0),
        )

    def receipts(self, name: str, student: str) -> list[Signed]:
        """The student's own, in order."""
        folder = self._submissions(name, student)
        found = sorted(folder.glob(f"[0-9]*/{RECEIPT}"))
        return [receipt.decode(path.read_bytes()) for path in found]

    def feedback(self, name: str, student: str) -> Feedback | None:
        """What was released to a student of their grade; None where nothing was."""
        return feedback.read(self._feedback(name, student))

    def give(self, name: str, student: str, found: Feedback | None) -> None:
        """Let a student read this, and nothing any more for None."""
        feedback.write(self._feedback(name, student), found)

    def students(self, name: str) -> list[str]:
        """Those who have handed in."""
        folder = self.directory / "submissions" / checked(name)
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []

    def hello(self, name: str, student: str) -> Hello:
        rules = self.rules(name)
        return Hello(
            student=checked(student),
            now=int(self.now()),
            rules=self.standing(name, student),
            due=str(rules.due or ""),
            late=rules.late,
            penalty=rules.penalty,
            max_bytes=rules.max_size,
            receiver=self.public(),
            number=len(self.receipts(name, student)),
        )

    def begin(
        self, name: str, student: str, sha256: str, size: int, at: float | None = None
    ) -> int | Signed:
        """How much of this bundle is here already; its receipt where it was taken in before.

        `at` is when it came, if another clock than this one's knows. Whatever the rules or the disk
        do not allow is refused now, before a byte of it travels.
        """
        rules = self.rules(name)
        staged = self._staged(name, student, sha256, size)
        staged.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._locked(staged.parent):
            if (known := self._last(name, student, sha256)) is not None:
                return known
            if size > rules.max_size:
                raise PolicyError(
                    f"the bundle is too large: {size} bytes",
                    why=f"{name} takes at most {rules.max_size} bytes",
                    hint="labctl submit --dry-run   # what is how large",
                )
            self._check_open(name, student, self.now() if at is None else at)
            if len(self.receipts(name, student)) >= MOST_SUBMISSIONS:
                raise PolicyError(
                    f"{student} has handed in {name} {MOST_SUBMISSIONS} times",
                    hint="labctl submit --receipts   # what counts; then ask your instructor",
                )
            for other in staged.parent.iterdir():
                if other != staged and not other.name.startswith("."):
                    other.unlink()
            here = staged.stat().st_size if staged.exists() else 0
            left = shutil.disk_usage(self.directory).free - (size - here)
            if left < RESERVE_BYTES:
                raise DiskFullError(
                    "the receiver's disk is full",
                    why="tell your instructor",
                    hint="labctl submit   # again, once there is room",
                )
            if left < (own := self._bytes_of(student)):
                raise DiskFullError(
                    f"the receiver's disk has no more room for {student}",
                    why=f"{own / 1e9:.1f} GB are theirs, and less than that is left for the others",
                    hint="hand in a smaller checkpoint, or tell your instructor",
                )
            staged.touch(mode=0o600)
        return here

    def write(
        self, name: str, student: str, sha256: str, size: int, offset: int, part: bytes
    ) -> int:
        """Add a part of a bundle that was begun; how much is here then."""
        staged = self._staged(name, student, sha256, size)
        if offset < 0 or offset + len(part) > size:
            raise TransferError("more arrived than was announced", hint=AGAIN)
        with self._locked(staged.parent), _begun(staged) as file:
            here = os.fstat(file.fileno()).st_size
            if offset > here:
                raise TransferError("the beginning of this bundle is not here", hint=AGAIN)
            file.seek(offset)
            file.write(part)
            file.flush()
            os.fsync(file.fileno())
            # When the last byte came, by the receiver's clock: what counts.
            os.utime(file.fileno(), (self.now(), self.now()))
        return max(here, offset + len(part))

    def finish(
        self, name: str, student: str, sha256: str, size: int, at: float | None = None
    ) -> Signed:
        """Take in what has arrived: check all of it, stamp it, sign for it.

        `at` is when it was all there, if another clock than this one's knows. PolicyError where the
        time is over, TransferError where it is no bundle that may be taken; then nothing is kept.
        """
        staged = self._staged(name, student, sha256, size)
        with self._locked(staged.parent):
            if (known := self._last(name, student, sha256)) is not None:
                return known
            if not staged.exists() or staged.stat().st_size != size:
                raise TransferError("not all of the bundle has arrived", hint=AGAIN)
            moment = staged.stat().st_mtime if at is None else at
            try:
                self._check_open(name, student, moment)
                check_arrived(staged, sha256)
                expected = Expected(name, self.rules(name).course, student)
                examined = examine_confined(staged, expected, self.directory / "incoming")
            except (PolicyError, TransferError):
                staged.unlink()
                raise
            standing = self.standing(name, student, moment)
            number = len(self.receipts(name, student)) + 1
            arrived = Arrived(student, size, sha256)
            made = stamp(self.rules(name), standing, number, moment, examined, arrived)
            signed = receipt.sign(made, self.key)
            self._keep(name, student, staged, signed)
        return signed

    def check(self, name: str) -> Iterator[tuple[Receipt | str, str]]:
        """(receipt or its place, what is wrong with it or "") of everything taken in."""
        public = self.public()
        for student in self.students(name):
            for folder in sorted(self._submissions(name, student).glob("[0-9]*")):
                try:
                    found = receipt.verify(receipt.decode((folder / RECEIPT).read_bytes()), public)
                    with (folder / BUNDLE).open("rb") as file:
                        digest = hashlib.file_digest(file, "sha256").hexdigest()
                except PolicyError as error:
                    yield str(folder), error.why
                    continue
                except OSError as error:
                    yield str(folder), f"{error.strerror}"
                    continue
                whose = (found.assignment, found.student, f"{found.number:04}")
                said = "" if whose == (name, student, folder.name) else "the receipt is of another"
                if digest != found.bundle_sha256:
                    said = "the bundle was changed after it was signed for"
                yield found, said

    def bundle_of(self, name: str, student: str, number: int = 0) -> Path:
        """Where a submission lies, the last one for 0; NotFoundError where there is none."""
        found = sorted(self._submissions(name, student).glob("[0-9]*"))
        chosen = [path for path in found if not number or int(path.name) == number]
        if not chosen:
            raise NotFoundError(
                f"{student} has not handed in {name}", hint=f"labctl receive list DIR {name}"
            )
        return chosen[-1] / BUNDLE

    def _check_open(self, name: str, student: str, at: float) -> None:
        standing = self.standing(name, student, at)
        if not standing.accepted:
            raise PolicyError(
                f"{name} is closed since {receipt.utc_text(standing.closes_at or 0)}",
                why="nothing was taken in; what was handed in before stays as it is",
                hint="ask your instructor for an extension",
            )

    def _keep(self, name: str, student: str, staged: Path, signed: Signed) -> None:
        """The bundle and its receipt appear in one rename."""
        folder = self._submissions(name, student)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = staged.parent / f".taken-{os.getpid()}"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(mode=0o700)
        os.link(staged, draft / BUNDLE)
        (draft / BUNDLE).chmod(0o400)
        _write(draft / RECEIPT, receipt.encode(signed))
        draft.rename(folder / f"{signed.receipt.number:04}")
        _to_disk(folder)
        with (self.directory / LOG).open("ab") as log:
            log.write(msgspec.json.encode(signed) + b"\n")
            log.flush()
            os.fsync(log.fileno())
        staged.unlink()

    def _last(self, name: str, student: str, sha256: str) -> Signed | None:
        """The receipt of the student's last submission, where that was this very bundle."""
        known = self.receipts(name, student)
        return known[-1] if known and known[-1].receipt.bundle_sha256 == sha256 else None

    def _bytes_of(self, student: str) -> int:
        """All that the student has handed in. Nobody has more of the disk than is left of it, so
        that one who hands in again and again takes nobody else's room."""
        places = (self.directory / "submissions").glob(f"*/{checked(student)}/*/{BUNDLE}")
        return sum(place.stat().st_size for place in places)

    def _feedback(self, name: str, student: str) -> Path:
        return self.directory / "feedback" / checked(name) / f"{checked(student)}.json"

    def _submissions(self, name: str, student: str) -> Path:
        return self.directory / "submissions" / checked(name) / checked(student)

    def _staged(self, name: str, student: str, sha256: str, size: int) -> Path:
        if not re.fullmatch("[0-9a-f]{64}", sha256) or not 0 < size < 2**50:
            raise UsageError("a bundle is announced by its size and SHA-256")
        folder = self.directory / "incoming" / checked(name) / checked(student)
        return folder / f"{sha256}.{size}"

    @contextmanager
    def _locked(self, folder: Path) -> Iterator[None]:
        """One process at a time; a connection that was cut may still be at its last request."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(folder / ".lock", flags, 0o600)
        except FileNotFoundError:
            raise TransferError("this bundle was not announced", hint=AGAIN) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def checked(name: str) -> str:
    """A name that can be a directory's; UsageError for anything else."""
    try:
        return parse_name(name)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _begun(staged: Path) -> BinaryIO:
    try:
        return os.fdopen(os.open(staged, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC), "r+b")
    except FileNotFoundError:
        raise TransferError("this bundle was not announced", hint=AGAIN) from None


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _to_disk(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
