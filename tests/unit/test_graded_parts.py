"""What an assignment's automatic grade consists of: tests with points, a metric, an autograder."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from labctl.config import load_course
from labctl.config.course_schema import GradeConfig
from labctl.courses.graded_parts import check_parts, describe_parts, list_part_cautions
from labctl.courses.grading.parts import MarkedTest, scale_metric
from labctl.courses.grading_request import encode_grade_rules
from labctl.courses.marked_tests import read_marked_tests
from labctl.errors import ConfigError

HIDDEN = """\
import pytest

@pytest.mark.points(5)
@pytest.mark.parametrize("n", [1, 2])
def test_a(outputs, n): ...

class TestMore:
    @pytest.mark.points(2.5, visibility="visible")
    def test_b(self, outputs): ...

    def test_c(self, outputs): ...

def helper(): ...
"""
GRADE = "grade: {inputs: in, labels: out%s}"


def make_course(root: Path, assignment: str, files: Mapping[str, str] | None = None) -> Path:
    (root / "course.yaml").write_text(
        "course: ml\nserver: {provider: static, static: {hosts: [g]}}\n"
        f"assignments:\n  hw3:\n    points: 10\n    {assignment}\n"
    )
    for name, text in (files or {}).items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


WITH_TESTS = {"hidden/test_a.py": HIDDEN, "hidden/probe.py": "def f(): ..."}
TESTS = "tests: {hidden: hidden}"


def test_points_are_read_without_running_a_test(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("raise SystemExit\n" + HIDDEN)
    assert read_marked_tests(tmp_path) == (
        MarkedTest(name="test_a.py::test_a", points=5.0),
        MarkedTest(name="test_a.py::TestMore::test_b", points=2.5, visibility="visible"),
        MarkedTest(name="test_a.py::TestMore::test_c", points=0.0),
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("@pytest.mark.points(N)\ndef test_a(): ...", r"test_a.py:1 is not valid: write"),
        ("@pytest.mark.points\ndef test_a(): ...", r"test_a.py:1 is not valid"),
        ("@pytest.mark.points(True)\ndef test_a(): ...", r"test_a.py:1 is not valid"),
        ("@pytest.mark.points(-1)\ndef test_a(): ...", r"test_a.py:1 is not valid"),
        ("@pytest.mark.points(1, seen=2)\ndef test_a(): ...", r"test_a.py:1 is not valid"),
        ("@pytest.mark.points(1, visibility='no')\ndef test_a(): ...", "visibility is one of hidd"),
        ("@pytest.mark.points(1)\n@pytest.mark.points(1)\ndef test_a(): ...", "points twice"),
        ("@pytest.mark.points(1)\nclass TestA:\n  def test_a(): ...", "mark each function"),
        ("pytestmark = [pytest.mark.points(1)]\ndef test_a(): ...", "mark each function"),
        ("def test_a(:", "test_a.py:1 is not valid Python"),
    ],
)
def test_a_marker_that_pytest_would_read_otherwise_is_refused(
    tmp_path: Path, text: str, why: str
) -> None:
    (tmp_path / "test_a.py").write_text(text)
    with pytest.raises(ValueError, match=why):
        read_marked_tests(tmp_path)


@pytest.mark.parametrize(
    ("assignment", "text"),
    [
        (GRADE % "", "10 points: 10 for the grader"),
        (
            TESTS + "\n    " + GRADE % ", metric: accuracy",
            "10 points: 2.5 for accuracy, 7.5 for 3 hidden tests",
        ),
        (
            TESTS + "\n    " + GRADE % ", scale: {0.9: 0, 0.97: 2.5}",
            "10 points: 2.5 for accuracy (0.9 to 0.97), 7.5 for 3 hidden tests",
        ),
        (
            "rubric: {code: 1.5, talk: 1}\n    " + TESTS,
            "10 points: 7.5 for 3 hidden tests, 2.5 for the rubric (code 1.5, talk 1)",
        ),
        ("rubric: {talk: 10}", "10 points: 10 for the rubric (talk 10)"),
    ],
)
def test_the_plan_says_where_points_come_from(tmp_path: Path, assignment: str, text: str) -> None:
    config = load_course(make_course(tmp_path, assignment, WITH_TESTS) / "course.yaml")
    assert describe_parts(config, check_parts(config)) == [f"hw3: {text}"]


@pytest.mark.parametrize(
    ("assignment", "why"),
    [
        (TESTS, "points do not add up to 10: hidden tests 7.5 make 7.5"),
        (TESTS + "\n    " + GRADE % ", points: 5", "grade 5, hidden tests 7.5 make 12.5"),
        (GRADE % ", points: 4", "do not add up to 10: grade 4 make 4"),
        ("tests: {hidden: nowhere}", "there is no directory nowhere"),
        ("tests: {hidden: empty}", r"empty has no file test_\*\.py"),
        ("tests: {hidden: bare}", "bare has no probe.py, whose functions call"),
        ("grade: {autograder: hidden}", "no directory or zip with run_autograder at its top"),
    ],
)
def test_what_does_not_add_up_is_an_error_of_the_plan(
    tmp_path: Path, assignment: str, why: str
) -> None:
    files = {**WITH_TESTS, "bare/test_a.py": HIDDEN, "empty/x": ""}
    config = load_course(make_course(tmp_path, assignment, files) / "course.yaml")
    with pytest.raises(ConfigError) as wrong:
        check_parts(config)
    (problem,) = wrong.value.problems
    assert problem.line in (6, 7)
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(problem.message)


@pytest.mark.parametrize(
    ("grade", "why"),
    [
        ("{scale: {0.9: 1}}", "at least two values"),
        ("{scale: {0.9: 0, 1: 5}, points: 6}", "scale gives 5 points at most, and points is 6"),
        ("{scale: {0.9: 0, 1: 0}}", "scale gives no points"),
        ("{scale: {best: 0, 1: 5}}", "'best' is not a value of the metric"),
        ("{autograder: a, command: x}", "an autograder cannot be combined"),
        ("{metric: 'a b'}", "is not the name of a metric"),
    ],
)
def test_a_grade_that_contradicts_itself_is_refused(tmp_path: Path, grade: str, why: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        load_course(make_course(tmp_path, f"grade: {grade}") / "course.yaml")
    assert why in wrong.value.problems[0].message


def test_the_plan_warns_of_points_that_a_student_can_forge(tmp_path: Path) -> None:
    archive = tmp_path / "autograder.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("run_autograder", "#!/bin/sh\n")
        file.writestr("setup.sh", "apt-get install -y jq\n")
    text = "tests: {public: hidden}\n    grade: {autograder: autograder.zip}"
    config = load_course(make_course(tmp_path, text, WITH_TESTS) / "course.yaml")
    parts = check_parts(config)
    text = "hw3: 10 points: 2.5 for the autograder, 7.5 for 3 public tests"
    assert describe_parts(config, parts) == [text]
    own, setup, public = list_part_cautions(config, parts)
    assert "in one container with the student's code, so that code can read" in own
    assert "labctl does not run setup.sh of autograder.zip" in setup
    assert "which can forge their points" in public


def test_hidden_tests_without_points_are_named(tmp_path: Path) -> None:
    text = TESTS + "\n    " + GRADE % ""
    config = load_course(make_course(tmp_path, text, WITH_TESTS) / "course.yaml")
    (caution,) = list_part_cautions(config, check_parts(config))
    assert caution == "hw3: 1 hidden test without points, such as test_a.py::TestMore::test_c"


@pytest.mark.parametrize(
    ("value", "points"), [(0.5, 0), (0.9, 0), (0.935, 20), (0.97, 40), (0.985, 45), (1.0, 50)]
)
def test_a_metric_becomes_points_in_a_straight_line(value: float, points: float) -> None:
    assert scale_metric({0.97: 40, 0.9: 0, 1.0: 50}, value) == pytest.approx(points)


def test_a_smaller_loss_may_give_more_points() -> None:
    assert scale_metric({0.2: 10, 1.2: 0}, 0.7) == pytest.approx(5)


def test_a_grade_of_an_earlier_version_stays_valid() -> None:
    # As the version before tests had points hashed it.
    earlier = (
        '{"predict":[],"command":["sh","g.sh"],"inputs":"a","labels":"b","timeout":600,'
        '"tolerance":0.02}'
    )
    config = GradeConfig(command=("sh", "g.sh"), inputs="a", labels="b", reference="r")
    assert encode_grade_rules(config) == earlier
    assert encode_grade_rules(msgspec.structs.replace(config, metric="f1")) != earlier
