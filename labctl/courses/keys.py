"""The keeper's authorized_keys: a line for each student, and one for each invitation.

Every line forces one command, `labctl course door`, which takes no word from whoever logs in. Lines
of other programs stay as they are. Processes that change the file at once take turns.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from labctl.config.identity import write_draft
from labctl.courses.records.folder import CourseFolder
from labctl.errors import LabError, PolicyError, UsageError
from labctl.providers.course import REQUEST as DOOR_REQUEST
from labctl.state.locks import hold_lock
from labctl.submissions import REQUEST as SUBMIT_REQUEST
from labctl.submissions.receive import KEY_LINE, program_words
from labctl.submissions.receive import MARK as SUBMIT_MARK
from labctl.submissions.receiver import checked

# What the ssh of an invitation asks for, and may ask for alone.
JOIN_REQUEST = "labctl-join"
REQUESTS = (SUBMIT_REQUEST, DOOR_REQUEST)
DEFAULT_FILE = "~/.ssh/authorized_keys"
MARK, JOIN_MARK, CHECK_MARK = "labctl-course:", "labctl-join:", "labctl-check:"
# Whose key a check's is: no student's, since no name begins with a dot.
CHECKER = ".check"
WAIT_S = 30.0
CHECK_WAIT_S = 120.0


class Keys:
    """One authorized_keys file, and this course's lines in it."""

    def __init__(self, folder: CourseFolder, file: Path) -> None:
        self.folder = folder
        self.file = Path(os.path.realpath(file.expanduser()))

    def admit(self, student: str, public: str, *, instead_of: str = "") -> None:
        """Let this key in as the student's, in place of the one that they had.

        `instead_of` is an invitation's public key, whose line goes in the same stroke: PolicyError
        where that is there no more. UsageError where `public` is no key, PolicyError where it is
        somebody else's.
        """
        body = checked_key(public)
        own = {f"{MARK}{self.folder.id}:{checked(student)}", f"{SUBMIT_MARK}{student}"}
        with self._alone():
            lines = self._lines()
            if instead_of:
                invitation = checked_key(instead_of)
                if not any(
                    _has(one, invitation) and _mark(one).startswith(JOIN_MARK) for one in lines
                ):
                    raise used()
                lines = [one for one in lines if not _has(one, invitation)]
            kept = [one for one in lines if _mark(one) not in own]
            if any(_has(one, body) for one in kept):
                raise PolicyError(
                    "this key is let in already, as somebody else's",
                    why="everybody joins with a key of their own",
                    hint="labctl join FILE   # in an account of your own",
                )
            self._write([*kept, self._line(student, body, f"{MARK}{self.folder.id}:{student}")])

    def invite(self, student: str, public: str) -> None:
        """Let an invitation's key in, to enrol one key of this student's; the one before goes."""
        mark = f"{JOIN_MARK}{self.folder.id}:{checked(student)}"
        line = self._line(student, checked_key(public), mark, "--joining", str(self.file))
        with self._alone():
            self._write([*(one for one in self._lines() if _mark(one) != mark), line])

    def withdraw(self, students: Iterable[str]) -> None:
        """Take these students' invitations back."""
        self._drop({f"{JOIN_MARK}{self.folder.id}:{one}" for one in students})

    def expel(self, students: Iterable[str] | None = None) -> list[str]:
        """Let these students (None: everybody of the course) in no longer; who had a key.

        Their invitations go too. What was handed in, and what runs, stays as it is.
        """
        own = f"{MARK}{self.folder.id}:"
        marks = None
        if students is not None:
            marks = {
                f"{kind}{self.folder.id}:{one}" for one in students for kind in (MARK, JOIN_MARK)
            }
        gone = self._drop(marks)
        return sorted(mark.removeprefix(own) for mark in gone if mark.startswith(own))

    @contextmanager
    def admit_check(self, public: str) -> Iterator[None]:
        """Let a key in for so long, which may ask how the keeper is and nothing else.

        One check at a time; a line that a kill has left is replaced by the next one's.
        """
        mark = f"{CHECK_MARK}{self.folder.id}"
        line = self._line(CHECKER, checked_key(public), mark)
        lock = keeper_dir(self.folder) / ".check.lock"
        with hold_lock(lock, "labctl course check", wait_s=CHECK_WAIT_S):
            with self._alone():
                self._write([*(one for one in self._lines() if _mark(one) != mark), line])
            try:
                yield
            finally:
                self._drop({mark})

    def is_open(self) -> bool:
        """Whether somebody of this course may log in by this file: students, or who is invited."""
        marks = tuple(f"{mark}{self.folder.id}:" for mark in (MARK, JOIN_MARK))
        return any(_mark(one).startswith(marks) for one in self._lines())

    def students(self) -> list[str]:
        """Who has a key here."""
        return sorted(self.publics())

    def publics(self) -> dict[str, str]:
        """Each student's public key: its type and base64."""
        own = f"{MARK}{self.folder.id}:"
        lines = [one for one in self._lines() if _mark(one).startswith(own)]
        return {_mark(one).removeprefix(own): " ".join(one.split()[-3:-1]) for one in lines}

    def _drop(self, marks: set[str] | None) -> set[str]:
        """Take lines away, all of this course's for None; the marks of those that were there."""
        prefixes = tuple(f"{mark}{self.folder.id}" for mark in (MARK, JOIN_MARK, CHECK_MARK))
        with self._alone():
            lines = self._lines()
            gone = {
                mark
                for mark in map(_mark, lines)
                if (mark in marks if marks is not None else mark.startswith(prefixes))
            }
            if gone:
                self._write([one for one in lines if _mark(one) not in gone])
        return gone

    def _line(self, student: str, body: tuple[str, str], mark: str, *more: str) -> str:
        words = [*program_words(), "course", "door", str(self.folder.path), student, *more]
        command = shlex.join(words)
        if re.search(r'["\\\n]', command):
            raise UsageError(
                f"{self.folder.path} cannot stand in authorized_keys",
                why="its name has quotes, backslashes or line breaks",
                hint="move the course's folder to a plainer place",
            )
        return f'restrict,command="{command}" {body[0]} {body[1]} {mark}'

    def _lines(self) -> list[str]:
        try:
            return self.file.read_text().splitlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise LabError(
                f"cannot read {self.file}", why=error.strerror or "", hint=f"ls -l {self.file}"
            ) from error

    def _write(self, lines: list[str]) -> None:
        """The whole file at once, for its owner alone: sshd may read it at any moment."""
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

    def _alone(self) -> AbstractContextManager[None]:
        return hold_lock(keeper_dir(self.folder) / ".keys.lock", "letting keys in", wait_s=WAIT_S)


def keeper_dir(folder: CourseFolder) -> Path:
    """Where the keeper keeps what is its own, 0700."""
    return folder.private / "keeper"


def checked_key(public: str) -> tuple[str, str]:
    """(type, base64) of a public key's line; UsageError where it is none."""
    match = KEY_LINE.fullmatch(public.strip())
    if match is None:
        raise UsageError("this is no public key", why="one line is needed: ssh-ed25519 AAAA...")
    return match[1], match[2]


def used() -> PolicyError:
    return PolicyError(
        "this join file is used up",
        why="each works once, and until it expires",
        hint="ask your instructor for another: labctl course invite",
    )


def _mark(line: str) -> str:
    return line.rpartition(" ")[2]


def _has(line: str, body: tuple[str, str]) -> bool:
    return f" {body[0]} {body[1]} " in f"{line} "
