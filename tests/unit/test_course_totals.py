"""Totals over the assignments, and the lowest grades that a group drops."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from submission_bed import make_receiver

from labctl.cli.submit_output import print_total
from labctl.config import load_course
from labctl.config.course_schema import AssignmentGroup
from labctl.courses.marking import give_mark, set_excuse
from labctl.courses.records.course_total import CountedGrade, CourseTotal, compute_total
from labctl.courses.records.folder import CourseFolder, make_private
from labctl.courses.records.plan_changes import describe_assignments
from labctl.courses.regrades import RegradeDesk
from labctl.courses.release import release_grades
from labctl.courses.totals import list_drop_reasons, list_totals, read_released_total
from labctl.errors import ConfigError
from labctl.submissions.receiver import Receiver
from labctl.submissions.service import serve
from labctl.wire.line_requests import encode_request
from labctl.wire.receiver import READ_FEEDBACK, ReadFeedbackRequest, TotalRecord

NAMES = ("hw1", "hw2", "hw3", "hw4")
COURSE = "course: ml\nmissing: 0\nassignments:\n" + "".join(
    f'  {name}: {{due: "2026-10-0{index}T12:00:00+01:00", points: 10, rubric: {{text: 10}}}}\n'
    for index, name in enumerate(NAMES, 1)
)
COURSE += "  project: {points: 100, rubric: {text: 100}}\n"
GROUP = f"assignment_groups: {{homework: {{assignments: [{', '.join(NAMES)}], drop_lowest: 1}}}}\n"
MARKS = {"hw1": "8", "hw2": "3", "hw3": "9", "hw4": "7", "project": "60"}


def make_folder(course: Path, text: str = COURSE + GROUP) -> CourseFolder:
    course.mkdir()
    (course / "course.yaml").write_text(text)
    (course / "roster.csv").write_text("id,name\nalice,Alice\nbob,Bob\n")
    make_private(course)
    make_receiver(course / ".course")
    return CourseFolder(course)


@pytest.fixture
def folder(tmp_path: Path) -> CourseFolder:
    folder = make_folder(tmp_path / "ml")
    for name, points in MARKS.items():
        give_mark(folder, name, "alice", "text", points)
    return folder


def total(finals: dict[str, tuple[float, float]], drop: int = 1) -> tuple[float, float, list[str]]:
    group = AssignmentGroup(assignments=(*NAMES, "hw5"), drop_lowest=drop)
    grades = [
        CountedGrade(assignment=name, final=final, points=points)
        for name, (final, points) in finals.items()
    ]
    found = compute_total(grades, {"homework": group})
    return found.final, found.points, [one.text for one in found.dropped]


@pytest.mark.parametrize(
    ("finals", "drop", "counts", "dropped"),
    [
        ({"hw1": (8, 10), "hw2": (3, 10), "hw3": (9, 10)}, 1, (17, 20), ["hw2"]),
        # The lowest is the one with the smallest share of its points.
        ({"hw1": (8, 10), "hw2": (9, 100), "hw3": (5, 10)}, 1, (13, 20), ["hw2"]),
        # Equal shares: more points first, else the first in the group, in whatever order they come.
        ({"hw1": (5, 10), "hw2": (10, 20), "hw3": (9, 10)}, 1, (14, 20), ["hw2"]),
        ({"hw3": (5, 10), "hw1": (5, 10), "hw2": (9, 10)}, 1, (14, 20), ["hw1"]),
        ({"hw1": (0.1 + 0.2, 1), "hw2": (0.3, 1), "hw3": (1, 1)}, 1, (1.3, 2), ["hw1"]),
        # One always counts.
        ({"hw1": (3, 10)}, 1, (3, 10), []),
        ({"hw1": (3, 10), "hw2": (4, 10)}, 3, (4, 10), ["hw1"]),
        ({}, 1, (0, 0), []),
        ({"project": (1, 10), "hw1": (8, 10), "hw2": (9, 10)}, 1, (10, 20), ["hw1"]),
    ],
)
def test_the_lowest_share_is_dropped(
    finals: dict[str, tuple[float, float]],
    drop: int,
    counts: tuple[float, float],
    dropped: list[str],
) -> None:
    final, points, texts = total(finals, drop)
    assert (final, points) == counts
    assert [text.split()[0] for text in texts] == dropped


def test_the_reason_says_of_how_many() -> None:
    finals = {name: (float(index), 10.0) for index, name in enumerate(NAMES)}
    assert total(finals)[2] == ["hw1 is dropped: the lowest of 4 in homework"]
    assert total(finals, 2)[2][1] == "hw2 is dropped: one of the 2 lowest of 4 in homework"


def test_totals_drop_zeros_and_never_excused_ones(folder: CourseFolder) -> None:
    alice, bob = list_totals(folder)
    assert (alice.total.final, alice.total.points) == (84, 130)
    assert [one.text for one in alice.total.dropped] == [
        "hw2 is dropped: the lowest of 4 in homework"
    ]
    # bob submitted nothing: of four zeros the first is dropped; the project never closes.
    assert (bob.total.final, bob.total.points) == (0, 30)
    assert [one.assignment for one in bob.total.dropped] == ["hw1"]
    set_excuse(folder, "hw2", "alice", excused=True, why="ill")
    alice, _ = list_totals(folder)
    assert [one.text for one in alice.total.dropped] == [
        "hw4 is dropped: the lowest of 3 in homework"
    ]
    assert (alice.total.final, alice.total.points) == (77, 120)


def read_reply(folder: CourseFolder, student: str) -> dict[str, Any]:
    sink = io.BytesIO()
    line = encode_request(READ_FEEDBACK, ReadFeedbackRequest("hw2"))
    serve(
        Receiver(folder.drop), student, io.BytesIO(line), sink, course=lambda: RegradeDesk(folder)
    )
    reply: dict[str, Any] = json.loads(sink.getvalue())
    return reply


def test_a_student_sees_what_was_released(
    folder: CourseFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    # Marks that were not released show nowhere, and do not count as missing either.
    assert read_released_total(folder, "alice") == CourseTotal()
    zeros = read_released_total(folder, "bob")
    assert zeros is not None
    assert (zeros.missing, zeros.points) == (NAMES, 30)
    for name in NAMES:
        release_grades(folder, name)
    reply = read_reply(folder, "alice")
    assert reply["total"]["dropped"] == ["hw2 is dropped: the lowest of 4 in homework"]
    assert (reply["total"]["final"], reply["total"]["points"]) == (24, 30)
    # A mark that is given after the release shows after the next one.
    give_mark(folder, "hw2", "alice", "text", "10", replace=True)
    assert read_reply(folder, "alice")["total"] == reply["total"]
    print_total(TotalRecord(**reply["total"]))
    assert capsys.readouterr().out.splitlines() == [
        "total so far: 24 of 30",
        "  hw2 is dropped: the lowest of 4 in homework",
    ]


def test_a_course_without_groups_computes_no_total_for_students(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "ml", COURSE)
    give_mark(folder, "hw1", "alice", "text", "8")
    release_grades(folder, "hw1")
    assert read_reply(folder, "alice").get("total") is None
    assert list_drop_reasons(folder, "hw1") is None
    assert list_totals(folder)[0].total.final == 8


def test_the_plan_says_what_is_dropped(folder: CourseFolder) -> None:
    text = "homework: the lowest grade of hw1, hw2, hw3 and hw4 is dropped"
    assert describe_assignments(folder.config)[-1] == text


@pytest.mark.parametrize(
    ("group", "says"),
    [
        ("{assignments: [hw1, hw2], drop_lowest: 2}", "so no grade would count"),
        ("{assignments: [hw1, hw1, hw2], drop_lowest: 1}", "name each only once"),
        ("{assignments: [hw1, hw9], drop_lowest: 1}", "there is no assignment 'hw9'"),
        ("{assignments: [hw1, hw2], drop_lowest: -1}", "is not a number from 1 to 100"),
        ("{assignments: [hw1, hw2], drop_lowest: 0}", "is not a number from 1 to 100"),
        ("{assignments: [hw1, hw2], drop_lowest: one}", "is not a number from 1 to 100"),
        ("{assignments: [hw1, hw2]}", "a group needs `drop_lowest`, `weight`, or both"),
        ("{assignments: [hw1, hw2], weight: 0}", "is not a percentage above 0"),
        ("{assignments: [hw1, hw2], weight: 101%}", "is not a percentage above 0"),
        ("{assignments: [], drop_lowest: 1}", "so no grade would count"),
        ("{assignments: [hw1, hw2], drop_lowest: 1, drop_highest: 1}", "unknown key"),
    ],
)
def test_a_bad_group_is_reported_with_its_line(tmp_path: Path, group: str, says: str) -> None:
    course = tmp_path / "ml"
    course.mkdir()
    (course / "course.yaml").write_text(f"{COURSE}assignment_groups:\n  homework: {group}\n")
    with pytest.raises(ConfigError) as caught:
        load_course(course)
    (problem,) = caught.value.problems
    assert says in problem.message
    assert problem.line == 10


def test_an_assignment_is_in_one_group(tmp_path: Path) -> None:
    course = tmp_path / "ml"
    course.mkdir()
    text = f"{COURSE}assignment_groups:\n"
    for name in ("homework", "other"):
        text += f"  {name}: {{assignments: [hw1, hw2], drop_lowest: 1}}\n"
    (course / "course.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_course(course)
    assert [problem.line for problem in caught.value.problems] == [11, 11]
    assert "'hw1' is in the group 'homework' already" in caught.value.problems[0].message


WEIGHTED = """\
assignment_groups:
  homework: {assignments: [hw1, hw2, hw3, hw4], drop_lowest: 1, weight: 40%}
  projects: {assignments: [project], weight: 60}
