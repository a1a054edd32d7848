"""The state of each run, and its final record once it has ended."""

from __future__ import annotations

import errno
import json
import signal
import time
from pathlib import Path
from typing import Any

from ...wire.boot_id import read_boot_token
from ...wire.codec import to_json
from ...wire.watchdog import WatchRequest
from ..broker.detection import LEASE
from ..host.docker import run_docker
from ..host.engine import inspect_container, inspect_containers
from ..host.engine_objects import Container, ContainerState
from ..host.gpu_access import find_loss_time
from ..host.paths import (
    LIMIT,
    is_going_down,
    lab_dir,
    measure_disk,
    read_json,
    read_text,
    run_dir,
    write_json,
)
from ..reply import Failure
from ..watchdog.state_files import watch
from .secrets_tmpfs import remove_secrets as drop_secrets

IGNORED_NEW = ("__pycache__", ".ipynb_checkpoints", ".git", ".labctl")
GIB = 1024**3
LEAST_ROOM_BYTES = 1024**2
PROGRESS = "logs/progress.json"
LARGEST_PROGRESS = 1e300
UNENDED = ("claimed", "starting", "running")


def require_run_directory(request: dict[str, Any]) -> Path:
    """Return the run's directory. Failure (missing) if it has none."""
    directory = run_dir(lab_dir(request["lab"], request["lab_id"]), request["run"])
    if not directory.is_dir():
        what = f"run {request['run']} does not exist on this server"
        raise Failure("missing", what, "", "labctl status")
    return directory


def read_last_attempt(directory: Path) -> dict[str, Any]:
    """Return the record of the run's newest attempt, {} if it has none."""
    attempts = sorted((directory / ".labctl").glob("attempt-*"), key=lambda p: int(p.name[8:]))
    return read_json(attempts[-1]) if attempts else {}


def status(request: dict[str, Any]) -> dict[str, Any]:
    """Report every run of the lab (or those named in "runs"), the disk and the watchdog's state."""
    root = lab_dir(request["lab"], request["lab_id"])
    selected = request.get("runs")
    directories = [
        d
        for d in sorted((root / "runs").glob("*"))
        if not d.name.startswith(".") and (not selected or d.name in selected)
    ]
    names = [
        read_last_attempt(d).get("container", "") for d in directories if not read_final_record(d)
    ]
    inspected = inspect_containers([n for n in names if n])
    free, total = measure_disk(root)
    return {
        "runs": [inspect_run(d, inspected) for d in directories],
        "disk": {"free_bytes": free, "total_bytes": total},
        "uptime_s": float(read_text(Path("/proc/uptime")).split()[0]),
        "now": time.time(),
        **to_json(watch(WatchRequest(request["lab_id"]))),
    }


def read_final_record(directory: Path) -> dict[str, Any]:
    """Return the record of a run that is known to have ended, {} otherwise."""
    return read_json(directory / ".labctl" / "record.json")


def inspect_run(directory: Path, inspected: dict[str, Container]) -> dict[str, Any]:
    """Determine a run's state now. An ended run is recorded once and for all.

    `inspected` has containers by name; one that it lacks is inspected here.
    """
    record = read_final_record(directory)
    if record:
        return record
    spec = read_json(directory / ".labctl" / "spec.json")
    attempt = read_last_attempt(directory)
    claim = read_json(directory / ".labctl" / "claim.json")
    state: dict[str, Any] = {
        "id": directory.name,
        "lab_id": spec.get("lab_id", ""),
        "command": spec.get("command", []),
        "image": spec.get("image", ""),
        "created_at": claim.get("created_at", 0.0),
        "started_at": attempt.get("started_at"),
        "container": attempt.get("container", ""),
        "image_id": attempt.get("image_id", ""),
        "image_digest": attempt.get("image_digest", ""),
        "progress": _read_progress(directory),
        "progress_at": _get_progress_time(directory),
        "log_offset": read_json(directory / ".labctl" / "resumed.json").get("offset", 0),
    }
    name = attempt.get("container", "")
    container = inspected.get(name) or (inspect_container(name) if name else None)
    ending = _determine_state(directory, spec, attempt, container)
    state.update(ending)
    state.update(_describe_gpu_loss(directory, name, state))
    if state["state"] in ("exited", "lost", "cancelled"):
        state["new_files"] = list_new_files(directory, spec.get("outputs", []))
        state["progress"] = _read_progress(directory)
        drop_secrets(directory.name)
        try:
            _save_console(directory, spec, name, container)
            write_json(directory / ".labctl" / "record.json", state)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            # Reported all the same; recorded by the first call that finds room.
            state["told"] += "; the server's disk is full"
    return state


