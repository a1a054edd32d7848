"""The next attempt of a run whose last attempt was lost with its machine."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

from ..host import engine
from ..host.paths import LIMIT, lab_dir, read_json, require_name, run_dir, write_json, write_text
from ..reply import Failure
from ..watchdog.reclaim_record import find_newest_complete
from .run_state import UNENDED, inspect_run, require_run_directory
from .runs import launch, lock_launch

SET_ASIDE = ("record.json", "exit.json", "reclaim.json", LIMIT)


def resume(request: dict[str, Any]) -> dict[str, Any]:
    """Start the next attempt of a lost run with its own code and its outputs so far.

    Replies as `start` does: {"missing": image} before anything is changed; a live run is found.
    Failure (policy) for a run that ended by itself. The request's `told` is written to the log
    where the gap is. "offset" is where in the log that line begins, "step" the step that the newest
    complete checkpoint records.
    """
    spec = request["spec"]
    directory = require_run_directory({**spec, "run": spec["id"]})
    image = engine.inspect_image(spec["image"])
    if image is None:
        return {"missing": spec["image"]}
    with lock_launch(directory):
        state = inspect_run(directory, {})
        if state["state"] in UNENDED:
            offset = read_log_offset(directory)
            return {"run": state, "found": True, "offset": offset, **_describe_location(directory)}
        if state["state"] != "lost":
            raise Failure(
                "policy",
                f"run {spec['id']} ended by itself, so it cannot be resumed",
                state.get("told", ""),
                f"labctl logs {spec['id']}",
            )
        _archive_last_attempt(directory)
        location = _describe_location(directory)
        offset = _mark_gap(directory, request.get("told") or "resumed")
        root = lab_dir(spec["lab"], spec["lab_id"])
        inspected = launch(root, directory, spec, image, request.get("secrets", {}))
    run = inspect_run(directory, inspected)
    return {"run": run, "found": False, "offset": offset, **location}


def _describe_location(directory: Path) -> dict[str, Any]:
    """Return the run's directory and the step of its newest complete checkpoint, or None."""
    newest = find_newest_complete(directory)
    return {"directory": str(directory), "step": newest.step if newest else None}


def from_push(request: dict[str, Any]) -> dict[str, Any]:
    """Make a run of what was pushed to `restore/<run>`: its code, its outputs, its spec.

    The new run counts as lost, and `resume` continues it. A run that exists already stays as it is.
    """
    spec = request["spec"]
    lab = lab_dir(spec["lab"], spec["lab_id"])
    pushed, directory = lab / "restore" / require_name(spec["id"]), run_dir(lab, spec["id"])
    if directory.is_dir():
        return {"run": inspect_run(directory, {})}
    if not (pushed / "code").is_dir():
        raise Failure("missing", f"no files of run {spec['id']} were uploaded to this server")
    text = json.dumps(spec, sort_keys=True)
    meta = pushed / ".labctl"
    meta.mkdir(exist_ok=True)
    write_text(meta / "spec.json", text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    write_json(meta / "claim.json", {"hash": digest, "created_at": request["created_at"]})
    for number in range(1, int(request["attempts"]) + 1):
        # It ran on another machine: a foreign boot token marks the attempt as lost.
        write_json(meta / f"attempt-{number}", {"container": "", "boot": "elsewhere"})
    names = sorted(str(p.relative_to(pushed / "code")) for p in (pushed / "code").rglob("*"))
    write_json(meta / "code.json", names)
    directory.parent.mkdir(exist_ok=True)
    pushed.rename(directory)
    return {"run": inspect_run(directory, {})}


def _archive_last_attempt(directory: Path) -> None:
    """Rename the records of how the last attempt ended, so that they stay beside the next one."""
    meta = directory / ".labctl"
    number = len(list(meta.glob("attempt-*"))) or 1
    for name in SET_ASIDE:
        if (meta / name).exists():
            (meta / name).replace(meta / f"ended-{number}-{name}")


def read_log_offset(directory: Path) -> int:
    """Return the byte of the log at which the last attempt began, 0 for a run never resumed."""
    return int(read_json(directory / ".labctl" / "resumed.json").get("offset", 0))


def _mark_gap(directory: Path, message: str) -> int:
    """Write a line to the run's log where it was cut; return the byte offset before it."""
    log = directory / "logs" / "run.log"
    log.parent.mkdir(exist_ok=True)
    offset = log.stat().st_size if log.exists() else 0
    write_json(directory / ".labctl" / "resumed.json", {"offset": offset})
    is_line_open = log.exists() and log.stat().st_size > 0 and log.read_bytes()[-1:] != b"\n"
    time_text = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    attempt = len(list((directory / ".labctl").glob("attempt-*"))) + 1
    with log.open("a") as file:
        file.write(
            ("\n" if is_line_open else "") + f"--- {time_text}: {message} (attempt {attempt}) ---\n"
        )
    return offset
