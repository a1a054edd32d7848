"""The template image-classifier-starter and the assignment hands-on, as an instructor gets them."""

from __future__ import annotations

import ast
import csv
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from template_project import REPOSITORY, TEMPLATE

from labctl.agent.sandbox import (
    grading_accuracy,
    grading_images,
    grading_probe,
    grading_tests,
)
from labctl.config import find_paths
from labctl.courses import sample_assignments
from labctl.courses.creation import init_course
from labctl.courses.graded_parts import check_parts, describe_parts
from labctl.courses.records.folder import CourseFolder
from labctl.courses.sample_assignments import add_assignment
from labctl.courses.starters import build_starters
from labctl.events import SilentReporter
from labctl.runs.public_tests import run_tests
from labctl.sync.starter import Starter, StarterRecord, write_record
from labctl.sync.starter_update import update_files

TEMPLATES = REPOSITORY / "templates"
STARTER = TEMPLATES / "image-classifier-starter"
EXERCISES = {"_block", "forward"}


GENERATORS = sample_assignments.GENERATORS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CourseFolder]:
    """A course with the assignment, without the model of its reference solution."""
    home = tmp_path_factory.mktemp("course")
    (home / "roster.csv").write_text("id,name\nalice,Alice\n")
    reporter = SilentReporter()
    init_course(TEMPLATES, home / "ml", home / "roster.csv", reporter)
    with pytest.MonkeyPatch.context() as patch:
        # Only one test needs the model, which is trained for 20 s.
        patch.setattr(sample_assignments, "GENERATORS", GENERATORS[:1])
        add_assignment(TEMPLATES, home / "ml", "hands-on", reporter, is_new=True)
        yield CourseFolder(home / "ml")


@pytest.fixture(scope="module")
def starter(folder: CourseFolder) -> Starter:
    (made,) = build_starters(folder.config, find_paths({"HOME": "/nonexistent"}))
    return made


def without_exercises(path: Path) -> str:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in EXERCISES:
            node.body = node.body[:1]  # the docstring
    return ast.dump(tree)


@pytest.mark.long
def test_a_course_without_an_image_builds_that_of_the_exercises(starter: Starter) -> None:
    """The default image has no PyTorch."""
    lab = starter.by_path()["lab.yaml"].content.decode()
    assert "image:\n  build: .\n" in lab
    assert "Dockerfile" in starter.by_path()


def test_the_starter_is_the_sample_without_the_solutions() -> None:
    assert without_exercises(STARTER / "model.py") == without_exercises(TEMPLATE / "model.py")
    needed = (TEMPLATE / "requirements.txt").read_text()
    assert (STARTER / "requirements.txt").read_text().startswith(needed)
    text = (STARTER / "model.py").read_text()
    assert text.count("raise NotImplementedError") == len(EXERCISES)


def test_the_public_tests_fail_at_first_and_pass_with_the_solution(
    starter: Starter, tmp_path: Path
) -> None:
    update_files(tmp_path, None, starter)
    write_record(tmp_path, StarterRecord(sha256="0" * 64, starter=starter))
    report = run_tests(tmp_path)
    assert len(report.failed) == len(report.tests) >= 5
    assert {test.message.partition(": ")[2][:10] for test in report.failed} == {"exercise 1"}
    (tmp_path / "model.py").write_text((TEMPLATE / "model.py").read_text())
    report = run_tests(tmp_path)
    assert report.failed == ()


def run_hidden_tests(folder: CourseFolder, code: Path, work: Path) -> dict[str, float]:
    """Run the hidden tests as a grading server does, apart from its containers."""
    hidden = folder.path / folder.config.assignments["hands-on"].tests.hidden
    env = {
        **os.environ,
        "LABCTL_PROBE": str(hidden / "probe.py"),
        "LABCTL_TIMEOUT_S": "300",
        "LABCTL_PREDICTIONS": str(work / "predictions"),
        "LABCTL_TESTS": str(hidden),
        "LABCTL_VISIBILITY": "hidden",
        "LABCTL_RESULTS": str(work / "results.json"),
    }
    for program, cwd in ((grading_probe, code), (grading_tests, work)):
        subprocess.run([sys.executable, program.__file__], env=env, cwd=cwd, check=True)
    results = json.loads((work / "results.json").read_text())
    return {test["name"].partition("::test_")[2]: test["score"] for test in results["tests"]}


