"""What was handed in, from the receiver's own list of receipts."""

from __future__ import annotations

import calendar
import os
import time
from pathlib import Path

import msgspec

from labctl.dashboard.view import HandIn
from labctl.submissions.receipt import Receipt, Signed
from labctl.submissions.receiver import LOG


class HandIns:
    """Reads on where it stopped: receipts are only ever appended."""

    def __init__(self, drop: Path) -> None:
        self._file = drop / LOG
        self._known: dict[str, tuple[HandIn, ...]] = {}
        self._read_to = 0
        self._which: tuple[int, int] = (0, 0)

    def by_student(self) -> dict[str, tuple[HandIn, ...]]:
        """Student (or team) -> their hand-ins, the oldest first."""
        try:
            with self._file.open("rb") as file:
                about = _about(file.fileno())
                if about[:2] != self._which or about[2] < self._read_to:
                    self._known, self._read_to, self._which = {}, 0, about[:2]
                file.seek(self._read_to)
                whole, end, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return {}
        self._read_to += len(whole) + len(end)
        for line in whole.split(b"\n") if end else ():
            receipt = _read(line)
            if receipt is not None:
                before = self._known.get(receipt.student, ())
                self._known[receipt.student] = (*before, _hand_in(receipt))
        return self._known


def _about(descriptor: int) -> tuple[int, int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino, found.st_size


def _read(line: bytes) -> Receipt | None:
    try:
        return msgspec.json.decode(line, type=Signed).receipt
    except msgspec.MsgspecError:
        return None


def _hand_in(receipt: Receipt) -> HandIn:
    return HandIn(
        assignment=receipt.assignment,
        number=receipt.number,
        received=receipt.received,
        late_s=receipt.late_s,
        penalty=receipt.penalty,
        run=receipt.run,
        size_bytes=receipt.bundle_bytes,
        sha256=receipt.bundle_sha256,
    )


def received_at(text: str) -> float:
    """Unix time of a receipt's `received`; 0.0 where it is none."""
    try:
        return float(calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ")))
    except ValueError:
        return 0.0
