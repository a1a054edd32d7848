"""Reclaim notices from a cloud machine's metadata service, which is polled for them."""

from __future__ import annotations

from ..host.imds import Imds
from ..host.retry import retry_on
from .provider_notice import ReclaimNotice, parse_interruption, parse_rebalance

# At boot the service may start late. Machines without one are tried three times, then left alone.
PROBE_PAUSES_S = (2.0, 10.0)
ACTION = "meta-data/spot/instance-action"
REBALANCE = "meta-data/events/recommendations/rebalance"
LIFE = "meta-data/instance-life-cycle"
# The life cycles that come with notices. Other replies (a captive portal, say) are ignored.
MAY_BE_TAKEN = ("spot", "scheduled", "capacity-block")


def has_reclaim_notices(imds: Imds) -> bool:
    """Return whether this machine has the service and may be reclaimed. Takes up to 15 s.

    An on-demand machine gets no notices.
    """
    try:
        response = retry_on(OSError, lambda: imds.get(LIFE), PROBE_PAUSES_S)
    except OSError:
        return False
    return response.status == 200 and response.body.strip() in MAY_BE_TAKEN


def read_notices(imds: Imds) -> list[ReclaimNotice]:
    """Return the current notices. OSError if the service does not answer properly."""
    notices = []
    for path in (REBALANCE, ACTION):
        response = imds.get(path)
        if response.status == 200:
            notices.append(
                parse_rebalance(response.body)
                if path == REBALANCE
                else parse_interruption(response.body, response.dated_s)
            )
        elif response.status != 404:
            raise OSError(f"the metadata service returned HTTP {response.status}")
    return notices
