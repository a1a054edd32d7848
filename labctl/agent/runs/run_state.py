"""The state of each run, and its final record once it has ended."""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Sequence
from pathlib import Path

from ...wire.boot_id import read_boot_token
from ...wire.codec import to_json
from ...wire.runs import (
    GPU_LEASE,
    MOVE,
    AttemptRecord,
    DiskSpace,
    ExitRecord,
    RunRecord,
    RunSpec,
    StatusReply,
    StatusRequest,
)
from ...wire.verbs import STATUS_COMMAND
from ..host.docker import end_session
from ..host.gpu_access import find_loss_time
from ..host.paths import (
    is_going_down,
    lab_dir,
    measure_disk,
    read_json,
    read_text,
    run_dir,
)
from ..reply import Failure
from .executor import ProgramState
from .executors import get_executor, inspect_unended
from .exit_summary import SERVER_MEMORY, describe_exit, find_signal_name
from .records import (
    read_claim,
    read_exit,
    read_final_record,
    read_last_attempt,
    read_log_offset,
    read_reached_limit,
    read_restored_container,
    write_final_record,
)
from .secrets_tmpfs import remove_secrets as drop_secrets
from .spec import read_spec

IGNORED_NEW = ("__pycache__", ".ipynb_checkpoints", ".git", ".labctl")
LEAST_ROOM_BYTES = 1024**2
PROGRESS = "logs/progress.json"
LARGEST_PROGRESS = 1e300
UNENDED = ("claimed", "starting", "running")
MOVED = "stopped to move to another server; its outputs up to then are kept"


def require_run_directory(lab: str, lab_id: str, run: str) -> Path:
    """Return the run's directory. Failure (missing) if it has none."""
    directory = run_dir(lab_dir(lab, lab_id), run)
    if not directory.is_dir():
        what = f"run {run} does not exist on this server"
        raise Failure("missing", what, "", STATUS_COMMAND)
    return directory


def status(request: StatusRequest) -> StatusReply:
    """Report every run of the lab (or those in `runs`), the disk and the watchdog's state."""
    # Imported here to keep `start` fast.
    from ...wire.watchdog import WatchRequest
    from ..watchdog.state_files import watch

    root = lab_dir(request.lab, request.lab_id)
    directories = [
        d
        for d in sorted((root / "runs").glob("*"))
        if not d.name.startswith(".") and (not request.runs or d.name in request.runs)
    ]
    programs = inspect_unended(directories)
    return StatusReply(
        runs=tuple(inspect_run(d, programs) for d in directories),
        disk=DiskSpace(*measure_disk(root)),
        uptime_s=float(read_text(Path("/proc/uptime")).split()[0]),
        now=time.time(),
        watch=to_json(watch(WatchRequest(request.lab_id)).watch),
    )


def inspect_run(directory: Path, programs: dict[str, ProgramState]) -> RunRecord:
    """Determine a run's state now. An ended run is recorded once and for all.

    `programs` has attempts by name; one that it lacks is inspected here.
    """
    final = read_final_record(directory)
    if final is not None:
        return final
    spec = read_spec(directory)
    attempt = read_last_attempt(directory)
    name = attempt.container
    program = programs.get(name)
    if program is None and name:
        program = get_executor(spec.executor).inspect([name]).get(name)
    record = RunRecord(
        id=directory.name,
        state="claimed",
        lab_id=spec.lab_id,
        command=spec.command,
        image=spec.image,
        created_at=read_claim(directory).created_at,
        started_at=(program and program.began_at) or attempt.started_at,
        container=name,
        image_id=attempt.image_id,
        image_digest=attempt.image_digest,
        progress=_read_progress(directory),
        progress_at=_get_progress_time(directory),
        log_offset=read_log_offset(directory),
        executor=spec.executor,
    )
    record = _determine_state(directory, spec, attempt, program, record)
    record = describe_failed_gang(directory, record)
    record = _describe_gpu_loss(directory, record)
    if record.state not in UNENDED:
        record = record._replace(
            new_files=tuple(list_new_files(directory, spec.outputs)),
            has_checkpoints=any(path.is_file() for path in (directory / "checkpoints").rglob("*")),
            progress=_read_progress(directory),
        )
        drop_secrets(directory.name)
        end_session(directory.name)
        try:
            _save_console(directory, spec, program)
            write_final_record(directory, record)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            # Reported all the same; recorded by the first call that finds room.
            record = record._replace(summary=f"{record.summary}; the server's disk is full")
    return record


