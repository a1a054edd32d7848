"""The next attempt of a run whose last one ended with its machine, not by itself."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

from ..host import engine
from ..host.paths import LIMIT, checked_name, lab_dir, read_json, run_dir, write_json, write_text
from ..reply import Failure
from ..watchdog.reclaim_record import newest_whole
from .run_state import UNENDED, existing, look
from .runs import launch, launching

SET_ASIDE = ("record.json", "exit.json", "reclaim.json", LIMIT)


def resume(request: dict[str, Any]) -> dict[str, Any]:
    """Go on with a run that was lost: its own code, its outputs so far, the next attempt.

    Replies as `start` does: {"missing": image} before anything is changed; a run that lives is
    found. One that ended by itself is refused. `told` is what the log says of the gap. "offset" is
    where in the log it stands, "step" what the newest whole checkpoint says of itself.
    """
    spec = request["spec"]
    directory = existing({**spec, "run": spec["id"]})
    image = engine.image(spec["image"])
    if image is None:
        return {"missing": spec["image"]}
    with launching(directory):
        state = look(directory, {})
        if state["state"] in UNENDED:
            offset = state_offset(directory)
            return {"run": state, "found": True, "offset": offset, **_place(directory)}
        if state["state"] != "lost":
            raise Failure(
                "policy",
                f"run {spec['id']} ended by itself and is not resumed",
                state.get("told", ""),
                f"labctl logs {spec['id']}",
            )
        _set_aside(directory)
        place = _place(directory)
        offset = _mark(directory, request.get("told") or "resumed")
        root = lab_dir(spec["lab"], spec["lab_id"])
        seen = launch(root, directory, spec, image, request.get("secrets", {}))
    run = look(directory, seen)
    return {"run": run, "found": False, "offset": offset, **place}


def _place(directory: Path) -> dict[str, Any]:
    """Where the run lies, and the step of its newest whole checkpoint, None where it has none."""
    newest = newest_whole(directory) or {}
    return {"directory": str(directory), "step": newest.get("step")}


def from_push(request: dict[str, Any]) -> dict[str, Any]:
    """Make a run of what was pushed to `restore/<run>`: its code, its outputs, its spec.

    It is a lost run from then on, which `resume` goes on with. One that is here already stays.
    """
    spec = request["spec"]
    lab = lab_dir(spec["lab"], spec["lab_id"])
    pushed, directory = lab / "restore" / checked_name(spec["id"]), run_dir(lab, spec["id"])
    if directory.is_dir():
        return {"run": look(directory, {})}
    if not (pushed / "code").is_dir():
        raise Failure("missing", f"nothing of run {spec['id']} was sent here")
    text = json.dumps(spec, sort_keys=True)
    own = pushed / ".labctl"
    own.mkdir(exist_ok=True)
    write_text(own / "spec.json", text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    write_json(own / "claim.json", {"hash": digest, "created_at": request["created_at"]})
    for number in range(1, int(request["attempts"]) + 1):
        # On another machine: by its boot the attempt is seen to be lost.
        write_json(own / f"attempt-{number}", {"container": "", "boot": "elsewhere"})
    names = sorted(str(p.relative_to(pushed / "code")) for p in (pushed / "code").rglob("*"))
    write_json(own / "code.json", names)
    directory.parent.mkdir(exist_ok=True)
    pushed.rename(directory)
    return {"run": look(directory, {})}


def _set_aside(directory: Path) -> None:
    """How the last attempt ended stays on record beside it."""
    own = directory / ".labctl"
    number = len(list(own.glob("attempt-*"))) or 1
    for name in SET_ASIDE:
        if (own / name).exists():
            (own / name).replace(own / f"ended-{number}-{name}")


def state_offset(directory: Path) -> int:
    """Where the last attempt began in the log, 0 for a run that was never resumed."""
    return int(read_json(directory / ".labctl" / "resumed.json").get("offset", 0))


def _mark(directory: Path, told: str) -> int:
    """One line in the run's log where it was cut and goes on; the byte at which it stands."""
    log = directory / "logs" / "run.log"
    log.parent.mkdir(exist_ok=True)
    offset = log.stat().st_size if log.exists() else 0
    write_json(directory / ".labctl" / "resumed.json", {"offset": offset})
    broken = log.exists() and log.stat().st_size > 0 and log.read_bytes()[-1:] != b"\n"
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    attempt = len(list((directory / ".labctl").glob("attempt-*"))) + 1
    with log.open("a") as file:
        file.write(("\n" if broken else "") + f"--- {at}: {told} (attempt {attempt}) ---\n")
    return offset
