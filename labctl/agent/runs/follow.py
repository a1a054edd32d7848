"""Streaming a run's log by byte offset, so that a lost connection resumes where it stopped."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from pathlib import Path

from ...wire.runs import (
    FollowRunOpening,
    FollowRunRequest,
    FollowRunResult,
    RunRecord,
    StartRunRequest,
)
from ..reply import Failure, send_closing_reply, send_reply
from .executor import Executor
from .executors import get_executor
from .records import read_last_attempt, read_log_offset
from .run_state import UNENDED, inspect_run, require_run_directory
from .runs import start
from .spec import read_spec

BLOCK = 256 * 1024
POLL_S = 0.05


def follow(request: FollowRunRequest) -> None:
    """Stream the log's bytes from `offset` until the run has ended and all is sent.

    If another attempt than the caller's runs now, the log of a restored run may be shorter, and the
    stream begins where the gap is marked.
    """
    directory = require_run_directory(request.lab, request.lab_id, request.run)
    offset = request.offset
    if request.attempt and request.attempt != read_last_attempt(directory).container:
        offset = min(offset, read_log_offset(directory))
    log = find_process_log(directory, request.process)
    if request.tail:
        offset = find_tail_offset(log, request.tail)
    send_reply(FollowRunOpening(inspect_run(directory, {}), offset))
    run = _stream(directory, log, offset, request.wait)
    if request.process:
        # torchrun keeps the errors of such a process in a file of their own.
        _send(log.with_name("stderr.log"), 0)
    send_closing_reply(FollowRunResult(run))


def find_process_log(directory: Path, process: int) -> Path:
    """Return the file that the last attempt of a process of torchrun on this server writes to.

    Failure (missing) without one.
    """
    if process == 0:
        return directory / "logs" / "run.log"
    logs = (directory / "logs" / "ranks").glob(f"*/attempt_*/{process}/stdout.log")
    newest = max(logs, key=lambda path: path.stat().st_mtime, default=None)
    if newest is None:
        what = f"run {directory.name} has no output of process {process} on this server"
        hint = f"labctl logs {directory.name}   # that of its first process"
        raise Failure("missing", what, "torchrun has not started it, or the number is wrong", hint)
    return newest


def _stream(directory: Path, log: Path, offset: int, wait: bool) -> RunRecord:
    """Stream the log, with `wait` until the run has ended; return the run's state then."""
    name = read_last_attempt(directory).container
    if wait and inspect_run(directory, {}).state in UNENDED:
        _pump(get_executor(read_spec(directory).executor), log, offset, name)
    else:
        _send(log, offset)
    return inspect_run(directory, {})


def start_and_follow(request: StartRunRequest) -> None:
    """Do `start`, then `follow` from the beginning, in one connection: one round trip."""
    started = start(request)
    send_reply(started)
    if started.run is None:
        send_closing_reply(started)
        return
    spec = request.spec
    directory = require_run_directory(spec.lab, spec.lab_id, spec.id)
    run = _stream(directory, find_process_log(directory, 0), 0, wait=True)
    send_closing_reply(started._replace(run=run))


def _pump(executor: Executor, log: Path, offset: int, name: str) -> None:
    """Send the log until the program has ended or the reader is gone."""
    reader = select.poll()
    reader.register(1, 0)
    waiter = _wait(executor, name)
    try:
        while True:
            ended = waiter.poll() is not None
            offset = _send(log, offset)
            if ended and not _is_active(executor, name):
                _send(log, offset)
                return
            if ended:
                # The engine restarted: `docker wait` ended with it, but the container runs on.
                time.sleep(0.5)
                waiter = _wait(executor, name)
            if any(event & (select.POLLERR | select.POLLHUP) for _, event in reader.poll(0)):
                return
            time.sleep(POLL_S)
    finally:
        waiter.kill()
        waiter.wait()


def _wait(executor: Executor, name: str) -> subprocess.Popen[bytes]:
    words = executor.build_wait_words(name)
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _is_active(executor: Executor, name: str) -> bool:
    program = executor.inspect([name]).get(name)
    return program is not None and program.status in ("queued", "running")


def _send(log: Path, offset: int) -> int:
    out = sys.stdout.fileno()
    with log.open("rb") as file:
        file.seek(offset)
        while block := file.read(BLOCK):
            view = memoryview(block)
            while view:
                view = view[os.write(out, view) :]
            offset += len(block)
    return offset


def find_tail_offset(log: Path, lines: int) -> int:
    """Return the offset at which the last `lines` lines begin, reading backwards."""
    size = log.stat().st_size
    position, count, block = size, 0, b""
    while position > 0 and count <= lines:
        step = min(BLOCK, position)
        position -= step
        with log.open("rb") as file:
            file.seek(position)
            block = file.read(step) + block
        count = block.count(b"\n", 0, max(0, len(block) - 1))
    if count < lines:
        return 0
    cut = len(block)
    for _ in range(lines + (1 if block.endswith(b"\n") else 0)):
        cut = block.rfind(b"\n", 0, cut)
        if cut < 0:
            return position
    return position + cut + 1
