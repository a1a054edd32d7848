"""The teams of a closed assignment, as recorded in the ledger. Pure.

Until an assignment closes the roster decides. A later change of team applies to later assignments
only: nobody gets another team's grade, and no grade moves to another team.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from labctl.config.course_schema import AssignmentConfig
from labctl.config.times import ANY_S
from labctl.courses.records.ledger_entries import CourseLedgerDraft, CourseLedgerEntry

KIND = "closed"
# Seat name -> its students' ids.
Members = Mapping[str, tuple[str, ...]]


def closing_time(rules: AssignmentConfig) -> float | None:
    """Return when an assignment's teams become final, in Unix seconds: after its late period.

    The grace period does not count. An assignment that always accepts late work closes when it is
    due; one without a due time never closes.
    """
    if rules.due is None:
        return None
    return float(rules.due.at + (0 if rules.late == ANY_S else rules.late))


def read_frozen_members(
    entries: Iterable[CourseLedgerEntry], name: str, rules: AssignmentConfig
) -> Members | None:
    """Return the teams that were recorded when the assignment closed, or None before that.

    A line from before the closing time does not count: the due time was moved since.
    """
    closes_at = closing_time(rules)
    if closes_at is None:
        return None
    for entry in entries:
        if entry.kind == KIND and entry.detail.get("assignment") == name and entry.at >= closes_at:
            seats: dict[str, list[str]] = entry.detail["seats"]
            return {seat: tuple(students) for seat, students in seats.items()}
    return None


def draft_closed_line(name: str, members: Members, by: str, why: str) -> CourseLedgerDraft:
    """Return the ledger's line for an assignment that closed with these teams."""
    detail = {
        "assignment": name,
        "seats": {seat: list(students) for seat, students in members.items()},
    }
    return CourseLedgerDraft(kind=KIND, by=by, why=why, detail=detail)
