"""Merge what a lab's keeper did into this machine's records, when the user returns to the lab.

An unreachable keeper is never an error here: a warning says so, and the local records are used.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from labctl.config.member_ids import list_lab_ids
from labctl.errors import (
    BusyError,
    ConnectError,
    LabError,
    NotFoundError,
    PolicyError,
    ProviderError,
)
from labctl.events import Note, Step, report_wait
from labctl.lifecycle import disk_restore
from labctl.lifecycle.keeper_host import KeeperHost
from labctl.lifecycle.recovery_lock import find_keeper
from labctl.model import Run
from labctl.runs import outputs, runs
from labctl.runs.saved_copies import find_downloaded_runs, list_outputs, pull_from_store
from labctl.runs.stored_images import BUILT_EVENT
from labctl.servers import adoption, disk_retention, kept_disks
from labctl.servers.context import LabContext
from labctl.shell import command
from labctl.state import ledgers
from labctl.state.disks import list_kept_disks
from labctl.state.ledgers import BACK, LedgerLine
from labctl.state.server_ends import find_end_reason
from labctl.sync.local_results import RECORD, read_pulled_run
from labctl.sync.pull import PulledRun
from labctl.text import add_next, names_text


def merge_keeper_records(context: LabContext, *, required: bool = False) -> str:
    """Merge the keeper's ledger and runs; return the keeper's host, "" if the lab has none.

    Does not ask the provider: `adopt` does that. If the keeper cannot be reached, a warning says
    so; with `required`, it is the PolicyError that nothing may be removed.
    """
    host = find_keeper(context)
    if not host:
        return ""
    try:
        with report_wait(context.reporter, f"reading the keeper's records on {host}"):
            report = KeeperHost(context, host).fetch_report()
    except NotFoundError:
        _record_end(context, host)
        context.reporter.emit(Note(text=f"{host} no longer keeps {context.config.name}"))
        return ""
    except LabError as error:
        if required:
            raise _refuse_removal(context, host, error) from error
        text = f"cannot reach the keeper at {host}: {error.what}; using this machine's records"
        context.reporter.emit(Note(text=text, level="warning"))
        return host
    _import_records(context, context.lab_id, report.lines, report.runs)
    own_ids = list_lab_ids(context.lab_id)[1:]
    for member in report.members:
        if member.lab_id in own_ids:
            _import_records(context, member.lab_id, member.lines, member.runs)
    if report.round is not None and report.round.error:
        text = f"the keeper at {host} reports: {report.round.error}"
        context.reporter.emit(Note(text=text, level="warning"))
    if not report.running:
        hint = f"on {host}:\nlabctl keep --install"
        text = add_next(f"labctl keep is not running on {host}", hint)
        context.reporter.emit(Note(text=text, level="warning"))
    return host


def _import_records(
    context: LabContext, lab_id: str, lines: Sequence[LedgerLine], keeper_runs: Sequence[Run]
) -> None:
    """Add what the keeper knows of one of the lab's servers to this machine's records."""
    # This machine loads images by the ids that it recorded itself: another id could be any image.
    safe_lines = [line for line in lines if line.kind != BUILT_EVENT]
    ledgers.import_lines(context.state, lab_id, safe_lines)
    for run in keeper_runs:
        recorded = context.state.get_run(lab_id, run.id)
        if run.lab_id == lab_id and (recorded is None or recorded.seen_at < run.seen_at):
            context.state.save_run(run)


def _record_end(context: LabContext, host: str) -> None:
    context.state.record(BACK, lab_id=context.lab_id, detail={"keeper": host})


def reconcile(context: LabContext) -> str:
    """Merge the keeper's records and the provider's; return the keeper's host."""
    host = merge_keeper_records(context)
    if host:
        try:
            adoption.adopt(context)
        except (BusyError, ProviderError) as error:
            text = f"cannot query {context.provider.name}: {error.what}"
            context.reporter.emit(Note(text=text, level="warning"))
    return host


def has_copies(context: LabContext) -> bool:
    """Whether results may exist outside the server: in a store, or at a keeper."""
    return bool(context.config.store or find_keeper(context))


