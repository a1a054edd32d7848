"""Stop and start servers whose provider can do that (protocol `Stoppable`)."""

from __future__ import annotations

from labctl.errors import ProviderError
from labctl.model import Server
from labctl.providers import Stoppable
from labctl.servers import deadlines, held_disks
from labctl.servers.context import LabContext


def stop_server(context: LabContext, server: Server, *, keep_until: float) -> bool:
    """Stop the server, and let no timer delete its disk before `keep_until` (Unix seconds).

    Returns False, and changes nothing, if this server cannot be stopped.
    """
    if not isinstance(context.provider, Stoppable):
        return False
    try:
        context.provider.stop(server.id)
    except ProviderError as error:
        # Most spot machines cannot be stopped. Any other error is no reason to terminate it.
        if type(error) is not ProviderError:
            raise
        return False
    stopped = context.provider.find(server.id)
    if stopped is not None:
        context.state.save_server(context.assign_alias(stopped, server))
    context.state.record("stopped", lab_id=context.lab_id, server_id=server.id)
    # The disk holds the only copy: no timer may terminate the server together with its disk.
    deadlines.postpone(context, server, keep_until)
    if held_disks.is_held(context, server):
        held_disks.keep_until(context, server, keep_until)
    return True


def start_if_stopped(context: LabContext, server: Server) -> None:
    """Start a stopped server, if its provider can do that; return at once."""
    if server.state == "stopped" and isinstance(context.provider, Stoppable):
        context.provider.start(server.id)
        context.state.record("started", lab_id=context.lab_id, server_id=server.id)
