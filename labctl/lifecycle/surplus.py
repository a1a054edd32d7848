"""Servers of a lab beyond the number in lab.yaml, which may have been lowered: they still cost."""

from __future__ import annotations

from labctl.events import Note
from labctl.servers import gang
from labctl.servers.context import LabContext
from labctl.text import add_next, names_text, price_or_free_text


def warn_of_surplus(context: LabContext) -> None:
    """Name the recorded servers that lab.yaml no longer asks for, and what removes them."""
    contexts = gang.list_surplus(context)
    servers = [one for each in contexts for one in context.state.list_servers(each.lab_id)]
    if not servers:
        return
    names = names_text([server.alias for server in servers], 5)
    verb = "is" if len(servers) == 1 else "are"
    wanted = f"{context.subject.config_file} asks for {context.config.server.count}"
    price = price_or_free_text(sum(server.offer.price_usd_per_hour for server in servers))
    what = f"{names} {verb} still running ({price}), but {wanted} of the lab's servers"
    text = add_next(what, f"{context.subject.down}   # removes all of them")
    context.reporter.emit(Note(text=text, level="warning"))
