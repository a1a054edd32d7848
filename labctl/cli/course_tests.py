"""The output of a dry run, and the tests that each student passed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from labctl.cli.course_options import shorten_name
from labctl.cli.exit_codes import clean, print_next
from labctl.cli.tables import print_json, print_table
from labctl.cli.wrapping import print_message
from labctl.courses.grades import StudentTests
from labctl.courses.grading.results import DEFAULT_VISIBILITY, GraderTest
from labctl.courses.records.gradebook import points_text
from labctl.text import names_text

if TYPE_CHECKING:
    from labctl.courses.grading_dry_run import DryRunResult

# lines of a failed solution's output that a dry run shows
MOST_OUTPUT_LINES = 20
# names of failed tests in a row
MOST_NAMES = 3


def print_dry_run(result: DryRunResult, json_: bool) -> None:
    """Print the result of a dry run: the score, or the failure with what the program printed."""
    name = result.assignment
    if json_:
        print_json({"assignment": name, "dry_run": result})
        return
    if result.outcome == "graded":
        score = f"{result.score:g}/{result.points:g}"
        click.echo(f"{clean(result.reference)}: {click.style('graded', fg='green')} {score}")
        _print_test_points(result.tests)
        print_message(f"Nothing was stored.\n  next: labctl course grade {name}")
        return
    for line in result.output.strip().splitlines()[-MOST_OUTPUT_LINES:]:
        print_message(f"  {clean(line)}")
    failed = click.style("failed", fg="red")
    click.echo(f"{clean(result.reference)}: {failed}  {clean(result.message)}")
    _print_test_points(result.tests)
    print_next(f"fix the image or the commands, then:\nlabctl course grade {name} --dry-run")


def _print_test_points(tests: Sequence[GraderTest]) -> None:
    """Print each test with its points; of one that failed, the last line of its output."""
    rows = [
        (
            f"{points_text(test.score) or '-'}/{points_text(test.max_score) or '-'}",
            test.visibility or DEFAULT_VISIBILITY,
            test.name,
            "" if test.score == test.max_score else _get_last_line(test.output),
        )
        for test in tests
    ]
    if rows:
        print_table(rows, ("POINTS", "VISIBLE", "TEST", ""), cut=False)


def _get_last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""


def print_student_tests(students: Sequence[StudentTests], names: Mapping[str, str]) -> None:
    """Print how many tests each student passed, and the first ones that gave no full points."""
    rows = [
        (
            one.student,
            shorten_name(names.get(one.student) or "-"),
            f"{len(one.tests) - len(one.failed)}/{len(one.tests)}" if one.tests else "-",
            names_text([test.name.rpartition("::")[2] for test in one.failed], MOST_NAMES),
        )
        for one in students
    ]
    print_table(rows, ("STUDENT", "NAME", "PASSED", "FAILED"), cut=False)
    if not any(one.tests for one in students):
        print_message("No grade has tests.")
