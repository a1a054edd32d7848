"""Update the course lab of a student who has joined: new assignments, and newer starters."""

from __future__ import annotations

from labctl.config.reader import LAB_FILE
from labctl.courses.course_lab_file import update_lab_file
from labctl.courses.join import JoinResult
from labctl.courses.starter_delivery import (
    deliver_starters,
    describe_course_lab,
    write_assignments,
)
from labctl.errors import UsageError
from labctl.providers.course import CourseProvider
from labctl.servers.context import LabContext
from labctl.sync.starter import read_record


def update_course_lab(context: LabContext) -> JoinResult:
    """Fetch new assignments and starters into the course lab of `context`, or of an assignment.

    UsageError if its servers come from no course.
    """
    provider, root = context.provider, context.config.root
    if not isinstance(provider, CourseProvider):
        raise UsageError(
            f"the servers of {context.name} do not come from a course",
            why="without FILE, labctl join updates the lab of a course that you have joined",
            hint="labctl join FILE",
        )
    if read_record(root) is not None:
        root = root.parent
        if not (root / LAB_FILE).is_file():
            raise UsageError(
                f"{root} is not the lab of the course",
                why="this assignment's lab was moved out of the directory of labctl join",
                hint=f"labctl -C DIRECTORY-OF-{provider.settings.course} join",
            )
    hello = provider.fetch_greeting()
    names = write_assignments(root, hello.assignments or {})
    lab = describe_course_lab(provider.settings, root, hello.image, hello.executor)
    update = update_lab_file(lab, context.paths)
    starters = deliver_starters(
        lab,
        hello.starters or {},
        hello.assignments or {},
        provider.fetch_starter,
        context.paths,
    )
    return JoinResult(
        course=provider.settings.course,
        student=provider.settings.student,
        directory=root,
        assignments=names,
        again=True,
        starters=starters,
        image=hello.image,
        image_change=update.image_change,
    )
