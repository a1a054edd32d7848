"""The grade from the results of several parts, and what of it a student may see."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from labctl.agent.sandbox import grading_probe, grading_tests
from labctl.agent.sandbox.grading_probe import CallResult
from labctl.config.course_schema import GradeConfig
from labctl.courses.grading.combine import PartResult, read_output, read_results
from labctl.courses.grading.feedback import render_text
from labctl.courses.grading.parts import GradedPart
from labctl.courses.grading.results import parse_results, select_shown
from labctl.wire.sandbox import GradedJobRecord, ProgramResult

OK = ProgramResult("ok", 0, "", 1.0)
GRADER = GradedPart(kind="grader", points=40)
HIDDEN = GradedPart(kind="hidden", points=10)
AUTOGRADER = GradedPart(kind="autograder", points=10)
TESTS = [
    {"name": "secret", "score": 4, "max_score": 6, "output": "2 != 3", "visibility": "hidden"},
    {"name": "shown", "score": 4, "max_score": 4, "visibility": "visible"},
    {"name": "later", "score": 0, "max_score": 0, "visibility": "after_due_date"},
    {"name": "unknown", "score": 0, "max_score": 0, "visibility": "on_sundays"},
]


def graded(results: Mapping[str, object], printed: str = "") -> GradedJobRecord:
    return GradedJobRecord(OK._replace(said=printed), OK, json.dumps(results))


def failed(last_line: str, outcome: str = "exit") -> GradedJobRecord:
    return GradedJobRecord(ProgramResult(outcome, 1, last_line, 1.0))


def accuracy(value: object) -> PartResult:
    results = {"score": 1, "output": "9 of 10", "extra_data": {"accuracy": value, "items": 10}}
    return PartResult(part=GRADER, result=graded(results, "epoch 1"))


TESTED = PartResult(part=HIDDEN, result=graded({"tests": TESTS}, "probed"))


def test_the_points_of_all_parts_are_added() -> None:
    found = read_results([accuracy(0.93), TESTED], GradeConfig(scale={0.9: 0, 0.96: 40}))
    assert (found.state, found.raw and found.raw.score) == ("graded", pytest.approx(28))
    assert found.raw is not None
    assert [test.name for test in found.raw.tests][:2] == ["accuracy", "secret"]
    assert found.raw.extra_data["items"] == 10
    assert found.raw.output == "9 of 10\naccuracy 0.93: 20 of 40 points"


def test_a_part_that_failed_takes_no_points_from_the_others() -> None:
    broken = PartResult(part=HIDDEN, result=failed("ImportError: model"))
    found = read_results([accuracy(0.5), broken], GradeConfig(metric="accuracy"))
    assert (found.state, found.raw and found.raw.score) == ("failed", 20.0)
    assert found.message == "its program ended with 1: ImportError: model (hidden tests)"


def test_outputs_that_the_tests_cannot_bear_are_the_submissions_fault() -> None:
    """Else one student would keep the grades of all from being released."""
    slow = GradedJobRecord(OK, ProgramResult("time", 137, "", 60.0))
    found = read_results([PartResult(part=HIDDEN, result=slow)], GradeConfig())
    assert (found.state, found.raw and found.raw.score) == ("failed", 0.0)
    crashed = GradedJobRecord(OK, ProgramResult("exit", 1, "ImportError: numpy", 1.0))
    staffs = read_results([PartResult(part=HIDDEN, result=crashed)], GradeConfig())
    assert (staffs.state, staffs.raw) == ("error", None)
    assert staffs.message.startswith("staff's grader: its program ended with 1: ImportError")


@pytest.mark.parametrize("value", [None, "high", True, float("inf"), 10**400])
def test_a_grader_without_its_metric_gives_no_grade(value: object) -> None:
    found = read_results([accuracy(value), TESTED], GradeConfig(metric="accuracy"))
    assert (found.state, found.raw) == ("error", None)


def test_tests_that_were_not_all_run_give_no_grade() -> None:
    found = read_results(
        [PartResult(part=HIDDEN, result=graded({"tests": TESTS[1:]}))], GradeConfig()
    )
    assert found.state == "error"
    assert "gave 4 points, but their markers 10" in found.message


def test_what_is_printed_beside_tests_is_not_for_students() -> None:
    output = read_output([accuracy(1), TESTED])
    assert (output.printed, output.private) == ("epoch 1", "hidden tests:\nprobed\n")


@pytest.mark.parametrize(("is_closed", "names"), [(False, ["shown"]), (True, ["shown", "later"])])
def test_a_student_sees_what_visibility_allows(is_closed: bool, names: list[str]) -> None:
    found = read_results([TESTED], GradeConfig())
    assert found.raw is not None
    shown = select_shown(found.raw, is_closed=is_closed)
    assert [test.name for test in shown.tests] == names
    text = render_text(shown)
    assert ("later: 0/0" in text) is is_closed
    assert "secret" not in text


def test_an_autograder_may_hide_all_of_its_results() -> None:
    body = {"visibility": "hidden", "output": "secret", "tests": [{"name": "a", "score": 3}]}
    result = PartResult(part=AUTOGRADER, result=GradedJobRecord(OK, None, json.dumps(body)))
    found = read_results([result], GradeConfig(autograder="a"))
    assert found.raw is not None
    assert found.raw.score == 3
    shown = select_shown(found.raw, is_closed=True)
    assert (shown.tests, shown.output) == ((), "")
    one = parse_results(json.dumps({**body, "tests": [{"score": 1, "visibility": "visible"}]}), 10)
    assert len(select_shown(one, is_closed=True).tests) == 1


def test_public_tests_give_no_more_than_their_points() -> None:
    """They run beside the student's code, which may write what it wants."""
    part = GradedPart(kind="public", points=4)
    body = {"score": 8, "tests": [{"name": "a", "score": 8, "max_score": 4}]}
    result = PartResult(part=part, result=GradedJobRecord(OK, None, json.dumps(body)))
    found = read_results([result], GradeConfig())
    assert found.raw is not None
    assert found.raw.score == 4


