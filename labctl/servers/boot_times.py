"""How long earlier servers took to boot, from the ledger of this machine."""

from __future__ import annotations

import statistics

from labctl.state import State

# the newest boots of a type that count
MOST_BOOTS = 20


def read_boot_times(state: State) -> dict[tuple[str, str], float]:
    """Return the median boot time in seconds by (provider, type), of the servers of all labs.

    It counts from the provider's reply to the request until the server was ready for a run.
    """
    ready: dict[str, float] = {}
    for line in state.list_events(kind="ready"):
        ready.setdefault(line.server_id, line.at)
    spans: dict[tuple[str, str], list[float]] = {}
    for line in state.list_events(kind="created"):
        if line.server_id in ready:
            key = (str(line.detail.get("provider", "")), str(line.detail.get("type", "")))
            spans.setdefault(key, []).append(max(0.0, ready[line.server_id] - line.at))
    return {key: statistics.median(values[-MOST_BOOTS:]) for key, values in spans.items()}
