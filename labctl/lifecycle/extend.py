"""Extend a server's lifetime: first in its watchdog, then in the provider's own timer."""

from __future__ import annotations

import math
from functools import partial

from labctl.events import report_wait
from labctl.lifecycle import gang
from labctl.lifecycle.status import record_watch
from labctl.servers import deadlines, guard
from labctl.servers.context import LabContext
from labctl.wire.watchdog import WatchRecord


def extend(
    context: LabContext, span_s: int, *, latest_at: float | None = None
) -> WatchRecord | None:
    """Extend the server's lifetime by `span_s` seconds and return the watchdog's report.

    PolicyError beyond `max_ttl` or the budget. The provider's timer is never set later than
    `latest_at` (Unix time): where somebody else is root, they control what the watchdog answers. Of
    a lab with several servers, all are extended.
    """
    if gang.has_several_servers(context):
        members = gang.build_members(context)
        return gang.call_for_each(members, partial(extend, span_s=span_s, latest_at=latest_at))[0]
    server = context.get_server()
    with report_wait(context.reporter, f"extending the life of {server.alias}"):
        watch = guard.extend(context, server, span_s)
    record_watch(context, server, watch)
    reported = watch.ttl_left_s if watch else None
    left_s = reported if reported is not None and math.isfinite(reported) else None
    detail = {"span_s": span_s, "ttl_left_s": left_s}
    context.state.record("extended", lab_id=context.lab_id, server_id=server.id, detail=detail)
    deadlines.move_timer(context, server, watch, latest_at=latest_at)
    return watch
