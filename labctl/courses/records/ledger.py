"""What a course has spent and decided: one JSON line each, only ever appended.

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

from labctl.courses.records.ledger_entries import KINDS, Draft, Entry, joined
from labctl.courses.records.spending import (
    Living,
    Spent,
    allowance_usd,
    due_extensions,
    hours,
    spending,
    spent_usd,
)
from labctl.errors import LabError

LEDGER_FILE = "ledger.jsonl"
TAIL_BYTES = 64 * 1024

__all__ = [
    "Draft",
    "Entry",
    "Ledger",
    "Living",
    "Spent",
    "allowance_usd",
    "due_extensions",
    "hours",
    "spending",
    "spent_usd",
]


class Ledger:
    """One file. `tell` hears, in words, of every damage that was found and what became of it."""

    def __init__(
        self,
        path: Path,
        *,
        now: Callable[[], float] = time.time,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.path = path
        self.now = now
        self.tell = tell
        self._known: list[Entry] = []
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
    ) -> Entry:
        """Write one line; it is on disk when this returns. LabError where that cannot be."""
        draft = Draft(kind=kind, seat=seat, student=student, by=by, why=why, detail=detail)
        return self.append_all([draft])[0]

    def append_all(self, drafts: Sequence[Draft]) -> list[Entry]:
        """Write lines together, with one wait for the disk."""
        for draft in drafts:
            if draft.kind not in KINDS:
                raise ValueError(f"{draft.kind!r} is no kind of ledger line")
        if not drafts:
            return []
        try:
            with self._locked() as file:
                number = self._mend(file)
                entries = [
                    Entry(
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
                _write(file, b"".join(msgspec.json.encode(one) + b"\n" for one in entries))
        except OSError as error:
            raise LabError(
                f"cannot write {self.path}",
                why=error.strerror or str(error),
                hint=f"df -h {self.path.parent}   # then the same command again",
            ) from error
        return entries

    def entries(self, seat: str | None = None, kind: str | None = None) -> list[Entry]:
        """The lines so far, the oldest first: of one seat, of one kind, or all.

        `cost` lines that follow one another without a gap are given as one, at the place of the
        first: a term has many. A line that cannot be read is left out and told.
        """
        self._read_on()
        return [
            one
            for one in self._known
            if (seat is None or one.seat == seat) and (kind is None or one.kind == kind)
        ]

    def _read_on(self) -> None:
        """Read what was appended since the last time."""
        try:
            with self.path.open("rb") as file:
                about = os.fstat(file.fileno())
                this = (about.st_dev, about.st_ino)
                if this != self._file or about.st_size < self._read_to:
                    self._forget()
                    self._file = this
                file.seek(self._read_to)
                for line in file:
                    self._read(line)
        except FileNotFoundError:
            self._forget()

    def _read(self, line: bytes) -> None:
        if not line.endswith(b"\n"):
            self.tell(f"{self.path}: the last line was not written whole; it does not count")
            return
        self._read_to += len(line)
        if (entry := _decoded(line)) is not None:
            self._take(entry)
        elif line.strip():
            self.tell(f"{self.path}: a line after number {self._last} cannot be read")

    def _take(self, entry: Entry) -> None:
        """Keep a line, or make it a part of the one that it goes on from."""
        self._last = entry.n
        if entry.kind == "cost":
            key = (entry.seat, str(entry.detail.get("server_id", "")))
            place = self._open.get(key)
            if place is not None and (whole := joined(self._known[place], entry)) is not None:
                self._known[place] = whole
                return
            self._open[key] = len(self._known)
        self._known.append(entry)

    def _forget(self) -> None:
        self._known, self._open, self._read_to, self._last = [], {}, 0, 0

    @contextmanager
    def _locked(self) -> Iterator[int]:
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self.path, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield descriptor
        finally:
            os.close(descriptor)

    def _mend(self, file: int) -> int:
        """Put a torn last line aside; the number of the last whole line."""
        size = os.fstat(file).st_size
        number, torn = _end_of(file, size)
        if not torn:
            os.lseek(file, 0, os.SEEK_END)
            return number
        if (entry := _decoded(torn)) is not None:
            os.lseek(file, 0, os.SEEK_END)
            _write(file, b"\n")  # all of it is there but its end
            return entry.n
        aside = self.path.with_name(f"{self.path.name}.torn-{number + 1}")
        kept = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            _write(kept, torn + b"\n")
        finally:
            os.close(kept)
        os.ftruncate(file, size - len(torn))
        os.lseek(file, 0, os.SEEK_END)
        entry = Entry(
            n=number + 1,
            at=self.now(),
            kind="torn",
            detail={"bytes": len(torn), "kept": aside.name},
        )
        _write(file, msgspec.json.encode(entry) + b"\n")
        self.tell(f"{self.path}: the last line was not written whole; it was put into {aside.name}")
        return entry.n


_DECODER = msgspec.json.Decoder(Entry)


def _decoded(line: bytes) -> Entry | None:
    try:
        return _DECODER.decode(line)
    except msgspec.MsgspecError:
        return None


def _end_of(file: int, size: int) -> tuple[int, bytes]:
    """(the number of the last whole line that can be read, 0 for none; what follows its end)."""
    length = TAIL_BYTES
    while True:
        begin = max(0, size - length)
        whole, newline, torn = os.pread(file, size - begin, begin).rpartition(b"\n")
        number = _last_number(whole) if newline else 0
        if begin == 0 or (newline and number):
            return number, torn
        length *= 4  # a line may be as long as a roster


def _last_number(whole: bytes) -> int:
    for line in reversed(whole.split(b"\n")):
        entry = _decoded(line)
        if entry is not None:
            return entry.n
    return 0


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]
    os.fsync(file)
