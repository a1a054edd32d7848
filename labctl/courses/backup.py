"""The copy of the ledger in the course's store: saved when it has grown, restored when it is lost.

After a keeper was set up on a new machine, each side may have lines that the other lacks. Every
such line is imported once, with its original time.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from labctl.courses.records.folder import CourseFolder
from labctl.courses.records.ledger_entries import CourseLedgerDraft, CourseLedgerEntry
from labctl.courses.servers import CourseOperator
from labctl.decoding import decode_json
from labctl.errors import PolicyError
from labctl.stores import LabStore, lab_store

LEDGER, IDENTITY = "ledger.jsonl", "course.json"


def open_course_store(staff: CourseOperator) -> LabStore | None:
    """Return the course's store, or None if course.yaml names none."""
    context = staff.course()
    return lab_store.open_lab_store(context) if context.config.store else None


class LedgerBackup:
    """The backup of one course's ledger. `save` writes nothing if nothing has changed."""

    def __init__(self, folder: CourseFolder, place: LabStore) -> None:
        self.folder = folder
        self.place = place
        self._saved = -1

    def restore(self) -> int:
        """Import the lines that only the store has; return how many there were.

        PolicyError if the store's ledger belongs to another course, or to this one under another
        secret: its seats would not match.
        """
        identity = (self.folder.private / IDENTITY).read_bytes()
        stored_identity = self.place.read(IDENTITY)
        if stored_identity is not None and stored_identity.strip() != identity.strip():
            raise PolicyError(
                f"{self.place.url} holds the ledger of another course",
                why="its secret differs from this folder's, so its seats have other names",
                hint=f"restore the .course/{IDENTITY} that belongs to it, or use another store",
            )
        stored = self.place.read(LEDGER)
        missing = _find_missing(self.folder.ledger.list_entries(), _parse_entries(stored or b""))
        self.folder.ledger.append_all(missing)
        return len(missing)

    def save(self) -> bool:
        """Write the ledger to the store if it has grown; return whether it had."""
        entries = self.folder.ledger.list_entries()
        if len(entries) == self._saved:
            return False
        if self._saved < 0:
            self.place.write(IDENTITY, (self.folder.private / IDENTITY).read_bytes())
        lines = (msgspec.json.encode(entry) + b"\n" for entry in entries)
        self.place.write(LEDGER, b"".join(lines))
        self._saved = len(entries)
        return True


def _parse_entries(data: bytes) -> list[CourseLedgerEntry]:
    """Parse the lines of a ledger; skip those that cannot be read."""
    entries = []
    for line in data.splitlines():
        try:
            entries.append(decode_json(line, CourseLedgerEntry))
        except msgspec.MsgspecError:
            continue
    return entries


def _find_missing(
    own: Sequence[CourseLedgerEntry], stored: Sequence[CourseLedgerEntry]
) -> list[CourseLedgerDraft]:
    """Return the lines of `stored` that `own` lacks. Line numbers do not count."""
    own_contents = {_encode_content(entry) for entry in own}
    return [
        CourseLedgerDraft(
            kind=entry.kind,
            seat=entry.seat,
            student=entry.student,
            by=entry.by,
            why=entry.why,
            detail=entry.detail,
            at=entry.at,
        )
        for entry in stored
        if _encode_content(entry) not in own_contents
    ]


def _encode_content(entry: CourseLedgerEntry) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(entry, n=0), order="deterministic")
