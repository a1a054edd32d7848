"""What the errors of a move add: which servers the lab has now, and how to go on."""

from __future__ import annotations

from labctl.errors import InterruptError, LabError
from labctl.model import Server
from labctl.servers import moves
from labctl.servers.context import LabContext
from labctl.text import price_or_free_text

GO_ON = "labctl move   # continues\nlabctl move --cancel   # removes the new server instead"


def explain_failure(context: LabContext, error: LabError) -> None:
    """Say in an error which servers the lab has now, and what to do."""
    state, lab_id = context.state, context.lab_id
    own = state.get_lab_server(lab_id)
    lines = [error.why]
    if own is not None:
        lines.append(f"{context.name} is on {own.alias} ({_describe(own)})")
    others = moves.list_moving_servers(state, lab_id)
    for other in others:
        part = "new" if other.moving == "next" else "former"
        lines.append(f"the {part} server {other.id} is still running ({_describe(other)})")
    attempts = [one for one in state.list_open_attempts(lab_id) if one.request.moving]
    lines += [f"a new {one.offer.type} may exist at {one.provider}" for one in attempts]
    error.why = "\n".join(filter(None, lines))
    has_next = bool(attempts) or any(other.moving == "next" for other in others)
    if has_next or others:
        steps = error.hint.splitlines()
        steps = [line for line in steps if not line.startswith(("labctl move", "labctl up"))]
        error.hint = "\n".join([*steps, GO_ON if has_next else "labctl move   # completes it"])


def _describe(server: Server) -> str:
    price = price_or_free_text(server.offer.price_usd_per_hour)
    return f"{server.provider} {server.offer.type}, {price}"


def make_interrupt_error(context: LabContext) -> InterruptError:
    """Build the error of a move that Ctrl-C ended."""
    error = InterruptError("interrupted before the move was finished")
    explain_failure(context, error)
    error.hint = error.hint or "labctl move   # again, with the same options"
    return error