@pytest.mark.long
def test_the_hidden_tests_give_mistakes_fewer_points(
    folder: CourseFolder, starter: Starter, tmp_path: Path
) -> None:
    parts = check_parts(folder.config)["hands-on"]
    assert {part.kind: part.points for part in parts} == {"grader": 40, "hidden": 20}
    code = tmp_path / "code"
    code.mkdir()
    update_files(code, None, starter)
    solution = (TEMPLATE / "model.py").read_text()
    mistakes = solution.replace("nn.GroupNorm(8, channels_out)", "nn.BatchNorm2d(channels_out)")
    mistakes = mistakes.replace(", ceil_mode=True", "").replace("/ 127.5 - 1", "/ 255")
    (code / "model.py").write_text(mistakes)
    scores = run_hidden_tests(folder, code, tmp_path)
    assert {name for name, score in scores.items() if not score} >= {
        "a_block_halves_any_size",
        "pixels_are_scaled_evenly",
        "an_image_gets_the_same_logits_in_any_batch",
    }
    assert scores["a_block_has_no_negative_output"] == 2


def test_all_points_of_the_assignment_come_from_somewhere(folder: CourseFolder) -> None:
    [text] = describe_parts(folder.config, check_parts(folder.config))
    rubric = "40 for the rubric (code 10, logs 10, report 20)"
    assert text.startswith("hands-on: 100 points: 40 for accuracy")
    assert text.endswith(rubric)


@pytest.mark.long
def test_the_reference_solution_gets_all_points_that_labctl_gives(
    folder: CourseFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_assignments, "GENERATORS", GENERATORS)
    add_assignment(TEMPLATES, folder.path, "hands-on", SilentReporter(), is_new=False)
    rules = folder.config.assignments["hands-on"].grade
    assert rules is not None
    reference = folder.path / rules.reference
    solution = (TEMPLATE / "model.py").read_text()
    assert (reference / "code" / "model.py").read_text() == solution
    assert sum(run_hidden_tests(folder, reference / "code", tmp_path).values()) == 20
    env = {
        **os.environ,
        "LABCTL_INPUTS": str(folder.path / rules.inputs),
        "LABCTL_LABELS": str(folder.path / rules.labels),
        "LABCTL_MODEL": str(reference / "model"),
        "LABCTL_PREDICTIONS": str(tmp_path / "predictions.csv"),
        "LABCTL_RESULTS": str(tmp_path / "results.json"),
        "LABCTL_POINTS": "40",
    }
    for program in (grading_images, grading_accuracy):
        command = [sys.executable, "-B", program.__file__]
        subprocess.run(command, env=env, cwd=reference / "code", check=True)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["extra_data"]["accuracy"] >= max(rules.scale)


def test_the_hidden_pictures_have_labels_and_are_not_handed_out(
    folder: CourseFolder, starter: Starter
) -> None:
    rules = folder.config.assignments["hands-on"].grade
    assert rules is not None
    pictures = {path.name for path in (folder.path / rules.inputs).iterdir()}
    with (folder.path / rules.labels / "labels.csv").open() as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["item", "label"]
    assert {name for name, _ in rows[1:]} == pictures
    assert {label for _, label in rows[1:]} == {str(digit) for digit in range(10)}
    paths = starter.by_path().keys()
    assert not [path for path in paths if "hidden" in path or "rubric" in path]
    assert not [path for path in paths if path.endswith("probe.py")]
    assert {"train.py", "lab.yaml", "tests/test_model.py", "README.md"} <= paths


def test_repeating_it_keeps_the_instructors_files_and_hidden_data(folder: CourseFolder) -> None:
    directory = folder.path / "assignments" / "hands-on"
    (directory / "rubric.md").write_text("mine")
    labels = (directory / "hidden" / "labels" / "labels.csv").read_bytes()
    before = folder.config.path.read_bytes()
    again = add_assignment(TEMPLATES, folder.path, "hands-on", SilentReporter(), is_new=False)
    assert again.section == ""
    assert (directory / "rubric.md").read_text() == "mine"
    assert (directory / "hidden" / "labels" / "labels.csv").read_bytes() == labels
    assert folder.config.path.read_bytes() == before
