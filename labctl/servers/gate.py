"""The firewall of providers that open ssh only to admitted addresses (protocol `Gate`)."""

from __future__ import annotations

from labctl.events import Note
from labctl.model import Server
from labctl.providers import Gate, get_provider_class
from labctl.servers.connections import is_reachable
from labctl.servers.context import LabContext

ANSWER_S = 2.0


def has_gate(server: Server) -> bool:
    """Whether the server's provider is a Gate. Asks the class, which needs no credentials."""
    return issubclass(get_provider_class(server.provider), Gate)


def admit_if_unreachable(context: LabContext, server: Server) -> None:
    """Admit this machine if the provider is a Gate and the server does not answer from here."""
    if isinstance(context.provider, Gate) and not is_reachable(server.endpoint, ANSWER_S):
        admit(context, server)


def admit(context: LabContext, server: Server) -> None:
    """Let this machine's present address reach the server, if the provider is a Gate."""
    if not isinstance(context.provider, Gate):
        return
    if address := context.provider.admit(server.id):
        context.reporter.emit(Note(text=f"SSH is open to {address} only"))
