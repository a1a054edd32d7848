"""The next attempt of a run whose last attempt was lost with its machine."""

from __future__ import annotations

import time
from pathlib import Path

from ...wire.runs import (
    AdoptPushedReply,
    AdoptPushedRequest,
    AttemptRecord,
    ResumeRunReply,
    ResumeRunRequest,
)
from ..host.paths import LIMIT, drop_tree, lab_dir, read_json, require_name, run_dir, write_json
from ..host.server_data import resolve_all
from ..reply import Failure
from ..watchdog.reclaim_record import find_newest_complete
from .executors import get_executor
from .records import (
    list_attempts,
    read_log_offset,
    read_member,
    write_attempt,
    write_log_offset,
    write_spec_and_claim,
)
from .run_state import UNENDED, inspect_run, require_run_directory
from .runs import launch, lock_launch

SET_ASIDE = ("record.json", "exit.json", "reclaim.json", "cancel", LIMIT)


def resume(request: ResumeRunRequest) -> ResumeRunReply:
    """Start the next attempt of a lost run with its own code and its outputs so far.

    Replies as `start` does: a missing image before anything is changed; a live run is found.
    Failure (policy) for a run that ended by itself, unless it is a member of one on several
    servers.
    """
    spec = request.spec
    directory = require_run_directory(spec.lab, spec.lab_id, spec.id)
    resolve_all(spec.data)  # before anything is changed
    image = get_executor(spec.executor).find_image(spec)
    if image is None:
        return ResumeRunReply(missing=spec.image)
    with lock_launch(directory):
        run = inspect_run(directory, {})
        reply = ResumeRunReply(run, directory=str(directory), member=request.member)
        if run.state in UNENDED:
            offset, step = read_log_offset(directory), _find_last_step(directory)
            member = read_member(directory)
            return reply._replace(found=True, offset=offset, step=step, member=member)
        if run.state != "lost" and request.member is None:
            raise Failure(
                "policy",
                f"run {spec.id} ended by itself, so it cannot be resumed",
                run.summary,
                f"labctl logs {spec.id}",
            )
        _archive_last_attempt(directory)
        step = _find_last_step(directory)
        offset = _mark_gap(directory, request.reason or "resumed")
        root = lab_dir(spec.lab, spec.lab_id)
        started = launch(
            root,
            directory,
            spec,
            image,
            request.secrets,
            held=request.member is not None,
            member=request.member,
        )
    return reply._replace(run=inspect_run(directory, started), offset=offset, step=step)


def _find_last_step(directory: Path) -> float | None:
    """Return the step of the run's newest complete checkpoint, None if that records none."""
    newest = find_newest_complete(directory)
    return newest.step if newest else None


def from_push(request: AdoptPushedRequest) -> AdoptPushedReply:
    """Make a run of what was pushed to `restore/<run>`: its code, its outputs, its spec.

    The new run counts as lost, and `resume` continues it. A run that exists already stays as it is.
    """
    spec = request.spec
    lab = lab_dir(spec.lab, spec.lab_id)
    pushed, directory = lab / "restore" / require_name(spec.id), run_dir(lab, spec.id)
    if directory.is_dir() and request.replaces:
        _set_aside(directory)
    if directory.is_dir():
        if request.completes:
            _add_outputs(pushed, directory)
        return AdoptPushedReply(inspect_run(directory, {}))
    if not (pushed / "code").is_dir():
        raise Failure("missing", f"no files of run {spec.id} were uploaded to this server")
    (pushed / ".labctl").mkdir(exist_ok=True)
    write_spec_and_claim(pushed, spec, request.created_at)
    for number in range(1, request.attempts + 1):
        # It ran on another machine: a foreign boot token marks the attempt as lost.
        write_attempt(pushed, number, AttemptRecord(boot="elsewhere"))
    names = sorted(str(p.relative_to(pushed / "code")) for p in (pushed / "code").rglob("*"))
    write_json(pushed / ".labctl" / "code.json", names)
    directory.parent.mkdir(exist_ok=True)
    pushed.rename(directory)
    return AdoptPushedReply(inspect_run(directory, {}))


def _set_aside(directory: Path) -> None:
    """Rename a run that is not active, so that one with newer files can take its place."""
    with lock_launch(directory):
        if inspect_run(directory, {}).state in UNENDED:
            return
        number = len(list(directory.parent.glob(f".replaced-{directory.name}-*"))) + 1
        directory.rename(directory.with_name(f".replaced-{directory.name}-{number}"))


def _add_outputs(pushed: Path, directory: Path) -> None:
    """Make the run's checkpoints those that were pushed, so that all its parts read the same one.

    Earlier copies are dropped. What the part wrote itself is kept beside them.
    """
    target, listing = directory / "checkpoints", directory / ".labctl" / "copied.json"
    copied = read_json(listing).get("names", [])
    names = sorted(path.name for path in (pushed / "checkpoints").glob("*"))
    aside = directory / f"own-checkpoints-{len(list_attempts(directory))}"
    for path in sorted(target.glob("*")):
        if path.name not in copied:
            aside.mkdir(exist_ok=True)
            path.rename(aside / path.name)
        elif path.is_dir() and not path.is_symlink():
            drop_tree(path)
        else:
            path.unlink()
    target.mkdir(exist_ok=True)
    for name in names:
        (pushed / "checkpoints" / name).rename(target / name)
    write_json(listing, {"names": names})
    if pushed.is_dir():
        drop_tree(pushed)


def _archive_last_attempt(directory: Path) -> None:
    """Rename the records of how the last attempt ended, so that they stay beside the next one."""
    meta = directory / ".labctl"
    number = len(list_attempts(directory)) or 1
    for name in SET_ASIDE:
        if (meta / name).exists():
            (meta / name).replace(meta / f"ended-{number}-{name}")


def _mark_gap(directory: Path, message: str) -> int:
    """Write a line to the run's log where it was cut; return the byte offset before it."""
    log = directory / "logs" / "run.log"
    log.parent.mkdir(exist_ok=True)
    offset = log.stat().st_size if log.exists() else 0
    write_log_offset(directory, offset)
    is_line_open = log.exists() and log.stat().st_size > 0 and log.read_bytes()[-1:] != b"\n"
    time_text = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    attempt = len(list_attempts(directory)) + 1
    with log.open("a") as file:
        file.write(
            ("\n" if is_line_open else "") + f"--- {time_text}: {message} (attempt {attempt}) ---\n"
        )
    return offset
