"""Who forms which seat for an assignment, as the ledger has it from the moment it closed. Pure.

Until an assignment closes the roster decides. From then on a change of team counts for later
assignments only: nobody gets another team's grade, and nobody's grade goes to another team.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from labctl.config.course_schema import AssignmentConfig
from labctl.config.times import ANY_S
from labctl.courses.records.ledger_entries import Draft, Entry

KIND = "closed"
# Seat name -> its students' ids.
Members = Mapping[str, tuple[str, ...]]


def closing_time(rules: AssignmentConfig) -> float | None:
    """Return when an assignment closes for a student without an extension, in Unix seconds.

    One that takes late work for ever closes when it is due; one without a due time never does.
    """
    if rules.due is None:
        return None
    return float(rules.due.at + (0 if rules.late == ANY_S else rules.late))


def frozen_members(entries: Iterable[Entry], name: str, rules: AssignmentConfig) -> Members | None:
    """Return the members that were written down when the assignment closed, None before that.

    A line from before the closing time says nothing: the due time was moved since.
    """
    closes_at = closing_time(rules)
    if closes_at is None:
        return None
    for one in entries:
        if one.kind == KIND and one.detail.get("assignment") == name and one.at >= closes_at:
            seats: dict[str, list[str]] = one.detail["seats"]
            return {seat: tuple(students) for seat, students in seats.items()}
    return None


def closed_line(name: str, members: Members, by: str, why: str) -> Draft:
    """Return the ledger's line of an assignment that has closed with these members."""
    detail = {"assignment": name, "seats": {seat: list(them) for seat, them in members.items()}}
    return Draft(kind=KIND, by=by, why=why, detail=detail)
