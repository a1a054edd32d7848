"""Examining a student's bundle in a confined process; `confinement` has the details.

The receiver's account may hold cloud credentials. So a submission is parsed by a process of its
own, with an empty environment and only the bundle open. Two values of its reply are used: the run's
name and the manifest's hash. The student and the assignment are known to the receiver itself.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from labctl.decoding import decode_json
from labctl.errors import LabError, TransferError
from labctl.lazy import lazy_imports
from labctl.model import Value
from labctl.submissions.confinement import confine, end_with_parent
from labctl.submissions.intake import Examined, Expected, examine
from labctl.submissions.manifest import make_refusal_error
from labctl.submissions.untrusted_json import decode_untrusted_json
from labctl.wire.judge import judge_file

with lazy_imports(__name__):
    import filelock

MEMORY_BYTES = 1024**3
CPU_S = 300
# One more second of CPU time beyond CPU_S for this many bytes; unpacking needs far less.
BYTES_PER_S = 1_000_000
MAX_AT_ONCE = 4
_WAIT_FACTOR = 4
_MAX_REPLY_BYTES = 256 * 1024
_BROKEN = "examining it exceeded the memory or time limit, or crashed the examining process"


class _ExaminationOrder(Value, frozen=True):
    """The request to the confined process."""

    expected: Expected
    memory_bytes: int
    cpu_s: int


class _ExaminationReply(Value, frozen=True):
    """The reply; exactly one field is set. `failed` is the receiver's fault, not the bundle's."""

    examined: Examined | None = None
    refused: str = ""
    failed: str = ""


def examine_confined(path: Path, expected: Expected, slots: Path) -> Examined:
    """Examine the bundle at `path` in a confined process.

    `slots` is a directory of lock files that limit how many are examined at the same time.

    Raises:
        TransferError: it is not the expected bundle, it is harmful, or examining it took too much.
    """
    order = _ExaminationOrder(expected, MEMORY_BYTES, CPU_S + path.stat().st_size // BYTES_PER_S)
    words = [sys.executable, "-P", "-m", "labctl.submissions.examination"]
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with _hold_slot(slots, expected.student), path.open("rb") as file:
        process = subprocess.Popen(
            [*words, msgspec.json.encode(order).decode()],
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        # For a process that sleeps and never ends; the kernel limits its CPU time.
        timer = threading.Timer(_WAIT_FACTOR * order.cpu_s, process.kill)
        timer.start()
        with process:
            assert process.stdout is not None
            text = process.stdout.read(_MAX_REPLY_BYTES + 1)
            process.kill()
        timer.cancel()
    try:
        reply = decode_untrusted_json(text, _ExaminationReply)
    except ValueError:
        raise make_refusal_error(_BROKEN) from None
    if reply.failed:
        raise LabError("the receiver cannot examine bundles", why=reply.failed)
    if reply.examined is None:
        raise make_refusal_error(reply.refused or _BROKEN)
    return reply.examined


@contextmanager
def _hold_slot(directory: Path, student: str) -> Iterator[None]:
    """Hold one of the slots for examining bundles; wait if all are in use."""
    # Not state.locks, which writes a note: on a full disk that would fail.
    count = min(MAX_AT_ONCE, os.cpu_count() or 1)
    first = zlib.crc32(student.encode()) % count
    with ExitStack() as held:
        for attempt in range(count + 1):
            # If all are in use, wait for the student's own slot.
            timeout_s = 0.0 if attempt < count else -1.0
            file = directory / f".examining.{(first + attempt) % count}"
            with suppress(filelock.Timeout):
                held.enter_context(
                    filelock.FileLock(file, timeout_s, mode=0o600, fallback_to_soft=False)
                )
                break
        yield


def main() -> None:
    """Run the confined process: the bundle is on standard input, the order in its argument."""
    end_with_parent()
    order = decode_json(sys.argv[1], _ExaminationOrder)
    with os.fdopen(0, "rb", closefd=False) as file:
        reply = _examine_order(file, order)
    sys.stdout.buffer.write(msgspec.json.encode(reply))
    sys.stdout.buffer.flush()
    os._exit(0)  # Python's own shutdown would need calls that are not permitted


def _examine_order(file: BinaryIO, order: _ExaminationOrder) -> _ExaminationReply:
    try:
        _import_everything()
        confine(order.memory_bytes, order.cpu_s)
    except (LabError, OSError, ValueError) as error:
        return _ExaminationReply(failed=str(error))
    try:
        return _ExaminationReply(examined=examine(file, order.expected))
    except TransferError as error:
        return _ExaminationReply(refused=error.why)
    except (MemoryError, RecursionError):
        return _ExaminationReply(refused=_BROKEN)


def _import_everything() -> None:
    """Import everything that Python otherwise imports when it first reads a file of each kind."""
    for name in ("cp437", "raw_unicode_escape", "unicode_escape", "latin-1", "ascii", "utf-8"):
        "a".encode(name)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as writer:
        writer.writestr("größe.pkl", b"\x80\x02}.")
    array = b"{'descr': '|O', 'shape': (1,)}"
    for content in (
        archive.getvalue(),
        b"\x80\x02cposix\nsystem\nV\\u0061\nS'a'\n.",
        b"\x93NUMPY\x01\0" + len(array).to_bytes(2, "little") + array,
        b"\x1f\x8b" + bytes(50),
        json.dumps({}).encode(),
        bytes(512),
    ):
        judge_file("model/a.pt", io.BytesIO(content), len(content))
    for data in (b"", bytes(1024)):
        try:
            examine(io.BytesIO(data), Expected("a", "", "a"))
        except TransferError as error:
            str(error)


if __name__ == "__main__":
    main()
