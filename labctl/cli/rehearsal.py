"""Client of the simulated cloud that a lab uses, if any: it can interrupt servers itself."""

from __future__ import annotations

import json
import urllib.parse
import urllib.request
from typing import Any, ClassVar

from labctl.config import copy_environment
from labctl.providers import Reclaimable
from labctl.servers.context import LabContext

LOOPBACK = ("127.0.0.1", "localhost")
HEADER = {"X-Labctl-Rehearsal": "1", "Content-Type": "application/json"}
TIMEOUT_S = 5.0


class RehearsalReclaim:
    """A Reclaim for spot instances of a rehearsal; other servers are left to their provider."""

    no_notice: ClassVar[str] = "only spot instances get a notice, and this is not a spot instance"

    def __init__(self, address: str, provider: Reclaimable) -> None:
        self.address = address
        self.provider = provider

    def reclaim(self, server_id: str, notice_s: float) -> bool:
        body = {"instance": server_id.partition(".")[0], "notice_s": notice_s}
        was_reclaimed = _post(self.address, "reclaim", body) is not None
        return was_reclaimed or self.provider.reclaim(server_id, notice_s)


def find_rehearsal(context: LabContext) -> RehearsalReclaim | None:
    """Return the rehearsal that simulates the lab's server, or None if it is not simulated here."""
    address = copy_environment().get("AWS_ENDPOINT_URL", "").rstrip("/")
    if urllib.parse.urlsplit(address).hostname not in LOOPBACK:
        return None
    state = _post(address, "state", {}) or {}
    is_simulated = context.get_server().id.partition(".")[0] in state.get("instances", ())
    provider = context.provider
    return (
        RehearsalReclaim(address, provider)
        if is_simulated and isinstance(provider, Reclaimable)
        else None
    )


def _post(address: str, name: str, body: dict[str, Any]) -> dict[str, Any] | None:
    """Call the rehearsal and return its reply; None if it refuses or does not run."""
    request = urllib.request.Request(
        f"{address}/rehearsal/{name}", data=json.dumps(body).encode(), headers=HEADER
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=TIMEOUT_S) as response:
            reply: dict[str, Any] = json.loads(response.read())
    except (OSError, ValueError):
        return None
    return reply
