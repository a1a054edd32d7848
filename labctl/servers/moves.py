"""The unfinished move of a lab to another server: what was asked for, and the servers of it.

While a move is unfinished, the lab has two servers: its own, and the one that will replace it
("next") or that it replaced ("former"). `Server.moving` says which is which.
"""

from __future__ import annotations

import msgspec

from labctl.decoding import convert_value
from labctl.model import Moving, Need, Server, Value
from labctl.servers import provider_choice
from labctl.servers.context import LabContext
from labctl.state import State

# Kinds of the ledger's lines: a move was confirmed, it stopped a run, it ended.
BEGAN, STOPPED_RUN, ENDED = "move", "move stopped run", "move ended"


PARTS: tuple[Moving, ...] = ("next", "former")


class MoveRequest(Value, frozen=True):
    """What a move asks for. `provider` is "" for the lab's own candidates."""

    need: Need
    provider: str = ""


def find_open_move(state: State, lab_id: str) -> MoveRequest | None:
    """Return what the lab's unfinished move asked for; None without one."""
    began = state.list_events(lab_id=lab_id, kind=BEGAN, limit=1)
    ended = state.list_events(lab_id=lab_id, kind=ENDED, limit=1)
    if not began or (ended and ended[0].number > began[0].number):
        return None
    return convert_value(began[0].detail, MoveRequest)


def begin_move(context: LabContext, request: MoveRequest) -> None:
    """Record what a move asks for, so that a later command can continue it."""
    detail = msgspec.to_builtins(request)
    context.state.record(BEGAN, lab_id=context.lab_id, detail=detail)


def end_move(context: LabContext, outcome: str) -> None:
    """Record that the lab's move has ended; a lab without an unfinished one is left alone."""
    if find_open_move(context.state, context.lab_id) is not None:
        detail = {"outcome": outcome}
        context.state.record(ENDED, lab_id=context.lab_id, detail=detail)


def note_stopped_run(context: LabContext, server: Server, run_id: str, gpus: str) -> None:
    """Record that the move stops a run, before it does. `gpus` is what the run uses there."""
    context.state.record(
        STOPPED_RUN,
        lab_id=context.lab_id,
        server_id=server.id,
        run_id=run_id,
        detail={"gpus": gpus},
    )


def list_stopped_runs(context: LabContext) -> dict[str, str]:
    """List the runs that the unfinished move has stopped, or was about to, with their GPUs."""
    began = context.state.list_events(lab_id=context.lab_id, kind=BEGAN, limit=1)
    lines = context.state.list_events(lab_id=context.lab_id, kind=STOPPED_RUN)
    since = began[0].number if began else 0
    stopped: dict[str, str] = {}
    for line in lines:
        if line.number > since:
            stopped.setdefault(line.run_id, str(line.detail.get("gpus", "")))
    return stopped


def list_moving_servers(state: State, lab_id: str) -> list[Server]:
    """List the lab's recorded servers beside its own one."""
    return [server for server in state.list_servers(lab_id) if server.moving]


def build_part(context: LabContext, moving: Moving) -> LabContext | None:
    """Return the context of a server of the move, at its own provider.

    None if the lab has no such server, and no interrupted request can have created one.
    """
    server = context.state.get_lab_server(context.lab_id, moving)
    names = [server.provider] if server else []
    names += [
        attempt.provider
        for attempt in context.state.list_open_attempts(context.lab_id)
        if attempt.request.moving == moving
    ]
    if not names:
        return None
    return change_part(provider_choice.select_provider(context, names[0]), moving)


def change_part(context: LabContext, moving: Moving) -> LabContext:
    """Return the same context for the server with another part in the move."""
    return msgspec.structs.replace(
        context,
        moving=moving,
        shared_provider=context.provider,
        shared_connections=context.connections,
    )
