"""What goes on costing money while something else fails, said in the error itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from labctl.errors import BusyError, LabError, ProviderError
from labctl.servers.context import Ground
from labctl.servers.disks import told
from labctl.state.disks import list_kept_disks


@contextmanager
def told_what_bills(
    ground: Ground,
    kinds: type[LabError] | tuple[type[LabError], ...] = (ProviderError, BusyError),
    *,
    every_lab: bool = False,
) -> Iterator[None]:
    """An error of these kinds also says which servers of the lab go on meanwhile, as recorded."""
    try:
        yield
    except kinds as error:
        lines = still_billing(ground, None if every_lab else ground.lab_id)
        error.why = "\n".join(filter(None, [error.why, *lines]))
        raise


def still_billing(ground: Ground, lab_id: str | None) -> list[str]:
    """One line for each server and kept disk on record, and for what may have become a server."""
    lines = [
        f"{one.id} goes on, as far as is known here, at "
        f"{one.offer.price_usd_per_hour:.2f} dollars an hour until labctl down"
        for one in ground.state.servers(lab_id)
        if one.offer.price_usd_per_hour and one.state not in ("stopped", "ending", "terminated")
    ]
    lines += [told(one) for one in list_kept_disks(ground.state, lab_id)]
    return lines + [
        f"a {one.offer.type} may have been made and not be shown yet, at "
        f"{one.offer.price_usd_per_hour:.2f} dollars an hour; labctl down finds it"
        for one in ground.state.open_attempts(lab_id)
        if one.offer.price_usd_per_hour
    ]
