"""The gate that some providers keep before a server: ssh passes from admitted addresses only."""

from __future__ import annotations

from labctl.events import Note
from labctl.model import Server
from labctl.providers import Gate, provider_class
from labctl.servers.connections import answers
from labctl.servers.context import Ground

ANSWER_S = 2.0


def has_gate(server: Server) -> bool:
    """Whether its provider keeps one. Asked of the class: nobody needs credentials for that."""
    return issubclass(provider_class(server.provider), Gate)


def let_in(ground: Ground, server: Server) -> None:
    """`admit`, where the provider keeps a gate and the server does not answer from here now."""
    if isinstance(ground.provider, Gate) and not answers(server.endpoint, ANSWER_S):
        admit(ground, server)


def admit(ground: Ground, server: Server) -> None:
    """Let this machine's present address reach the server, where the provider keeps a gate."""
    if not isinstance(ground.provider, Gate):
        return
    if address := ground.provider.admit(server.id):
        ground.reporter.emit(Note(text=f"ssh is open to {address} and to no other address"))
