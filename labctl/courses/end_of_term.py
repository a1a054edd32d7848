"""Steps of the end of a term that other modules do: collecting submissions, revoking keys."""

from __future__ import annotations

from pathlib import Path

from labctl.courses.collect import collect
from labctl.courses.end_consent import AccessCount
from labctl.courses.keys import DEFAULT_FILE, AuthorizedKeys
from labctl.courses.servers import CourseOperator
from labctl.courses.teardown import Collect, Revoke


def count_access(staff: CourseOperator) -> AccessCount:
    """Count what `make_revoker` would remove from authorized_keys."""
    keys = AuthorizedKeys(staff.folder, Path(DEFAULT_FILE))
    return AccessCount(students=len(keys.list_students()), invitations=keys.count_invitations())


def make_revoker(staff: CourseOperator) -> Revoke:
    """Return a function that removes all students' keys and invitations from authorized_keys."""

    def revoke() -> int:
        keys = AuthorizedKeys(staff.folder, Path(DEFAULT_FILE))
        removed = keys.expel()
        if removed:
            why = "end of term: keys revoked"
            staff.folder.ledger.append("left", by=staff.by, why=why, students=removed)
        return len(removed)

    return revoke


def make_collector(staff: CourseOperator) -> Collect:
    """Return a function that collects an assignment's submissions and describes the result."""

    def collect_one(name: str) -> str:
        collection = collect(staff.folder, name, by=staff.by)
        states = [submission.state for submission in collection.submissions]
        missing, excused = states.count("missing"), states.count("excused")
        not_yet = states.count("open")
        parts = [f"{len(collection.accepted)} submitted and intact"]
        parts += [f"{missing} missing"] if missing else []
        parts += [f"{not_yet} not submitted yet"] if not_yet else []
        parts += [f"{excused} excused"] if excused else []
        parts += [f"{len(collection.damaged)} DAMAGED"] if collection.damaged else []
        return ", ".join(parts)

    return collect_one