def pull(context: LabContext, run_ids: list[str], *, everything: bool) -> list[PulledRun]:
    """Pull the outputs of these runs (all, if empty) from the server.

    If the server has ended, pull them from the lab's store or its keeper, unless `down` downloaded
    all of them. NotFoundError if neither has them.
    """
    try:
        server = context.get_server()
        disk_retention.renew(context, server)
        if disk_restore.has_pending_disks(context, server):
            disk_restore.restore(context, server)
        pulled = outputs.pull(context, server, run_ids, everything=everything)
        return [outputs.add_left_files(context, server, run) for run in pulled]
    except (NotFoundError, ConnectError) as error:
        if isinstance(error, NotFoundError) and (here := find_downloaded(context, run_ids)):
            return here
        if not has_copies(context) or (isinstance(error, ConnectError) and _has_server(context)):
            raise explain_missing_results(context, run_ids, error) from None
    try:
        return pull_saved_copies(context, run_ids)
    except NotFoundError as error:
        raise explain_missing_results(context, run_ids, error) from None


def find_downloaded(context: LabContext, run_ids: Sequence[str]) -> list[PulledRun]:
    """Return these runs (all, if empty) if `down` downloaded all of them, and say so; else []."""
    ids = run_ids or [run.id for run in context.state.list_runs(context.lab_id)]
    pulled = find_downloaded_runs(context, ids)
    if pulled:
        whose = ids[0] if len(ids) == 1 else "these runs"
        text = f"the server of {whose} was removed after everything on it had been downloaded"
        context.reporter.emit(Note(text=text))
    return pulled


def _has_server(context: LabContext) -> bool:
    return adoption.adopt(context) is not None


def explain_missing_results(
    context: LabContext, run_ids: Sequence[str], error: LabError
) -> LabError:
    """Add to the error of a missing server where the results of these runs (all, if empty) are.

    Kept disks come first: they may have more than was downloaded.
    """
    if not isinstance(error, NotFoundError) or context.state.get_lab_server(context.lab_id):
        return error
    if list_kept_disks(context.state, context.lab_id):
        return kept_disks.explain_missing_server(context, error)
    folder = context.config.root / "runs"
    ids = run_ids or [run.id for run in context.state.list_runs(context.lab_id)]
    pulled = [run for name in ids if (run := read_pulled_run(folder / name / RECORD)) is not None]
    if pulled:
        error.why = "\n".join(filter(None, [error.why, _describe_pulled_runs(pulled)]))
        place = folder / pulled[0].id if len(pulled) == 1 else folder
        # The user may be in a directory below the lab's.
        error.hint = command("ls", os.path.relpath(place)).render()
    elif ids:
        error.why = _describe_lost_runs(context, ids)
        error.hint = "labctl run --up" if context.config.run else "labctl run --up -- COMMAND"
    return error


def _describe_lost_runs(context: LabContext, run_ids: Sequence[str]) -> str:
    """Say that nothing of these runs is left, and what ended the server that they were on."""
    run = context.state.get_run(context.lab_id, run_ids[-1])
    reason = find_end_reason(context.state, run.server_id) if run else ""
    names = names_text(run_ids, 5)
    text = f"the results of {names} were on the server that ended, and no copy was saved"
    return "\n".join(filter(None, [text, reason]))


def _describe_pulled_runs(pulled: Sequence[Run]) -> str:
    if len(pulled) > 1:
        names = names_text([run.id for run in pulled], 5)
        return f"what was downloaded of {names} is on this machine, in runs/"
    (run,) = pulled
    if run.has_ended:
        return f"the results of {run.id} are on this machine, in runs/{run.id}"
    return f"what {run.id} had written before the last pull is in runs/{run.id}"


def pull_saved_copies(context: LabContext, run_ids: list[str]) -> list[PulledRun]:
    """Pull these runs' outputs (all runs, if empty) from the lab's store, or else its keeper.

    NotFoundError if neither has any of them.
    """
    ids = run_ids or [run.id for run in context.state.list_runs(context.lab_id)]
    pulled = [run for run_id in ids if (run := _pull_copy(context, run_id)) is not None]
    if not pulled:
        raise NotFoundError(
            f"no copy of {', '.join(ids) or 'any run'} is saved outside the server",
            why="the server has ended, and neither a store nor a keeper has a copy",
            hint="labctl status --refresh",
        )
    return pulled


def _pull_copy(context: LabContext, run_id: str) -> PulledRun | None:
    if context.config.store:
        try:
            return pull_from_store(context, run_id)
        except NotFoundError:
            pass
    if host := find_keeper(context):
        return pull_keeper_copy(context, KeeperHost(context, host), run_id)
    return None


def pull_keeper_copy(context: LabContext, keeper: KeeperHost, run_id: str) -> PulledRun | None:
    """Pull the run's files that the keeper mirrored; None if there are none."""
    have = {file.path: file.sha256 for file in list_outputs(context.config.root, run_id)}
    pulled = keeper.pull_copy(run_id, have, context.state.get_run(context.lab_id, run_id))
    directory = context.config.root / "runs" / run_id
    return pulled if pulled.files or have or any(directory.glob("*")) else None


