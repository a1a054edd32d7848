"""Looking at runs: what can truthfully be said of each, and its record once it has ended."""

from __future__ import annotations

import errno
import json
import signal
import time
from pathlib import Path
from typing import Any

from ...wire.boot_id import boot_token
from ..broker.detection import LEASE
from ..host.docker import docker
from ..host.engine import inspect
from ..host.gpu_access import lost_at
from ..host.paths import LIMIT, disk, going_down, lab_dir, read_json, read_text, run_dir, write_json
from ..reply import Failure
from ..watchdog.state_files import watch
from .secrets_tmpfs import drop as drop_secrets

IGNORED_NEW = ("__pycache__", ".ipynb_checkpoints", ".git", ".labctl")
GIB = 1024**3
LEAST_ROOM_BYTES = 1024**2
PROGRESS = "logs/progress.json"
LARGEST_PROGRESS = 1e300
UNENDED = ("claimed", "starting", "running")


def existing(request: dict[str, Any]) -> Path:
    directory = run_dir(lab_dir(request["lab"], request["lab_id"]), request["run"])
    if not directory.is_dir():
        raise Failure("missing", f"there is no run {request['run']} here", "", "labctl status")
    return directory


def last_attempt(directory: Path) -> dict[str, Any]:
    found = sorted((directory / ".labctl").glob("attempt-*"), key=lambda p: int(p.name[8:]))
    return read_json(found[-1]) if found else {}


def status(request: dict[str, Any]) -> dict[str, Any]:
    """Every run of the lab (or those named in "runs"), the disk, and what the watchdog says."""
    root = lab_dir(request["lab"], request["lab_id"])
    wanted = request.get("runs")
    directories = [
        d
        for d in sorted((root / "runs").glob("*"))
        if not d.name.startswith(".") and (not wanted or d.name in wanted)
    ]
    names = [last_attempt(d).get("container", "") for d in directories if not final(d)]
    seen = inspect([n for n in names if n])
    free, total = disk(root)
    return {
        "runs": [look(d, seen) for d in directories],
        "disk": {"free_bytes": free, "total_bytes": total},
        "uptime_s": float(read_text(Path("/proc/uptime")).split()[0]),
        "now": time.time(),
        **watch(request),
    }


def final(directory: Path) -> dict[str, Any]:
    """The record of a run that is known to have ended, {} otherwise."""
    return read_json(directory / ".labctl" / "record.json")


