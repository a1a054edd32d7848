"""Remove a lab's server. Nothing here destroys the only copy of a run's outputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from labctl.errors import (
    AuthenticationError,
    ConnectError,
    HostKeyError,
    LabError,
    PolicyError,
)
from labctl.events import Note, Question, Step, report_wait
from labctl.lazy import lazy_imports
from labctl.lifecycle import reconcile, unsaved_server
from labctl.lifecycle.final_download import FinalDownload, download_everything
from labctl.lifecycle.recovery_lock import find_keeper
from labctl.model import Resource, Server, Value
from labctl.retry import poll_until
from labctl.runs import runs
from labctl.servers import (
    adoption,
    end_server,
    former_providers,
    job_queue,
    pending_attempts,
)
from labctl.servers.context import LabContext
from labctl.servers.open_costs import explain_open_costs
from labctl.servers.provider_choice import is_market
from labctl.services import lab_services
from labctl.state import ledgers
from labctl.stores import lab_store
from labctl.text import price_or_free_text

with lazy_imports(__name__):
    from labctl.lifecycle import gang_down, gang_wireguard, move_end

# seconds to wait for another command that works on the lab
WAIT_S = 10.0

# Raises PolicyError if this server, with these active runs, must stay. The last argument says
# whether results that were not pulled would be lost.
Consent = Callable[[LabContext, Server, list[str], bool], None]


class DownResult(Value, frozen=True):
    """What `down` did and what remains. If `servers_left` is empty, no server bills.

    `dropped` is a leased machine that cannot be reached, or `has_other_key`: only the record of it
    here was removed. `home_files` counts the files that were downloaded from the server's home
    directory, to `home_directories` of the lab, one for each server. `unchecked` says why the
    machines of a lab without a server on record could not be checked. `failures` says, by provider,
    why it could not be asked what the lab has left there.
    """

    removed: str = ""
    dropped: str = ""
    has_other_key: bool = False
    pulled_files: int = 0
    saved_edits: int = 0
    home_files: int = 0
    home_directories: tuple[str, ...] = ()
    servers_left: tuple[Server, ...] = ()
    leftovers: tuple[Resource, ...] = ()
    unchecked: str = ""
    failures: dict[str, str] = msgspec.field(default_factory=dict)


def down(
    context: LabContext, *, discard: bool, consent: Consent | None = None, wait_s: float = WAIT_S
) -> DownResult:
    """Pull what is not here, remove the lab's server, and ask the provider what remains.

    PolicyError if the user declines, or if results could not be saved: the server is stopped then,
    and its disk is kept. `consent` decides instead of the user.
    """
    if gang_down.has_other_servers(context):
        return gang_down.down_all(context, discard=discard, consent=consent, wait_s=wait_s)
    move_lock = context.state.lock(f"{context.lab_id}-move", "down", wait_s=wait_s)
    lock = context.state.lock(context.lab_id, "down", wait_s=wait_s)
    with move_lock, lock, explain_open_costs(context):
        # An unreachable keeper is a refusal, so it must come before the question and the downloads.
        reconcile.merge_keeper_records(context, required=not discard)
        try:
            server = find_server(context, discard) or await_unconfirmed(context)
        except (AuthenticationError, ConnectError) as error:
            return _forget_attempts(context, error)
        if server is None:
            reconcile.release_keeper(context, discard=discard)
            move_end.remove_parts(context)
            return _add_former(context, _sweep(context))
        is_fresh = adoption.is_fresh(context, server)
        loses_results = discard and not is_fresh
        discard = discard or is_fresh
        running = []
        if server.state != "stopped":
            running = _list_running(context, server, discard, consent)
        (consent or _ask_for_consent)(context, server, running, loses_results)
        # A process that follows one of its runs must not mistake this for a lost server.
        context.state.record(ledgers.PUT_DOWN, lab_id=context.lab_id, server_id=server.id)
        lab_services.stop_forwards(context, server)
        saved = FinalDownload()
        if not discard:
            saved = download_everything(context, server, running, asks_for_home=consent is None)
        reconcile.release_keeper(context, discard=discard)
        move_end.remove_parts(context)
        if adoption.is_leased(context) and server.state != "stopped":
            gang_wireguard.remove(context, server)
        rest = end_server.remove_or_drop(context, server, discard=discard)
        if not isinstance(rest, LabError):
            job_queue.remove_files(context)
        _record_lost_runs(context, server, is_removed=not isinstance(rest, LabError))
        _close_store(context)
        if isinstance(rest, LabError):
            return DownResult(dropped=server.id, has_other_key=isinstance(rest, HostKeyError))
        result = DownResult(
            removed=rest.server_id,
            pulled_files=saved.results,
            saved_edits=saved.edits,
            home_files=saved.home_files,
            home_directories=(saved.home_directory,) if saved.home_directory else (),
            servers_left=rest.survivors,
            leftovers=rest.leftovers,
        )
        return _add_former(context, result)


def _add_former(context: LabContext, result: DownResult) -> DownResult:
    """Remove what the lab has left at other providers too, and add what is still there."""
    former = former_providers.sweep_former_providers(context)
    context.connections.retire_machines()
    rests = former.removals
    return msgspec.structs.replace(
        result,
        servers_left=(*result.servers_left, *(one for rest in rests for one in rest.survivors)),
        leftovers=(*result.leftovers, *(one for rest in rests for one in rest.leftovers)),
        failures=former.failures,
    )


def _record_lost_runs(context: LabContext, server: Server, *, is_removed: bool) -> None:
    """Record that runs which were active until now are lost with their server."""
    summary = "lost: labctl down removed its server"
    if not is_removed:
        summary = "lost: labctl down gave up its machine, where it may still run"
    for run in context.state.list_runs(context.lab_id):
        if run.server_id == server.id and not run.has_ended:
            lost = msgspec.structs.replace(run, state="lost", summary=summary, ended_at=time.time())
            context.state.save_run(lost)


def _sweep(context: LabContext) -> DownResult:
    """Remove what is left of a lab without a live server.

    The providers behind a market are swept with the lab's former ones.
    """
    if is_market(context.provider.name):
        return DownResult()
    ending = context.state.get_lab_server(context.lab_id)
    rest = end_server.sweep(context, ending.id if ending else "")
    return DownResult(removed=rest.server_id, servers_left=rest.survivors, leftovers=rest.leftovers)


def drain_server(
    context: LabContext, server: Server, *, discard: bool, saves_home: bool = False
) -> FinalDownload:
    """Do all of `down` but the removal: stop what runs, then pull and verify everything.

    Files in the server's home directory are downloaded only with `saves_home`. Asks no questions.
    PolicyError if not everything could be saved: the server is stopped then, and its disk is kept.
    """
    discard = discard or adoption.is_fresh(context, server)
    running = [] if server.state == "stopped" else _list_running(context, server, discard)
    context.state.record(ledgers.PUT_DOWN, lab_id=context.lab_id, server_id=server.id)
    lab_services.stop_forwards(context, server)
    if discard:
        return FinalDownload()
    asks_for_home = False if saves_home else None
    return download_everything(context, server, running, asks_for_home=asks_for_home)


def _close_store(context: LabContext) -> None:
    """Revoke the removed server's access to the lab's store. The store's content stays."""
    try:
        lab_store.forget_store(context)
    except LabError as error:
        message = f"the server's key still has access to {context.config.store}: {error.what}"
        text = f"{message}; the next `labctl up` replaces it"
        context.reporter.emit(Note(text=text, level="warning"))


