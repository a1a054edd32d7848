"""Client of the simulated cloud that a lab uses, if any: it can interrupt servers itself.

labctl.rehearsal is that cloud; it runs in a process of its own, and is not imported.
"""

from __future__ import annotations

import urllib.parse
import urllib.request
from typing import ClassVar

import msgspec

from labctl.config import copy_environment
from labctl.model import Value
from labctl.providers import Reclaimable
from labctl.servers.context import LabContext

LOOPBACK = ("127.0.0.1", "localhost")
HEADER = {"X-Labctl-Rehearsal": "1", "Content-Type": "application/json"}
TIMEOUT_S = 5.0


class RehearsalRequest(Value, frozen=True):
    """A control request of the rehearsal; "state" has no fields."""


class RehearsalReclaimRequest(RehearsalRequest, frozen=True):
    """Reclaim an instance, `notice_s` seconds after its notice."""

    instance: str
    notice_s: float


class RehearsalReply(Value, frozen=True):
    """The states of the simulated instances, by id."""

    instances: dict[str, str] = msgspec.field(default_factory=dict)


class RehearsalReclaim:
    """A Reclaim for spot instances of a rehearsal; other servers are left to their provider."""

    no_notice: ClassVar[str] = "only spot instances get a notice, and this is not a spot instance"

    def __init__(self, address: str, provider: Reclaimable) -> None:
        self.address = address
        self.provider = provider

    def reclaim(self, server_id: str, notice_s: float) -> bool:
        request = RehearsalReclaimRequest(instance=server_id.partition(".")[0], notice_s=notice_s)
        was_reclaimed = _post(self.address, "reclaim", request) is not None
        return was_reclaimed or self.provider.reclaim(server_id, notice_s)


def find_rehearsal(context: LabContext, provider: Reclaimable) -> RehearsalReclaim | None:
    """Return the rehearsal that simulates the lab's server, or None if it is not simulated here.

    Servers that it cannot reclaim are left to `provider`.
    """
    address = copy_environment().get("AWS_ENDPOINT_URL", "").rstrip("/")
    if urllib.parse.urlsplit(address).hostname not in LOOPBACK:
        return None
    state = _post(address, "state", RehearsalRequest()) or RehearsalReply()
    is_simulated = context.get_server().id.partition(".")[0] in state.instances
    return RehearsalReclaim(address, provider) if is_simulated else None


def _post(address: str, name: str, message: RehearsalRequest) -> RehearsalReply | None:
    """Call the rehearsal and return its reply; None if it refuses or does not run."""
    request = urllib.request.Request(
        f"{address}/rehearsal/{name}", data=msgspec.json.encode(message), headers=HEADER
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=TIMEOUT_S) as response:
            return msgspec.json.decode(response.read(), type=RehearsalReply)
    except (OSError, msgspec.MsgspecError):
        return None
