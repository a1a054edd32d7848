"""Sending released grades to Canvas.

What Canvas has already is not sent, so that a repeated transfer sends only the rest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from labctl.config import Paths, copy_environment, read_secret
from labctl.config.course_schema import CanvasConfig
from labctl.courses.canvas_connection import (
    TOKEN,
    load_assignment,
    open_assignment,
    translate_errors,
)
from labctl.courses.grades import list_grades
from labctl.courses.records.folder import CourseFolder
from labctl.courses.records.gradebook import Grade, points_text
from labctl.courses.records.ledger_entries import CourseLedgerDraft
from labctl.courses.records.roster_import import load_keys
from labctl.courses.records.writeback import EXCUSED as EXCUSED_CELLS
from labctl.decoding import convert_value
from labctl.errors import ConfigError, LabError, PolicyError
from labctl.events import Progress, Question, Reporter
from labctl.model import Value
from labctl.retry import poll_until

# Grades in one request: a failed one leaves the others sent.
BATCH = 50
PROGRESS_S = 300.0
# Grading types whose grades are points or percent, as labctl's are.
POINTS_TYPES = ("points", "percent")
# A smaller difference comes from rounding: labctl sends three decimal places.
SAME_POINTS = 0.0006
# What stands for a grade of an excused student, as in Canvas's own exports.
EXCUSED = EXCUSED_CELLS["canvas"]


class CanvasChange(Value, frozen=True):
    """A grade that differs from Canvas's.

    Texts of the points, or EXCUSED; `before` is "" if Canvas has neither.
    """

    student: str
    canvas_id: str
    before: str
    after: str


class CanvasTransfer(Value, frozen=True):
    """What a transfer changes in Canvas, or has changed.

    `same` grades are there already. `failed` are students whose grade Canvas did not take. `notes`
    say which grades are left out, and why.
    """

    assignment: str
    title: str
    changes: tuple[CanvasChange, ...]
    same: int
    notes: tuple[str, ...] = ()
    sent: int = 0
    failed: tuple[str, ...] = ()


class _CanvasAssignment(Value, frozen=True):
    name: str
    points_possible: float | None = None
    grading_type: str = "points"
    published: bool = True


class _CanvasSubmission(Value, frozen=True):
    """`entered_score` is the score before Canvas's own penalty for lateness."""

    user_id: int
    score: float | None = None
    entered_score: float | None = None
    excused: bool | None = None

    @property
    def points(self) -> float | None:
        return self.score if self.entered_score is None else self.entered_score

    @property
    def value(self) -> str:
        """The points as text, EXCUSED, or "" without a grade."""
        return EXCUSED if self.excused else points_text(self.points)

    def has_value(self, value: str) -> bool:
        """Whether this is the grade, or the excuse, that labctl would send as `value`."""
        if self.excused or value == EXCUSED:
            return self.value == value
        return self.points is not None and abs(self.points - float(value)) < SAME_POINTS