@pytest.mark.parametrize("text", ["", "{", '{"score": 1e9}', "[" * 100_000])
def test_an_autograder_without_valid_results_gives_no_points(text: str) -> None:
    result = PartResult(part=AUTOGRADER, result=GradedJobRecord(OK, None, text))
    found = read_results([result], GradeConfig(autograder="a"))
    assert (found.state, found.raw and found.raw.score) == ("failed", 0.0)


def run_tests(
    folder: Path, test_file: str, outputs: str
) -> tuple[int, dict[str, tuple[float, str]]]:
    """Run the program that runs hidden tests; its exit code, score and output by test."""
    (folder / "tests").mkdir()
    (folder / "tests" / "test_a.py").write_text(test_file)
    (folder / "tests" / "other_test.py").write_text("def test_that_the_plan_does_not_read(): ...")
    (folder / "predictions").write_text(outputs)
    env = {
        "LABCTL_TESTS": str(folder / "tests"),
        "LABCTL_VISIBILITY": "hidden",
        "LABCTL_PREDICTIONS": str(folder / "predictions"),
        "LABCTL_RESULTS": str(folder / "results.json"),
    }
    program = [sys.executable, grading_tests.__file__]
    done = subprocess.run(program, env=env, cwd=folder, capture_output=True, check=False)
    if done.returncode:
        return done.returncode, {}
    body = json.loads((folder / "results.json").read_text())
    return 0, {test["name"]: (test["score"], test["output"]) for test in body["tests"]}


CASES = """\
import pytest

@pytest.mark.points(3)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_cases(outputs, n):
    assert n in outputs["numbers"]

@pytest.mark.points(2)
def test_skipped(outputs):
    pytest.skip()

@pytest.mark.points(1)
def test_failed_function(outputs):
    outputs["broken"]

def test_without_points(outputs): ...
"""


