"""Runs: claim, launch, inspect and cancel them.

The truth about a run is its directory, its container's labels and `docker inspect`.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ...wire.boot_id import read_boot_token
from ...wire.runs import (
    MOVE,
    AttemptRecord,
    CancelRunReply,
    CancelRunRequest,
    GangMember,
    RunRequest,
    RunSpec,
    StartRunReply,
    StartRunRequest,
)
from ...wire.verbs import SHOW_DISK
from ..host.background import BackgroundShell
from ..host.docker import run_tmux
from ..host.engine_objects import Image
from ..host.paths import drop_tree, lab_dir, run_dir, write_json, write_text
from ..host.server_data import resolve_all
from ..program import PROGRAM
from ..reply import Failure
from . import secrets_tmpfs
from .containers import create_output_directories
from .executor import AttemptImage, Executor, NewAttempt, ProgramState, UnknownStartError
from .executors import get_executor
from .records import (
    list_attempts,
    read_claim,
    read_last_attempt,
    read_member,
    write_attempt,
    write_final_record,
    write_member,
    write_reached_limit,
    write_spec_and_claim,
)
from .run_state import MOVED, UNENDED, describe_failed_gang, inspect_run, require_run_directory
from .spec import read_spec
from .tmux_session import build_session_words
from .trackers import write_tracker_files

# Starts the telemetry recorder, a second later: it stays out of the way of the container's start.
_RECORDER = "sleep 1\nexec " + shlex.join(
    [sys.executable, "-I", "-S", str(PROGRAM / "__main__.py"), "telemetry"]
)


def start(request: StartRunRequest) -> StartRunReply:
    """Claim and launch a run, or find the one that an identical request started before."""
    spec = request.spec
    root = lab_dir(spec.lab, spec.lab_id)
    directory = run_dir(root, spec.id)
    image = None
    if not directory.exists():
        resolve_all(spec.data)  # a missing directory is reported before an image is built
        image = get_executor(spec.executor).find_image(spec)
    if image is None and not directory.exists():
        return StartRunReply(missing=spec.image)
    existed = not _claim(directory, spec)
    with lock_launch(directory):
        return _launch_claimed(request, root, directory, image, existed)


@contextmanager
def lock_launch(directory: Path) -> Iterator[None]:
    """Hold the lock of a claimed run while it is launched: a later call waits, then finds the run.

    The lock ends with this process: no child inherits it.
    """
    try:
        file = (directory / ".labctl" / "claim.json").open("r+")
    except FileNotFoundError:
        raise _describe_failed_launch(directory) from None
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not directory.exists():
            raise _describe_failed_launch(directory)
        yield


def _describe_failed_launch(directory: Path) -> Failure:
    message = f"run {directory.name} was being started by another call, which failed"
    return Failure("docker", message, hint=f"labctl run --id {directory.name}")


def _launch_claimed(
    request: StartRunRequest,
    root: Path,
    directory: Path,
    image: AttemptImage | None,
    existed: bool,
) -> StartRunReply:
    spec = request.spec
    run = inspect_run(directory, {})
    # It was launched before, or by a call that found our claim and was quicker. A held one was
    # created by a call that was lost before it started the container.
    if run.state != "claimed" or (request.held and _is_held(spec.executor, run.container)):
        member = read_member(directory)
        return StartRunReply(run, found=True, directory=str(directory), member=member)
    image = image or get_executor(spec.executor).find_image(spec)
    if image is None:
        return StartRunReply(missing=spec.image)
    try:
        started = launch(
            root,
            directory,
            spec,
            image,
            request.secrets,
            held=request.held,
            member=request.member,
        )
    except UnknownStartError:
        raise  # a repeated call finds the run by its claim
    except Failure:
        if not existed:
            drop_tree(directory)
        secrets_tmpfs.remove_secrets(spec.id)
        raise
    return StartRunReply(
        inspect_run(directory, started),
        existed,
        str(directory),
        active=_list_other_active_runs(spec),
        member=request.member,
    )


def _list_other_active_runs(spec: RunSpec) -> tuple[str, ...]:
    """List the ids of the lab's running runs except this one on this machine, the newest first."""
    executor = get_executor(spec.executor)
    if not executor.runs_here:
        return ()
    try:
        live = executor.list_live(spec.lab_id)
    except Failure:  # the run has started: a list for information must not fail it
        return ()
    return tuple(attempt.run for attempt in live if attempt.run != spec.id)


