"""Name in an error what continues to cost money."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from labctl.config.member_ids import list_lab_ids
from labctl.errors import BusyError, LabError, ProviderError
from labctl.servers.context import LabContext
from labctl.servers.disks import describe_kept_disk
from labctl.state.disks import list_kept_disks
from labctl.text import price_text


@contextmanager
def explain_open_costs(
    context: LabContext,
    kinds: type[LabError] | tuple[type[LabError], ...] = (ProviderError, BusyError),
    *,
    every_lab: bool = False,
) -> Iterator[None]:
    """Add to errors of these kinds what of the lab still costs money, as last recorded."""
    try:
        yield
    except kinds as error:
        lines = describe_open_costs(context, None if every_lab else context.lab_id)
        error.why = "\n".join(filter(None, [error.why, *lines]))
        raise


def describe_open_costs(context: LabContext, lab_id: str | None) -> list[str]:
    """Describe each recorded server, kept disk and open attempt that may cost money, one a line.

    Those of all servers of the lab, if it has several; of all labs if `lab_id` is None.
    """
    ids = [None] if lab_id is None else list_lab_ids(lab_id)
    return [line for one in ids for line in _describe_costs(context, one)]


def _describe_costs(context: LabContext, lab_id: str | None) -> list[str]:
    down = context.subject.end_all
    lines = [
        f"{server.id} is still running (last known), at "
        f"{price_text(server.offer.price_usd_per_hour)} until {down}"
        for server in context.state.list_servers(lab_id)
        if server.offer.price_usd_per_hour
        and server.state not in ("stopped", "ending", "terminated")
    ]
    lines += [describe_kept_disk(disk) for disk in list_kept_disks(context.state, lab_id)]
    return lines + [
        f"an interrupted `up` may have created a {attempt.offer.type}, at "
        f"{price_text(attempt.offer.price_usd_per_hour)}; {down} finds it"
        for attempt in context.state.list_open_attempts(lab_id)
        if attempt.offer.price_usd_per_hour
    ]
