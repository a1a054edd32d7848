"""The rehearsed cloud that a lab's commands speak to, if they do: it takes servers back itself."""

from __future__ import annotations

import json
import urllib.parse
import urllib.request
from typing import Any, ClassVar

from labctl.config import environment
from labctl.providers import Reclaim
from labctl.servers.context import Ground

LOOPBACK = ("127.0.0.1", "localhost")
HEADER = {"X-Labctl-Rehearsal": "1", "Content-Type": "application/json"}
TIMEOUT_S = 5.0


class Rehearsed:
    """A Reclaim: what the rehearsal does to spot instances; all others as their provider does."""

    no_notice: ClassVar[str] = "only spot instances are given notice, and this is none"

    def __init__(self, address: str, provider: Reclaim) -> None:
        self.address = address
        self.provider = provider

    def reclaim(self, server_id: str, notice_s: float) -> bool:
        asked = {"instance": server_id.partition(".")[0], "notice_s": notice_s}
        done = _asked(self.address, "reclaim", asked) is not None
        return done or self.provider.reclaim(server_id, notice_s)


def rehearsed_taker(ground: Ground) -> Rehearsed | None:
    """None where the lab's provider speaks to no rehearsal of this machine."""
    address = environment().get("AWS_ENDPOINT_URL", "").rstrip("/")
    if urllib.parse.urlsplit(address).hostname not in LOOPBACK:
        return None
    state = _asked(address, "state", {}) or {}
    ours = ground.server().id.partition(".")[0] in state.get("instances", ())
    provider = ground.provider
    return Rehearsed(address, provider) if ours and isinstance(provider, Reclaim) else None


def _asked(address: str, name: str, body: dict[str, Any]) -> dict[str, Any] | None:
    """The rehearsal's answer; None where it refuses or there is none."""
    asked = urllib.request.Request(
        f"{address}/rehearsal/{name}", data=json.dumps(body).encode(), headers=HEADER
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(asked, timeout=TIMEOUT_S) as reply:
            found: dict[str, Any] = json.loads(reply.read())
    except (OSError, ValueError):
        return None
    return found
