"""The facts that graded submissions are compared by: read from their bundles, never executed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from labctl.courses.collect import SeatSubmission
from labctl.courses.grading.flags import (
    Flag,
    SubmissionFacts,
    SubmittedRun,
    find_flags,
    find_mentions,
)
from labctl.courses.grading.record import GradeRecord
from labctl.courses.handed_out import hash_handed_out_files
from labctl.courses.records.folder import CourseFolder
from labctl.decoding import convert_value
from labctl.errors import TransferError
from labctl.model import FileEntry
from labctl.submissions import bundle, manifest

# Larger files are data, whatever they are called.
MOST_CODE_BYTES = 1024 * 1024


def flag_submissions(
    folder: CourseFolder,
    handed: Sequence[SeatSubmission],
    records: Mapping[str, GradeRecord],
    templates: Path,
) -> dict[str, tuple[Flag, ...]]:
    """Return the flags of each of these submissions that has a grade record, by seat.

    `templates` holds the templates of labctl, whose files are nobody's own work either.
    """
    handed_out = hash_handed_out_files(folder, templates)
    facts = [
        _read_facts(folder, submission, records[submission.seat], handed_out)
        for submission in handed
        if submission.seat in records
    ]
    return find_flags(facts)


def _read_facts(
    folder: CourseFolder,
    handed: SeatSubmission,
    record: GradeRecord,
    handed_out: Collection[str],
) -> SubmissionFacts:
    try:
        with Path(handed.bundle).open("rb") as file:
            members = bundle.read_members(file)
            first = next(members)
            file.seek(first.offset)
            bundle_manifest = manifest.decode(file.read(first.size))
            own_files = [one for one in bundle_manifest.files if one.sha256 not in handed_out]
            own_paths = {one.path for one in own_files if one.path.startswith("code/")}
            mentions = []
            for member in members:
                if member.path in own_paths and member.size <= MOST_CODE_BYTES:
                    file.seek(member.offset)
                    mentions += find_mentions(member.path, file.read(member.size))
    except (TransferError, StopIteration, OSError):
        return SubmissionFacts(seat=handed.seat, comparison=record.comparison)
    run = bundle_manifest.record
    return SubmissionFacts(
        seat=handed.seat,
        pseudonym=folder.pseudonym(handed.seat),
        run=bundle_manifest.run,
        record=convert_value(run, SubmittedRun) if run else None,
        commit=bundle_manifest.code.commit,
        run_commit=bundle_manifest.code.run_commit,
        files=tuple(
            FileEntry(path=file.path, size=file.size, sha256=file.sha256) for file in own_files
        ),
        comparison=record.comparison,
        mentions=tuple(mentions),
    )
