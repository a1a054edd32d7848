"""End a server that has powered itself off, at a provider that goes on to bill it.

On most clouds a power-off ends the costs, and the watchdog's power-off is the end of a server.
Where it is not (protocol `EndsBilling`), a keeper finishes what the watchdog began.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from labctl.errors import LabError, PolicyError
from labctl.events import Note
from labctl.lifecycle.server_loss import (
    ANSWER_S,
    DEAD_CHECKS,
    FailedChecks,
    ServerGoneError,
    require_alive,
)
from labctl.model import Server
from labctl.servers import deadlines
from labctl.servers.connections import is_reachable
from labctl.servers.context import LabContext

# The checks are spread over longer than DEAD_S: 10 min.
PAUSE_S = 12.0
CHECKS = 4 * DEAD_CHECKS + 4


def end_powered_off(context: LabContext, pause: Callable[[float], None]) -> bool:
    """Terminate the lab's server if it does not answer for 10 minutes; return whether it did.

    Does nothing while the server answers, where a power-off ends the costs, and if the server may
    hold the only copy of results: then it warns. Call it when all runs are over.
    """
    provider = context.provider
    if deadlines.is_guarded_elsewhere(provider) or deadlines.is_free_when_off(provider):
        return False
    silences = FailedChecks()
    for _ in range(CHECKS):
        server = context.state.get_lab_server(context.lab_id)
        if server is None or not server.offer.price_usd_per_hour:
            return False
        if is_reachable(server.endpoint, ANSWER_S) or _is_stopped(context, server):
            return False
        try:
            require_alive(context, server, silences)
        except ServerGoneError as error:
            text = f"{error.what}; {provider.name} bills a machine that is off, so it was ended"
            context.reporter.emit(Note(text=text))
            return True
        except PolicyError:
            return False
        pause(PAUSE_S)
    return False


def _is_stopped(context: LabContext, server: Server) -> bool:
    """Whether it costs only its disk, since `labctl stop` or the provider's timer stopped it."""
    with suppress(LabError):
        shown = context.provider.find(server.id)
        return shown is not None and shown.state == "stopped"
    return False