def describe_failed_gang(directory: Path, record: RunRecord) -> RunRecord:
    """Add why labctl ended a run that did not fail here, but on another of its servers."""
    reason = read_text(directory / ".labctl" / "cancel").strip()
    if record.state != "cancelled" or not reason:
        return record
    # It may have ended with 0 at the SIGTERM, as a program does that saves first.
    return record._replace(state="exited", exit_code=record.exit_code or 1, summary=reason)


def _describe_gpu_loss(directory: Path, record: RunRecord) -> RunRecord:
    """Add since when the run's container has no access to its GPUs, if it lost them."""
    container = record.container
    lost_since = find_loss_time(directory, container) if container else None
    if lost_since is None:
        return record
    if record.state == "running":
        summary = "its container has lost access to its GPU"
    else:
        summary = f"{record.summary}; its container had lost access to its GPU".lstrip("; ")
    return record._replace(gpu_lost_at=lost_since, summary=summary)


def _determine_state(
    directory: Path,
    spec: RunSpec,
    attempt: AttemptRecord,
    program: ProgramState | None,
    record: RunRecord,
) -> RunRecord:
    """Add state, exit code, end and its reason, from the exit record, the executor and the boot."""
    if program is None and attempt == AttemptRecord():
        return record
    if program and program.status == "running":
        return record._replace(state="running")
    if program and program.status == "created":
        return record
    if program and program.status == "queued":
        return record._replace(state="starting", summary=program.summary)
    exit_record = read_exit(directory)
    rebooted = bool(attempt.boot) and attempt.boot != read_boot_token()
    cancelled = (directory / ".labctl" / "cancel").exists()
    reached = read_reached_limit(directory)
    if reached and not cancelled and (exit_record is None or exit_record.asked):
        return _describe_limit(reached, exit_record, program, record)
    if exit_record:
        return _describe_exit(directory, spec, exit_record, program, cancelled, rebooted, record)
    if rebooted:
        return _describe_reboot(directory, attempt, record)
    if program is None:
        return _describe_missing_program(spec, attempt, record)
    return _describe_killed_program(directory, spec, program, cancelled, record)


def _describe_reboot(directory: Path, attempt: AttemptRecord, record: RunRecord) -> RunRecord:
    restored_container = read_restored_container(directory)
    was_restored = restored_container and restored_container == attempt.container
    what_happened = "ended" if was_restored else "restarted"
    summary = f"lost: the server {what_happened} while it ran; its outputs up to then are kept"
    return record._replace(state="lost", summary=summary)


def _describe_missing_program(
    spec: RunSpec, attempt: AttemptRecord, record: RunRecord
) -> RunRecord:
    # Another call may have claimed the run this second and still be starting its program.
    recent = time.time() - (attempt.started_at or 0) < 30
    if recent and not attempt.launched:
        return record._replace(state="starting")
    noun = get_executor(spec.executor).noun
    return record._replace(state="lost", summary=f"lost: its {noun} was removed")


def _describe_killed_program(
    directory: Path, spec: RunSpec, program: ProgramState, cancelled: bool, record: RunRecord
) -> RunRecord:
    """Describe how a program ended whose entry script wrote no record."""
    code, noun = program.exit_code, get_executor(spec.executor).noun
    if program.is_out_of_memory:
        summary = describe_exit(
            code=137,
            oom_kills=1,
            memory_bytes=spec.memory_bytes,
            memory_name=_name_memory(spec),
        )
    elif cancelled and not program.began:
        summary = "canceled before it started"
    elif cancelled:
        summary = "canceled: it did not stop in time and was killed"
    elif program.error:
        summary = f"could not start: {program.error[-500:]}"
    elif program.summary:
        summary = program.summary
    elif code is None:
        summary = f"its {noun} was killed from outside"
    elif code <= 128 and measure_disk(directory)[0] < LEAST_ROOM_BYTES:
        # The entry script had no room to write its record; the executor still has its exit code.
        summary = describe_exit(code)
    else:
        summary = f"its {noun} was killed from outside ({find_signal_name(code - 128)})"
        if code <= 128:
            summary = f"its {noun} ended with exit code {code} before the command did"
    return record._replace(
        state="cancelled" if cancelled else "exited",
        exit_code=code,
        ended_at=program.ended_at,
        summary=summary,
        oom_limit_bytes=spec.memory_bytes if program.is_out_of_memory else None,
    )


def _name_memory(spec: RunSpec) -> str:
    """Name the memory that a run without a limit of its own may use."""
    is_job = not get_executor(spec.executor).runs_here
    return "the memory limit of its job" if is_job else SERVER_MEMORY


