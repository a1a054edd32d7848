"""Comments on lines of submissions, and how students read them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from marking_bed import FILES, make_notebook
from submission_bed import DUE_AT, handed_in, make_receiver, packed

from labctl.courses import commenting
from labctl.courses.commenting import add_comment, list_comments, parse_place, remove_comment
from labctl.courses.marking import give_mark
from labctl.courses.notebook import MOST_CHARS, parse_notebook
from labctl.courses.records.folder import CourseFolder, make_private
from labctl.courses.records.ledger_entries import CourseLedgerDraft
from labctl.courses.release import release_grades
from labctl.errors import LabError, NotFoundError, PolicyError, UsageError
from labctl.submissions.receiver import Receiver

COURSE = """\
course: ml
assignments:
  hw3: {due: "2026-11-28T23:59:00+01:00", late: 48h, points: 10, rubric: {code: 10}}
"""
ROSTER = "id,name,team\nalice,Alice,\nbob,Bob,owls\ncarol,Carol,owls\n"
HOSTILE = "good\x1b[2J <script>alert(1)</script>\u202etxt"


@pytest.fixture
def folder(tmp_path: Path) -> CourseFolder:
    course = tmp_path / "ml"
    course.mkdir()
    (course / "course.yaml").write_text(COURSE)
    (course / "roster.csv").write_text(ROSTER)
    make_private(course)
    make_receiver(course / ".course", late="48h", penalty="10")
    folder = CourseFolder(course)
    hand_in(folder, "alice")
    return folder


def hand_in(folder: CourseFolder, student: str, files: dict[str, bytes] = FILES) -> None:
    data = packed({**files, "model/m.safetensors": b"x"}, student=student)
    handed_in(Receiver(folder.drop, lambda: DUE_AT - 100), data, student)


def read_feedback(folder: CourseFolder, student: str) -> tuple[str, str]:
    feedback = Receiver(folder.drop).feedback("hw3", student)
    assert feedback is not None
    return feedback.text, feedback.page


def test_students_read_comments_with_their_grade(folder: CourseFolder) -> None:
    add_comment(folder, "hw3", "alice", ("train.py", 3), "Why 10?", by="ann")
    add_comment(folder, "hw3", "alice", ("code/intro.ipynb", 2), HOSTILE, by="ben")
    give_mark(folder, "hw3", "alice", "code", "7", by="ann")
    release_grades(folder, "hw3")
    text, page = read_feedback(folder, "alice")
    assert text.splitlines() == [
        "code: 7 of 10 (ann)",
        "intro.ipynb, cell 2 (ben): good\ufffd[2J <script>alert(1)</script>\ufffdtxt",
        "train.py:3 (ann): Why 10?",
    ]
    assert "<h2>Comments on your files</h2>" in page
    assert "<script>alert" not in page
    # A comment that was added or removed later is released with the next release.
    (comment, _) = list_comments(folder, "hw3")
    remove_comment(folder, "hw3", comment.id, by="ann")
    assert "cell 2" in read_feedback(folder, "alice")[0]
    release_grades(folder, "hw3")
    assert "cell 2" not in read_feedback(folder, "alice")[0]


def test_a_comment_stays_with_its_submission(folder: CourseFolder) -> None:
    add_comment(folder, "hw3", "alice", ("train.py", 3), "Why 10?", by="ann")
    hand_in(folder, "alice", {"code/train.py": b"pass\n"})
    with pytest.raises(NotFoundError, match=r"train\.py:3 does not exist"):
        add_comment(folder, "hw3", "alice", ("train.py", 3), "again")
    add_comment(folder, "hw3", "alice", ("train.py", 1), "short", by="ben")
    give_mark(folder, "hw3", "alice", "code", "7")
    release_grades(folder, "hw3")
    assert read_feedback(folder, "alice")[0].splitlines()[1:] == [
        "train.py:3 of submission 1 (ann): Why 10?",
        "train.py:1 (ben): short",
    ]


def test_a_team_reads_the_comments_on_its_submission(folder: CourseFolder) -> None:
    hand_in(folder, "carol")
    comment = add_comment(folder, "hw3", "bob", ("train.py", 1), "torch?", by="ann")
    assert (comment.seat, comment.student, comment.number) == ("owls", "carol", 1)
    give_mark(folder, "hw3", "owls", "code", "7")
    release_grades(folder, "hw3")
    for student in ("bob", "carol"):
        assert "train.py:1 (ann): torch?" in read_feedback(folder, student)[0]
    assert [one.id for one in list_comments(folder, "hw3", "carol")] == [comment.id]
    assert list_comments(folder, "hw3", "alice") == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("../../course.yaml", 1), ("/etc/passwd", 1), ("code/../code/train.py", 1),
        ("model/m.safetensors", 1), ("manifest.json", 1), ("code/", 1), ("", 1),
        ("train.py", 0), ("train.py", 5), ("train.py", -1), ("intro.ipynb", 4),
    ],
)  # fmt: skip
def test_only_lines_of_readable_files_are_commented(
    folder: CourseFolder, file: str, line: int
) -> None:
    with pytest.raises(NotFoundError):
        add_comment(folder, "hw3", "alice", (file, line), "x")
    assert list_comments(folder, "hw3") == []


def test_a_place_is_a_file_and_a_line() -> None:
    assert parse_place("train.py:12") == ("train.py", 12)
    assert parse_place("a:1:12") == ("a:1", 12)
    for text in ("train.py", ":3", "train.py:", "train.py:x", "train.py:-1"):
        with pytest.raises(UsageError):
            parse_place(text)


def test_a_comment_on_what_the_writer_did_not_read_is_refused(folder: CourseFolder) -> None:
    with pytest.raises(PolicyError, match="submission 1 has arrived meanwhile"):
        add_comment(folder, "hw3", "alice", ("train.py", 1), "x", bundle_sha256="00" * 32)


def test_a_comment_needs_a_text_of_a_submission(folder: CourseFolder) -> None:
    for text in ("", " \n", "x" * 2001):
        with pytest.raises(UsageError):
            add_comment(folder, "hw3", "alice", ("train.py", 1), text)
    with pytest.raises(NotFoundError, match="no submission"):
        add_comment(folder, "hw3", "bob", ("train.py", 1), "x")


def test_a_comment_is_removed_once(folder: CourseFolder) -> None:
    comment = add_comment(folder, "hw3", "alice", ("train.py", 1), "x", by="ann")
    other = add_comment(folder, "hw3", "alice", ("train.py", 1), "y", by="ann")
    errors: list[LabError] = []

    def remove() -> None:
        try:
            remove_comment(CourseFolder(folder.path), "hw3", comment.id, by="ben")
        except NotFoundError as error:
            errors.append(error)

    threads = [threading.Thread(target=remove) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 3
    assert [one.id for one in list_comments(folder, "hw3")] == [other.id]
    # The ledger keeps who wrote it and who removed it.
    lines = folder.ledger.list_entries(kind="comment")
    assert [line.by for line in lines] == ["ann", "ann", "ben"]


def test_a_comment_that_two_graders_save_at_once_is_there_once(
    folder: CourseFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft_line = commenting.draft_saved_line

    def save_meanwhile(text: str, by: str) -> CourseLedgerDraft:
        monkeypatch.undo()
        commenting.save_comment(CourseFolder(folder.path), text, by="ben")
        return draft_line(text, by)

    monkeypatch.setattr(commenting, "draft_saved_line", save_meanwhile)
    assert commenting.save_comment(folder, "Name it.", by="ann").by == "ben"
    assert [one.text for one in commenting.list_saved_comments(folder)] == ["Name it."]


def test_saved_comments_are_shared_and_each_is_there_once(folder: CourseFolder) -> None:
    first = commenting.save_comment(folder, " Name this.\n", by="ann")
    assert commenting.save_comment(folder, "Name this.", by="ben") == first
    second = commenting.save_comment(folder, HOSTILE, by="ben")
    assert "\x1b" not in second.text
    commenting.forget_comment(folder, first.id, by="ben")
    assert commenting.list_saved_comments(folder) == [second]
    with pytest.raises(NotFoundError):
        commenting.forget_comment(folder, first.id)


def test_a_notebook_becomes_text_and_images() -> None:
    words, code, empty = parse_notebook(make_notebook("<b>"))
    assert (words.kind, words.source) == ("markdown", "# Results <b>\nSome text.")
    assert (code.number, empty.outputs) == (2, ())
    texts = [output.text for output in code.outputs]
    assert texts == [
        "epoch 1\nepoch 2 <b>\n",
        "",
        "   x  y\n0  1  2",
        "[not shown here: application/javascript]",
        "[not shown here: image/png]",  # it is none
        "ValueError: bad",
    ]
    assert code.outputs[1].image.startswith("data:image/png;base64,iVBOR")


def test_images_of_a_notebook_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("labctl.courses.notebook.MOST_IMAGE_BYTES", 100)
    (_, code, _) = parse_notebook(make_notebook())
    assert "too large" in code.outputs[1].text


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{}", b"\xff\xfe", b'{"cells": 1}', b'{"cells": ' + b"[" * 100_000,
     b'{"cells": [{"cell_type": "evil"}]}', b'{"cells": [{"cell_type": "code", "source": 1}]}'],
)  # fmt: skip
def test_what_is_no_notebook_is_an_error(content: bytes) -> None:
    with pytest.raises(ValueError, match="not a notebook"):
        parse_notebook(content)


def test_a_cell_is_cut_where_nobody_reads_on() -> None:
    content = b'{"cells": [{"cell_type": "raw", "source": "%s"}]}' % (b"x" * 100_000)
    (cell,) = parse_notebook(content)
    assert len(cell.source) < MOST_CHARS + 10
