"""Publishing course.yaml's assignments to the receiver, and inviting students."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path

from labctl.config.identity import write_private
from labctl.courses.allowances import apply_extensions
from labctl.courses.costs import escape_formula
from labctl.courses.invitation import VALID_S, Invitation, invite, keeper_address
from labctl.courses.keys import AuthorizedKeys, parse_key
from labctl.courses.records.folder import CourseFolder
from labctl.courses.records.timetable import list_pauses
from labctl.courses.starters import list_published
from labctl.errors import ConnectError, NotFoundError
from labctl.lazy import lazy_imports
from labctl.model import Endpoint
from labctl.submissions.assignment import SSH_PLACE, Assignment, assignment_text
from labctl.submissions.receipt import utc_text
from labctl.submissions.receiver import Receiver
from labctl.wire.keeper import CourseRecord

with lazy_imports(__name__):
    from labctl.transports import fabric_login

# The file beside the join files that says who gets which.
MAIL_MERGE = "invitations.csv"


def publish_assignments(folder: CourseFolder, host_key: str) -> list[str]:
    """Publish every assignment of course.yaml to the receiver; return the names that changed.

    Submissions go to the keeper, whose host key is part of the assignment. Extensions apply at
    once. Repeating it changes nothing.
    """
    receiver = Receiver(folder.drop)
    public = receiver.init()
    receiver.set_pauses(list_pauses(folder.config))
    keeper, changed = keeper_address(folder), []
    for name, rules in folder.config.assignments.items():
        published = Assignment(
            assignment=name,
            hand_in=keeper,
            receiver=public,
            course=folder.config.name,
            due=rules.due,
            late=rules.late,
            penalty=rules.penalty,
            max_size=rules.max_size,
            require=rules.require,
            host_key=host_key,
        )
        file, text = receiver.assignment_file(name), assignment_text(published)
        if not file.is_file() or file.read_text() != text:
            write_private(file, text.encode())
            changed.append(name)
        receiver.set_grace(name, rules.grace if rules.due else 0)
        apply_extensions(folder, name)
    return changed


def describe_course(folder: CourseFolder, student: str) -> CourseRecord:
    """Return the description of the course that a student gets."""
    files = sorted((folder.drop / "assignments").glob("[!.]*.yaml"))
    return CourseRecord(
        course=folder.config.name,
        student=student,
        image=folder.config.image_reference,
        receiver=Receiver(folder.drop).init(),
        assignments={file.stem: file.read_text() for file in files},
        starters=list_published(folder),
        executor="slurm" if folder.config.lab.submits_jobs else "",
    )


def invite_all(
    folder: CourseFolder,
    students: Iterable[str],
    into: Path,
    keys: AuthorizedKeys,
    *,
    host_key: str = "",
    valid_s: int = VALID_S,
    replace: bool = False,
) -> list[Invitation]:
    """Write a join file for each student. NotFoundError if one is not in the course: no file then.

    With `replace`, the keys of the students' devices are revoked now. MAIL_MERGE lists the files.
    `host_key` is the keeper's; UsageError for other text. Without it the known one is used, or what
    its sshd shows from here.
    """
    chosen = [folder.find_student(student).id for student in students]
    # sshd's key file ends with a comment, which does not belong to the key.
    pinned = " ".join(parse_key(host_key or _read_host_key(folder)))
    store_host_key(folder, pinned)
    publish_assignments(folder, pinned)
    if replace:
        keys.expel(chosen)
    invitations = [invite(folder, student, into, keys, pinned, valid_s) for student in chosen]
    if invitations:
        _write_mail_merge(folder, into / MAIL_MERGE, invitations)
    return invitations


def _write_mail_merge(folder: CourseFolder, file: Path, invitations: list[Invitation]) -> None:
    """Write a row for each of these invitations, for a program that mails files to people."""
    text = io.StringIO()
    rows = csv.writer(text)
    rows.writerow(("student", "name", "email", "file", "expires"))
    for one in invitations:
        name = escape_formula(folder.find_student(one.student).name)
        path = str(one.path.absolute())
        rows.writerow((one.student, name, one.email, path, utc_text(one.expires)))
    write_private(file, text.getvalue().encode())


def _read_host_key(folder: CourseFolder) -> str:
    try:
        return read_host_key(folder)
    except NotFoundError:
        place = SSH_PLACE.fullmatch(keeper_address(folder))
    assert place is not None
    endpoint = Endpoint(host=place["host"], port=int(place["port"] or 22), user=place["user"])
    try:
        return fabric_login.fetch_host_key(endpoint)
    except ConnectError as error:
        key = "/etc/ssh/ssh_host_ed25519_key.pub"
        error.hint = f'labctl course invite ... --host-key "$(cat {key})"   # on the keeper'
        raise


def read_host_key(folder: CourseFolder) -> str:
    """Return the keeper's stored host key; NotFoundError if none was stored."""
    try:
        return (folder.private / "keeper" / "host-key").read_text().strip()
    except FileNotFoundError:
        raise NotFoundError(
            "the keeper's host key is not known yet",
            why="students pin it to prevent a machine-in-the-middle attack",
            hint="labctl course invite --all   # reads the host key from the keeper's sshd",
        ) from None


def store_host_key(folder: CourseFolder, host_key: str) -> None:
    """Store the keeper's host key, without its comment."""
    words = host_key.split()[:2]
    write_private(folder.private / "keeper" / "host-key", (" ".join(words) + "\n").encode())
