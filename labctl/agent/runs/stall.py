"""For how long a run has shown no progress: no output of any process, and no changed output file.

Only a change that one check sees and the check before did not counts, by a clock that stands still
while the machine sleeps. So neither a corrected clock nor a closed laptop looks like a stall. What
the last check saw is in the run's directory: whoever checks next goes on from there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from ...wire.boot_id import read_boot_token
from ...wire.codec import to_json
from ...wire.runs import ProcessOutput, RunRequest, StallRecord, StallReply
from ..host.paths import read_record, write_json
from ..host.telemetry import NAME as TELEMETRY
from .records import read_last_attempt
from .run_state import PROGRESS, inspect_run, require_run_directory
from .spec import read_spec

RECORD = Path(".labctl") / "stall.json"


def measure(request: RunRequest) -> StallReply:
    """Measure since when the run shows no progress, and when each process printed last."""
    directory = require_run_directory(request.lab, request.lab_id, request.run)
    run = inspect_run(directory, {})
    if run.state != "running":
        return StallReply()
    now_s = time.monotonic()
    state = StallRecord(
        attempt=run.container,
        boot=read_boot_token(),
        changed_at=_find_last_change(directory, read_spec(directory).outputs),
        since_s=now_s,
    )
    before = read_record(StallRecord, directory / RECORD)
    if before is not None and before._replace(since_s=now_s) == state:
        state = before
    else:
        write_json(directory / RECORD, to_json(state))
    started_at = read_last_attempt(directory).started_at or 0.0
    outputs = tuple(_list_outputs(directory, started_at))
    return StallReply(now_s - state.since_s, outputs, time.time())


def _find_last_change(directory: Path, outputs: Sequence[str]) -> float:
    """Return when a file of the run's outputs changed last, without labctl's own telemetry."""
    own = directory / "logs" / TELEMETRY
    names = {*outputs, "logs", "checkpoints"}
    files = (file for name in names for file in _list_files(directory / name))
    return max((_find_time(file) for file in files if file != own), default=0.0)


def _list_files(path: Path) -> Iterator[Path]:
    """List the files at or below a path. Links are not followed."""
    if path.is_symlink() or not path.is_dir():
        yield path
        return
    for folder, _, names in os.walk(path):
        yield from (Path(folder) / name for name in names)


def _list_outputs(directory: Path, started_at: float) -> Iterator[ProcessOutput]:
    """List when each process of the last attempt printed; the first one may report progress too."""
    at_by_process = {0: _find_time(directory / "logs" / "run.log", directory / PROGRESS)}
    for log in (directory / "logs" / "ranks").glob("*/attempt_*/*/std*.log"):
        if log.parent.name.isdecimal() and (process := int(log.parent.name)) > 0:
            at = at_by_process.setdefault(process, 0.0)
            with suppress(OSError):
                # torchrun creates the files of a process that may never print.
                at_by_process[process] = max(at, _find_time(log) if log.lstat().st_size else 0.0)
    for process, at in sorted(at_by_process.items()):
        yield ProcessOutput(process, started_at, max(at, started_at))


def _find_time(*paths: Path) -> float:
    """Return when the newest of these files changed, 0 if none exists."""
    times = [0.0]
    for path in paths:
        with suppress(OSError):  # the program may have deleted it meanwhile
            times.append(path.lstat().st_mtime)
    return max(times)
