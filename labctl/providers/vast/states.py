"""What Vast.ai's statuses mean for a server."""

from __future__ import annotations

from labctl.model import Endpoint, Server, ServerState
from labctl.providers.vast.api import VastInstance
from labctl.providers.vast.catalog import PROVIDER, parse_rented
from labctl.providers.vast.first_boot import USER
from labctl.providers.vast.label import VastLabel

SSH_PORT = "22/tcp"
_STATES: dict[str | None, ServerState] = {
    "running": "running",
    # Its host has lost the connection, and may find it again: whether it answers, labctl finds out.
    "offline": "running",
    "unknown": "running",
    "stopped": "stopped",
    "exited": "stopped",
    "inactive": "stopped",
}


def get_state(instance: VastInstance) -> ServerState:
    if has_lost_bid(instance):
        return "terminated"
    state = _STATES.get(instance.actual_status, "starting")
    if is_stopping(instance):
        return "stopped"
    return "starting" if state == "running" and find_address(instance) is None else state


def has_lost_bid(instance: VastInstance) -> bool:
    """Whether somebody has outbid it: labctl itself never stops an interruptible instance.

    It may run again one day, and its disk bills until then. labctl takes another server.
    """
    return instance.is_bid and _STATES.get(instance.actual_status) == "stopped"


def is_stopping(instance: VastInstance) -> bool:
    """Whether it was told to stop, and still runs."""
    return instance.actual_status == "running" and instance.intended_status == "stopped"


def find_address(instance: VastInstance) -> tuple[str, int] | None:
    """Return the address of its sshd: the host's own port, or else that of Vast.ai's proxy."""
    for mapping in (instance.ports or {}).get(SSH_PORT, ()):
        if instance.public_ipaddr and mapping.host_port.isdecimal():
            return instance.public_ipaddr.strip(), int(mapping.host_port)
    if instance.ssh_host and instance.ssh_port:
        return instance.ssh_host, instance.ssh_port
    return None


def parse_server(instance: VastInstance, label: VastLabel, account: str) -> Server:
    """Turn an instance into a Server, without its key file, which the caller adds."""
    host, port = find_address(instance) or ("", 0)
    return Server(
        id=str(instance.id),
        provider=PROVIDER,
        lab=label.lab,
        lab_id=label.lab_id,
        alias=label.lab,
        endpoint=Endpoint(
            host=host,
            port=port,
            user=USER,
            host_key=label.host_key,
            next_host_key=label.next_host_key,
        ),
        offer=parse_rented(instance),
        created_at=label.created_ms / 1000,
        state=get_state(instance),
        account=account,
    )