def _describe_gpu_loss(directory: Path, container: str, state: dict[str, Any]) -> dict[str, Any]:
    """Return gpu_lost_at and told for a container that lost its GPUs, {} if it has them."""
    lost_since = find_loss_time(directory, container) if container else None
    if lost_since is None:
        return {}
    if state["state"] == "running":
        return {"gpu_lost_at": lost_since, "told": "its container has lost access to its GPU"}
    summary = f"{state.get('told', '')}; its container had lost access to its GPU"
    return {"gpu_lost_at": lost_since, "told": summary.lstrip("; ")}


def _determine_state(
    directory: Path, spec: dict[str, Any], attempt: dict[str, Any], container: Container | None
) -> dict[str, Any]:
    """Return state, exit_code, ended_at and told from the exit record, Docker and the boot."""
    if container is None and not attempt:
        return {"state": "claimed"}
    status = container.State if container else ContainerState()
    if status.Running or status.Restarting:
        return {"state": "running"}
    if status.Status == "created" and not status.Error:
        return {"state": "claimed"}
    exit_record = read_json(directory / ".labctl" / "exit.json")
    rebooted = bool(attempt.get("boot")) and attempt["boot"] != read_boot_token()
    cancelled = (directory / ".labctl" / "cancel").exists()
    reached = read_json(directory / ".labctl" / LIMIT).get("by", "")
    if reached and not cancelled and (not exit_record or exit_record.get("asked")):
        return _describe_limit(reached, exit_record, container)
    if exit_record:
        return _describe_exit(directory, spec, exit_record, cancelled, rebooted)
    if rebooted:
        restored_container = read_json(directory / ".labctl" / "restored.json").get("container")
        what_happened = (
            "ended"
            if restored_container and restored_container == attempt.get("container")
            else "restarted"
        )
        summary = f"lost: the server {what_happened} while it ran; its outputs up to then are kept"
        return {"state": "lost", "ended_at": None, "told": summary}
    if container is None:
        # Another call may have claimed the run this second and still be starting its container.
        recent = time.time() - float(attempt.get("started_at") or 0) < 30
        if recent and not attempt.get("launched"):
            return {"state": "starting"}
        return {"state": "lost", "ended_at": None, "told": "lost: its container was removed"}
    code = status.ExitCode
    ended_at = _parse_docker_time(status.FinishedAt)
    if status.OOMKilled:
        summary = describe_exit(137, {"oom_kills": 1}, spec, False)
    elif cancelled:
        summary = "canceled: it did not stop in time and was killed"
    elif status.Error:
        summary = f"could not start: {status.Error[-500:]}"
    elif code <= 128 and measure_disk(directory)[0] < LEAST_ROOM_BYTES:
        # The entry script had no room to write its record; the container still has its exit code.
        summary = describe_exit(code, {}, spec, False)
    else:
        summary = f"its container was killed from outside ({find_signal_name(code - 128)})"
        if code <= 128:
            summary = f"its container ended with exit code {code} before the command did"
    state = "cancelled" if cancelled else "exited"
    return {"state": state, "exit_code": code, "ended_at": ended_at, "told": summary}


