"""More time for a server: its watchdog first, then the provider's own timer."""

from __future__ import annotations

import time
from typing import Any

from labctl.actions import Note, guard
from labctl.actions.ground import Ground
from labctl.actions.status import keep_watch
from labctl.errors import DeniedError
from labctl.providers import Deadline


def extend(ground: Ground, span_s: int) -> dict[str, Any]:
    """The watchdog's clocks after the server was given `span_s` seconds more.

    PolicyError beyond `max_ttl` or the budget.
    """
    server = ground.server()
    watch = guard.extend(ground, server, span_s)
    keep_watch(ground, server, watch)
    left_s = watch.get("ttl_left_s")
    detail = {"span_s": span_s, "ttl_left_s": left_s}
    ground.state.record("extended", lab_id=ground.lab_id, server_id=server.id, detail=detail)
    if left_s is not None and isinstance(ground.provider, Deadline):
        try:
            ground.provider.set_deadline(server.id, time.time() + left_s)
        except DeniedError as error:
            ground.reporter.emit(Note(text=error.what, level="warning"))
    return watch