class CanvasGradebook:
    """An assignment of course.yaml in Canvas."""

    def __init__(self, folder: CourseFolder, paths: Paths, name: str) -> None:
        self._folder, self._name = folder, name
        self._config, self._number = _find_numbers(folder, name)
        token = read_secret(paths, folder.id, TOKEN, copy_environment())
        self._assignment = open_assignment(self._config, self._number, token)

    def plan(self, *, penalty: bool = True) -> CanvasTransfer:
        """Compare the released grades, and the excuses, with Canvas's.

        Without `penalty`, lateness does not count.
        """
        rules = self._folder.config.assignments[self._name]
        with translate_errors(self._config, self._name):
            found = convert_value(vars(load_assignment(self._assignment)), _CanvasAssignment)
            _check_assignment(found, self._name, rules.points)
            submissions = self._read_submissions()
        grades = list_grades(self._folder, self._name, everybody=True)
        ids = {student: key for key, student in _load_ids(self._folder).items()}
        changes, same = [], 0
        left_out: dict[str, list[str]] = defaultdict(list)
        excused_by_labctl = self._list_own_excuses()
        for grade in grades:
            after = _find_value(grade, penalty=penalty)
            submission = submissions.get(ids.get(grade.student, ""))
            may_replace = grade.student in excused_by_labctl
            if not after:
                continue
            if reason := _explain_omission(grade, submission, may_replace=may_replace):
                left_out[reason.format(name=self._name)].append(grade.student)
            elif submission and submission.has_value(after):
                same += 1
            elif submission:
                change = CanvasChange(
                    student=grade.student,
                    canvas_id=ids[grade.student],
                    before=submission.value,
                    after=after,
                )
                changes.append(change)
        return CanvasTransfer(
            assignment=self._name,
            title=found.name,
            changes=tuple(changes),
            same=same,
            notes=tuple(_list_notes(left_out, submissions)),
        )

    def _list_own_excuses(self) -> frozenset[str]:
        """Return the students whose newest transfer to Canvas was an excuse."""
        sent: dict[str, str] = {}
        for line in self._folder.ledger.list_entries(kind="canvas"):
            if line.detail.get("assignment") == self._name:
                sent |= line.detail.get("grades", {})
        return frozenset(student for student, value in sent.items() if value == EXCUSED)

    def send(self, transfer: CanvasTransfer, by: str, reporter: Reporter) -> CanvasTransfer:
        """Send the changes and verify them; return the transfer with `sent` and `failed`.

        `reporter` must agree before grades that Canvas has are replaced: PolicyError without.
        A failed request leaves earlier ones in effect: LabError, and another transfer sends the
        rest.
        """
        _require_consent(transfer, reporter)
        changes = transfer.changes
        for begin in range(0, len(changes), BATCH):
            reporter.emit(_make_progress(begin, len(changes)))
            self._send_batch(changes[begin : begin + BATCH], by)
        reporter.emit(_make_progress(len(changes), len(changes)))
        with translate_errors(self._config, self._name):
            submissions = self._read_submissions()
        failed = [change.student for change in changes if not _is_there(change, submissions)]
        return msgspec.structs.replace(
            transfer, sent=len(changes) - len(failed), failed=tuple(failed)
        )

    def _send_batch(self, changes: Sequence[CanvasChange], by: str) -> None:
        """Send some grades and wait until Canvas has worked them off. The ledger gets a line."""
        data = {change.canvas_id: _make_grade_data(change) for change in changes}
        with translate_errors(self._config, self._name):
            progress = self._assignment.submissions_bulk_update(grade_data=data)
            ended = poll_until(
                lambda: progress.query().workflow_state in ("completed", "failed"),
                pause_s=0.2,
                longest_pause_s=5.0,
                deadline_s=PROGRESS_S,
            )
        # A failed job may have taken some of the grades: they are read back afterwards.
        detail = {
            "assignment": self._name,
            "grades": {change.student: change.after for change in changes},
        }
        self._folder.ledger.append_all([CourseLedgerDraft(kind="canvas", by=by, detail=detail)])
        if not ended:
            raise LabError(
                f"Canvas did not finish within {PROGRESS_S:g} s",
                why="it processes grades in the background, so they may still arrive",
                hint=f"labctl course grades {self._name} --to canvas   # shows what is missing",
            )

    def _read_submissions(self) -> dict[str, _CanvasSubmission]:
        """Return the submissions by Canvas's id of the student: each has one, also without work."""
        listed = [
            convert_value(vars(submission), _CanvasSubmission)
            for submission in self._assignment.get_submissions()
        ]
        return {str(submission.user_id): submission for submission in listed}


def _load_ids(folder: CourseFolder) -> Mapping[str, str]:
    """Return the students by Canvas's ids, from the imported rosters."""
    keys = load_keys(folder.private).keys.get("canvas", {})
    if not keys:
        raise ConfigError(
            "no roster from Canvas was imported",
            why="it has the ids by which Canvas knows the students",
            hint="labctl course roster FILE   # Grades, Export in Canvas",
        )
    return keys


def _make_progress(done: int, total: int) -> Progress:
    return Progress(name="sending grades", done=done, total=total, unit="steps")