def test_cases_share_the_points_of_their_test(tmp_path: Path) -> None:
    outputs = {"numbers": {"value": [1, 3]}, "broken": {"error": "ZeroDivisionError: by zero"}}
    code, found = run_tests(tmp_path, CASES, json.dumps(outputs))
    assert code == 0
    scores = {name.partition("::")[2]: score for name, (score, _) in found.items()}
    assert scores == {
        "test_cases[1]": 1.0,
        "test_cases[2]": 0.0,
        "test_cases[3]": 1.0,
        "test_skipped": 0.0,
        "test_failed_function": 0.0,
        "test_without_points": 0.0,
    }
    assert "broken: ZeroDivisionError" in found["test_a.py::test_failed_function"][1]


@pytest.mark.parametrize("outputs", ["", "[]", "{", '{"numbers": 1}', "[" * 200_000])
def test_outputs_of_another_form_fail_the_tests_and_not_the_grading(
    tmp_path: Path, outputs: str
) -> None:
    code, found = run_tests(tmp_path, CASES, outputs)
    assert code == 0
    assert sum(score for score, _ in found.values()) == 0


@pytest.mark.parametrize("text", ["import nothing_like_it\n", ""])
def test_tests_that_cannot_be_run_are_staffs_error(tmp_path: Path, text: str) -> None:
    assert run_tests(tmp_path, text, "{}")[0] == 1


def test_a_probes_functions_are_found_without_running_it() -> None:
    text = "import model\nX = 1\ndef first(): ...\ndef _own(): ...\nclass A: ...\ndef second(): ..."
    assert grading_probe.list_functions(text) == ["first", "second"]


class Tensor:
    def tolist(self) -> list[float]:
        return [1.0, float("nan")]


@pytest.mark.parametrize("value", [{1, 2}, object(), [10**5000]])
def test_a_value_that_json_has_not_is_an_error_of_its_function(value: object) -> None:
    assert grading_probe.call_function(lambda: value).error


def test_arrays_become_lists() -> None:
    result = grading_probe.call_function(lambda: {"a": (1, Tensor())})
    assert result.error == ""
    assert "[1, [1.0, nan]]" in str(result.value)


def test_lines_that_students_code_wrote_among_the_results_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "results"
    file.write_text('["a", 1, ""]\n["b"]\n{\n7\n["c", 5, "no"]\n' + "[" * 100_000 + "\n")
    found = grading_probe.read_results(file)
    assert found == {"a": CallResult(1), "c": CallResult(5, "no")}


PROBE = """\
import os, time

def fine():
    return 1

def ends():
    os._exit(3)

def hangs():
    time.sleep(1000)

def fails():
    return 1 / 0

def last():
    return [2]
"""


def test_a_function_that_ends_or_does_not_end_spoils_no_other(tmp_path: Path) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    env = {
        "LABCTL_PROBE": str(tmp_path / "probe.py"),
        "LABCTL_TIMEOUT_S": "6",
        "LABCTL_PREDICTIONS": str(tmp_path / "predictions"),
    }
    program = [sys.executable, grading_probe.__file__]
    subprocess.run(program, env=env, cwd=tmp_path, check=True, capture_output=True)
    assert json.loads((tmp_path / "predictions").read_text()) == {
        "fine": {"value": 1, "error": ""},
        "ends": {"value": None, "error": "the process ended with 3"},
        "hangs": {"value": None, "error": "it did not end in time"},
        "fails": {"value": None, "error": "ZeroDivisionError: division by zero"},
        "last": {"value": [2], "error": ""},
    }
    (tmp_path / "probe.py").write_text("import nothing_like_it\ndef f(): ...\n")
    done = subprocess.run(program, env=env, cwd=tmp_path, capture_output=True, check=False)
    assert (done.returncode, b"No module named 'nothing_like_it'" in done.stdout) == (1, True)
