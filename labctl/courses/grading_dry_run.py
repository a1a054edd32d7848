"""A trial of an assignment's grading with the staff's own solution: nothing is stored."""

from __future__ import annotations

import os
from pathlib import Path

from labctl.config.course_schema import GradeConfig
from labctl.courses.grading.combine import read_results
from labctl.courses.grading.record import Outcome
from labctl.courses.grading.results import GraderTest, clean_text
from labctl.courses.grading_material import list_bundle_files, upload_material
from labctl.courses.grading_request import find_grading, grade_submission, make_grading_plan
from labctl.courses.grading_server import open_grading_server
from labctl.courses.servers import CourseOperator
from labctl.errors import ConfigError
from labctl.model import Value

SUBMISSION = "reference"


class DryRunResult(Value, frozen=True):
    """The grading of the reference solution: `score` is None without one.

    `message` says why it failed, `output` is what the solution's programs printed, and `tests` are
    what each part and test gave.
    """

    assignment: str
    reference: str
    outcome: Outcome
    points: float
    score: float | None = None
    message: str = ""
    output: str = ""
    tests: tuple[GraderTest, ...] = ()


def try_reference(staff: CourseOperator, name: str, *, keep: bool = False) -> DryRunResult:
    """Grade the staff's reference solution as a submission is graded, and store nothing.

    ConfigError if course.yaml names no reference solution, or its directory has no code or model.
    """
    rules, config, _ = find_grading(staff.folder, name)
    root = _find_reference(staff, name, config)
    files = tuple(list_bundle_files(root))
    # A grading would clear the server while this trial uses it.
    command = f"course grade {name} --dry-run"
    with staff.state.lock(f"{staff.folder.id}-grade", command, wait_s=0.5):
        plan = make_grading_plan(staff, name)
        with open_grading_server(staff, keep=keep, is_own_code=True) as server:
            server.prepare_image()
            upload_material(server, name, plan.material)
            server.upload(SUBMISSION, root, files)
            results = grade_submission(server, plan, f"g-{os.urandom(16).hex()}", SUBMISSION)
    outcome = read_results(results, config)
    return DryRunResult(
        assignment=name,
        reference=config.reference,
        outcome=outcome.state,
        points=rules.graded_points,
        score=outcome.raw.score if outcome.raw else None,
        message=clean_text(outcome.message),
        output=clean_text("".join(one.result.predict.said for one in results)),
        tests=outcome.raw.tests if outcome.raw else (),
    )


def _find_reference(staff: CourseOperator, name: str, config: GradeConfig) -> Path:
    file = staff.folder.config.path
    place = config.reference or f"assignments/{name}/reference"
    if not config.reference:
        raise ConfigError(
            f"course.yaml names no reference solution of {name}",
            why="a dry run grades your own solution, a directory with code/ and model/",
            hint=f"edit {file}: assignments: {name}: grade: {{reference: {place}}}",
        )
    root = staff.folder.path / place
    if not any((root / part).is_dir() for part in ("code", "model")):
        raise ConfigError(
            f"{root} has neither code/ nor model/",
            why="the reference solution has the directories of a submission",
            hint=f"put your solution there, then:\nlabctl course grade {name} --dry-run",
        )
    return root
