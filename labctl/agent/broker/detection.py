"""Whether this is a shared server, where a broker stands between accounts and the engine."""

from __future__ import annotations

import os

BROKER = "/run/labctl/broker.sock"
ENGINE = "/var/run/docker.sock"
# The limit (place.LIMIT) that ended a run whose GPU was lent for no longer.
LEASE = "GPU lease"
# How the broker's words begin where others have what is asked, or the account's share is used.
TAKEN = "shared server: "


def brokered() -> bool:
    """Whether this account reaches the engine through the broker: it may not use it directly."""
    return os.path.exists(BROKER) and not os.access(ENGINE, os.W_OK)  # noqa: PTH110 (3 ms less)