def _is_held(executor: str, name: str) -> bool:
    program = get_executor(executor).inspect([name]).get(name) if name else None
    return program is not None and program.status == "created"


def _claim(directory: Path, spec: RunSpec) -> bool:
    """Create the run directory by a rename that carries the spec's hash.

    Returns False if an identical request has created it before. Failure (taken) if the run there
    has another spec.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    fresh = directory.parent / f".{spec.id}.{os.urandom(4).hex()}"
    (fresh / ".labctl").mkdir(parents=True)
    claim = write_spec_and_claim(fresh, spec, time.time())
    try:
        fresh.rename(directory)
        return True
    except OSError:
        drop_tree(fresh)
        if read_claim(directory).hash != claim.hash:
            raise Failure(
                "taken",
                f'A run named "{spec.id}" already exists on this server.',
                "its command, image or settings differ",
                f"labctl logs -f {spec.id}   # instead, to follow that run",
            ) from None
        return False


def launch(
    root: Path,
    directory: Path,
    spec: RunSpec,
    image: AttemptImage,
    secrets: dict[str, str],
    *,
    held: bool = False,
    member: GangMember | None = None,
) -> dict[str, ProgramState]:
    """Start the run's next attempt; with `held`, only create it.

    Returns the attempt by its name, as its executor would show it now.
    """
    _snapshot(root / "code", directory / "code")
    create_output_directories(directory, spec.outputs)
    (directory / "logs" / "run.log").touch()
    meta = directory / ".labctl"
    write_text(meta / "entry.sh", read_entry_script(), 0o755)
    write_tracker_files(meta, spec.env)
    attempt = len(list_attempts(directory)) + 1
    container = f"{root.name}-{spec.id}-{attempt}"
    executor = get_executor(spec.executor)
    record = AttemptRecord(
        container=container,
        boot=read_boot_token() if executor.runs_here else "",
        image_id=image.Id if isinstance(image, Image) else "",
        image_digest=next(iter(image.RepoDigests or ()), "") if isinstance(image, Image) else "",
        started_at=time.time(),
    )
    write_attempt(directory, attempt, record)
    secrets_tmpfs.write_secrets(spec.id, secrets)
    if member is not None:
        write_member(directory, member)
    new_attempt = NewAttempt(container, root, directory, spec, image, member)
    with BackgroundShell() as shell:
        started = _start_attempt(executor, new_attempt, held)
        script = _RECORDER if executor.runs_here else ""
        # `labctl attach` opens a held run's session: a shell in the container needs a running one.
        if not held:
            script = _note_launch(executor, directory, attempt, record)
        shell.run(script)
    return started


def _note_launch(executor: Executor, directory: Path, number: int, record: AttemptRecord) -> str:
    """Record that an attempt has started; return the script of what runs beside it."""
    # The run has started: even if it has filled the disk by now, that is not a failure.
    with suppress(OSError):
        write_attempt(directory, number, record._replace(launched=True))
    # Elsewhere the session's shell would be a step of the job: `labctl attach` opens it.
    if not executor.runs_here:
        return ""
    session = ["tmux", *build_session_words(executor, directory, record.container)]
    return f"{shlex.join(session)} &\n{_RECORDER}"


def start_held(request: RunRequest) -> StartRunReply:
    """Start a run that was created and waits for that; leave one that has started as it is."""
    directory = require_run_directory(request.lab, request.lab_id, request.run)
    with lock_launch(directory):
        run, spec = inspect_run(directory, {}), read_spec(directory)
        executor = get_executor(spec.executor)
        is_held = run.state == "claimed" and _is_held(spec.executor, run.container)
        image = executor.find_image(spec) if is_held else None
        if image is None:
            return StartRunReply(run, found=True, directory=str(directory))
        root, number = lab_dir(spec.lab, spec.lab_id), len(list_attempts(directory))
        record = read_last_attempt(directory)._replace(started_at=time.time())
        with BackgroundShell() as shell:
            try:
                executor.start(NewAttempt(run.container, root, directory, spec, image))
            except UnknownStartError:
                raise
            except Failure:
                if number == 1:
                    drop_tree(directory)
                raise
            shell.run(_note_launch(executor, directory, number, record))
        return StartRunReply(inspect_run(directory, {}), directory=str(directory))


def _start_attempt(executor: Executor, attempt: NewAttempt, held: bool) -> dict[str, ProgramState]:
    """Create an attempt, and start it unless it is `held`.

    If it exists, it belongs to another call for this attempt: leave it alone.
    """
    if not executor.create(attempt):
        return {}
    if held:
        return {attempt.name: ProgramState(attempt.name, "created")}
    executor.start(attempt)
    if not executor.runs_here:
        return executor.inspect([attempt.name])  # it may be queued
    # Its start has just been confirmed. To inspect a command that ends at once would take 80 ms.
    return {attempt.name: ProgramState(attempt.name, "running")}


def read_entry_script() -> str:
    return Path(__file__).with_name("entry.sh").read_text()


def _snapshot(code: Path, target: Path) -> None:
    """Copy the code for this run alone, with reflinks where the filesystem supports them."""
    if target.exists():
        return
    code.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(".code.partial")
    if partial.exists():
        drop_tree(partial)
    complaint = _copy_tree(code, partial)
    if complaint:
        full = "No space left" in complaint  # cp exits with 1 for every error
        raise Failure(
            "disk" if full else "docker",
            "the server's disk is full" if full else "could not copy the code for the run",
            complaint[-500:],
            SHOW_DISK,
        )
    names = sorted(str(p.relative_to(partial)) for p in partial.rglob("*") if p.is_file())
    write_json(target.parent / ".labctl" / "code.json", names)
    partial.rename(target)


def _copy_tree(source: Path, target: Path) -> str:
    """Copy a tree; return what `cp` complains of, or "" on success.

    Importing subprocess would take 3 ms.
    """
    words = ["cp", "-a", "--reflink=auto", str(source), str(target)]
    reading, writing = os.pipe()
    errors = [(os.POSIX_SPAWN_DUP2, writing, 2)]
    process = os.posix_spawnp("cp", words, os.environ, file_actions=errors)
    os.close(writing)
    with os.fdopen(reading, errors="replace") as stream:
        text = stream.read().strip()
    _, status = os.waitpid(process, 0)
    return text or f"cp ended with status {status}" if status else ""


def cancel(request: CancelRunRequest) -> CancelRunReply:
    """Send SIGTERM, allow `grace_s` seconds for a checkpoint, then SIGKILL. Safe to repeat.

    With `moves`, the run counts as lost then, unless it ended by itself.
    """
    directory = require_run_directory(request.lab, request.lab_id, request.run)
    before = inspect_run(directory, {})
    if before.state not in UNENDED:
        return CancelRunReply(before, already=True)
    # A launch that is under way would start the container after this.
    with lock_launch(directory):
        before = inspect_run(directory, {})
        if request.moves:
            write_reached_limit(directory, MOVE)
        else:
            write_text(directory / ".labctl" / "cancel", request.reason)
        if before.container:
            executor = get_executor(read_spec(directory).executor)
            executor.stop(before.container, request.grace_s)
        after = inspect_run(directory, {})
        if after.state == "claimed" and request.moves:
            after = after._replace(state="lost", summary=MOVED)
            write_final_record(directory, after)
        elif after.state == "claimed":
            after = after._replace(state="cancelled", summary="canceled before it started")
            after = describe_failed_gang(directory, after)
            write_final_record(directory, after)
    run_tmux("kill-session", "-t", f"=labctl-{directory.name}")
    return CancelRunReply(after, already=False)
