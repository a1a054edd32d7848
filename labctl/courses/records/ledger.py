"""The ledger of a course: what it has spent and decided, as JSON lines that are only appended.

Several processes may append at once. Every line is on disk when `append` returns.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from labctl.courses.records.ledger_entries import (
    KINDS,
    CourseLedgerDraft,
    CourseLedgerEntry,
    merge_cost_entries,
)
from labctl.errors import LabError

TAIL_BYTES = 64 * 1024


class Ledger:
    """The ledger of one course. `notify` is called with a message about any damage in the file."""

    def __init__(
        self,
        path: Path,
        *,
        now: Callable[[], float] = time.time,
        notify: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.path = path
        self.now = now
        self.notify = notify
        self._known: list[CourseLedgerEntry] = []
        self._open: dict[tuple[str, str], int] = {}
        self._read_to = 0
        self._last = 0
        self._file: tuple[int, int] = (0, 0)

    def append(
        self,
        kind: str,
        *,
        seat: str = "",
        student: str = "",
        by: str = "",
        why: str = "",
        **detail: Any,
    ) -> CourseLedgerEntry:
        """Append one line and sync it to disk; LabError if that fails."""
        draft = CourseLedgerDraft(
            kind=kind, seat=seat, student=student, by=by, why=why, detail=detail
        )
        return self.append_all([draft])[0]

    def append_all(
        self,
        drafts: Sequence[CourseLedgerDraft],
        *,
        check: Callable[[], None] = lambda: None,
    ) -> list[CourseLedgerEntry]:
        """Append lines together, with one sync to disk.

        `check` is called while no other process can append; it may read the lines. If it raises an
        error, nothing is appended.
        """
        for draft in drafts:
            if draft.kind not in KINDS:
                raise ValueError(f"{draft.kind!r} is not a kind of ledger line")
        if not drafts:
            return []
        try:
            with self._lock_file() as file:
                number = self._repair_end(file)
                check()
                entries = [
                    CourseLedgerEntry(
                        n=number + place,
                        at=self.now() if draft.at is None else draft.at,
                        kind=draft.kind,
                        seat=draft.seat,
                        student=draft.student,
                        by=draft.by,
                        why=draft.why,
                        detail=draft.detail,
                    )
                    for place, draft in enumerate(drafts, 1)
                ]
                _write(file, b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries))
        except OSError as error:
            raise LabError(
                f"cannot write {self.path}",
                why=error.strerror or str(error),
                hint=f"df -h {self.path.parent}   # then repeat the command",
            ) from error
        return entries

    def list_entries(
        self, seat: str | None = None, kind: str | None = None
    ) -> list[CourseLedgerEntry]:
        """Return the lines so far, the oldest first, optionally of one seat or one kind.

        Consecutive `cost` lines without a gap are merged into the first: a term has many. A line
        that cannot be read is skipped and reported.
        """
        self._read_new_lines()
        return [
            entry
            for entry in self._known
            if (seat is None or entry.seat == seat) and (kind is None or entry.kind == kind)
        ]

    def _read_new_lines(self) -> None:
        """Read the lines that were appended since the last read."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                file_id = (status.st_dev, status.st_ino)
                if file_id != self._file or status.st_size < self._read_to:
                    self._forget()
                    self._file = file_id
                file.seek(self._read_to)
                for line in file:
                    self._read_line(line)
        except FileNotFoundError:
            self._forget()

    def _read_line(self, line: bytes) -> None:
        if not line.endswith(b"\n"):
            self.notify(f"{self.path}: the last line is incomplete; it is ignored")
            return
        self._read_to += len(line)
        if (entry := _decode(line)) is not None:
            self._store(entry)
        elif line.strip():
            self.notify(f"{self.path}: a line after number {self._last} cannot be read")

    def _store(self, entry: CourseLedgerEntry) -> None:
        """Store a line, or merge it into the one that it continues."""
        self._last = entry.n
        if entry.kind == "cost":
            key = (entry.seat, str(entry.detail.get("server_id", "")))
            place = self._open.get(key)
            if (
                place is not None
                and (merged := merge_cost_entries(self._known[place], entry)) is not None
            ):
                self._known[place] = merged
                return
            self._open[key] = len(self._known)
        self._known.append(entry)

    def _forget(self) -> None:
        self._known, self._open, self._read_to, self._last = [], {}, 0, 0

    @contextmanager
    def _lock_file(self) -> Iterator[int]:
        # Not state.locks, which keeps a note in the file: earlier versions lock the ledger itself.
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self.path, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield descriptor
        finally:
            os.close(descriptor)

    def _repair_end(self, file: int) -> int:
        """Move an incomplete last line to a file of its own; return the last line's number."""
        size = os.fstat(file).st_size
        number, torn = _find_end(file, size)
        if not torn:
            os.lseek(file, 0, os.SEEK_END)
            return number
        if (entry := _decode(torn)) is not None:
            os.lseek(file, 0, os.SEEK_END)
            _write(file, b"\n")  # only its newline was missing
            return entry.n
        aside = self.path.with_name(f"{self.path.name}.torn-{number + 1}")
        aside_file = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            _write(aside_file, torn + b"\n")
        finally:
            os.close(aside_file)
        os.ftruncate(file, size - len(torn))
        os.lseek(file, 0, os.SEEK_END)
        entry = CourseLedgerEntry(
            n=number + 1,
            at=self.now(),
            kind="torn",
            detail={"bytes": len(torn), "kept": aside.name},
        )
        _write(file, msgspec.json.encode(entry) + b"\n")
        self.notify(f"{self.path}: the last line was incomplete; it was moved to {aside.name}")
        return entry.n


_DECODER = msgspec.json.Decoder(CourseLedgerEntry)


def _decode(line: bytes) -> CourseLedgerEntry | None:
    try:
        return _DECODER.decode(line)
    except msgspec.MsgspecError:
        return None


def _find_end(file: int, size: int) -> tuple[int, bytes]:
    """Return the number of the last complete, readable line (0 for none), and what follows it."""
    length = TAIL_BYTES
    while True:
        begin = max(0, size - length)
        complete, newline, torn = os.pread(file, size - begin, begin).rpartition(b"\n")
        number = _last_number(complete) if newline else 0
        if begin == 0 or (newline and number):
            return number, torn
        length *= 4  # a line may be as long as a roster


def _last_number(complete: bytes) -> int:
    for line in reversed(complete.split(b"\n")):
        entry = _decode(line)
        if entry is not None:
            return entry.n
    return 0


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]
    os.fsync(file)
