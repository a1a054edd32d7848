"""The facts that graded submissions are compared by: read from their bundles, never executed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from labctl.courses.collect import Handed
from labctl.courses.grading.flags import Facts, Flag, flags, mentions_in
from labctl.courses.grading.record import Record
from labctl.courses.records.folder import CourseFolder
from labctl.errors import TransferError
from labctl.model import FileEntry
from labctl.submissions import bundle, manifest

# Larger files are data, whatever they are called.
MOST_CODE_BYTES = 1024 * 1024


def flagged(
    folder: CourseFolder, handed: Sequence[Handed], records: Mapping[str, Record]
) -> dict[str, tuple[Flag, ...]]:
    """Return the flags of each of these submissions that has a grade record, by seat."""
    facts = [
        _read_facts(folder, submission, records[submission.seat])
        for submission in handed
        if submission.seat in records
    ]
    return flags(facts)


def _read_facts(folder: CourseFolder, handed: Handed, record: Record) -> Facts:
    try:
        with Path(handed.bundle).open("rb") as file:
            members = bundle.members(file)
            first = next(members)
            file.seek(first.offset)
            bundle_manifest = manifest.decode(file.read(first.size))
            mentions = []
            for member in members:
                if member.path.startswith("code/") and member.size <= MOST_CODE_BYTES:
                    file.seek(member.offset)
                    mentions += mentions_in(member.path, file.read(member.size))
    except (TransferError, StopIteration, OSError):
        return Facts(seat=handed.seat, comparison=record.comparison)
    return Facts(
        seat=handed.seat,
        pseudonym=folder.pseudonym(handed.seat),
        run=bundle_manifest.run,
        record=bundle_manifest.record,
        commit=bundle_manifest.code.commit,
        run_commit=bundle_manifest.code.run_commit,
        files=tuple(
            FileEntry(path=file.path, size=file.size, sha256=file.sha256)
            for file in bundle_manifest.files
        ),
        comparison=record.comparison,
        mentions=tuple(mentions),
    )
