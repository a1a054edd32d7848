"""Take a server back on purpose, for drills (protocol `Reclaimable`).

A simulated cloud on this machine interrupts its spot instances itself, as the real one does.
labctl.rehearsal is that cloud; it runs in a process of its own, and is not imported.
"""

from __future__ import annotations

import urllib.parse
from dataclasses import dataclass

import msgspec

from labctl.config import copy_environment
from labctl.decoding import decode_json
from labctl.http_client import open_session
from labctl.model import Value
from labctl.providers import Reclaimable
from labctl.servers.context import LabContext

# How the variables end that direct a cloud's tools to another address.
ENDPOINT = "_ENDPOINT_URL"
LOOPBACK = ("127.0.0.1", "localhost")
HEADER = {"X-Labctl-Rehearsal": "1", "Content-Type": "application/json"}
TIMEOUT_S = 5.0
NOT_SPOT = "only spot instances get a notice, and this is not a spot instance"


class RehearsalRequest(Value, frozen=True):
    """A control request of the rehearsal; "state" has no fields."""


class RehearsalReclaimRequest(RehearsalRequest, frozen=True):
    """Reclaim an instance, `notice_s` seconds after its notice."""

    instance: str
    notice_s: float


class RehearsalReply(Value, frozen=True):
    """The states of the simulated instances, by id."""

    instances: dict[str, str] = msgspec.field(default_factory=dict)


@dataclass(frozen=True)
class Reclaimer:
    """Takes servers back. The rehearsal at `address` takes its spot instances, the provider others.

    `address` is "" without a rehearsal.
    """

    provider: Reclaimable
    address: str = ""

    @property
    def no_notice(self) -> str:
        """Why the server gets no notice on request, as a text for users; "" without a reason."""
        return NOT_SPOT if self.address else self.provider.no_notice

    def reclaim(self, server_id: str, notice_s: float) -> bool:
        """Do what `Reclaimable.reclaim` says."""
        if self.address:
            instance = server_id.partition(".")[0]
            request = RehearsalReclaimRequest(instance=instance, notice_s=notice_s)
            if _post(self.address, "reclaim", request) is not None:
                return True
        return self.provider.reclaim(server_id, notice_s)


def find_reclaimer(context: LabContext) -> Reclaimer | None:
    """Return the Reclaimer of the lab's server; None if nothing can take the server back."""
    if not isinstance(context.provider, Reclaimable):
        return None
    address = _find_rehearsal(context.get_server().id)
    return Reclaimer(context.provider, address)


def _find_rehearsal(server_id: str) -> str:
    """Return the address of the rehearsal that simulates the server on this machine, or ""."""
    for name, value in copy_environment().items():
        address = value.rstrip("/")
        if not name.endswith(ENDPOINT) or urllib.parse.urlsplit(address).hostname not in LOOPBACK:
            continue
        state = _post(address, "state", RehearsalRequest()) or RehearsalReply()
        if server_id.partition(".")[0] in state.instances:
            return address
    return ""


def _post(address: str, name: str, message: RehearsalRequest) -> RehearsalReply | None:
    """Call the rehearsal and return its reply; None if it refuses or does not run."""
    url, body = f"{address}/rehearsal/{name}", msgspec.json.encode(message)
    try:
        with open_session() as session:
            session.trust_env = False  # a proxy cannot reach this machine's loopback addresses
            response = session.post(url, data=body, headers=HEADER, timeout=TIMEOUT_S)
            response.raise_for_status()
            return decode_json(response.content, RehearsalReply)
    except (OSError, msgspec.MsgspecError):
        return None