def _describe_limit(
    limit: str, exit_record: ExitRecord | None, program: ProgramState | None, record: RunRecord
) -> RunRecord:
    if limit == MOVE:
        ended = record._replace(state="lost", summary=MOVED)
    else:
        ended = _describe_reached_limit(limit, record)
    if exit_record:
        return ended._replace(exit_code=exit_record.code, ended_at=exit_record.ended_at)
    if program is None:
        return ended
    return ended._replace(exit_code=program.exit_code, ended_at=program.ended_at)


def _describe_reached_limit(limit: str, record: RunRecord) -> RunRecord:
    reached = "its GPU time ended" if limit == GPU_LEASE else f"the server reached its {limit}"
    return record._replace(
        state="lost",
        stopped_by=limit,
        summary=f"stopped: {reached}; the outputs saved by then are kept",
    )


def _describe_exit(
    directory: Path,
    spec: RunSpec,
    exit_record: ExitRecord,
    program: ProgramState | None,
    cancelled: bool,
    rebooted: bool,
    record: RunRecord,
) -> RunRecord:
    """Describe how a run ended from the record that its entry script wrote."""
    code = exit_record.code
    ended = record._replace(ended_at=exit_record.ended_at)
    was_reclaimed = (directory / ".labctl" / "reclaim.json").exists()
    # While the machine goes down, its SIGTERM must not be mistaken for one that a person sent.
    if not cancelled and exit_record.asked and (rebooted or was_reclaimed or is_going_down()):
        cause = "taken back by its provider" if was_reclaimed else "shut down"
        summary = f"lost: the server was {cause} while it ran (exit code {code})"
        return ended._replace(state="lost", summary=summary)
    # A job's script does not see its memory limit: Slurm knows whether the kernel killed a process.
    oom_kills = exit_record.oom_kills or int(program is not None and program.is_out_of_memory)
    summary = describe_exit(
        code,
        oom_kills=oom_kills,
        peak_memory_bytes=exit_record.peak_memory_bytes,
        memory_bytes=spec.memory_bytes,
        cancelled=cancelled,
        memory_name=_name_memory(spec),
    )
    if program and program.summary and code and not cancelled and not oom_kills:
        summary = f"{program.summary} (exit code {code})"
    return ended._replace(
        state="cancelled" if cancelled else "exited",
        exit_code=code,
        summary=summary,
        oom_limit_bytes=spec.memory_bytes if oom_kills > 0 and code != 0 else None,
    )


def _get_progress_time(directory: Path) -> float | None:
    """Return when the run last wrote its progress, in Unix seconds of this server's clock."""
    try:
        return (directory / PROGRESS).stat().st_mtime
    except OSError:
        return None


def _read_progress(directory: Path) -> dict[str, float]:
    """Return the numbers that a training script may leave in logs/progress.json."""
    body = read_json(directory / PROGRESS)
    # A script may write NaN, an infinity or a huge integer, which JSON readers reject.
    return {
        k: float(v)
        for k, v in body.items()
        if isinstance(v, (int, float)) and -LARGEST_PROGRESS < v < LARGEST_PROGRESS
    }


def list_new_files(directory: Path, outputs: Sequence[str]) -> list[str]:
    """List files that the run made outside its outputs, relative to its directory; at most 200."""
    try:
        code_files = set(json.loads(read_text(directory / ".labctl" / "code.json") or "[]"))
    except ValueError:
        code_files = set()
    output_names = {*outputs, "logs", "checkpoints", ".labctl"}
    files = []
    for path in sorted(directory.rglob("*")):
        parts = path.relative_to(directory).parts
        if any(p in IGNORED_NEW for p in parts) or path.is_symlink() or not path.is_file():
            continue
        name = "/".join(parts)
        is_code_copy = parts[0] == "code" and "/".join(parts[1:]) in code_files
        is_output = any(name == o or name.startswith(f"{o}/") for o in output_names)
        if not is_code_copy and not is_output:
            files.append(name)
        if len(files) >= 200:
            break
    return files


def _save_console(directory: Path, spec: RunSpec, program: ProgramState | None) -> None:
    """Append what the program printed to the log: all of it with a terminal, otherwise only the
    shell's errors (where the log is empty).
    """
    log = directory / "logs" / "run.log"
    if program and (spec.tty or not log.exists() or log.stat().st_size == 0):
        console = get_executor(spec.executor).read_console(program.name)
        with log.open("a") as file:
            file.write(console)