def look(directory: Path, seen: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What can truthfully be said of a run now. An ended run is recorded once and for all."""
    record = final(directory)
    if record:
        return record
    spec = read_json(directory / ".labctl" / "spec.json")
    attempt = last_attempt(directory)
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
        "progress": _progress(directory),
        "progress_at": _progress_at(directory),
        "log_offset": read_json(directory / ".labctl" / "resumed.json").get("offset", 0),
    }
    name = attempt.get("container", "")
    found = seen.get(name) or (inspect([name]).get(name) if name else None)
    ending = _ending(directory, spec, attempt, found)
    state.update(ending)
    state.update(_gpu_loss(directory, name, state))
    if state["state"] in ("exited", "lost", "cancelled"):
        state["new_files"] = new_files(directory, spec.get("outputs", []))
        state["progress"] = _progress(directory)
        drop_secrets(directory.name)
        try:
            _keep_console(directory, spec, name, found)
            write_json(directory / ".labctl" / "record.json", state)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            # Told all the same; recorded by the first look that finds room.
            state["told"] += "; the server's disk is full"
    return state


def _gpu_loss(directory: Path, container: str, state: dict[str, Any]) -> dict[str, Any]:
    """gpu_lost_at, and what is said of the run then; {} where its container has its GPUs."""
    since = lost_at(directory, container) if container else None
    if since is None:
        return {}
    if state["state"] == "running":
        return {"gpu_lost_at": since, "told": "its container has lost access to its GPU"}
    told = f"{state.get('told', '')}; its container had lost access to its GPU"
    return {"gpu_lost_at": since, "told": told.lstrip("; ")}


def _ending(
    directory: Path, spec: dict[str, Any], attempt: dict[str, Any], found: dict[str, Any] | None
) -> dict[str, Any]:
    """state, exit_code, ended_at and told, from the exit record, Docker and the boot token."""
    if found is None and not attempt:
        return {"state": "claimed"}
    inner = (found or {}).get("State") or {}
    if inner.get("Running") or inner.get("Restarting"):
        return {"state": "running"}
    if inner.get("Status") == "created" and not inner.get("Error"):
        return {"state": "claimed"}
    written = read_json(directory / ".labctl" / "exit.json")
    rebooted = bool(attempt.get("boot")) and attempt["boot"] != boot_token()
    cancelled = (directory / ".labctl" / "cancel").exists()
    limit = read_json(directory / ".labctl" / LIMIT).get("by", "")
    if limit and not cancelled and (not written or written.get("asked")):
        return _by_limit(limit, written, inner)
    if written:
        return _as_written(directory, spec, written, cancelled, rebooted)
    if rebooted:
        there = read_json(directory / ".labctl" / "restored.json").get("container")
        gone = "ended" if there and there == attempt.get("container") else "restarted"
        told = f"lost: the server {gone} while it ran; its outputs up to then are kept"
        return {"state": "lost", "ended_at": None, "told": told}
    if found is None:
        # `docker run` may still be at work for a claim that another call made this second.
        recent = time.time() - float(attempt.get("started_at") or 0) < 30
        if recent and not attempt.get("launched"):
            return {"state": "starting"}
        return {"state": "lost", "ended_at": None, "told": "lost: its container was removed"}
    code = int(inner.get("ExitCode", -1))
    ended = _docker_time(inner.get("FinishedAt", ""))
    if inner.get("OOMKilled"):
        told = told_of(137, {"oom_kills": 1}, spec, False)
    elif cancelled:
        told = "cancelled: it did not stop within its time and was killed"
    elif inner.get("Error"):
        told = f"could not start: {inner['Error'][-500:]}"
    elif code <= 128 and disk(directory)[0] < LEAST_ROOM_BYTES:
        # There was no room for the entry script to write this down; it passes the code on.
        told = told_of(code, {}, spec, False)
    else:
        told = f"its container was killed from outside ({signal_name(code - 128)})"
        told = told if code > 128 else f"its container ended with {code} before the command did"
    state = "cancelled" if cancelled else "exited"
    return {"state": state, "exit_code": code, "ended_at": ended, "told": told}


def _by_limit(limit: str, written: dict[str, Any], inner: dict[str, Any]) -> dict[str, Any]:
    reached = "its GPU lease ended" if limit == LEASE else f"the server reached its {limit}"
    told = f"stopped: {reached}; what it had saved by then is kept"
    return {
        "state": "lost",
        "stopped_by": limit,
        "exit_code": written.get("code", inner.get("ExitCode")),
        "ended_at": written.get("ended_at") or _docker_time(inner.get("FinishedAt", "")),
        "told": told,
    }


def _as_written(
    directory: Path, spec: dict[str, Any], written: dict[str, Any], cancelled: bool, rebooted: bool
) -> dict[str, Any]:
    """How a run ended whose entry script lived to write it down."""
    code, end = int(written["code"]), float(written["ended_at"])
    taken = (directory / ".labctl" / "reclaim.json").exists()
    # Whoever looks while the machine goes down must not take its SIGTERM for somebody's word.
    if not cancelled and written.get("asked") and (rebooted or taken or going_down()):
        whose = "taken back by its provider" if taken else "shut down"
        told = f"lost: the server was {whose} while it ran (the command ended with {code})"
        return {"state": "lost", "ended_at": end, "told": told}
    state = "cancelled" if cancelled else "exited"
    told = told_of(code, written, spec, cancelled)
    return {"state": state, "exit_code": code, "ended_at": end, "told": told}


def told_of(code: int, written: dict[str, Any], spec: dict[str, Any], cancelled: bool) -> str:
    """How a run ended, in words."""
    if int(written.get("oom_kills") or 0) > 0 and code != 0:
        limit = int(spec.get("memory_bytes") or 0)
        said = f"its limit of {limit / GIB:.2f} GiB" if limit else "the server's memory"
        peak = int(written.get("peak_memory_bytes") or 0)
        peak_said = f" (peak {peak / GIB:.2f} GiB)" if peak else ""
        return f"out of memory: killed at {said}{peak_said}"
    if cancelled:
        return f"cancelled; the command ended with {code}"
    if code == 0:
        return "done"
    if code == 127:
        return "exit 127: the command was not found in the image"
    if code == 126:
        return "exit 126: the command was found but cannot be executed"
    if code > 128 and signal_name(code - 128):
        return f"ended by {signal_name(code - 128)} (exit {code})"
    return f"failed with exit code {code}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""


def _docker_time(text: str) -> float | None:
    from datetime import datetime, timezone  # a start need not pay for it

    try:
        moment = datetime.strptime(text[:19], "%Y-%m-%dT%H:%M:%S")
    except ValueError:
        return None
    return moment.replace(tzinfo=timezone.utc).timestamp()


def _progress_at(directory: Path) -> float | None:
    """When the run last told its progress, by this server's clock."""
    try:
        return (directory / PROGRESS).stat().st_mtime
    except OSError:
        return None


def _progress(directory: Path) -> dict[str, float]:
    """Numbers that a training script may leave in logs/progress.json."""
    body = read_json(directory / PROGRESS)
    # A script may write NaN, an infinity or a number beyond all bounds: none has a place in JSON.
    return {
        k: float(v)
        for k, v in body.items()
        if isinstance(v, (int, float)) and -LARGEST_PROGRESS < v < LARGEST_PROGRESS
    }


def new_files(directory: Path, outputs: list[str]) -> list[str]:
    """Files that the run made outside its outputs, relative to the run directory."""
    try:
        known = set(json.loads(read_text(directory / ".labctl" / "code.json") or "[]"))
    except ValueError:
        known = set()
    kept = {*outputs, "logs", "checkpoints", ".labctl"}
    found = []
    for path in sorted(directory.rglob("*")):
        parts = path.relative_to(directory).parts
        if any(p in IGNORED_NEW for p in parts) or path.is_symlink() or not path.is_file():
            continue
        name = "/".join(parts)
        brought = parts[0] == "code" and "/".join(parts[1:]) in known
        output = parts[0] in kept or any(name.startswith(f"{o}/") for o in outputs)
        if not brought and (parts[0] == "code" or not output):
            found.append(name)
        if len(found) >= 200:
            break
    return found


def _keep_console(
    directory: Path, spec: dict[str, Any], name: str, found: dict[str, Any] | None
) -> None:
    """What the container itself printed: all of it with a terminal, the shell's errors without."""
    log = directory / "logs" / "run.log"
    if found and (spec.get("tty") or not log.exists() or log.stat().st_size == 0):
        done = docker("logs", name, check=False)
        with log.open("a") as file:
            file.write(done.stdout + done.stderr)
