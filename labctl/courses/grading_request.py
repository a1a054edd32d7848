"""How an assignment is graded, and the request for one submission to the grading server."""

from __future__ import annotations

import msgspec

from labctl.config.course_schema import AssignmentConfig, GradeConfig
from labctl.courses.collect import find_rules
from labctl.courses.grading_material import GradingMaterial, build_limits, remote_name
from labctl.courses.grading_server import GradingServer
from labctl.courses.records.folder import CourseFolder
from labctl.errors import ConfigError
from labctl.wire.sandbox import GradeRequest

PYTHON = ("sh", "-c", 'command -v python >/dev/null && exec python "$@"; exec python3 "$@"', "run")
PREDICT = (*PYTHON, "/lab/labctl/images.py")
ACCURACY = (*PYTHON, "/lab/labctl/accuracy.py")
# Seconds for the connection and for starting two containers, on top of the two time limits.
LINK_S = 90.0


def find_grading(folder: CourseFolder, name: str) -> tuple[AssignmentConfig, GradeConfig]:
    """Return an assignment's rules and how it is graded. ConfigError if course.yaml lacks that."""
    rules = find_rules(folder, name)
    if rules.grade is None:
        raise ConfigError(
            f"course.yaml does not say how {name} is graded",
            hint=f"edit {folder.config.path}: assignments: {name}: grade: "
            f"{{inputs: assignments/{name}/inputs, labels: assignments/{name}/labels}}",
        )
    return rules, rules.grade


def encode_grade_rules(config: GradeConfig) -> str:
    """Return the rules that a grade depends on, as JSON; the staff's solution is not one."""
    fields = msgspec.to_builtins(config)
    del fields["reference"]
    return msgspec.json.encode(fields).decode()


def build_request(
    server: GradingServer,
    name: str,
    rules: AssignmentConfig,
    config: GradeConfig,
    material: GradingMaterial,
    job: str,
    submission: str,
) -> GradeRequest:
    """Build the request to run a pushed submission of an assignment and to grade it."""
    return GradeRequest(
        lab=server.context.config.name,
        lab_id=server.context.lab_id,
        image=server.image,
        job=job,
        submission=submission,
        inputs=remote_name(name, "inputs") if material.inputs else "",
        labels=remote_name(name, "labels") if material.labels else "",
        grader=remote_name(name, "grader"),
        predict=tuple(config.predict or PREDICT),
        grade=tuple(config.command or ACCURACY),
        points=rules.graded_points,
        timeout_s=config.timeout,
        limits=build_limits(server),
    )
