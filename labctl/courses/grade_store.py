"""Where grades lie: grades/ASSIGNMENT/OWNER/, for the seat and for everybody of it.

A results.json that a person has edited is a correction: it is never overwritten.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from labctl.config.identity import write_private
from labctl.courses.grading import record as records
from labctl.courses.grading.record import FILE, OUTPUT, RESULTS, Record
from labctl.courses.grading.results import encode as encode_results
from labctl.courses.records.folder import CourseFolder
from labctl.courses.records.ledger import Draft

# The hashes of every results.json that grading wrote, each before the file itself.
WRITTEN = "results.sha256"


class Shelf:
    """One assignment's grades."""

    def __init__(self, folder: CourseFolder, name: str, by: str = "") -> None:
        self.folder = folder
        self.name = name
        self.by = by

    def place(self, owner: str) -> Path:
        """The directory of a seat's or a student's grade, perhaps not there."""
        return self.folder.grades / self.name / owner

    def read(self, owner: str) -> Record | None:
        """What is kept of a grade; None where there is none, or one of another labctl's."""
        try:
            return records.decode((self.place(owner) / FILE).read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None

    def output(self, owner: str) -> str:
        """What the submission's own program printed; "" where nothing."""
        try:
            return (self.place(owner) / OUTPUT).read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            return ""

    def is_corrected(self, owner: str) -> bool:
        """Whether a person has edited, or put there, this results.json."""
        place = self.place(owner)
        try:
            data = (place / RESULTS).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return False
        try:
            return _sha256(data) not in (place / WRITTEN).read_text().split()
        except FileNotFoundError:
            # Graded before hashes were kept: it is what its record says, or it was edited.
            made = self.read(owner)
        if made is None or made.raw is None:
            return True
        return not _same_json(data, encode_results(records.results_of(made)))

    def put(self, made: Record, *, fresh: bool, said: str | None = None) -> tuple[str, ...]:
        """Write a grade down for everybody of its seat. `said` None leaves what was printed.

        Feedback that was released stays as it was released. Returns whose results.json was left
        alone, since a person had edited it.
        """
        corrected = tuple(owner for owner in owners(made) if self.is_corrected(owner))
        for owner in owners(made):
            place = self.place(owner)
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            if said is not None:
                write_private(place / OUTPUT, said.encode("utf-8", "replace"))
            if owner not in corrected:
                _write_results(place, made)
        self.replace(made)
        if fresh:
            self._note(made)
        return corrected

    def replace(self, made: Record) -> None:
        for owner in owners(made):
            write_private(self.place(owner) / FILE, records.encode(made))

    def _note(self, made: Record) -> None:
        detail = {
            "assignment": self.name,
            "number": made.number,
            "sha256": made.bundle_sha256,
            "outcome": made.outcome,
            "score": made.score,
        }
        self.folder.ledger.append_all(
            [Draft(kind="graded", seat=made.seat, student=made.student, by=self.by, detail=detail)]
        )


def _write_results(place: Path, made: Record) -> None:
    if made.raw is None:
        (place / RESULTS).unlink(missing_ok=True)
        return
    data = encode_results(records.results_of(made))
    hashes = place / WRITTEN
    known = hashes.read_text().split() if hashes.exists() else []
    if _sha256(data) not in known:
        write_private(hashes, "".join(f"{one}\n" for one in [*known, _sha256(data)]).encode())
    write_private(place / RESULTS, data)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _same_json(one: bytes, other: bytes) -> bool:
    try:
        return bool(json.loads(one) == json.loads(other))
    except (ValueError, RecursionError):
        return False


def owners(made: Record) -> tuple[str, ...]:
    return tuple(dict.fromkeys((made.seat, *made.students)))
