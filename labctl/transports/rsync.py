"""Runs rsync over a transport's own ssh. It ends with this process, and with its transfer."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from labctl.commands import rsync
from labctl.errors import LabError, TransferError
from labctl.model import Endpoint, Value
from labctl.transports import RemoteShell, failures

KEPT_BYTES = 64 * 1024  # of what rsync prints, its end
END_S = 3.0  # how long an rsync that is to end may take before it is killed
# rsync goes on when whoever reads its progress is gone. So a process beside it waits, and ends the
# process group once the other end of a pipe is closed, as it is when labctl is killed. (By path:
# some shells redirect no descriptors above 9.)
GUARDED = '(exec >/dev/null 2>&1; cat "/dev/fd/$0" && kill -TERM 0) & exec "$@"'


class RsyncUnusableError(Exception):
    """The two rsyncs cannot talk to each other, or a login shell disturbs them."""


class Copied(Value, frozen=True):
    """What a transfer did. `sent_bytes` had to travel; `complaint` is about files left out.

    `is_disk_error` says that a file could not be written: the transfer ended there.
    """

    sent_bytes: int = 0
    complaint: str = ""
    is_disk_error: bool = False


@functools.cache
def find_program() -> rsync.RsyncProgram:
    """This machine's rsync; without options where it is not installed."""
    try:
        done = subprocess.run(
            ["rsync", "--help"], stdin=subprocess.DEVNULL, capture_output=True, env=_environment()
        )
    except OSError:
        return rsync.RsyncProgram()
    return rsync.parse_program((done.stdout + done.stderr).decode(errors="replace"))


def copy(
    endpoint: Endpoint,
    shell: RemoteShell,
    argv: list[str],
    names: bytes,
    on_bytes: Callable[[int], None],
) -> Copied:
    """Run `argv`, which reads `names`; `on_bytes` hears how many bytes of the files are done.

    RsyncUnusableError where a stream may do better. LinkLostError and TransferError leave what has
    arrived.
    """
    with (
        _open_pipe() as alive,
        subprocess.Popen(
            ["sh", "-c", GUARDED, str(alive), *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(),
            process_group=0,
            # The transfer's lock stays held as long as rsync lives, even where labctl is killed.
            close_fds=False,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        errors = _ErrorOutput(process.stderr)
        feeding = threading.Thread(target=_feed, args=(process.stdin, names), daemon=True)
        feeding.start()
        try:
            output = _read_progress(process.stdout, on_bytes)
            code = process.wait()
        finally:
            _end(process)
            complaint = errors.text()
            feeding.join()
    if code in (0, *rsync.PARTIAL_CODES, rsync.FILE_ERROR_CODE):
        return Copied(
            sent_bytes=rsync.parse_sent_bytes(output),
            complaint=complaint if code else "",
            is_disk_error=code == rsync.FILE_ERROR_CODE,
        )
    raise _failure(endpoint, shell, code, complaint)


@contextlib.contextmanager
def _open_pipe() -> Iterator[int]:
    """A pipe's reading end, for a program to inherit; nothing is ever written to the other."""
    reading, writing = os.pipe()
    os.set_inheritable(reading, True)
    try:
        yield reading
    finally:
        os.close(writing)
        os.close(reading)


def _failure(endpoint: Endpoint, shell: RemoteShell, code: int, said: str) -> Exception:
    if code in rsync.UNUSABLE_CODES:
        return RsyncUnusableError(said)
    lost = bool(shell.control_path) and not Path(shell.control_path).exists()
    if code == rsync.SSH_FAILED_CODE or lost:
        return failures.lost(endpoint, "it ended in the middle of a transfer")
    return _cut(code, said)


def _cut(code: int, said: str) -> LabError:
    ended = f"rsync ended with signal {-code}" if code < 0 else f"rsync ended with code {code}"
    why = "; ".join(part for part in (ended, said.strip()[-300:]) if part)
    return TransferError("the transfer was cut short", why=why)


def _environment() -> dict[str, str]:
    """Without the user's settings for rsync, and with numbers and words as they are parsed."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RSYNC_")}
    return {**kept, "LC_ALL": "C"}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End rsync, and whatever it started (ssh, its own second process), if they are not over."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        if process.poll() is None:
            _signal_group(process.pid, signal.SIGTERM)
            process.wait(END_S)
    # A part of it that went on alone would hold the pipes open.
    _signal_group(process.pid, signal.SIGKILL)


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _feed(pipe: IO[bytes], names: bytes) -> None:
    with contextlib.suppress(OSError):  # it ended without reading them all, and says why
        pipe.write(names)
        pipe.close()


def _read_progress(pipe: IO[bytes], on_bytes: Callable[[int], None]) -> str:
    """Tell what is done, line by line as rsync draws it; the end of what it printed."""
    kept, line = b"", b""
    while chunk := os.read(pipe.fileno(), KEPT_BYTES):
        kept = (kept + chunk)[-KEPT_BYTES:]
        *lines, line = (line + chunk).replace(b"\r", b"\n").split(b"\n")
        done = [rsync.parse_progress(one.decode(errors="replace")) for one in lines]
        known = [one for one in done if one is not None]
        if known:
            on_bytes(known[-1])
        line = line[-KEPT_BYTES:]
    return kept.decode(errors="replace")


class _ErrorOutput:
    """The end of a stream, read beside everything else."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._kept = b""
        self._thread = threading.Thread(target=self._read, args=(pipe,), daemon=True)
        self._thread.start()

    def _read(self, pipe: IO[bytes]) -> None:
        while chunk := os.read(pipe.fileno(), KEPT_BYTES):
            self._kept = (self._kept + chunk)[-KEPT_BYTES:]

    def text(self) -> str:
        self._thread.join()
        return self._kept.decode(errors="replace")
