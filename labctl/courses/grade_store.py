"""Stored grades: grades/ASSIGNMENT/OWNER/, one for each seat and each of its students.

A results.json that somebody has edited is a correction: it is never overwritten.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import msgspec

from labctl.config.identity import write_private
from labctl.courses.grading import record as records
from labctl.courses.grading.combine import ProgramOutput
from labctl.courses.grading.record import FILE, OUTPUT, RESULTS, TESTS_OUTPUT, GradeRecord
from labctl.courses.grading.results import encode as encode_results
from labctl.courses.grading.results import lateness_note, list_earlier_lateness_notes
from labctl.courses.records.folder import CourseFolder
from labctl.courses.records.ledger_entries import CourseLedgerDraft

# Hashes of every results.json that grading wrote; each is written before its file.
WRITTEN = "results.sha256"


class GradeStore:
    """The stored grades of one assignment."""

    def __init__(self, folder: CourseFolder, name: str, by: str = "") -> None:
        self.folder = folder
        self.name = name
        self.by = by

    def grade_directory(self, owner: str) -> Path:
        """Return the directory of a seat's or a student's grade. It may not exist."""
        return self.folder.grades / self.name / owner

    def read_record(self, owner: str) -> GradeRecord | None:
        """Return a grade's record, or None if it is missing or from a newer labctl."""
        try:
            return records.decode((self.grade_directory(owner) / FILE).read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read_output(self, owner: str) -> str:
        """Return what the submission's program printed, or "" if nothing."""
        try:
            return (self.grade_directory(owner) / OUTPUT).read_text(
                encoding="utf-8", errors="replace"
            )
        except (FileNotFoundError, NotADirectoryError):
            return ""

    def is_corrected(self, owner: str) -> bool:
        """Tell whether somebody has edited or added this results.json."""
        place = self.grade_directory(owner)
        try:
            data = (place / RESULTS).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return False
        try:
            return _sha256(data) not in (place / WRITTEN).read_text().split()
        except FileNotFoundError:
            # Graded before hashes were stored: either it matches its record, or it was edited.
            record = self.read_record(owner)
        if record is None or record.raw is None:
            return True
        return not _is_written_for(data, record)

    def store_grade(
        self, record: GradeRecord, *, fresh: bool, output: ProgramOutput | None = None
    ) -> tuple[str, ...]:
        """Store a grade for its seat and each student of it; `output` None keeps the stored output.

        Released feedback does not change. Returns the owners whose results.json was left alone
        because somebody had edited it.
        """
        corrected = tuple(owner for owner in list_owners(record) if self.is_corrected(owner))
        for owner in list_owners(record):
            place = self.grade_directory(owner)
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            if output is not None:
                _write_output(place, output)
            if owner not in corrected:
                _write_results(place, record)
        self.replace_record(record)
        if fresh:
            self._record_graded(record)
        return corrected

    def replace_record(self, record: GradeRecord) -> None:
        for owner in list_owners(record):
            write_private(self.grade_directory(owner) / FILE, records.encode(record))

    def _record_graded(self, record: GradeRecord) -> None:
        detail = {
            "assignment": self.name,
            "number": record.number,
            "sha256": record.bundle_sha256,
            "outcome": record.outcome,
            "score": record.score,
        }
        self.folder.ledger.append_all(
            [
                CourseLedgerDraft(
                    kind="graded",
                    seat=record.seat,
                    student=record.student,
                    by=self.by,
                    detail=detail,
                )
            ]
        )


def _write_output(place: Path, output: ProgramOutput) -> None:
    write_private(place / OUTPUT, output.printed.encode("utf-8", "replace"))
    if output.private:
        write_private(place / TESTS_OUTPUT, output.private.encode("utf-8", "replace"))
    else:
        (place / TESTS_OUTPUT).unlink(missing_ok=True)


def _write_results(place: Path, record: GradeRecord) -> None:
    if record.raw is None:
        (place / RESULTS).unlink(missing_ok=True)
        return
    data = encode_results(records.build_results(record))
    hashes = place / WRITTEN
    digests = hashes.read_text().split() if hashes.exists() else []
    if _sha256(data) not in digests:
        write_private(
            hashes, "".join(f"{digest}\n" for digest in [*digests, _sha256(data)]).encode()
        )
    write_private(place / RESULTS, data)


def _is_written_for(data: bytes, record: GradeRecord) -> bool:
    """Tell whether this results.json is what this or an earlier version wrote for the record."""
    assert record.raw is not None
    results = records.build_results(record)
    free_days = record.free_days.text
    lateness = (record.raw.score, record.points, record.penalty, record.late_s, free_days)
    versions = [results]
    if note := lateness_note(*lateness):
        text = results.output.removesuffix(note)
        versions += [
            msgspec.structs.replace(results, output=text + earlier)
            for earlier in list_earlier_lateness_notes(*lateness)
        ]
    return any(_is_same_json(data, encode_results(version)) for version in versions)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _is_same_json(data: bytes, other: bytes) -> bool:
    try:
        return bool(json.loads(data) == json.loads(other))
    except (ValueError, RecursionError):
        return False


def list_owners(record: GradeRecord) -> tuple[str, ...]:
    return tuple(dict.fromkeys((record.seat, *record.students)))