def _describe_limit(
    limit: str, exit_record: dict[str, Any], container: Container | None
) -> dict[str, Any]:
    reached = "its GPU lease ended" if limit == LEASE else f"the server reached its {limit}"
    summary = f"stopped: {reached}; the outputs saved by then are kept"
    return {
        "state": "lost",
        "stopped_by": limit,
        "exit_code": exit_record.get("code", container.State.ExitCode if container else None),
        "ended_at": exit_record.get("ended_at")
        or (_parse_docker_time(container.State.FinishedAt) if container else None),
        "told": summary,
    }


def _describe_exit(
    directory: Path,
    spec: dict[str, Any],
    exit_record: dict[str, Any],
    cancelled: bool,
    rebooted: bool,
) -> dict[str, Any]:
    """Describe how a run ended from the record that its entry script wrote."""
    code, ended_at = int(exit_record["code"]), float(exit_record["ended_at"])
    was_reclaimed = (directory / ".labctl" / "reclaim.json").exists()
    # While the machine goes down, its SIGTERM must not be mistaken for one that a person sent.
    if (
        not cancelled
        and exit_record.get("asked")
        and (rebooted or was_reclaimed or is_going_down())
    ):
        cause = "taken back by its provider" if was_reclaimed else "shut down"
        summary = f"lost: the server was {cause} while it ran (exit code {code})"
        return {"state": "lost", "ended_at": ended_at, "told": summary}
    state = "cancelled" if cancelled else "exited"
    summary = describe_exit(code, exit_record, spec, cancelled)
    return {"state": state, "exit_code": code, "ended_at": ended_at, "told": summary}


def describe_exit(
    code: int, exit_record: dict[str, Any], spec: dict[str, Any], cancelled: bool
) -> str:
    """Describe in words how a run ended."""
    if int(exit_record.get("oom_kills") or 0) > 0 and code != 0:
        limit_bytes = int(spec.get("memory_bytes") or 0)
        limit_text = (
            f"its limit of {limit_bytes / GIB:.2f} GiB" if limit_bytes else "the server's memory"
        )
        peak_bytes = int(exit_record.get("peak_memory_bytes") or 0)
        peak_text = f" (peak {peak_bytes / GIB:.2f} GiB)" if peak_bytes else ""
        return f"out of memory: killed at {limit_text}{peak_text}"
    if cancelled:
        ending = find_signal_name(code - 128) if code > 128 else ""
        return f"canceled ({ending or f'exit code {code}'})"
    if code == 0:
        return "done"
    if code == 127:
        return "exit 127: the command was not found in the image"
    if code == 126:
        return "exit 126: the command was found but cannot be executed"
    if code > 128 and find_signal_name(code - 128):
        return f"ended by {find_signal_name(code - 128)} (exit {code})"
    return f"failed with exit code {code}"


def find_signal_name(number: int) -> str:
    """Return the name of a signal, for example SIGTERM; "" for an unknown number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""


def _parse_docker_time(text: str) -> float | None:
    from datetime import datetime, timezone  # imported here to keep `start` fast

    try:
        moment = datetime.strptime(text[:19], "%Y-%m-%dT%H:%M:%S")
    except ValueError:
        return None
    return moment.replace(tzinfo=timezone.utc).timestamp()


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


def list_new_files(directory: Path, outputs: list[str]) -> list[str]:
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
        is_output = parts[0] in output_names or any(name.startswith(f"{o}/") for o in outputs)
        if not is_code_copy and (parts[0] == "code" or not is_output):
            files.append(name)
        if len(files) >= 200:
            break
    return files


def _save_console(
    directory: Path, spec: dict[str, Any], container: str, inspected: Container | None
) -> None:
    """Append what the container printed to the log: all of it with a terminal, otherwise only the
    shell's errors (where the log is empty).
    """
    log = directory / "logs" / "run.log"
    if inspected and (spec.get("tty") or not log.exists() or log.stat().st_size == 0):
        done = run_docker("logs", container, check=False)
        with log.open("a") as file:
            file.write(done.stdout + done.stderr)
