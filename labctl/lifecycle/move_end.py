"""End an unfinished move: give it up, or remove its servers with the lab's own."""

from __future__ import annotations

from contextlib import suppress

from labctl.errors import ConnectError, NotFoundError, PolicyError
from labctl.lifecycle import down, moved_runs
from labctl.lifecycle.recovery_lock import hold_recovery_locks
from labctl.model import Server, Value
from labctl.runs import runs
from labctl.servers import adoption, end_server, moves
from labctl.servers.context import LabContext


class CanceledMove(Value, frozen=True):
    """A move that was given up: the new server that was removed, and the runs that are back.

    `removed` is "" if no new server existed.
    """

    removed: str = ""
    returned: tuple[str, ...] = ()


def cancel(context: LabContext) -> CanceledMove:
    """Remove the new server of an unfinished move, and resume what was stopped on the old one.

    NotFoundError without an unfinished move. PolicyError if the lab is on the new server already.
    """
    with context.state.lock(f"{context.lab_id}-move", "move --cancel", wait_s=0.0):
        if moves.build_part(context, "former") is not None:
            raise PolicyError(
                f"the move of {context.name} cannot be canceled",
                why="the lab and its runs are on the new server already",
                hint="labctl move   # removes the old server, which completes the move",
            )
        part = moves.build_part(context, "next")
        if part is None:
            raise NotFoundError(f"{context.name} has no unfinished move", hint="labctl status")
        server = _find_part(part)
        returned = _return_runs(context, part, server)
        if server is not None:
            end_server.remove(part, server)
        else:
            end_server.sweep(part)
        moves.end_move(context, "canceled")
        return CanceledMove(removed=server.id if server else "", returned=tuple(returned))


def _find_part(part: LabContext) -> Server | None:
    """Find a server of the move; one whose reply was lost may take a while to appear."""
    server = adoption.adopt(part)
    return server or down.await_unconfirmed(part)


def _return_runs(context: LabContext, part: LabContext, server: Server | None) -> list[str]:
    own = context.state.get_lab_server(context.lab_id)
    run_ids = list(moves.list_stopped_runs(context))
    if own is None or not run_ids:
        return []
    with hold_recovery_locks(context, run_ids) as locks:
        other = (part, server) if server else None
        return moved_runs.return_runs(context, own, run_ids, locks, other)


def remove_parts(context: LabContext) -> None:
    """Remove the servers of an unfinished move beside the lab's own: `down` ends all of them."""
    for moving in moves.PARTS:
        part = moves.build_part(context, moving)
        if part is None:
            continue
        server = _find_part(part)
        if server is None:
            end_server.sweep(part)
            continue
        if moving == "former":
            with suppress(ConnectError):  # it was saved before the lab left it
                _save_former(part, server)
        end_server.remove(part, server)
    moves.end_move(context, "down")


def _save_former(part: LabContext, server: Server) -> None:
    for run_id in moved_runs.list_active_runs(part, server):
        runs.cancel(part, server, run_id, moved_runs.GRACE_S)
    moved_runs.save_all(part, server)
