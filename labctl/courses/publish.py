"""Assignments of course.yaml, in the form that the course's receiver and students know them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from labctl.config.identity import write_private
from labctl.courses.allowances import apply_extensions
from labctl.courses.invitation import VALID_S, Invitation, invite, keeper_place
from labctl.courses.keys import Keys
from labctl.courses.records.folder import CourseFolder
from labctl.errors import ConnectError, NotFoundError
from labctl.model import Endpoint
from labctl.submissions.assignment import SSH_PLACE, Assignment, assignment_text
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


def invite_all(
    folder: CourseFolder,
    students: Iterable[str],
    into: Path,
    keys: Keys,
    *,
    host_key: str = "",
    valid_s: int = VALID_S,
) -> list[Invitation]:
    """A join file for each; NotFoundError, and no file, where one of them is not in the course.

    `host_key` is the keeper's; without it what is known counts, or what its sshd shows from here.
    """
    chosen = [folder.student(one).id for one in students]
    pinned = host_key or _shown_host_key(folder)
    remember_host_key(folder, pinned)
    publish(folder, pinned)
    return [invite(folder, one, into, keys, pinned, valid_s) for one in chosen]


def _shown_host_key(folder: CourseFolder) -> str:
    try:
        return known_host_key(folder)
    except NotFoundError:
        place = SSH_PLACE.fullmatch(keeper_place(folder))
    assert place is not None
    from labctl.transports.fabric_login import fetch_host_key

    way = Endpoint(host=place["host"], port=int(place["port"] or 22), user=place["user"])
    try:
        return fetch_host_key(way)
    except ConnectError as error:
        key = "/etc/ssh/ssh_host_ed25519_key.pub"
        error.hint = f'labctl course invite ... --host-key "$(cat {key})"   # on the keeper'
        raise


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
