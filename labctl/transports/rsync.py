"""Run rsync over a transport's own ssh. It ends when this process or its transfer ends."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from labctl.commands import rsync
from labctl.config import copy_environment
from labctl.errors import LabError, TransferError
from labctl.model import Endpoint, Value
from labctl.parallel import on_cancel, start_daemon
from labctl.transports import RemoteShell, failures

KEPT_BYTES = 64 * 1024  # how much of the end of rsync's output is kept
END_S = 3.0  # seconds from SIGTERM to SIGKILL
# rsync continues after the reader of its progress has exited. So a second process waits, and ends
# the process group once the other end of a pipe is closed, as happens when labctl is killed. (The
# pipe is opened by path: some shells cannot redirect descriptors above 9.)
GUARDED = '(exec >/dev/null 2>&1; cat "/dev/fd/$0" && kill -TERM 0) & exec "$@"'


class RsyncUnusableError(Exception):
    """The two rsyncs are incompatible, or output of a login shell disturbs them."""


class CopyResult(Value, frozen=True):
    """The result of a transfer. `sent_bytes` went over the network.

    `complaint` is rsync's output about skipped files. `is_disk_error`: a file could not be
    written, and the transfer ended there.
    """

    sent_bytes: int = 0
    complaint: str = ""
    is_disk_error: bool = False


@functools.cache
def find_program() -> rsync.RsyncProgram:
    """Find this machine's rsync and its options; none if it is not installed."""
    try:
        result = subprocess.run(
            ["rsync", "--help"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=_copy_environment_without_rsync(),
        )
    except OSError:
        return rsync.RsyncProgram()
    return rsync.parse_program((result.stdout + result.stderr).decode(errors="replace"))


def copy(
    endpoint: Endpoint,
    shell: RemoteShell,
    argv: list[str],
    names: bytes,
    on_bytes: Callable[[int], None],
    on_file: Callable[[str], None] | None = None,
) -> CopyResult:
    """Run `argv`, which reads `names`; `on_bytes` is called with the bytes copied so far.

    `on_file` is called with the path of each file that is complete, if `argv` asks for that.

    RsyncUnusableError if tar may work instead. LinkLostError and TransferError leave what has
    arrived.
    """
    with (
        _open_pipe() as alive,
        subprocess.Popen(
            ["sh", "-c", GUARDED, str(alive), *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_copy_environment_without_rsync(),
            process_group=0,
            # rsync inherits the transfer's lock and holds it, even if labctl is killed.
            close_fds=False,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        reading = start_daemon(functools.partial(_read_end, process.stderr))
        feeding = start_daemon(functools.partial(_feed, process.stdin, names))
        try:
            with on_cancel(lambda: _signal_group(process.pid, signal.SIGTERM)):
                output = _read_progress(process.stdout, on_bytes, on_file)
                code = process.wait()
        finally:
            _end(process)
            complaint = reading.result()
            feeding.result()
    if code in (0, *rsync.PARTIAL_CODES, rsync.FILE_ERROR_CODE):
        return CopyResult(
            sent_bytes=rsync.parse_sent_bytes(output),
            complaint=complaint if code else "",
            is_disk_error=code == rsync.FILE_ERROR_CODE,
        )
    raise _make_error(endpoint, shell, code, complaint)


@contextlib.contextmanager
def _open_pipe() -> Iterator[int]:
    """Yield the read end of a pipe, for a program to inherit; nothing is ever written to it."""
    reading, writing = os.pipe()
    os.set_inheritable(reading, True)
    try:
        yield reading
    finally:
        os.close(writing)
        os.close(reading)


def _make_error(endpoint: Endpoint, shell: RemoteShell, code: int, stderr: str) -> Exception:
    if code in rsync.UNUSABLE_CODES:
        return RsyncUnusableError(stderr)
    lost = bool(shell.control_path) and not Path(shell.control_path).exists()
    if code == rsync.SSH_FAILED_CODE or lost:
        return failures.make_link_lost_error(endpoint, "it was closed during a transfer")
    return _make_cut_short_error(code, stderr)


def _make_cut_short_error(code: int, stderr: str) -> LabError:
    end = f"rsync was ended by signal {-code}" if code < 0 else f"rsync exited with code {code}"
    why = "; ".join(part for part in (end, stderr.strip()[-300:]) if part)
    return TransferError("the transfer was cut short", why=why)


def _copy_environment_without_rsync() -> dict[str, str]:
    """Return this environment without the user's rsync settings, in the C locale for parsing."""
    env = {key: value for key, value in copy_environment().items() if not key.startswith("RSYNC_")}
    return {**env, "LC_ALL": "C"}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End rsync and the processes that it started (ssh, its second process), if still running."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        if process.poll() is None:
            _signal_group(process.pid, signal.SIGTERM)
            process.wait(END_S)
    # A process of the group that is still running would hold the pipes open.
    _signal_group(process.pid, signal.SIGKILL)


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _feed(pipe: IO[bytes], names: bytes) -> None:
    with contextlib.suppress(OSError):  # rsync exited before it read all names; it says why
        pipe.write(names)
        pipe.close()


def _read_progress(
    pipe: IO[bytes], on_bytes: Callable[[int], None], on_file: Callable[[str], None] | None
) -> str:
    """Report the progress that rsync prints; return the last KEPT_BYTES of its output."""
    output, line = b"", b""
    while chunk := os.read(pipe.fileno(), KEPT_BYTES):
        output = (output + chunk)[-KEPT_BYTES:]
        *lines, line = (line + chunk).replace(b"\r", b"\n").split(b"\n")
        texts = [text.decode(errors="replace") for text in lines]
        counts = [count for text in texts if (count := rsync.parse_progress(text)) is not None]
        if counts:
            on_bytes(counts[-1])
        if on_file is not None:
            for text in texts:
                if path := rsync.parse_complete_file(text):
                    on_file(path)
        line = line[-KEPT_BYTES:]
    return output.decode(errors="replace")


def _read_end(pipe: IO[bytes]) -> str:
    """Read a stream to its end; return the last KEPT_BYTES."""
    kept = b""
    while chunk := os.read(pipe.fileno(), KEPT_BYTES):
        kept = (kept + chunk)[-KEPT_BYTES:]
    return kept.decode(errors="replace")
