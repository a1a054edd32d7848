"""Submissions, from the receiver's list of receipts."""

from __future__ import annotations

import calendar
import contextlib
import copy
import functools
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from labctl.config.course_schema import AssignmentConfig
from labctl.decoding import decode_json
from labctl.errors import LabError
from labctl.submissions.assignment import Pauses, judge
from labctl.submissions.receipt import Receipt, Signed
from labctl.submissions.receiver import LOG, Receiver
from labctl.web.downloads import has_report
from labctl.web.view import SubmissionView

# bundles that are opened for one snapshot
BUNDLES_AT_ONCE = 50
# assignment, student and number
SubmissionId = tuple[str, str, int]


class SubmissionList:
    """Submissions by student. Receipts are only ever appended, so each is read once."""

    def __init__(self, drop: Path, key_of: Callable[[str], str]) -> None:
        self._key_of = key_of
        self._receiver = Receiver(drop)
        self._assignments: Mapping[str, AssignmentConfig] = {}
        # assignment -> student -> seconds
        self._extensions: dict[str, dict[str, int]] = {}
        self._pauses: Pauses = ()
        self._file = drop / LOG
        # submissions whose bundles contain a report, and those whose bundle was not opened yet
        self._with_report: set[SubmissionId] = set()
        self._unopened: list[SubmissionId] = []
        self._by_student: dict[str, tuple[SubmissionView, ...]] = {}
        # student -> the submissions as received, and as judged by the rules of `_judged_by`
        self._judged: dict[str, tuple[tuple[SubmissionView, ...], tuple[SubmissionView, ...]]] = {}
        self._judged_by: tuple[object, ...] = ()
        self._read_to = 0
        # device and inode of the file that was read
        self._identity: tuple[int, int] = (0, 0)

    def read_on(self, assignments: Mapping[str, AssignmentConfig]) -> None:
        """Read what was added since the last call: receipts, extensions, and which have a report.

        `assignments` are the rules of now.
        """
        self._assignments = assignments
        self._read_extensions()
        self._read_receipts()
        self._open_bundles()
        rules = (assignments, copy.deepcopy(self._extensions), self._pauses, len(self._with_report))
        if rules != self._judged_by:
            self._judged, self._judged_by = {}, rules

    def _read_receipts(self) -> None:
        """Read the receipts appended since the last call; all of them if the file was replaced."""
        try:
            with self._file.open("rb") as file:
                stat = os.fstat(file.fileno())
                identity = (stat.st_dev, stat.st_ino)
                if identity != self._identity or stat.st_size < self._read_to:
                    self._by_student, self._read_to, self._identity = {}, 0, identity
                    self._unopened.clear()
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
                self._unopened.append((receipt.assignment, receipt.student, receipt.number))

    def _read_extensions(self) -> None:
        for name in self._assignments:
            with contextlib.suppress(OSError, msgspec.MsgspecError):  # keep the last ones
                self._extensions[name] = self._receiver.extensions(name)
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            self._pauses = self._receiver.read_pauses()

    def _open_bundles(self) -> None:
        """Open the bundles of the newest receipts, a few at a time: only some contain a report."""
        for _ in range(min(BUNDLES_AT_ONCE, len(self._unopened))):
            submission_id = self._unopened.pop()
            with contextlib.suppress(LabError):
                if has_report(self._receiver.find_bundle(*submission_id)):
                    self._with_report.add(submission_id)

    def submissions_of(self, names: Iterable[str]) -> tuple[SubmissionView, ...]:
        """Return the submissions of these students that `read_on` has read, the oldest first."""
        submissions = [one for name in names for one in self._judge(name)]
        return tuple(sorted(submissions, key=lambda one: one.received))

    def has_submitted(self, assignment: str, names: Iterable[str]) -> bool:
        """Tell whether one of these students has submitted the assignment."""
        return any(
            one.assignment == assignment for name in names for one in self._by_student.get(name, ())
        )

    def find_closings(self, assignment: str) -> dict[str, int]:
        """Return when an assignment closes (Unix time): for "", and for students with an extension.

        {} if it never closes.
        """
        rules, extensions = self._assignments[assignment], self._extensions.get(assignment, {})
        closings = {
            student: judge(rules, 0, extension_s, rules.grace, self._pauses).closes_at
            for student, extension_s in {"": 0, **extensions}.items()
        }
        return {student: at for student, at in closings.items() if at is not None}

    def _judge(self, student: str) -> tuple[SubmissionView, ...]:
        """Return a student's submissions as judged now; only new ones if no rule has changed."""
        received = self._by_student.get(student, ())
        judged = self._judged.get(student)
        if judged is None or judged[0] is not received:
            judged = (received, tuple(self._update(one) for one in received))
            self._judged[student] = judged
        return judged[1]

    def _update(self, submission: SubmissionView) -> SubmissionView:
        """Return the submission judged by the rules of now, and whether it has a report.

        Its receipt has the lateness at its time; an extension may have been granted since.
        """
        rules = self._assignments.get(submission.assignment)
        submission_id = (submission.assignment, submission.by, submission.number)
        has_report = submission_id in self._with_report
        if rules is None:
            return msgspec.structs.replace(submission, has_report=has_report)
        extension_s = self._extensions.get(submission.assignment, {}).get(submission.by, 0)
        received_at = parse_received_at(submission.received)
        standing = judge(rules, received_at, extension_s, rules.grace, self._pauses)
        return msgspec.structs.replace(
            submission,
            late_s=standing.late_s,
            penalty=standing.penalty,
            accepted=standing.accepted,
            has_report=has_report,
        )

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
        return decode_json(line, Signed).receipt
    except msgspec.MsgspecError:
        return None


@functools.lru_cache(maxsize=65_536)
def parse_received_at(text: str) -> float:
    """Return the Unix time of a receipt's `received`; 0.0 if it is not a time."""
    try:
        return float(calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ")))
    except ValueError:
        return 0.0
