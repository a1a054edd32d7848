"""Whether this is a shared server, where a broker stands between accounts and the engine."""

from __future__ import annotations

import os

BROKER = "/run/labctl/broker.sock"
ENGINE = "/var/run/docker.sock"


def brokered() -> bool:
    """Whether this account reaches the engine through the broker: it may not use it directly."""
    return os.path.exists(BROKER) and not os.access(ENGINE, os.W_OK)  # noqa: PTH110 (3 ms less)