"""


def test_groups_with_weights_give_a_percentage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path / "ml", COURSE + WEIGHTED)
    for name, points in MARKS.items():
        give_mark(folder, name, "alice", "text", points)
        release_grades(folder, name)
    alice, bob = list_totals(folder)
    # 24 of 30 in homework, 60 of 100 in projects: 0.4 * 80% + 0.6 * 60%.
    assert (alice.total.final, alice.total.points, alice.total.text) == (68, 100, "68%")
    # The project is not graded: its weight does not count yet.
    assert (bob.total.final, bob.total.points) == (0, 100)
    assert [one.name for one in bob.total.groups] == ["homework"]
    reply = read_reply(folder, "alice")
    print_total(TotalRecord(**reply["total"]))
    assert capsys.readouterr().out.splitlines() == [
        "total so far: 68%",
        "  homework (40%): 24 of 30",
        "  projects (60%): 60 of 100",
        "  hw2 is dropped: the lowest of 4 in homework",
    ]
    assert describe_assignments(folder.config)[-2:] == [
        "homework: 40% of the total; the lowest grade of hw1, hw2, hw3 and hw4 is dropped",
        "projects: 60% of the total for project",
    ]


def test_a_group_without_grades_leaves_its_weight_to_the_others() -> None:
    groups = {
        "homework": AssignmentGroup(assignments=("hw1",), weight=30),
        "exams": AssignmentGroup(assignments=("exam",), weight=50),
        "projects": AssignmentGroup(assignments=("project",), weight=20),
    }
    graded = [
        CountedGrade(assignment="hw1", final=5, points=10),
        CountedGrade(assignment="project", final=10, points=10),
    ]
    assert compute_total(graded, groups).final == 70  # (30 * 50% + 20 * 100%) / 50
    assert compute_total([], groups) == CourseTotal()


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        (WEIGHTED.replace("60", "50"), "the weights add up to 90%, and must be 100%"),
        (WEIGHTED.replace(", weight: 40%", ""), "give each group one, or none"),
        (
            "assignment_groups:\n  homework: {assignments: [hw1, hw2], weight: 100}\n",
            "hw3, hw4, project: in no group",
        ),
    ],
)
def test_weights_are_checked_when_the_course_is_planned(
    tmp_path: Path, groups: str, says: str
) -> None:
    course = tmp_path / "ml"
    course.mkdir()
    (course / "course.yaml").write_text(COURSE + groups)
    with pytest.raises(ConfigError) as caught:
        load_course(course)
    (problem,) = caught.value.problems
    assert says in problem.message
    assert problem.line >= 9
