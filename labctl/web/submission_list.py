"""What was handed in, from the receiver's own list of receipts."""

from __future__ import annotations

import calendar
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from labctl.submissions.receipt import Receipt, Signed
from labctl.submissions.receiver import LOG
from labctl.web.view import HandIn


class HandIns:
    """Reads on where it stopped: receipts are only ever appended."""

    def __init__(self, drop: Path, key_of: Callable[[str], str]) -> None:
        self._key_of = key_of
        self._file = drop / LOG
        self._known: dict[str, tuple[HandIn, ...]] = {}
        self._read_to = 0
        self._which: tuple[int, int] = (0, 0)

    def read_on(self) -> None:
        """Read what was appended since the last time."""
        try:
            with self._file.open("rb") as file:
                about = _about(file.fileno())
                if about[:2] != self._which or about[2] < self._read_to:
                    self._known, self._read_to, self._which = {}, 0, about[:2]
                file.seek(self._read_to)
                whole, end, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            self._known, self._read_to = {}, 0
            return
        self._read_to += len(whole) + len(end)
        for line in whole.split(b"\n") if end else ():
            receipt = _read(line)
            if receipt is not None:
                before = self._known.get(receipt.student, ())
                self._known[receipt.student] = (*before, self._hand_in(receipt))

    def of(self, names: Iterable[str]) -> tuple[HandIn, ...]:
        """Those of any of these, the oldest first; of what `read_on` has read."""
        found = [one for name in names for one in self._known.get(name, ())]
        return tuple(sorted(found, key=lambda one: one.received))

    def _hand_in(self, receipt: Receipt) -> HandIn:
        return HandIn(
            assignment=receipt.assignment,
            number=receipt.number,
            by=receipt.student,
            by_key=self._key_of(receipt.student),
            received=receipt.received,
            late_s=receipt.late_s,
            penalty=receipt.penalty,
            run=receipt.run,
            size_bytes=receipt.bundle_bytes,
            sha256=receipt.bundle_sha256,
        )


def _about(descriptor: int) -> tuple[int, int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino, found.st_size


def _read(line: bytes) -> Receipt | None:
    try:
        return msgspec.json.decode(line, type=Signed).receipt
    except msgspec.MsgspecError:
        return None


def received_at(text: str) -> float:
    """Unix time of a receipt's `received`; 0.0 where it is none."""
    try:
        return float(calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ")))
    except ValueError:
        return 0.0
