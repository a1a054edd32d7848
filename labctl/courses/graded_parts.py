"""The parts of an assignment's automatic grade, and what each is worth."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from labctl.config import AssignmentConfig, CourseConfig
from labctl.config.course_schema import GradeConfig
from labctl.config.document import Node, make_problem_at, make_problems_error, parse
from labctl.courses.grading.parts import GradedPart, MarkedTest, PartKind
from labctl.courses.marked_tests import read_marked_tests
from labctl.errors import Problem
from labctl.text import count_text

PROBE = "probe.py"
RUN_AUTOGRADER, SETUP = "run_autograder", "setup.sh"


def list_parts(rules: AssignmentConfig, root: Path) -> tuple[GradedPart, ...]:
    """Return the parts of an assignment of the course at `root`; () if nothing grades it.

    ValueError if the files of a part are not valid, or the points do not add up.
    """
    tests: list[GradedPart] = []
    if hidden := _read_hidden(rules, root):
        tests.append(_make_tests_part("hidden", hidden))
    public = _read_public(rules, root)
    if any(test.points for test in public):
        tests.append(_make_tests_part("public", public))
    grade, given = rules.grade, sum(part.points for part in tests)
    if not has_grader(grade, bool(tests)):
        if tests:
            _require_sum(rules, tests)
        return tuple(tests)
    assert grade is not None
    points = grade.points or max(grade.scale.values(), default=0.0) or rules.graded_points - given
    if points <= 0:
        raise ValueError(
            f"the tests give {given:g} of {rules.graded_points:g} points, which leaves none for "
            "`grade`"
        )
    kind: PartKind = "autograder" if grade.autograder else "grader"
    if grade.autograder:
        _check_autograder(root / grade.autograder, grade.autograder)
    parts = [GradedPart(kind=kind, points=points), *tests]
    _require_sum(rules, parts)
    return tuple(parts)


def _make_tests_part(kind: PartKind, tests: tuple[MarkedTest, ...]) -> GradedPart:
    return GradedPart(kind=kind, points=sum(test.points for test in tests), tests=tests)


def has_grader(grade: GradeConfig | None, has_tests: bool) -> bool:
    """Whether a grading command or an autograder gives points, beside the tests."""
    if grade is None:
        return False
    has_points = grade.points is not None or bool(grade.metric_name)
    return bool(grade.autograder) or grade.has_commands or has_points or not has_tests


def _require_sum(rules: AssignmentConfig, parts: list[GradedPart]) -> None:
    total = sum(part.points for part in parts)
    if abs(total - rules.graded_points) < 1e-6:
        return
    names = [f"{part.title or 'grade'} {part.points:g}" for part in parts]
    raise ValueError(
        f"the points do not add up to {rules.graded_points:g}: {', '.join(names)} make {total:g}"
    )


def _read_hidden(rules: AssignmentConfig, root: Path) -> tuple[MarkedTest, ...]:
    place = rules.tests.hidden
    if not place:
        return ()
    tests = _read(root, place)
    if not (root / place / PROBE).is_file():
        raise ValueError(f"{place} has no {PROBE}, whose functions call the student's code")
    return tests


def _read_public(rules: AssignmentConfig, root: Path) -> tuple[MarkedTest, ...]:
    return _read(root, rules.tests.public) if rules.tests.public else ()


def _read(root: Path, place: str) -> tuple[MarkedTest, ...]:
    try:
        return read_marked_tests(root / place)
    except ValueError as error:
        raise ValueError(str(error).replace(str(root / place), place)) from None


def _check_autograder(path: Path, place: str) -> None:
    if RUN_AUTOGRADER not in list_autograder_files(path):
        raise ValueError(f"{place} is no directory or zip with {RUN_AUTOGRADER} at its top")


def list_autograder_files(path: Path) -> frozenset[str]:
    """Return the names at the top of an autograder's directory or zip."""
    if path.is_dir():
        return frozenset(file.name for file in path.iterdir())
    try:
        with zipfile.ZipFile(path) as archive:
            return frozenset(archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return frozenset()


def check_parts(config: CourseConfig) -> dict[str, tuple[GradedPart, ...]]:
    """Return the parts of every assignment that has some.

    ConfigError lists what is wrong, by the lines of course.yaml.
    """
    top = parse(config.path.read_bytes(), "", [])
    problems: list[Problem] = []
    parts = {}
    for name, rules in config.assignments.items():
        try:
            if found := list_parts(rules, config.root):
                parts[name] = found
        except ValueError as error:
            problems.append(_make_problem(top, name, rules, str(error)))
    if problems:
        hint = "labctl course plan   # after you fix these lines"
        raise make_problems_error(str(config.path), problems, hint=hint)
    return parts


def _make_problem(top: Node | None, name: str, rules: AssignmentConfig, message: str) -> Problem:
    key = "tests" if rules.tests.hidden or rules.tests.public else "grade"
    return make_problem_at(top, f"assignments.{name}.{key}", message)


def describe_parts(config: CourseConfig, parts: Mapping[str, tuple[GradedPart, ...]]) -> list[str]:
    """Describe what gives the points of each assignment."""
    texts = []
    for name, rules in config.assignments.items():
        sources = [_describe_part(rules, part) for part in parts.get(name, ())]
        if rules.rubric:
            items = ", ".join(f"{item} {points:g}" for item, points in rules.rubric.items())
            sources.append(f"{sum(rules.rubric.values()):g} for the rubric ({items})")
        if sources:
            texts.append(f"{name}: {rules.points:g} points: {', '.join(sources)}")
    return texts


def _describe_part(rules: AssignmentConfig, part: GradedPart) -> str:
    return f"{part.points:g} for {_name_source(rules.grade or GradeConfig(), part)}"


def _name_source(grade: GradeConfig, part: GradedPart) -> str:
    if part.tests:
        return count_text(len(part.tests), f"{part.kind} test")
    if part.kind == "autograder":
        return "the autograder"
    values = sorted(grade.scale)
    span = f" ({values[0]:g} to {values[-1]:g})" if values else ""
    return f"{grade.metric_name or 'the grader'}{span}"


def list_part_cautions(
    config: CourseConfig, parts: Mapping[str, tuple[GradedPart, ...]]
) -> list[str]:
    """Say what an instructor should know of these parts before students' code runs."""
    return [
        f"{name}: {text}"
        for name, own in parts.items()
        for part in own
        for text in _list_cautions(config, config.assignments[name], part)
    ]


def _list_cautions(
    config: CourseConfig, rules: AssignmentConfig, part: GradedPart
) -> Iterator[str]:
    unmarked = [test.name for test in part.tests if not test.points]
    if part.kind == "hidden" and unmarked:
        count = count_text(len(unmarked), "hidden test")
        yield f"{count} without points, such as {unmarked[0]}"
    if part.kind == "public":
        yield (
            "its public tests run beside the student's code, which can forge their points; it "
            "cannot forge those of hidden tests"
        )
    if part.kind == "autograder" and rules.grade is not None:
        place = rules.grade.autograder
        yield (
            "its autograder runs in one container with the student's code, so that code can read "
            "the tests and write its own result"
        )
        if SETUP in list_autograder_files(config.root / place):
            yield (
                f"labctl does not run {SETUP} of {place}, as grading has no network: put what it "
                "installs into grading.image"
            )