def find_server(
    context: LabContext, discard: bool, listed: Sequence[Server] | None = None
) -> Server | None:
    """Return the lab's server; `listed` is the provider's list of servers, if it is known.

    One whose host key changed, or a leased one that does not answer, can be removed only with
    `discard`.
    """
    try:
        with report_wait(context.reporter, f"looking for the server of {context.name}"):
            return adoption.adopt(context, listed)
    except HostKeyError:
        if not discard:
            raise
    except ConnectError:
        if not (discard and adoption.is_shared_with_others(context) and _get_recorded(context)):
            raise
    return _get_recorded(context)


def _get_recorded(context: LabContext) -> Server | None:
    return context.state.get_lab_server(context.lab_id)


def await_unconfirmed(context: LabContext) -> Server | None:
    """Return the server of a create request whose reply was lost; it may take a while to appear."""
    server: Server | None = None

    def is_settled() -> bool:
        nonlocal server
        server = adoption.adopt(context)
        return server is not None or not pending_attempts.list_pending_attempts(context)

    if pending_attempts.list_pending_attempts(context):
        context.reporter.emit(Step(name="checking whether an interrupted `up` created a server"))
        settle_s = context.provider.settle_s
        poll_until(is_settled, pause_s=min(1.0, settle_s), deadline_s=settle_s)
        if server is not None:
            return server
    pending_attempts.close_unseen_attempts(context)
    return None


def _forget_attempts(context: LabContext, error: LabError) -> DownResult:
    """Close the attempts at leased machines that cannot be reached; `error` says why.

    Raises it again if a server is on record or a keeper has the lab, or if a server could cost
    money. A machine that such an attempt leased, with its reply lost, costs nothing, and its lease
    ends by itself.
    """
    may_exist = context.state.list_servers(context.lab_id) or find_keeper(context)
    if may_exist or not adoption.is_shared_with_others(context):
        raise error
    for attempt in context.state.list_open_attempts(context.lab_id):
        if attempt.provider == context.provider.name:
            context.state.end_attempt(attempt.token, "unreachable")
    return DownResult(unchecked=error.what)


def _list_running(
    context: LabContext, server: Server, discard: bool, consent: Consent | None = None
) -> list[str]:
    try:
        with report_wait(context.reporter, f"reading the runs on {server.alias}"):
            runs.refresh(context, server)
    except LabError as error:
        if discard:
            return []
        if isinstance(error, HostKeyError):
            raise
        if consent is not None:
            # Stopping the server would end what others run on it, as far as that is recorded.
            consent(context, server, [], discard)
        raise unsaved_server.stop_and_keep_disk(
            context, server, error, home_is_saved=False
        ) from error
    all_runs = context.state.list_runs(context.lab_id)
    active = ("starting", "running")  # a job may wait for its machine
    return [run.id for run in all_runs if run.state in active and run.server_id == server.id]


def _ask_for_consent(
    context: LabContext, server: Server, running: list[str], loses_results: bool
) -> None:
    verb = "is" if len(running) == 1 else "are"
    live = f"{', '.join(running)} {verb} still running and would be canceled; " if running else ""
    lost = "Results that were not pulled will be LOST. " if loses_results else ""
    action = "end the lease of" if adoption.is_leased(context) else "remove the server"
    if job_queue.has_job_queue(context):
        action = "remove the lab's files from"
    question = f"{lost}{live}{action} {server.alias} ({server.provider})?"
    if not context.reporter.confirm(Question(question=question)):
        raise PolicyError(
            "nothing was removed",
            why=f"{server.alias} is still running "
            f"({price_or_free_text(server.offer.price_usd_per_hour)})",
            hint="labctl pull   # downloads new results and keeps the server",
        )
