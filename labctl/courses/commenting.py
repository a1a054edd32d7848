"""Comments on lines of submissions, and the comments that staff saves for reuse."""

from __future__ import annotations

import re

import msgspec

from labctl.courses.assignment_seats import list_assignment_seats
from labctl.courses.collect import find_rules
from labctl.courses.grading.results import clean_text
from labctl.courses.notebook import parse_notebook
from labctl.courses.records.comments import (
    CODE,
    KIND,
    NOTEBOOK,
    SAVED_KIND,
    LineComment,
    SavedComment,
    draft_comment_line,
    draft_forgotten_line,
    draft_removed_line,
    draft_saved_line,
    format_place,
    read_comments,
    read_saved_comments,
)
from labctl.courses.records.folder import CourseFolder
from labctl.courses.submission_files import (
    ReadableSubmission,
    open_submission,
    require_submission,
    split_lines,
)
from labctl.errors import NotFoundError, UsageError

MOST_COMMENT_CHARS = 2000
MOST_SAVED = 200
# of a file whose lines can be commented; a notebook with its images is larger than its text
MOST_FILE_BYTES = 16 * 1024**2


def list_comments(folder: CourseFolder, assignment: str, name: str = "") -> list[LineComment]:
    """List the comments of an assignment, or those on the submissions of one seat."""
    find_rules(folder, assignment)
    comments = read_comments(folder.ledger.list_entries(kind=KIND), assignment)
    if not name:
        return comments
    (seat,) = folder.choose_seats([name], list_assignment_seats(folder, assignment))
    owners = (seat.name, *seat.students)
    return [comment for comment in comments if comment.student in owners]


def add_comment(
    folder: CourseFolder,
    assignment: str,
    name: str,
    place: tuple[str, int],
    text: str,
    *,
    by: str = "",
    bundle_sha256: str | None = None,
) -> LineComment:
    """Comment on a file and line of the submission of a seat that counts.

    The file is its path in the bundle, or below `code/`. NotFoundError without a submission, or if
    it has no such line; UsageError for an empty text; PolicyError if the submission is not the one
    with this `bundle_sha256`, which the writer read (`require_submission`).
    """
    find_rules(folder, assignment)
    (seat,) = folder.choose_seats([name], list_assignment_seats(folder, assignment, by=by))
    require_submission(folder, assignment, seat, bundle_sha256)
    submission = open_submission(folder, assignment, seat)
    if submission is None:
        raise NotFoundError(
            f"{name} has no submission for {assignment}", hint=f"labctl course collect {assignment}"
        )
    words = check_text(text, f'labctl course comment {assignment} {name} FILE:LINE "..."')
    file, line = _find_line(submission, *place)
    comment = LineComment(
        id=0,
        assignment=assignment,
        seat=seat.name,
        student=submission.receipt.student,
        number=submission.receipt.number,
        file=file,
        line=line,
        text=words,
        by=by,
    )
    (entry,) = folder.ledger.append_all(
        [draft_comment_line(comment)],
        check=lambda: require_submission(folder, assignment, seat, bundle_sha256),
    )
    return msgspec.structs.replace(comment, id=entry.n, at=entry.at)


def remove_comment(
    folder: CourseFolder, assignment: str, comment_id: int, *, by: str = ""
) -> LineComment:
    """Remove a comment; NotFoundError if no comment in force has this number."""

    def find() -> LineComment:
        for comment in list_comments(folder, assignment):
            if comment.id == comment_id:
                return comment
        raise NotFoundError(
            f"{assignment} has no comment {comment_id}",
            why="it was removed, or never existed",
            hint=f"labctl course comment {assignment}",
        )

    comment = find()
    folder.ledger.append_all([draft_removed_line(comment, by)], check=lambda: (find(), None)[1])
    return comment


def list_saved_comments(folder: CourseFolder) -> list[SavedComment]:
    """List the comments that the course's staff saved for reuse."""
    return read_saved_comments(folder.ledger.list_entries(kind=SAVED_KIND))


def save_comment(folder: CourseFolder, text: str, *, by: str = "") -> SavedComment:
    """Save a comment for reuse. One that is saved already stays as it is."""
    words = check_text(text, 'labctl course comment --save "..."')

    def check() -> None:
        saved = list_saved_comments(folder)
        for comment in saved:
            if comment.text == words:
                raise _AlreadySavedError(comment)
        if len(saved) >= MOST_SAVED:
            raise UsageError(
                f"the course has {MOST_SAVED} saved comments, and no more are allowed",
                hint="labctl course comment --saved\nlabctl course comment --forget NUMBER",
            )

    try:
        (entry,) = folder.ledger.append_all([draft_saved_line(words, by)], check=check)
    except _AlreadySavedError as error:
        return error.comment
    return SavedComment(id=entry.n, text=words, by=by)


class _AlreadySavedError(Exception):
    def __init__(self, comment: SavedComment) -> None:
        super().__init__(comment.text)
        self.comment = comment


def forget_comment(folder: CourseFolder, comment_id: int, *, by: str = "") -> SavedComment:
    """Remove a saved comment; comments that were made with it stay."""
    comment = find_saved_comment(folder, comment_id)
    folder.ledger.append_all([draft_forgotten_line(comment, by)])
    return comment


def find_saved_comment(folder: CourseFolder, comment_id: int) -> SavedComment:
    """Return a saved comment; NotFoundError if none has this number."""
    for comment in list_saved_comments(folder):
        if comment.id == comment_id:
            return comment
    raise NotFoundError(
        f"the course has no saved comment {comment_id}", hint="labctl course comment --saved"
    )


def check_text(text: str, hint: str) -> str:
    """Return a comment without control characters; UsageError for an empty or too long one."""
    words = clean_text(text.strip(), MOST_COMMENT_CHARS + 1)
    if not words:
        raise UsageError("the comment has no text", hint=hint)
    if len(text.strip()) > MOST_COMMENT_CHARS:
        raise UsageError(
            f"the comment has {len(text.strip())} characters",
            why=f"it can have {MOST_COMMENT_CHARS}",
            hint="shorten it, or write two comments",
        )
    return words


def parse_place(text: str) -> tuple[str, int]:
    """Return the file and line of a text such as train.py:12 or intro.ipynb:3."""
    name, separator, line = text.rpartition(":")
    if not separator or not name or not re.fullmatch(r"\d{1,7}", line):
        raise UsageError(
            f"{text[:100]!a} does not name a line",
            why="write FILE:LINE, such as train.py:12; in a notebook, LINE is the number of a cell",
            hint='labctl course comment hw3 alice train.py:12 "..."',
        )
    return name, int(line)


def _find_line(submission: ReadableSubmission, name: str, line: int) -> tuple[str, int]:
    """Return the file's path in the bundle, and the line, if they exist."""
    paths = [member.path for member in submission.members]
    path = next((one for one in (name, f"{CODE}{name}") if one in paths), name)
    content = submission.read_file(path, MOST_FILE_BYTES)
    is_notebook = path.lower().endswith(NOTEBOOK)
    most = _count_cells(content) if is_notebook else len(split_lines(content))
    if not 1 <= line <= most:
        raise NotFoundError(
            f"{format_place(path, line)} does not exist", why=f"the last one is {most}"
        )
    return path, line


def _count_cells(content: bytes) -> int:
    """Return the number of cells of a notebook; 0 if it is not one."""
    try:
        return len(parse_notebook(content))
    except ValueError:
        return 0
