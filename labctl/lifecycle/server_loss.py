"""Detect that a server is lost (gone, reclaimed, or dead), and prepare for a replacement."""

from __future__ import annotations

import time
from contextlib import suppress

from labctl.errors import ConnectError, LabError, PolicyError
from labctl.events import Note, Step
from labctl.model import Server, Value
from labctl.retry import poll_until
from labctl.runs import outputs
from labctl.runs.runs import record_address
from labctl.servers import (
    accounts,
    adoption,
    affordable_offers,
    disk_retention,
    end_server,
)
from labctl.servers.connections import is_reachable
from labctl.servers.context import LabContext
from labctl.servers.watch_reports import parse_watch
from labctl.state import ledgers
from labctl.sync import lab_files
from labctl.wire.runs import STATUS, StatusRequest
from labctl.wire.watchdog import ReclaimRecord

DEAD_S = 600.0
# A server is dead after this many failed checks over at least DEAD_S, if its provider says it runs.
DEAD_CHECKS = 12
# Checks that are further apart start a new count: this machine may have slept in between.
PAUSE_S = 240.0
ANSWER_S = 5.0
POLL_S = 1.0


class ServerGoneError(ConnectError):
    """The server that a run was on no longer exists, or is dead."""


class _Silence(Value, frozen=True):
    since_s: float
    last_s: float
    checks: int


class FailedChecks:
    """How long each server has not answered, by the checks of this process only."""

    def __init__(self) -> None:
        self._by_server: dict[str, _Silence] = {}

    def note_failure(self, server_id: str, now_s: float) -> bool:
        """Count one more failed check; return whether the server counts as dead now."""
        before = self._by_server.get(server_id)
        if before is None or now_s - before.last_s > PAUSE_S:
            before = _Silence(since_s=now_s, last_s=now_s, checks=0)
        silence = _Silence(since_s=before.since_s, last_s=now_s, checks=before.checks + 1)
        self._by_server[server_id] = silence
        return silence.checks >= DEAD_CHECKS and now_s - silence.since_s >= DEAD_S

    def reset(self, server_id: str) -> None:
        """Forget the failed checks of a server that has answered."""
        self._by_server.pop(server_id, None)


class ServerRemovedError(PolicyError):
    """The user removed the server that a run was on."""


def require_not_removed(context: LabContext, server: Server | None) -> None:
    """ServerRemovedError if the user removed the server (None: the lab's last one)."""
    removals = context.state.list_events(lab_id=context.lab_id, kind=ledgers.PUT_DOWN, limit=1)
    creations = context.state.list_events(lab_id=context.lab_id, kind="created", limit=1)
    if not removals or (server is not None and removals[0].server_id != server.id):
        return
    if server is not None or not creations or creations[0].at < removals[0].at:
        by = removals[0].detail.get("by", "labctl down")
        raise ServerRemovedError(
            f"the server {removals[0].server_id} was removed by `{by}`",
            why="labctl does not replace a server that you removed",
            hint="labctl up\nlabctl run --recover --id RUN   # resumes from what is saved",
        )


def require_alive(context: LabContext, server: Server, silences: FailedChecks) -> None:
    """ServerGoneError if the provider says that the server has ended, or if the server is dead.

    Returns without a conclusion while the provider cannot be reached: this machine may be offline.
    Records the server's address if it has changed. PolicyError if the credentials are those of
    another account.
    """
    try:
        current = context.provider.find(server.id)
        if current is None and not accounts.is_gone(context, server):
            return
    except PolicyError:
        raise
    except LabError:
        return
    if current is None or current.state in accounts.ENDED:
        raise ServerGoneError(f"the server {server.id} is gone")
    record_address(context, server, current)
    if current.state != "running" or is_reachable(current.endpoint, ANSWER_S):
        silences.reset(server.id)
        return
    if silences.note_failure(server.id, time.monotonic()) and _terminate_dead(context, server):
        raise ServerGoneError(f"the server {server.id} is dead: it did not answer for 10 minutes")


def _terminate_dead(context: LabContext, server: Server) -> bool:
    """Terminate a dead server, which still bills; False if it may hold the only copy of results."""
    is_kept = disk_retention.keep_disk(context, server, time.time() + disk_retention.KEPT_S)
    if not (is_kept or context.config.store):
        why = "its disk cannot be kept and " if disk_retention.can_keep(context.provider) else ""
        text = f"{server.id} does not answer. labctl keeps it running, because {why}the lab has no "
        text += "store for its results. To remove it: labctl down --discard"
        context.reporter.emit(Note(text=text, level="warning"))
        return False
    context.state.record("dead", lab_id=context.lab_id, server_id=server.id)
    end_server.end(context, [server], keep_disks=True)
    return True


def save_and_terminate(context: LabContext, run_id: str) -> None:
    """Make room for another server: save a server that is being reclaimed, then terminate it.

    Records its zone, so that the next server is requested there last.
    """
    recorded = context.state.get_lab_server(context.lab_id)
    server = adoption.adopt(context)
    if server is None or server.state in accounts.ENDED:
        _avoid_zone(context, recorded)
        return
    if not _fetch_reclaim(context, server):
        return
    is_saved = False
    with suppress(ConnectError):  # the server ended early: what is saved by then is enough
        is_saved = _await_shutdown(context, server, run_id)
    _avoid_zone(context, server)
    end_server.end(context, [server], keep_disks=not is_saved)


def _avoid_zone(context: LabContext, server: Server | None) -> None:
    if server is not None and server.offer.zone:
        detail = {"zone": server.offer.zone}
        context.state.record(
            affordable_offers.LEFT, lab_id=context.lab_id, server_id=server.id, detail=detail
        )


def _fetch_reclaim(context: LabContext, server: Server) -> ReclaimRecord | None:
    """Fetch the watchdog's report of a reclaim in progress, None if none exists."""
    request = StatusRequest(context.config.name, context.lab_id)
    try:
        watch = parse_watch(context.open_agent(server).call(STATUS, request).watch)
    except ConnectError:
        return None
    reclaim = watch.reclaim if watch else None
    return reclaim if reclaim and reclaim.kind == "interruption" else None


def _await_shutdown(context: LabContext, server: Server, run_id: str) -> bool:
    """Wait until the server's runs have ended and are mirrored; without a store, pull the run.

    Returns whether everything on the server is on this machine. With a store, that is False: if
    the server could not send everything there, it has kept its disk itself.
    """
    name = "the server is being reclaimed; waiting for its runs to save and stop"
    context.reporter.emit(Step(name=name))

    def is_over() -> bool:
        reclaim = _fetch_reclaim(context, server)
        return reclaim is None or bool(reclaim.ready_at) or time.time() >= reclaim.ends_at

    poll_until(is_over, pause_s=POLL_S)
    is_saved = False
    if not context.config.store:
        try:
            outputs.pull(context, server, [run_id])
            edits = lab_files.save_edits(context, server)
            is_saved = not (edits.skipped or outputs.list_missing(context, server))
        except LabError as error:
            text = f"could not pull all files of {run_id}: {error.what}"
            context.reporter.emit(Note(text=text, level="warning"))
    context.reporter.emit(Step(name=name, done=True))
    return is_saved
