"""Submissions, from the receiver's list of receipts."""

from __future__ import annotations

import calendar
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from labctl.submissions.receipt import Receipt, Signed
from labctl.submissions.receiver import LOG
from labctl.web.view import SubmissionView


class SubmissionList:
    """Submissions by student. Receipts are only ever appended, so each is read once."""

    def __init__(self, drop: Path, key_of: Callable[[str], str]) -> None:
        self._key_of = key_of
        self._file = drop / LOG
        self._by_student: dict[str, tuple[SubmissionView, ...]] = {}
        self._read_to = 0
        # device and inode of the file that was read
        self._identity: tuple[int, int] = (0, 0)

    def read_on(self) -> None:
        """Read the receipts appended since the last call; all of them if the file was replaced."""
        try:
            with self._file.open("rb") as file:
                stat = os.fstat(file.fileno())
                identity = (stat.st_dev, stat.st_ino)
                if identity != self._identity or stat.st_size < self._read_to:
                    self._by_student, self._read_to, self._identity = {}, 0, identity
                file.seek(self._read_to)
                complete_lines, end, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            self._by_student, self._read_to = {}, 0
            return
        self._read_to += len(complete_lines) + len(end)
        for line in complete_lines.split(b"\n") if end else ():
            receipt = _parse_receipt(line)
            if receipt is not None:
                before = self._by_student.get(receipt.student, ())
                self._by_student[receipt.student] = (*before, self._convert_receipt(receipt))

    def submissions_of(self, names: Iterable[str]) -> tuple[SubmissionView, ...]:
        """Return the submissions of these students that `read_on` has read, the oldest first."""
        submissions = [one for name in names for one in self._by_student.get(name, ())]
        return tuple(sorted(submissions, key=lambda one: one.received))

    def _convert_receipt(self, receipt: Receipt) -> SubmissionView:
        return SubmissionView(
            assignment=receipt.assignment,
            number=receipt.number,
            by=receipt.student,
            by_key=self._key_of(receipt.student),
            received=receipt.received,
            late_s=receipt.late_s,
            penalty=receipt.penalty,
            run=receipt.run,
            size_bytes=receipt.bundle_bytes,
            sha256=receipt.bundle_sha256,
        )


def _parse_receipt(line: bytes) -> Receipt | None:
    try:
        return msgspec.json.decode(line, type=Signed).receipt
    except msgspec.MsgspecError:
        return None


def parse_received_at(text: str) -> float:
    """Return the Unix time of a receipt's `received`; 0.0 if it is not a time."""
    try:
        return float(calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ")))
    except ValueError:
        return 0.0
