"""Assignments of course.yaml, in the form that the course's receiver and students know them."""

from __future__ import annotations

from labctl.actions.courses.allowances import apply_extensions
from labctl.actions.courses.invitation import keeper_place
from labctl.config.identity import write_private
from labctl.courses.folder import CourseFolder
from labctl.errors import NotFoundError
from labctl.submissions.assignment import Assignment, assignment_text
from labctl.submissions.receiver import Receiver


def publish(folder: CourseFolder, host_key: str) -> list[str]:
    """Have the receiver know every assignment as course.yaml has it now; those that changed.

    They are handed in at the keeper, whose pinned key students are told. Extensions that were
    given count at once. Repeated, nothing changes.
    """
    receiver = Receiver(folder.drop)
    public = receiver.init()
    place, changed = keeper_place(folder), []
    for name, rules in folder.config.assignments.items():
        found = Assignment(
            assignment=name,
            hand_in=place,
            receiver=public,
            course=folder.config.name,
            due=rules.due,
            late=rules.late,
            penalty=rules.penalty,
            max_size=rules.max_size,
            require=rules.require,
            host_key=host_key,
        )
        file, text = receiver.assignment_file(name), assignment_text(found)
        if not file.is_file() or file.read_text() != text:
            write_private(file, text.encode())
            changed.append(name)
        apply_extensions(folder, name)
    return changed


def known_host_key(folder: CourseFolder) -> str:
    """The keeper's host key as `remember_host_key` had it; NotFoundError where nobody said one."""
    try:
        return (folder.private / "keeper" / "host-key").read_text().strip()
    except FileNotFoundError:
        raise NotFoundError(
            "the keeper's host key is not known yet",
            why="students pin it, so that nobody can stand in between",
            hint="labctl course invite   # asks the keeper's sshd for it once",
        ) from None


def remember_host_key(folder: CourseFolder, host_key: str) -> None:
    words = host_key.split()[:2]
    write_private(folder.private / "keeper" / "host-key", (" ".join(words) + "\n").encode())
