"""How an assignment is graded, and the requests for one submission to the grading server."""

from __future__ import annotations

import msgspec

from labctl.config.course_schema import AssignmentConfig, GradeConfig
from labctl.courses.collect import find_rules
from labctl.courses.graded_parts import list_parts
from labctl.courses.grading.combine import PartResult
from labctl.courses.grading.parts import GradedPart
from labctl.courses.grading_material import (
    GradingMaterial,
    build_limits,
    hash_material,
    remote_name,
)
from labctl.courses.grading_server import GradingServer
from labctl.courses.records.folder import CourseFolder
from labctl.courses.servers import CourseOperator
from labctl.errors import ConfigError
from labctl.model import Value
from labctl.wire.sandbox import GradeRequest

PYTHON = ("sh", "-c", 'command -v python >/dev/null && exec python "$@"; exec python3 "$@"', "run")
PREDICT = (*PYTHON, "/lab/labctl/images.py")
ACCURACY = (*PYTHON, "/lab/labctl/accuracy.py")
PROBE = (*PYTHON, "/lab/labctl/probe.py")
TESTS = (*PYTHON, "/lab/labctl/tests.py")
AUTOGRADER = ("sh", "/lab/labctl/autograder.sh")
# Seconds for the connection and for starting two containers, on top of the two time limits.
LINK_S = 90.0


class GradingPlan(Value, frozen=True):
    """Everything that grades an assignment."""

    name: str
    rules: AssignmentConfig
    config: GradeConfig
    parts: tuple[GradedPart, ...]
    material: GradingMaterial


def find_grading(
    folder: CourseFolder, name: str
) -> tuple[AssignmentConfig, GradeConfig, tuple[GradedPart, ...]]:
    """Return an assignment's rules, how it is graded, and the parts of the grade.

    ConfigError if course.yaml lacks that, or the points do not add up.
    """
    rules = find_rules(folder, name)
    file = folder.config.path
    try:
        parts = list_parts(rules, folder.path)
    except ValueError as error:
        hint = f"edit {file}: assignments: {name}, then:\nlabctl course plan"
        raise ConfigError(f"{name} cannot be graded", why=str(error), hint=hint) from None
    if not parts and rules.rubric:
        raise ConfigError(
            f"{name} has nothing to run",
            why="people give all of its points, by its rubric",
            hint=f"labctl course mark {name} --next",
        )
    if not parts:
        raise ConfigError(
            f"course.yaml does not say how {name} is graded",
            hint=f"edit {file}: assignments: {name}: grade: "
            f"{{inputs: assignments/{name}/inputs, labels: assignments/{name}/labels}}",
        )
    return rules, rules.grade or GradeConfig(), parts


def make_grading_plan(staff: CourseOperator, name: str) -> GradingPlan:
    """Read how an assignment is graded, and hash the files for it. ConfigError as above."""
    rules, config, parts = find_grading(staff.folder, name)
    material = hash_material(staff, name, rules, config, parts)
    return GradingPlan(name=name, rules=rules, config=config, parts=parts, material=material)


def encode_grade_rules(config: GradeConfig) -> str:
    """Return the rules that a grade depends on, as JSON; the staff's solution is not one.

    Keys of later versions are left out while they are not set, so that a stored hash stays valid.
    """
    fields = msgspec.to_builtins(config)
    del fields["reference"]
    for key in ("metric", "points", "scale", "autograder"):
        if not fields[key]:
            del fields[key]
    return msgspec.json.encode(fields).decode()


def grade_submission(
    server: GradingServer, plan: GradingPlan, job: str, submission: str
) -> tuple[PartResult, ...]:
    """Grade a pushed submission in all parts, one after the other."""
    timeout_s = 2 * plan.config.timeout + LINK_S
    return tuple(
        PartResult(
            part=part,
            result=server.grade(_build_request(server, plan, part, job, submission), timeout_s),
        )
        for part in plan.parts
    )


def _build_request(
    server: GradingServer, plan: GradingPlan, part: GradedPart, job: str, submission: str
) -> GradeRequest:
    """Build the request to run a submission for one part of its grade."""
    files, config = plan.material.files, plan.config

    def find_remote(name: str) -> str:
        return remote_name(plan.name, name) if files.get(name) else ""

    request = GradeRequest(
        lab=server.context.config.name,
        lab_id=server.context.lab_id,
        image=server.image,
        job=job if part.kind == "grader" else f"{job}-{part.kind[0]}",
        submission=submission,
        inputs=find_remote("inputs"),
        labels=find_remote("labels"),
        grader=remote_name(plan.name, "grader"),
        predict=tuple(config.predict or PREDICT),
        grade=tuple(config.command or ACCURACY),
        points=part.points,
        timeout_s=config.timeout,
        limits=build_limits(server),
    )
    if part.kind == "hidden":
        tests, probe = remote_name(plan.name, "hidden"), remote_name(plan.name, "probe")
        return request._replace(predict=PROBE, grade=TESTS, grader=tests, staff_files=probe)
    if part.kind in ("public", "autograder"):
        command = TESTS if part.kind == "public" else AUTOGRADER
        staff_files = remote_name(plan.name, part.kind)
        return request._replace(predict=command, grade=(), staff_files=staff_files)
    return request
