"""Excuses of students from assignments, which then count neither as 0 nor as late. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from labctl.courses.records.ledger_entries import CourseLedgerDraft, CourseLedgerEntry
from labctl.model import Value

KIND = "excuse"


class Excuse(Value, frozen=True):
    """A student's excuse from an assignment, with who granted it and why."""

    assignment: str
    student: str
    by: str = ""
    why: str = ""
    at: float = 0.0

    @property
    def text(self) -> str:
        return f"excused: {self.why}" if self.why else "excused"


def read_excuses(
    entries: Iterable[CourseLedgerEntry], assignment: str = ""
) -> dict[tuple[str, str], Excuse]:
    """Return (assignment, student) -> the excuse in force, of one assignment or of all."""
    excuses: dict[tuple[str, str], Excuse] = {}
    for entry in entries:
        name = str(entry.detail.get("assignment", ""))
        if entry.kind != KIND or assignment not in ("", name):
            continue
        if entry.detail.get("excused"):
            excuses[name, entry.student] = Excuse(
                assignment=name, student=entry.student, by=entry.by, why=entry.why, at=entry.at
            )
        else:
            excuses.pop((name, entry.student), None)
    return excuses


def draft_excuse_line(
    assignment: str, seat: str, student: str, *, excused: bool, by: str = "", why: str = ""
) -> CourseLedgerDraft:
    """Return the ledger's line for an excuse, or for taking it back."""
    detail = {"assignment": assignment, "excused": excused}
    return CourseLedgerDraft(kind=KIND, seat=seat, student=student, by=by, why=why, detail=detail)