def local_log_path(context: LabContext, run_id: str) -> Path:
    """Return the local path of the run's pulled log."""
    return context.config.root / "runs" / runs.find_run(context, run_id).id / "logs" / "run.log"


def read_saved_log(context: LabContext, run_id: str) -> bytes:
    """Read a run's log from a saved or pulled copy; NotFoundError if there is no copy."""
    path = local_log_path(context, run_id)
    if has_copies(context) or not path.is_file():
        pull_saved_copies(context, [run_id])
    if not path.is_file():
        raise NotFoundError(f"the log of {run_id} was not saved", hint=context.subject.status)
    return path.read_bytes()


def fetch_logs(context: LabContext, run_id: str = "") -> Run:
    """Fetch the logs of the run (by default the latest) and return its current state.

    They come from the server or a saved copy. If neither can be reached, the logs that were pulled
    before are used, with a warning. NotFoundError if there are none.
    """
    reconcile(context)
    run = runs.find_run(context, run_id)
    try:
        _fetch_logs(context, run)
    except (NotFoundError, BusyError) as error:
        _fetch_saved_logs(context, run, error)
    return runs.find_run(context, run.id)


def _fetch_logs(context: LabContext, run: Run) -> None:
    server = context.get_server()
    if run.server_id != server.id:
        raise NotFoundError(f"the server of run {run.id} is gone", hint=f"labctl pull {run.id}")
    name = f"fetching the logs of {run.id}"
    context.reporter.emit(Step(name=name))
    outputs.pull(context, server, [run.id], only=("logs",))
    context.reporter.emit(Step(name=name, done=True))


def _fetch_saved_logs(context: LabContext, run: Run, error: LabError) -> None:
    """Fetch the logs from the store or the keeper, else use those that were pulled before."""
    if has_copies(context):
        try:
            pull_saved_copies(context, [run.id])
            return
        except NotFoundError:
            pass
    if not local_log_path(context, run.id).parent.is_dir():
        raise NotFoundError(
            f"no logs of run {run.id} on this machine", why=error.what, hint=error.next_step
        ) from error
    if not run.has_ended:
        text = f"{error.what}; using the logs that were pulled before"
        context.reporter.emit(Note(text=text, level="warning"))


def release_keeper(context: LabContext, *, discard: bool) -> None:
    """Pull what only the keeper has, then make it forget the lab.

    Must run before the lab's server is removed: a keeper that does not know would replace it.
    A recovery there that only waits ends. BusyError if one does more than that, PolicyError if the
    keeper cannot be reached; with `discard` both are only warnings.
    """
    host = find_keeper(context)
    if not host:
        return
    keeper = KeeperHost(context, host)
    try:
        for run_id in [] if discard else [run.id for run in keeper.fetch_report().runs]:
            pull_keeper_copy(context, keeper, run_id)
        with report_wait(context.reporter, f"waiting until the keeper at {host} drops the lab"):
            keeper.drop()
    except NotFoundError:
        pass
    except LabError as error:
        is_busy = isinstance(error, BusyError) and not isinstance(error, ConnectError)
        if not discard:
            refuse = _explain_recovery if is_busy else _refuse_removal
            raise refuse(context, host, error) from error
        problem = "cannot stop the recovery" if is_busy else "cannot reach the keeper"
        text = f"{problem} at {host} ({error.what}); it may create another server"
        hint = f"on {host}:\nlabctl keep --drop {context.config.name}"
        context.reporter.emit(Note(text=add_next(text, hint), level="warning"))
    _record_end(context, host)


def _explain_recovery(context: LabContext, host: str, error: LabError) -> LabError:
    """Return the error that the keeper at `host` cannot drop the lab before a step has ended."""
    return BusyError(
        f"the keeper at {host} is recovering {context.config.name} right now",
        why=f"{error.why}\nit must complete that first",
        hint="labctl down   # again, in a few minutes",
    )


def _refuse_removal(context: LabContext, host: str, error: LabError) -> PolicyError:
    """Return the error that the server stays because the keeper at `host` would replace it."""
    server = context.state.get_lab_server(context.lab_id)
    is_paid = server is None or server.offer.price_usd_per_hour > 0
    cost = ", which costs money" if is_paid else ""
    return PolicyError(
        f"cannot reach the keeper at {host}: {error.what}",
        why=f"it would replace the removed server with another one{cost}",
        hint="labctl down   # again, once the keeper is reachable\n"
        "labctl down --discard   # instead, if the keeper is gone for good",
    )
