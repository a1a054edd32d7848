"""Move a lab to another server: larger, cheaper, or at another provider.

The new server is up and checked before a run is stopped, and a run has resumed there before the
old server ends. Until then the old server stays the lab's own. Each step can be repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import msgspec

from labctl.errors import (
    ConnectError,
    EngineError,
    InterruptError,
    LabError,
    NotFoundError,
    PolicyError,
    UsageError,
    assign_subject,
)
from labctl.events import Event, Note, Question, Reporter, report_wait
from labctl.lifecycle import final_download, gang_runs, home_files, moved_runs, up
from labctl.lifecycle.move_errors import GO_ON, explain_failure, make_interrupt_error
from labctl.lifecycle.moved_runs import SavedFiles
from labctl.lifecycle.recovery_lock import find_keeper, hold_recovery_locks
from labctl.model import Need, Server, Value
from labctl.runs import first_run, run_specs, runs
from labctl.runs.saved_copies import note_downloaded
from labctl.servers import (
    adoption,
    chosen_need,
    deadlines,
    end_server,
    kept_disks,
    moves,
    provider_choice,
)
from labctl.servers.context import LabContext
from labctl.servers.job_queue import has_job_queue
from labctl.servers.moves import MoveRequest
from labctl.servers.provider_traits import describe_provider
from labctl.services import lab_services
from labctl.stores.lab_store import has_one_key, prepare_store
from labctl.text import names_text, price_or_free_text

WHERE = "labctl move --gpu A100\nlabctl move --provider NAME\nlabctl move --type TYPE"


class MoveResult(Value, frozen=True):
    """A finished move. `resumed` are the runs that go on there; counts are of downloaded files."""

    server: Server
    former: Server
    resumed: tuple[str, ...] = ()
    closed_forwards: tuple[str, ...] = ()
    saved: SavedFiles = SavedFiles()


def move(context: LabContext, need: Need | None = None, provider: str = "") -> MoveResult:
    """Move the lab to a server for `need`, or at `provider`; without both, continue a move.

    Whatever fails, the lab keeps a server with all of its results, and errors say how to go on.
    PolicyError if the user declines, if a keeper has the lab, or if its servers cannot be moved.
    """
    gang_runs.require_one_server(context, "move", "labctl down && labctl up")
    with context.state.lock(f"{context.lab_id}-move", "move", wait_s=0.0):
        _require_no_keeper(context)
        request = _settle_request(context, need, provider)
        try:
            return _move(context, request)
        except (KeyboardInterrupt, InterruptError):
            raise make_interrupt_error(context) from None
        except LabError as error:
            explain_failure(context, error)
            raise
        finally:
            if not _list_parts(context):
                moves.end_move(context, "over")


def _require_no_keeper(context: LabContext) -> None:
    if keeper := find_keeper(context):
        raise PolicyError(
            f"{context.name} was not moved",
            why=f"the keeper at {keeper} looks after the lab, and would replace the old server",
            hint="labctl down   # downloads the results, and ends the keeper's watch\n"
            "labctl up   # then, with the options of the new server",
        )


def _settle_request(context: LabContext, need: Need | None, provider: str) -> MoveRequest:
    """Return what to move to: what was typed, or what an unfinished move asked for."""
    pending = moves.find_open_move(context.state, context.lab_id)
    is_typed = need is not None or bool(provider)
    typed = MoveRequest(need=need or context.config.server.need, provider=provider)
    if pending is not None and _list_parts(context):
        if is_typed and typed != pending:
            raise UsageError(
                f"{context.name} has an unfinished move to another server",
                why="its new server exists already",
                hint=GO_ON,
            )
        return pending
    if not is_typed:
        raise UsageError(
            "labctl move needs a GPU, a provider or a machine type to move to", hint=WHERE
        )
    moves.begin_move(context, typed)
    return typed


def _list_parts(context: LabContext) -> list[LabContext]:
    """List the contexts of the servers that an unfinished move has, or may have."""
    parts = [moves.build_part(context, moving) for moving in moves.PARTS]
    return [part for part in parts if part is not None]


def _move(context: LabContext, request: MoveRequest) -> MoveResult:
    recorded = context.state.get_lab_server(context.lab_id)
    former = context.state.get_lab_server(context.lab_id, "former")
    if former is not None and recorded is not None:
        return _finish(context, recorded, former)
    old = _find_server(context)
    if recorded is not None and old.id != recorded.id:  # only the new server is left
        return MoveResult(server=old, former=recorded)
    target = _build_target(context, request)
    _require_movable(context)
    _require_movable(target)
    active = moved_runs.list_active_runs(context, old)
    asking = _MoveReporter(context.reporter, old, active)
    with assign_subject(target.subject):
        server = up.up(msgspec.structs.replace(target, reporter=asking), explains_costs=False)
        selected = provider_choice.select_provider(target, server.provider)
        member = moves.change_part(selected, "next")
        first_run.push_with_image(member, server, run_specs.find_run_image(member))
    carried, saved = _carry(context, old, member, server)
    own = moves.change_part(member, "")
    server = own.get_server()
    former = own.state.get_lab_server(own.lab_id, "former")
    result = MoveResult(server=server, former=former or old)
    if former is not None:
        result = _finish(own, server, former)
    return msgspec.structs.replace(result, resumed=tuple(carried), saved=saved)


def _find_server(context: LabContext) -> Server:
    """Find the lab's server, which must run.

    If it has ended meanwhile, that is the new server of an interrupted move.
    """
    waiting = report_wait(context.reporter, f"checking {describe_provider(context.provider)}")
    with waiting, context.state.lock(context.lab_id, "move"):
        server = adoption.adopt(context) or _promote_next(context)
    if server is None:
        raise NotFoundError(
            f"{context.name} has no server to move",
            hint="labctl up   # starts one, with the same options",
        )
    if server.state == "stopped":
        raise NotFoundError(
            f"the server of {context.name} is stopped",
            why="labctl can move only a running server",
            hint="labctl start\nlabctl move   # then, with the same options",
        )
    return server


def _promote_next(context: LabContext) -> Server | None:
    """Make the new server of an interrupted move the lab's own; None without one."""
    part = moves.build_part(context, "next")
    server = adoption.adopt(part) if part else None
    if part is None or server is None:
        return None
    own = msgspec.structs.replace(server, moving="")
    context.state.save_server(own)
    provider_choice.record_choice(part)
    text = f"the old server has ended; {context.name} is on {own.id} now"
    context.reporter.emit(Note(text=text, level="warning"))
    return own


