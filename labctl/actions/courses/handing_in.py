"""The course's assignments as its receiver has them: rules from course.yaml, extensions too."""

from __future__ import annotations

from labctl.actions.courses.allowances import apply_extensions
from labctl.actions.receive import write_assignment
from labctl.config.course_schema import AssignmentConfig
from labctl.config.document import shown
from labctl.config.moments import late_text
from labctl.config.reader import nearest
from labctl.config.scalars import size_text
from labctl.courses.folder import CourseFolder
from labctl.errors import ConfigError, NotFoundError
from labctl.submissions.receiver import Receiver


def rules_of(folder: CourseFolder, name: str) -> AssignmentConfig:
    """What course.yaml says of an assignment; NotFoundError names the nearest."""
    found = folder.config.assignments.get(name)
    if found is None:
        near = nearest(name, list(folder.config.assignments))
        known = ", ".join(folder.config.assignments) or "none yet"
        raise NotFoundError(
            f"there is no assignment {shown(name)}",
            why=f"did you mean {near}?" if near else f"course.yaml has {known}",
            hint=f"edit {folder.config.path}",
        )
    return found


def open_assignments(
    folder: CourseFolder, *, place: str = "", host_key: str = ""
) -> dict[str, str]:
    """Have the receiver take in what course.yaml asks for; assignment -> the text of its file.

    `place` is where students hand in; without it the keeper's address, else the course's store.
    Repeated, it brings the receiver up to course.yaml. An assignment that left course.yaml stays:
    its submissions do.
    """
    receiver = Receiver(folder.drop)
    receiver.init()
    to = place or place_of(folder)
    written = {}
    for name, rules in folder.config.assignments.items():
        given = {
            "course": folder.config.name,
            "due": str(rules.due or ""),
            "late": late_text(rules.late),
            "penalty": str(rules.penalty),
            "max_size": size_text(rules.max_size),
            "require": rules.require,
            "host_key": host_key or _pinned(receiver, name, to),
        }
        written[name] = write_assignment(receiver, name, to, given)
        apply_extensions(folder, name)
    return written


def place_of(folder: CourseFolder) -> str:
    """`ssh://` of the keeper, else the course's bucket; ConfigError where there is neither."""
    keeper = folder.config.keeper
    if keeper is not None:
        return f"ssh://{keeper.user}@{keeper.host}:{keeper.port}"
    if folder.config.store.startswith("s3://"):
        return f"{folder.config.store.rstrip('/')}/drop"
    raise ConfigError(
        "students have nowhere to hand in",
        why="course.yaml names neither a keeper nor a bucket as its store",
        hint=f"edit {folder.config.path}: keeper: {{host: keeper.example.edu}}",
    )


def _pinned(receiver: Receiver, name: str, place: str) -> str:
    """The host key that the assignment's file has already for this place: pinned once."""
    if not receiver.assignment_file(name).is_file():
        return ""
    known = receiver.rules(name)
    return known.host_key if known.hand_in == place else ""
