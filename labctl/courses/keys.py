"""The keeper's authorized_keys: a line for each student's device, and one for each invitation.

Every line forces one command, `labctl course door`, which ignores the client's own command line.
Lines of other programs stay as they are. A lock serializes changes from several processes.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from labctl.config import expand_user
from labctl.config.identity import write_draft
from labctl.courses.records.folder import CourseFolder
from labctl.errors import LabError, PolicyError, UsageError
from labctl.state.locks import hold_lock
from labctl.submissions.receive import KEY_LINE, labctl_argv
from labctl.submissions.receive import MARK as SUBMIT_MARK
from labctl.submissions.receiver import check_name

# The only request that an invitation's key may send.
JOIN_REQUEST = "labctl-join"
DEFAULT_FILE = "~/.ssh/authorized_keys"
MARK, JOIN_MARK, CHECK_MARK = "labctl-course:", "labctl-join:", "labctl-check:"
# Owner of the key of a check: never a student, since no name begins with a dot.
CHECKER = ".check"
WAIT_S = 30.0
CHECK_WAIT_S = 120.0
# Keys that one student may have: a laptop, a machine at home, a few of the university's.
MOST_DEVICES = 5


class AuthorizedKeys:
    """The lines of a course in one authorized_keys file."""

    def __init__(self, folder: CourseFolder, file: Path) -> None:
        self.folder = folder
        self.file = Path(os.path.realpath(expand_user(file)))

    def admit(self, student: str, public: str, *, instead_of: str = "") -> None:
        """Authorize a student's key, beside those of the student's other devices.

        `instead_of` is an invitation's public key, whose line is removed in the same write:
        PolicyError if it is no longer there. UsageError if `public` is not a key, PolicyError if it
        belongs to another student, or if the student has MOST_DEVICES keys.
        """
        body = parse_key(public)
        own_mark = f"{MARK}{self.folder.id}:{check_name(student)}"
        with self._lock():
            lines = self._read_lines()
            if instead_of:
                invitation = parse_key(instead_of)
                if not any(
                    _has_key(line, invitation) and _mark_of(line).startswith(JOIN_MARK)
                    for line in lines
                ):
                    raise make_join_file_invalid_error()
                lines = [line for line in lines if not _has_key(line, invitation)]
            lines = [line for line in lines if _mark_of(line) != f"{SUBMIT_MARK}{student}"]
            devices = [
                line for line in lines if _mark_of(line) == own_mark and not _has_key(line, body)
            ]
            if len(devices) >= MOST_DEVICES:
                raise PolicyError(
                    f"{student} has joined from {len(devices)} devices, and no more are allowed",
                    hint="ask your instructor for a join file that replaces them, made with:\n"
                    f"labctl course invite {student} --replace",
                )
            others = [line for line in lines if _mark_of(line) != own_mark]
            if any(_has_key(line, body) for line in others):
                raise PolicyError(
                    "this key already belongs to another student",
                    why="every student needs a key of their own",
                    hint="labctl join FILE   # from your own account",
                )
            self._write_lines([*others, *devices, self._format_line(student, body, own_mark)])

    def invite(self, student: str, public: str) -> None:
        """Authorize an invitation's key to enroll a student; an earlier invitation is replaced."""
        mark = f"{JOIN_MARK}{self.folder.id}:{check_name(student)}"
        line = self._format_line(student, parse_key(public), mark, "--joining", str(self.file))
        with self._lock():
            self._write_lines(
                [*(other for other in self._read_lines() if _mark_of(other) != mark), line]
            )

    def withdraw(self, students: Iterable[str]) -> None:
        """Revoke the invitations of these students."""
        self._remove_lines({f"{JOIN_MARK}{self.folder.id}:{student}" for student in students})

    def expel(self, students: Iterable[str] | None = None) -> list[str]:
        """Remove the keys and invitations of these students, or of all if None.

        Returns those who had a key. Their submissions and running servers stay as they are.
        """
        own_mark = f"{MARK}{self.folder.id}:"
        marks = None
        if students is not None:
            marks = {
                f"{kind}{self.folder.id}:{student}"
                for student in students
                for kind in (MARK, JOIN_MARK)
            }
        removed = self._remove_lines(marks)
        return sorted(mark.removeprefix(own_mark) for mark in removed if mark.startswith(own_mark))

    @contextmanager
    def admit_check(self, public: str) -> Iterator[None]:
        """Authorize a key inside this context that may only ask for the keeper's health.

        One check at a time; the next check replaces a line that a killed one left.
        """
        mark = f"{CHECK_MARK}{self.folder.id}"
        line = self._format_line(CHECKER, parse_key(public), mark)
        lock = keeper_dir(self.folder) / ".check.lock"
        with hold_lock(lock, "course check", wait_s=CHECK_WAIT_S):
            with self._lock():
                self._write_lines(
                    [*(other for other in self._read_lines() if _mark_of(other) != mark), line]
                )
            try:
                yield
            finally:
                self._remove_lines({mark})

    def is_open(self) -> bool:
        """Tell whether this file has a line of the course: a student's or an invitation's."""
        marks = tuple(f"{mark}{self.folder.id}:" for mark in (MARK, JOIN_MARK))
        return any(_mark_of(line).startswith(marks) for line in self._read_lines())

    def count_invitations(self) -> int:
        """Count the invitations whose join files still work."""
        mark = f"{JOIN_MARK}{self.folder.id}:"
        return sum(_mark_of(line).startswith(mark) for line in self._read_lines())

    def list_students(self) -> list[str]:
        """List the students who have a key here."""
        return sorted({student for student, _ in self.read_public_keys()})

    def read_public_keys(self) -> list[tuple[str, str]]:
        """Return each student with a public key, as its type and base64; one for each device."""
        own_mark = f"{MARK}{self.folder.id}:"
        lines = [line for line in self._read_lines() if _mark_of(line).startswith(own_mark)]
        return [
            (_mark_of(line).removeprefix(own_mark), " ".join(line.split()[-3:-1])) for line in lines
        ]

    def _remove_lines(self, marks: set[str] | None) -> set[str]:
        """Remove the lines with these marks, or all of the course's; return the removed marks."""
        prefixes = tuple(f"{mark}{self.folder.id}" for mark in (MARK, JOIN_MARK, CHECK_MARK))
        with self._lock():
            lines = self._read_lines()
            removed = {
                mark
                for mark in map(_mark_of, lines)
                if (mark in marks if marks is not None else mark.startswith(prefixes))
            }
            if removed:
                self._write_lines([line for line in lines if _mark_of(line) not in removed])
        return removed

    def _format_line(self, student: str, body: tuple[str, str], mark: str, *more: str) -> str:
        words = [*labctl_argv(), "course", "door", str(self.folder.path), student, *more]
        command = shlex.join(words)
        if re.search(r'["\\\n]', command):
            raise UsageError(
                f"the path {self.folder.path} cannot be written into authorized_keys",
                why="it contains quotes, backslashes or line breaks",
                hint="move the course's folder to a path without them",
            )
        return f'restrict,command="{command}" {body[0]} {body[1]} {mark}'

    def _read_lines(self) -> list[str]:
        try:
            return self.file.read_text().splitlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise LabError(
                f"cannot read {self.file}", why=error.strerror or "", hint=f"ls -l {self.file}"
            ) from error

    def _write_lines(self, lines: list[str]) -> None:
        """Replace the file atomically, for its owner only: sshd may read it at any moment."""
        text = "".join(f"{line}\n" for line in lines)
        try:
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_draft(self.file, text.encode(), mode=0o600).replace(self.file)
        except OSError as error:
            raise LabError(
                f"cannot write {self.file}",
                why=error.strerror or "",
                hint=f"ls -ld {self.file.parent}",
            ) from error

    def _lock(self) -> AbstractContextManager[None]:
        lock = keeper_dir(self.folder) / ".keys.lock"
        return hold_lock(lock, "changing authorized_keys", wait_s=WAIT_S, is_command=False)


def keeper_dir(folder: CourseFolder) -> Path:
    """Return the keeper's own directory in the course's folder (0700)."""
    return folder.private / "keeper"


def parse_key(public: str) -> tuple[str, str]:
    """Parse a public key's line into (type, base64); UsageError if it is not one."""
    match = KEY_LINE.fullmatch(public.strip())
    if match is None:
        raise UsageError("this is not a public key", why="expected one line: ssh-ed25519 AAAA...")
    return match[1], match[2]


def make_join_file_invalid_error() -> PolicyError:
    return PolicyError(
        "this join file was already used, or has expired",
        why="each join file works only once",
        hint="ask your instructor for another, made with:\nlabctl course invite STUDENT",
    )


def _mark_of(line: str) -> str:
    return line.rpartition(" ")[2]


def _has_key(line: str, body: tuple[str, str]) -> bool:
    return f" {body[0]} {body[1]} " in f"{line} "
