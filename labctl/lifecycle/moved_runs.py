"""The runs of a lab on their way to another server: stopped with a checkpoint, saved, resumed.

They go through this machine: what a run needs there (code, spec, outputs) is saved and verified
here first, as `down` does it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from labctl.errors import LabError, NotFoundError
from labctl.events import Note, report_wait
from labctl.lifecycle import home_files, recover, restore, spending_policy
from labctl.lifecycle.final_download import describe_missing, make_unsaved_error
from labctl.lifecycle.recovery_lock import RecoveryLock
from labctl.model import Run, Server, Value
from labctl.runs import outputs, runs
from labctl.servers import moves
from labctl.servers.agent import AgentClient
from labctl.servers.context import LabContext
from labctl.servers.gpus import choose_server_gpus_option, select_gpus
from labctl.servers.plan import describe_offer
from labctl.servers.provider_choice import RECOVERABLE
from labctl.shell import command
from labctl.sync import lab_files
from labctl.sync import pull as transfer
from labctl.wire.codec import MessageError, decode, encode
from labctl.wire.containment import is_contained
from labctl.wire.files import MANIFEST, ManifestRequest
from labctl.wire.runs import RunSpec

GRACE_S = 60
CODE = "code"
# States of a run that another server would resume.
ACTIVE = ("starting", "running")
CALL_S = 600.0


class SavedFiles(Value, frozen=True):
    """How many files were downloaded from a server that is about to be removed."""

    results: int = 0
    edits: int = 0
    home_files: int = 0


def list_active_runs(context: LabContext, server: Server) -> list[str]:
    """List the runs of the lab that are active on the server, after asking it."""
    with report_wait(context.reporter, f"reading the runs on {server.alias}"):
        runs.refresh(context, server)
    every = context.state.list_runs(context.lab_id)
    return [run.id for run in every if run.server_id == server.id and run.state in ACTIVE]


def keep_for_move(context: LabContext, server: Server, run_id: str) -> None:
    """Save the code and the spec with which the run was started, unless they are here."""
    kept = context.config.root / restore.KEPT / run_id
    with suppress(NotFoundError):
        restore.read_local(context, run_id)
        return
    remote = context.open_agent(server)
    request = ManifestRequest(
        context.config.name, context.lab_id, runs=(run_id,), only=(CODE,), quick=True
    )
    manifest = remote.call(MANIFEST, request, timeout_s=CALL_S).runs[run_id]
    text = remote.transport.run(command("cat", f"{manifest.directory}/.labctl/spec.json")).stdout
    spec = _parse_spec(run_id, text)
    root = context.config.root / ".labctl" / "moving"
    shutil.rmtree(root, ignore_errors=True)
    transfer.pull(
        remote,
        context.config.name,
        context.lab_id,
        [run_id],
        root,
        reporter=context.reporter,
        only=(CODE,),
    )
    staging = kept.with_name(f".{run_id}.new")
    shutil.rmtree(staging, ignore_errors=True)
    (root / "runs" / run_id / CODE).mkdir(parents=True, exist_ok=True)
    _restore_modes(remote, f"{manifest.directory}/{CODE}", root / "runs" / run_id / CODE)
    staging.mkdir(parents=True)
    (root / "runs" / run_id / CODE).rename(staging / CODE)
    (staging / "spec.json").write_text(encode(spec), encoding="utf-8")
    shutil.rmtree(kept, ignore_errors=True)
    staging.rename(kept)
    shutil.rmtree(root, ignore_errors=True)


def _restore_modes(remote: AgentClient, directory: str, code: Path) -> None:
    """Make programs executable as on the server: a download of outputs leaves that out."""
    line = command("find", directory, "-type", "f", "-perm", "-u+x", "-print0")
    for name in remote.transport.run(line).stdout.split("\0"):
        relative = name.removeprefix(f"{directory}/")
        path = code / relative
        if relative and is_contained(relative) and path.is_file() and not path.is_symlink():
            path.chmod(0o755)


def _parse_spec(run_id: str, text: str) -> RunSpec:
    try:
        spec = decode(RunSpec, text)
    except MessageError as error:
        raise LabError(
            f"the server's record of run {run_id} cannot be read", why=str(error)
        ) from None
    if spec.id != run_id:
        raise LabError(f"the server's record of run {run_id} is that of {spec.id!a}")
    return spec


def stop_runs(context: LabContext, server: Server, run_ids: Sequence[str]) -> list[str]:
    """Stop the runs, each with the time for a checkpoint; return those that another must resume.

    One that ended by itself meanwhile is not among them.
    """
    stopped = []
    for run_id in run_ids:
        gpus = restore.read_local(context, run_id).spec.gpus
        moves.note_stopped_run(context, server, run_id, gpus)
        run = runs.stop_to_move(context, server, run_id, GRACE_S)
        context.reporter.emit(Note(text=f"{run.id}: {run.summary}"))
        if is_resumable(run):
            stopped.append(run_id)
    return stopped


def is_resumable(run: Run) -> bool:
    """Whether a run has not ended by itself, nor by its user, nor by a limit."""
    return run.state in (*ACTIVE, "lost") and not run.stopped_by


def save_all(context: LabContext, server: Server) -> SavedFiles:
    """Download everything that is only on the server, and verify it.

    LabError if something cannot be saved: the server must stay then.
    """
    pulled = outputs.pull(context, server, [], everything=True)
    with report_wait(context.reporter, "looking for files that were edited on the server"):
        edits = lab_files.save_edits(context, server)
    if home := home_files.choose_home_files(context, server, asks=False):
        home_files.pull_home_files(context, server, home)
    unsaved = [
        *(describe_missing(file) for file in outputs.list_missing(context, server)),
        *(f"code/{skipped}" for skipped in edits.skipped),
    ]
    if unsaved:
        raise make_unsaved_error(unsaved)
    return SavedFiles(
        results=sum(run.files for run in pulled),
        edits=len(edits.saved),
        home_files=len(home.files) if home else 0,
    )


def resume_runs(
    context: LabContext,
    server: Server,
    run_ids: Sequence[str],
    locks: Mapping[str, RecoveryLock],
    source: Server,
) -> None:
    """Send the saved runs to the server, and start the next attempt of each there."""
    for run_id in run_ids:
        there = runs.fetch_run(context, server, run_id)
        if there is not None and there.state not in (*ACTIVE, "lost"):
            runs.record_run(context, server, there)  # an interrupted move resumed it, and it ended
            continue
        was_recoverable = context.state.list_events(
            lab_id=context.lab_id, run_id=run_id, kind=RECOVERABLE, limit=1
        )
        replaces = there is not None and there.state == "lost"
        _resume(context, server, run_id, locks[run_id], source, replaces=replaces)
        if was_recoverable:
            spending_policy.record_price_limit(context, server, run_id)


def _resume(
    context: LabContext,
    server: Server,
    run_id: str,
    lock: RecoveryLock,
    source: Server,
    *,
    replaces: bool,
) -> None:
    """Send a run and start its next attempt; one that is active there is found."""
    reason = f"moved from {source.provider} {describe_offer(source.offer)}"
    started_s = time.monotonic()
    known = runs.find_run(context, run_id)
    spec = _adapt_spec(context, server, run_id)
    files = 0
    if replaces or runs.fetch_run(context, server, run_id) is None:
        files = restore.restore_local(context, server, run_id, replaces=replaces)
    reply, record = recover.resume_run(context, server, spec, reason, lock)
    run = runs.record_run(context, server, record)
    recovery = recover.Recovery(
        run=run,
        server_id=server.id,
        last_step=known.progress.get("step"),
        from_step=reply.step,
        took_s=time.monotonic() - started_s,
        files=files,
        reason=reason,
    )
    if not reply.found:
        recover.record_recovery(context, recovery)


def _adapt_spec(context: LabContext, server: Server, run_id: str) -> RunSpec:
    """Return the run's spec for the GPUs of another server, and save it."""
    path = context.config.root / restore.KEPT / run_id / "spec.json"
    spec = restore.read_local(context, run_id).spec
    if spec.gpus in ("", "all"):
        gpus = choose_server_gpus_option(context, server)
    else:
        gpus = select_gpus(context.load_facts(server), len(spec.gpus.split(",")))
    adapted = spec._replace(gpus=gpus)
    if adapted != spec:
        path.write_text(encode(adapted), encoding="utf-8")
    return adapted