def _find_numbers(folder: CourseFolder, name: str) -> tuple[CanvasConfig, int]:
    canvas = folder.config.canvas
    if canvas is None or name not in canvas.assignments:
        key = "canvas" if canvas is None else f"canvas.assignments.{name}"
        raise ConfigError(
            f"course.yaml has no {key}",
            why="labctl must know the course and the assignment in Canvas",
            hint=f"edit {folder.config.path}\nlabctl docs grading   # the lines to add",
        )
    return canvas, canvas.assignments[name]


def _check_assignment(found: _CanvasAssignment, name: str, points: float) -> None:
    if not found.published:
        raise ConfigError(
            f"{name} is not published in Canvas",
            why="Canvas accepts grades only for published assignments",
            hint=f"publish it, then:\nlabctl course grades {name} --to canvas",
        )
    if found.grading_type not in POINTS_TYPES:
        raise ConfigError(
            f"{name} has no points in Canvas",
            why=f"its grading type there is {found.grading_type[:40]!a}",
            hint='in Canvas, choose "Display Grade as: Points"',
        )
    if found.points_possible is None or abs(found.points_possible - points) > SAME_POINTS:
        raise ConfigError(
            f"{name} has {points_text(found.points_possible) or 'no'} points in Canvas",
            why=f"course.yaml has {points_text(points)}",
            hint=f"change one of them, then:\nlabctl course grades {name} --to canvas",
        )


def _find_value(grade: Grade, *, penalty: bool) -> str:
    """Return the text that Canvas gets for this grade; "" if there is nothing to send."""
    if grade.excused:
        return EXCUSED
    points = grade.final if penalty else grade.score
    return "" if points is None else points_text(points)


def _explain_omission(
    grade: Grade, submission: _CanvasSubmission | None, *, may_replace: bool
) -> str:
    """Say why this grade is not sent; "" if it may be.

    `may_replace` is whether labctl itself excused the student in Canvas.
    """
    if not (grade.released or grade.excused):
        return "not released yet (labctl course grades {name} --release)"
    if submission is None:
        return "not in the assignment in Canvas, or not in an imported roster of it"
    if submission.excused and not (grade.excused or may_replace):
        return "excused in Canvas, so not sent"
    return ""


def _make_grade_data(change: CanvasChange) -> dict[str, str]:
    """Return the parameters of Canvas's `grade_data` for one student."""
    if change.after == EXCUSED:
        return {"excuse": "true"}
    excuse = {"excuse": "false"} if change.before == EXCUSED else {}
    return {"posted_grade": change.after, **excuse}


def _list_notes(
    left_out: Mapping[str, Sequence[str]], submissions: Mapping[str, _CanvasSubmission]
) -> list[str]:
    notes = [
        f"{reason}: {', '.join(students[:10])}{' ...' if len(students) > 10 else ''}"
        for reason, students in left_out.items()
    ]
    if any(_has_canvas_penalty(submission) for submission in submissions.values()):
        notes.append("Canvas's own late policy takes points off as well: turn it off there")
    return notes


def _has_canvas_penalty(submission: _CanvasSubmission) -> bool:
    scores = submission.score, submission.entered_score
    return None not in scores and scores[0] != scores[1]


def _is_there(change: CanvasChange, submissions: Mapping[str, _CanvasSubmission]) -> bool:
    submission = submissions.get(change.canvas_id)
    return submission is not None and submission.has_value(change.after)


def _require_consent(transfer: CanvasTransfer, reporter: Reporter) -> None:
    replaced = [change for change in transfer.changes if change.before]
    if not replaced:
        return
    lines = [f"{one.student}: {one.before} -> {one.after}" for one in replaced]
    count = "1 grade" if len(lines) == 1 else f"{len(lines)} grades"
    question = f"replace {count} of {transfer.assignment} that Canvas has?"
    if not reporter.confirm(Question(question=question, detail="\n".join(lines))):
        raise PolicyError(
            "nothing was sent",
            why=f"{count} that Canvas has would change",
        )
