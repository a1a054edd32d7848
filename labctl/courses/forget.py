"""Giving up on a course's servers that nobody can ask about any more."""

from __future__ import annotations

from labctl.courses import metering
from labctl.courses.leftovers import labs_of
from labctl.courses.records.ledger import Draft
from labctl.courses.servers import Staff
from labctl.lifecycle import forget

WHY = "given up: nobody can say whether it has ended"


def forget_lost(staff: Staff) -> list[str]:
    """Drop what the course has on record and these credentials do not show; the names of it.

    Nothing is ended. The ledger counts such a server up to its last line. PolicyError where the
    person says no, NotFoundError where there is nothing to forget.
    """
    course = staff.course()
    lab_ids = labs_of(staff)
    lost = forget.find_lost(course, sorted(lab_ids))
    in_ledger = {
        server_id: one
        for server_id, one in metering.open_servers(staff.folder.ledger.entries(), course).items()
        if forget.is_lost(course, server_id, one.account, one.price)
    }
    names = list(dict.fromkeys([*lost.names, *in_ledger]))
    forget.require_consent(course, names, "labctl course down")
    forget.drop(course, lost)
    recorded = {one.id for one in lost.servers}
    for server_id in in_ledger.keys() - recorded:
        forget.note_forgotten(course, staff.folder.id, server_id)
    staff.folder.ledger.append_all(
        [
            Draft(kind="down", seat=one.seat, by=staff.by, why=WHY, detail={"server_id": server_id})
            for server_id, one in in_ledger.items()
        ]
    )
    return names
