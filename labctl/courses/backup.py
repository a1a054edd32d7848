"""The ledger's copy in the course's store: written when it has grown, brought back when it is lost.

Both may have lines that the other has not, after a keeper was set up anew somewhere. Then each line
is taken over once, with the time that it bears.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from labctl.courses.records.folder import CourseFolder
from labctl.courses.records.ledger import Draft, Entry
from labctl.courses.servers import Staff
from labctl.errors import PolicyError
from labctl.stores import Store, lab_store

LEDGER, IDENTITY = "ledger.jsonl", "course.json"


def course_store(staff: Staff) -> Store | None:
    """The course's own place in its store; None where course.yaml names none."""
    ground = staff.course()
    return lab_store.lab_store(ground) if ground.config.store else None


class Backup:
    """One course's copy. `save` costs nothing where nothing has changed."""

    def __init__(self, folder: CourseFolder, place: Store) -> None:
        self.folder = folder
        self.place = place
        self._saved = -1

    def bring_back(self) -> int:
        """Take over what only the store has; how many lines that were.

        PolicyError where the store's ledger is of another course, or of this one under another
        secret: its seats would be strangers.
        """
        own = (self.folder.private / IDENTITY).read_bytes()
        there = self.place.read(IDENTITY)
        if there is not None and there.strip() != own.strip():
            raise PolicyError(
                f"{self.place.url} keeps the ledger of another course",
                why="its secret differs from this folder's, so that its seats have other names",
                hint=f"put the .course/{IDENTITY} back that belongs to it, or name another store",
            )
        kept = self.place.read(LEDGER)
        news = missing(self.folder.ledger.entries(), parsed(kept or b""))
        self.folder.ledger.append_all(news)
        return len(news)

    def save(self) -> bool:
        """Write the ledger there if it has grown since; whether it had."""
        entries = self.folder.ledger.entries()
        if len(entries) == self._saved:
            return False
        if self._saved < 0:
            self.place.write(IDENTITY, (self.folder.private / IDENTITY).read_bytes())
        lines = (msgspec.json.encode(one) + b"\n" for one in entries)
        self.place.write(LEDGER, b"".join(lines))
        self._saved = len(entries)
        return True


def parsed(data: bytes) -> list[Entry]:
    """The lines of a ledger; what cannot be read is left out."""
    found = []
    for line in data.splitlines():
        try:
            found.append(msgspec.json.decode(line, type=Entry))
        except msgspec.MsgspecError:
            continue
    return found


def missing(own: Sequence[Entry], kept: Sequence[Entry]) -> list[Draft]:
    """What `kept` has and `own` has not, whatever their numbers."""
    known = {_content(one) for one in own}
    return [
        Draft(
            kind=one.kind,
            seat=one.seat,
            student=one.student,
            by=one.by,
            why=one.why,
            detail=one.detail,
            at=one.at,
        )
        for one in kept
        if _content(one) not in known
    ]


def _content(entry: Entry) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(entry, n=0), order="deterministic")
