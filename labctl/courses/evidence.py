"""What graded submissions are compared by: read out of their bundles, never run."""

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
    folder: CourseFolder, handed: Sequence[Handed], made: Mapping[str, Record]
) -> dict[str, tuple[Flag, ...]]:
    """seat -> flags, for each of these that has a record."""
    facts = [_facts(folder, one, made[one.seat]) for one in handed if one.seat in made]
    return flags(facts)


def _facts(folder: CourseFolder, handed: Handed, made: Record) -> Facts:
    try:
        with Path(handed.bundle).open("rb") as file:
            inside = bundle.members(file)
            first = next(inside)
            file.seek(first.offset)
            found = manifest.decode(file.read(first.size))
            mentions = []
            for member in inside:
                if member.path.startswith("code/") and member.size <= MOST_CODE_BYTES:
                    file.seek(member.offset)
                    mentions += mentions_in(member.path, file.read(member.size))
    except (TransferError, StopIteration, OSError):
        return Facts(seat=handed.seat, comparison=made.comparison)
    return Facts(
        seat=handed.seat,
        pseudonym=folder.pseudonym(handed.seat),
        run=found.run,
        record=found.record,
        commit=found.code.commit,
        run_commit=found.code.run_commit,
        files=tuple(
            FileEntry(path=one.path, size=one.size, sha256=one.sha256) for one in found.files
        ),
        comparison=made.comparison,
        mentions=tuple(mentions),
    )