def _build_target(context: LabContext, request: MoveRequest) -> LabContext:
    """Build the context of the new server, at the typed provider or at the lab's candidates."""
    config = chosen_need.choose_need(context.config, request.need)
    changed = context.make_sibling(config, context.lab_id)
    if request.provider:
        changed = provider_choice.select_alone(changed, request.provider)
    part = moves.build_part(changed, "next") or moves.change_part(changed, "next")
    return msgspec.structs.replace(part, subject=context.subject._replace(is_moving=True))


def _require_movable(context: LabContext) -> None:
    """PolicyError for servers that somebody else gives, or that are login nodes of a cluster."""
    if deadlines.is_guarded_elsewhere(context.provider) or has_job_queue(context):
        raise PolicyError(
            f"labctl move does not work with {context.provider.name}",
            why="its servers are granted by a course, or shared with a cluster's other users",
            hint="labctl down && labctl up --provider NAME",
        )


class _MoveReporter:
    """A Reporter that adds to the question about the price what happens to the lab's runs."""

    def __init__(self, reporter: Reporter, old: Server, active: Sequence[str]) -> None:
        self._reporter, self._old, self._active = reporter, old, active

    def emit(self, event: Event) -> None:
        self._reporter.emit(event)

    def confirm(self, decision: Question) -> bool:
        if decision.about == "price":
            lines = ["the old server is removed once the new one has everything"]
            if self._active:
                names = names_text(self._active, 5)
                verb = "is" if len(self._active) == 1 else "are"
                lines.insert(
                    0, f"{names} {verb} stopped with a checkpoint, and resumed on the new server"
                )
            detail = "\n".join([decision.detail, *lines])
            decision = msgspec.structs.replace(decision, detail=detail)
        return self._reporter.confirm(decision)


