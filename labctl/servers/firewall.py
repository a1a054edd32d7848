"""The firewall of providers that open ssh only to admitted addresses (protocol `Firewall`)."""

from __future__ import annotations

from labctl.events import Note
from labctl.model import Server
from labctl.providers import Firewall, get_provider_class
from labctl.servers.connections import is_reachable
from labctl.servers.context import LabContext

ANSWER_S = 2.0


def has_firewall(server: Server) -> bool:
    """Whether the server's provider has a firewall. Asks the class: it needs no credentials."""
    return issubclass(get_provider_class(server.provider), Firewall)


def admit_if_unreachable(context: LabContext, server: Server) -> None:
    """Admit this machine if the provider has a firewall and the server does not answer."""
    if isinstance(context.provider, Firewall) and not is_reachable(server.endpoint, ANSWER_S):
        admit(context, server)


def admit(context: LabContext, server: Server) -> None:
    """Let this machine's present address reach the server, if the provider has a firewall."""
    if not isinstance(context.provider, Firewall):
        return
    if address := context.provider.admit(server.id):
        context.reporter.emit(Note(text=f"SSH is open to {address} only"))
