"""Removing lost servers from a course's records: those that no provider can report on any more."""

from __future__ import annotations

from labctl.courses import metering
from labctl.courses.leftovers import list_lab_ids
from labctl.courses.records.ledger_entries import CourseLedgerDraft
from labctl.courses.servers import CourseOperator
from labctl.lifecycle import forget

WHY = "given up: its provider cannot confirm that it ended"


def forget_lost(staff: CourseOperator) -> list[str]:
    """Drop the course's recorded servers that these credentials cannot see; return their names.

    Nothing is ended. The ledger bills such a server up to its last line. PolicyError if the user
    declines, NotFoundError if there is nothing to forget.
    """
    course = staff.course()
    lab_ids = list_lab_ids(staff)
    lost = forget.find_lost(course, sorted(lab_ids))
    in_ledger = {
        server_id: server
        for server_id, server in metering.list_open_servers(
            staff.folder.ledger.list_entries(), course
        ).items()
        if forget.is_lost(course, server_id, server.account, server.price)
    }
    names = list(dict.fromkeys([*lost.names, *in_ledger]))
    forget.require_consent(course, names, "labctl course down")
    forget.drop(course, lost)
    recorded = {server.id for server in lost.servers}
    for server_id in in_ledger.keys() - recorded:
        forget.note_forgotten(course, staff.folder.id, server_id)
    staff.folder.ledger.append_all(
        [
            CourseLedgerDraft(
                kind="down", seat=server.seat, by=staff.by, why=WHY, detail={"server_id": server_id}
            )
            for server_id, server in in_ledger.items()
        ]
    )
    return names
