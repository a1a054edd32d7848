"""The paths of a course's folder that no student may get, and no code of students may read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from labctl.config import CourseConfig
from labctl.config.course_schema import GradeConfig


def list_hidden_paths(config: CourseConfig) -> list[str]:
    """List what students' code must not read: labels, staff's solutions and hidden tests."""
    paths: list[str] = []
    for rules in config.assignments.values():
        grade = rules.grade or GradeConfig()
        paths += filter(None, (grade.labels, grade.reference, rules.tests.hidden))
    return paths


def list_grading_paths(config: CourseConfig) -> list[str]:
    """List everything that grades: what is hidden, and what only runs beside students' code."""
    grades = [rules.grade for rules in config.assignments.values() if rules.grade]
    others = [path for grade in grades for path in (grade.inputs, grade.autograder) if path]
    return [*list_hidden_paths(config), *others]


def find_overlap(root: Path, place: str, paths: Iterable[str]) -> str:
    """Return the first of the paths below `root` that is in directory `place`, or contains it."""
    directory = (root / place).resolve()
    for name in paths:
        path = (root / name).resolve()
        if path.is_relative_to(directory) or directory.is_relative_to(path):
            return name
    return ""
