"""Comments, saved comments and released feedback of before."""

from __future__ import annotations

from pathlib import Path

import pytest
from frozen import TESTS, Frozen

from labctl.courses.commenting import add_comment, list_comments, list_saved_comments
from labctl.courses.records.folder import CourseFolder
from labctl.submissions.receiver import Receiver


@pytest.fixture
def folder(tmp_path: Path) -> CourseFolder:
    return CourseFolder(Frozen(tmp_path, TESTS / "fixtures" / "comments").unpack("course"))


def test_comments_are_still_read_and_more_can_be_added(folder: CourseFolder) -> None:
    comments = list_comments(folder, "hw3")
    assert [(one.id, one.seat, one.student, one.place, one.text, one.by) for one in comments] == [
        (1, "alice", "alice", "train.py:3", "Why 10?", "ann"),
        (4, "owls", "carol", "intro.ipynb, cell 2", "Two epochs\nare few.", "ben"),
    ]
    assert [(one.id, one.text, one.by) for one in list_saved_comments(folder)] == [
        (5, "Name this.", "ann")
    ]
    assert add_comment(folder, "hw3", "owls", ("train.py", 1), "more").id == 10


def test_released_feedback_has_the_comments(folder: CourseFolder) -> None:
    feedback = Receiver(folder.drop).feedback("hw3", "alice")
    assert feedback is not None
    assert "train.py:3 (ann) Why 10?" in feedback.text
    assert "Comments on your files" in feedback.page