def return_runs(
    context: LabContext,
    server: Server,
    run_ids: Sequence[str],
    locks: Mapping[str, RecoveryLock],
    other: tuple[LabContext, Server] | None = None,
) -> list[str]:
    """Resume stopped runs on the server that they were stopped on; return those that run there.

    `other` is the server that may have resumed some of them: it stops them first.
    """
    returned = []
    for run_id in run_ids:
        try:
            if other is not None and runs.fetch_run(*other, run_id) is not None:
                runs.stop_to_move(*other, run_id, GRACE_S)
            if _return_run(context, server, run_id, locks[run_id]):
                returned.append(run_id)
        except LabError as error:
            text = f"{run_id} was not resumed on {server.alias}: {error.what}"
            context.reporter.emit(Note(text=text, level="warning"))
    return returned


def _return_run(context: LabContext, server: Server, run_id: str, lock: RecoveryLock) -> bool:
    """Resume a run that the move stopped; False if it was not stopped, or has ended by itself."""
    there = runs.fetch_run(context, server, run_id)
    if there is None or there.state != "lost":
        if there is not None:
            runs.record_run(context, server, there)
        return False
    path = context.config.root / restore.KEPT / run_id / "spec.json"
    gpus = moves.list_stopped_runs(context).get(run_id, "")
    spec = restore.read_local(context, run_id).spec._replace(gpus=gpus)
    path.write_text(encode(spec), encoding="utf-8")
    _, record = recover.resume_run(context, server, spec, "not moved", lock)
    runs.record_run(context, server, record)
    return True
