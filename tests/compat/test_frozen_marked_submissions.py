"""Marks with the submission that they are for, of before."""

from __future__ import annotations

from pathlib import Path

from frozen import TESTS, Frozen

from labctl.courses.grades import list_grades
from labctl.courses.records.folder import CourseFolder
from labctl.courses.release import release_grades


def test_marks_still_have_their_submissions(tmp_path: Path) -> None:
    frozen = Frozen(tmp_path, TESTS / "fixtures" / "submissions-of-marks")
    folder = CourseFolder(frozen.unpack("course"))
    alice, bob = list_grades(folder, "essay")
    assert alice.unreleased is not None
    text = "marked for submission 1 instead of 2: talk"
    assert (alice.unreleased.final, alice.unreleased.outdated_marks_text) == (26, text)
    assert (bob.final, bob.unreleased, bob.outdated_marks) == (25, None, {})
    released = folder.ledger.list_entries(kind="released")
    result = release_grades(folder, "essay")
    assert (result.students, result.unmarked) == (("bob",), (f"alice: {text}",))
    assert folder.ledger.list_entries(kind="released") == released