def _carry(
    context: LabContext, old: Server, member: LabContext, server: Server
) -> tuple[list[str], SavedFiles]:
    """Move the lab's active runs and results, and make the new server the lab's own.

    If a step fails, the runs are resumed on the old server. The recovery locks keep others, who see
    a lost run, from recovering it meanwhile. Returns the runs that go on, and what was saved.
    """
    # Too many files in the home directory are an error, which must come before a run is stopped.
    home_files.choose_home_files(context, old, asks=False)
    run_ids = _list_runs_to_move(context, old)
    for run_id in run_ids:
        moved_runs.keep_for_move(context, old, run_id)
    with (
        hold_recovery_locks(context, run_ids) as locks,
        context.state.lock(context.lab_id, "move"),
    ):
        resumer = None
        try:
            stopped = moved_runs.stop_runs(context, old, run_ids)
            saved = moved_runs.save_all(context, old)
            resumer = (member, server)
            moved_runs.resume_runs(member, server, stopped, locks, old)
        except BaseException:
            returned = moved_runs.return_runs(context, old, run_ids, locks, resumer)
            if returned:
                text = f"resumed on {old.alias} again: {names_text(returned, 5)}"
                context.reporter.emit(Note(text=text))
            raise
        cut_over(context, old, member, server)
    return stopped, saved


def _list_runs_to_move(context: LabContext, old: Server) -> list[str]:
    """List the active runs, and those that an interrupted move stopped.

    Runs of labctl's own, such as a probe, measure the old server: they are canceled.
    """
    active = moved_runs.list_active_runs(context, old)
    known = {run.id: run for run in context.state.list_runs(context.lab_id)}
    for run_id in moves.list_stopped_runs(context):
        if run_id not in active and run_id in known and moved_runs.is_resumable(known[run_id]):
            active.append(run_id)
    for run_id in [run_id for run_id in active if known[run_id].is_auxiliary]:
        runs.cancel(context, old, run_id, moved_runs.GRACE_S)
        active.remove(run_id)
    return active


def cut_over(context: LabContext, old: Server, member: LabContext, server: Server) -> None:
    """Make the new server the lab's own, under the name for ssh that the old one had."""
    former = context.state.get_server(old.id)
    current = context.state.get_server(server.id) or server
    own = msgspec.structs.replace(current, alias=old.alias, moving="")
    if former is None:
        context.state.save_server(own)
    else:
        alias = f"{old.alias}-former"
        if not context.connections.is_alias_free(alias, old.id):
            alias = f"{old.alias}-former-{context.lab_id[:4]}"
        former = msgspec.structs.replace(former, alias=alias, moving="former")
        context.state.save_servers(former, own)
        with suppress(LabError):
            context.connections.write(former)
    provider_choice.record_choice(member)
    with suppress(LabError):
        context.connections.write(own)


def _finish(context: LabContext, server: Server, former: Server) -> MoveResult:
    """Remove the former server, whose results are all here."""
    if has_one_key(context):
        prepare_store(context, server)
    part = moves.build_part(context, "former")
    assert part is not None, "its server is on record"
    shown = adoption.adopt(part)
    saved = SavedFiles()
    closed = lab_services.stop_forwards(part, former)
    if shown is not None:
        with suppress(ConnectError):  # it was saved before the lab left it
            saved = _empty(part, shown)
        end_server.remove(part, shown)
    moves.end_move(context, "done")
    return MoveResult(server=server, former=former, closed_forwards=closed, saved=saved)


def _empty(context: LabContext, former: Server) -> SavedFiles:
    """Save what appeared on the former server since it was saved, and clear it."""
    if active := moved_runs.list_active_runs(context, former):
        raise PolicyError(
            f"{former.alias} was not removed: {names_text(active, 5)} started there meanwhile",
            why=f"it is still running ({price_or_free_text(former.offer.price_usd_per_hour)})",
            hint="labctl move   # again, after these runs have ended",
        )
    with suppress(EngineError):
        lab_services.stop_services(context, former)
    saved = moved_runs.save_all(context, former)
    kept_disks.note_saved(context, former)
    note_downloaded(context, former)
    final_download.remove_containers(context, former)
    return saved
