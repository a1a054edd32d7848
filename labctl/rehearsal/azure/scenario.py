"""The settings of a rehearsal of Azure."""

from __future__ import annotations

from labctl.model import Value
from labctl.rehearsal.core.scenario import CloudScenario, Seconds


class FamilyQuota(Value, frozen=True):
    """A limit of the subscription, in vCPUs of one region (`*` of every one)."""

    name: str
    limit: float
    region: str = "*"


class AzureScenario(CloudScenario, frozen=True):
    """All settings of a rehearsal of Azure; docs/rehearsal.md explains each.

    `operation` is how long each long-running operation takes. `quotas` replace limits, which are
    large otherwise. `closed` are sizes (patterns) that the subscription may not use. `lacking` are
    the actions that the role of the caller does not have. `registered`: Microsoft.ComputeSchedule
    is registered, so that timers can be set; `timer` replaces the time until one fires. `address`
    is the caller's own, as labctl finds it. With a `balance` of 0 the subscription is disabled.
    """

    regions: tuple[str, ...] = ("eastus", "westeurope")
    subscription: str = "0a0a0a0a-1111-2222-3333-0b0b0b0b0b0b"
    operation: Seconds = 0.0
    quotas: tuple[FamilyQuota, ...] = ()
    closed: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()
    registered: bool = True
    timer: Seconds | None = None
    address: str = ""
