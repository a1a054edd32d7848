"""Stop and start servers whose provider can do that (protocol `Stoppable`)."""

from __future__ import annotations

from labctl.errors import PolicyError, ProviderError
from labctl.errors.subject import Subject
from labctl.model import Server
from labctl.providers import Stoppable
from labctl.servers import deadlines, disk_retention
from labctl.servers.context import LabContext
from labctl.state.disks import STOPPED


class CannotStopError(PolicyError):
    """This server cannot be stopped; nothing was changed."""

    def __init__(self, server: Server, why: str) -> None:
        super().__init__(f"{server.alias} cannot be stopped", why=why, hint=_name_removal)


def _name_removal(subject: Subject) -> str:
    return f"{subject.down}   # downloads the results, then removes the server"


def require_stoppable(context: LabContext, server: Server) -> None:
    """CannotStopError if the provider cannot stop this server, as far as that is known."""
    name = context.provider.name
    _require_ability(context, server)
    if server.offer.spot:
        raise CannotStopError(server, f"{name} does not stop spot servers, it only ends them")


def _require_ability(context: LabContext, server: Server) -> Stoppable:
    if not isinstance(context.provider, Stoppable):
        why = f"{context.provider.name} cannot stop a server and keep its disk"
        raise CannotStopError(server, why)
    return context.provider


def sum_disk_price_usd(context: LabContext, server: Server) -> float:
    """Return what the server costs per month while it is stopped, as the provider lists it."""
    resources = context.provider.leftovers()
    return sum(each.price_usd_per_month for each in resources if each.server_id == server.id)


def stop_server(
    context: LabContext,
    server: Server,
    *,
    keep_until: float,
    usd_per_month: float = 0.0,
    forwards: tuple[str, ...] = (),
) -> None:
    """Stop the server, and let no timer delete its disk before `keep_until` (Unix seconds).

    CannotStopError if this server cannot be stopped. `usd_per_month` is recorded as its price, and
    `forwards` as the services whose background forwards were closed.
    """
    provider = _require_ability(context, server)
    try:
        provider.stop(server.id)
    except ProviderError as error:
        # Most spot machines cannot be stopped. Any other error is no reason to terminate it.
        if type(error) is not ProviderError:
            raise
        raise CannotStopError(server, error.what) from error
    stopped = context.provider.find(server.id)
    if stopped is not None:
        context.state.save_server(context.assign_alias(stopped, server))
    # The disk holds the only copy: no timer may terminate the server together with its disk.
    until = deadlines.postpone(context, server, keep_until)
    detail = {"usd_per_month": usd_per_month, "until": until, "forwards": forwards}
    context.state.record(STOPPED, lab_id=context.lab_id, server_id=server.id, detail=detail)
    if disk_retention.is_kept(context, server):
        disk_retention.keep_until(context, server, keep_until)


def start_if_stopped(context: LabContext, server: Server) -> None:
    """Start a stopped server, if its provider can do that; return at once."""
    if server.state == "stopped" and isinstance(context.provider, Stoppable):
        context.provider.start(server.id)
        context.state.record("started", lab_id=context.lab_id, server_id=server.id)
