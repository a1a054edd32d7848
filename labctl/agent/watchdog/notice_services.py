"""The metadata services that give notice of a reclaim, by the name that limits.json has."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from ...wire.verbs import Empty
from ..host.azure_metadata import AzureMetadata
from ..host.gce_metadata import GceMetadata
from ..host.imds import Imds
from ..host.retry import retry_on
from . import imds_notices
from .provider_notice import INTERRUPTION, ReclaimNotice
from .state_files import read_limits, read_status

# seconds from Google's notice until it switches the machine off
# (cloud.google.com/compute/docs/instances/preemptible, "Preemption process")
GCE_NOTICE_S = 30.0
PREEMPTED = "instance/preempted"
# seconds of them for which a shutdown may wait until results are saved
GCE_SHUTDOWN_S = 25.0
AWAIT_POLL_S = 0.2
# The first request of a machine at Azure enables the service, and may take two minutes to be
# answered (learn.microsoft.com/azure/virtual-machines/linux/scheduled-events).
AZURE_FIRST_S = 130.0
PREEMPT = "Preempt"


class NoticeService:
    """A service that is polled every `poll_s`. The default has no notices.

    `shutdown_s`: the system is shut down as soon as the notice is there, and this is how long the
    shutdown waits until results are saved; 0 if the machine goes on to run until its end.
    """

    poll_s = 5.0
    shutdown_s = 0.0

    def is_available(self) -> bool:
        """Whether this machine has the service and may be reclaimed. Takes up to 15 s."""
        return False

    def read(self) -> list[ReclaimNotice]:
        """Return the current notices. OSError if the service does not answer properly."""
        return []


class Ec2Notices(NoticeService):
    def __init__(self) -> None:
        self._imds = Imds()

    def is_available(self) -> bool:
        return imds_notices.has_reclaim_notices(self._imds)

    def read(self) -> list[ReclaimNotice]:
        return imds_notices.read_notices(self._imds)


class GceNotices(NoticeService):
    """Google's service: `instance/preempted` becomes TRUE at the preemption of a spot machine."""

    poll_s = 1.0
    shutdown_s = GCE_SHUTDOWN_S

    def __init__(self, metadata: GceMetadata | None = None) -> None:
        self._metadata = metadata or GceMetadata()

    def is_available(self) -> bool:
        try:
            pauses_s = imds_notices.PROBE_PAUSES_S
            return bool(retry_on(OSError, lambda: self._metadata.get(PREEMPTED), pauses_s))
        except OSError:
            return False

    def read(self) -> list[ReclaimNotice]:
        if self._metadata.get(PREEMPTED) != "TRUE":
            return []
        source = "Google's metadata service"
        return [ReclaimNotice(INTERRUPTION, PREEMPTED, GCE_NOTICE_S, "delete", source)]


class AzureNotices(NoticeService):
    """Azure's Scheduled Events: one of type Preempt, at least 30 s before a spot machine ends."""

    poll_s = 1.0

    def __init__(self, metadata: AzureMetadata | None = None) -> None:
        self._metadata = metadata or AzureMetadata()

    def is_available(self) -> bool:
        try:
            pauses_s = imds_notices.PROBE_PAUSES_S
            retry_on(OSError, lambda: self._metadata.read_events(AZURE_FIRST_S), pauses_s)
        except OSError:
            return False
        return True

    def read(self) -> list[ReclaimNotice]:
        reply = self._metadata.read_events()
        return [
            ReclaimNotice(
                INTERRUPTION,
                event.EventId,
                event.compute_left_s(reply.dated_s),
                "delete",
                "Azure's metadata service",
            )
            for event in reply.events
            if event.EventType == PREEMPT
        ]


SERVICES: dict[str, type[NoticeService]] = {
    "": Ec2Notices,
    "azure": AzureNotices,
    "gce": GceNotices,
}


def open_notice_service(name: str) -> NoticeService:
    """Return the service of this name; one without notices for a name that is unknown here."""
    return SERVICES.get(name, NoticeService)()


def await_reclaim(request: Empty) -> None:
    """Wait before a shutdown until the results of a reclaimed server are saved.

    The verb `await-reclaim`, for the watchdog's unit; `sys.argv[2]` is the watchdog's directory.
    Returns at once for any other shutdown.
    """
    directory = Path(sys.argv[2])
    limits = read_limits(directory)
    service = open_notice_service(limits.notices if limits else "")
    if not service.shutdown_s or not _has_notice(service):
        return
    end_s = time.monotonic() + service.shutdown_s
    while time.monotonic() < end_s:
        reclaim = read_status(directory, True, 0).reclaim
        if reclaim is not None and reclaim.ready_at:
            return
        time.sleep(AWAIT_POLL_S)


def _has_notice(service: NoticeService) -> bool:
    try:
        return bool(service.read())
    except OSError:
        return False
