"""What a lab with several servers and a keeper refuses, so that one machine alone acts on a run.

Two machines that restart the same run, or replace the same server, would undo each other's work.
"""

from __future__ import annotations

from labctl.errors import BusyError, LabError, LockHeldError, NotFoundError, PolicyError, UsageError
from labctl.events import Note
from labctl.lifecycle import gang_runs, reconcile
from labctl.lifecycle.keeper_host import KeeperHost
from labctl.lifecycle.recovery_lock import find_keeper
from labctl.servers.context import LabContext
from labctl.text import add_next


def require_one_watcher(context: LabContext, run_id: str, *, recover: bool, keeper: str) -> None:
    """Raise the errors of `run --recover` beside a keeper, or beside a process that follows a run.

    UsageError if a keeper has the lab and this machine would replace its servers too, or for a run
    on more servers than lab.yaml has now. BusyError if a process here follows a run that would be
    handed over.
    """
    kept_by = find_keeper(context)
    if recover and not keeper and kept_by:
        raise UsageError(
            f"this machine cannot recover a run of {context.name}",
            why=f"the keeper at {kept_by} replaces the lab's servers",
            hint=f"labctl run --recover --keeper {kept_by}",
        )
    if not keeper:
        return
    require_enough_servers(context, run_id)
    try:
        with gang_runs.hold_watch(context, f"run --keeper {keeper}"):
            pass
    except LockHeldError as error:
        raise BusyError(
            f"{context.name} cannot be handed over to a keeper",
            why=f"{error.what}, and would act on its runs too",
            hint="press Ctrl-C there, then repeat this command",
        ) from error


def require_enough_servers(context: LabContext, run_id: str) -> None:
    """UsageError if the run, "" for a new one, is on more servers than lab.yaml has now."""
    count = context.config.server.count
    if run_id and (parts := gang_runs.count_parts(context, run_id)) > count:
        raise UsageError(
            f"run {run_id} cannot be handed over to a keeper",
            why=f"it is on {parts} servers, and lab.yaml has `count: {count}` now",
            hint=f"write `count: {parts}` under `server` in lab.yaml",
        )


def require_not_kept(context: LabContext, run_id: str) -> None:
    """PolicyError if a keeper starts the run again, so that this machine must not."""
    if keeper := find_keeper(context, run_id):
        raise PolicyError(
            f"run {run_id} is not started again from here",
            why=f"the keeper at {keeper} does that, as often as `restarts` in lab.yaml allows",
            hint=f"labctl logs {run_id}\n"
            f"labctl run --recover --keeper {keeper}   # starts another run",
        )


def note_cancel(context: LabContext, host: str, run_id: str) -> None:
    """Tell the keeper at `host` that the run must not start again, and merge its records.

    It may have replaced servers since. A keeper that does not answer is a warning.
    """
    try:
        KeeperHost(context, host).note_cancel(run_id)
    except NotFoundError:
        pass  # the merge says that the keeper no longer has the lab
    except LabError as error:
        text = f"cannot tell the keeper at {host} ({error.what}); it may start {run_id} again"
        hint = f"labctl cancel {run_id}   # again, once the keeper is reachable"
        context.reporter.emit(Note(text=add_next(text, hint), level="warning"))
        return
    reconcile.merge_keeper_records(context)
