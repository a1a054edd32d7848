"""What the subscription may use in a region: its quotas in vCPUs, and the sizes open to it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from labctl.model import Offer, Value
from labctl.providers.azure import permissions
from labctl.providers.azure.arm import Arm
from labctl.providers.azure.replies import SkuReply, UsageReply

USAGES, SKUS = "2024-07-01", "2021-07-01"
# The quota of all spot machines of a region, and that of all others.
SPOT_QUOTA, ALL_QUOTA = "lowPriorityCores", "cores"
VM_RESOURCE = "virtualMachines"
CLOSED = frozenset({"Location"})
_PUNCTUATION = re.compile(r"[^a-z0-9]")


class AzureQuota(Value, frozen=True):
    """A quota that limits a machine, in vCPUs."""

    name: str
    region: str
    limit: float
    usage: float

    @property
    def text(self) -> str:
        return f"{self.name} in {self.region}"


class RegionLimits(Value, frozen=True):
    """The quotas of one region by their plain names, and its sizes by name."""

    quotas: dict[str, AzureQuota]
    sizes: dict[str, SkuReply]


class SubscriptionLimits:
    """The limits of the regions that were read."""

    def __init__(self, regions: dict[str, RegionLimits]) -> None:
        self._regions = regions

    def list_quotas(self, offer: Offer) -> list[AzureQuota]:
        """List the quotas that limit an offer: spot machines have one of their own."""
        limits = self._regions.get(offer.region)
        if limits is None:
            return []
        size = limits.sizes.get(offer.type)
        names = [SPOT_QUOTA] if offer.spot else [size.family if size else "", ALL_QUOTA]
        found = (limits.quotas.get(make_plain(name)) for name in names if name)
        return [quota for quota in found if quota is not None]

    def find_lack(self, offer: Offer) -> str:
        """Return what does not allow one such machine; "" if nothing does."""
        limits = self._regions.get(offer.region)
        if limits is not None and limits.sizes:
            size = limits.sizes.get(offer.type)
            if size is None or any(one.type in CLOSED for one in size.restrictions):
                return f"not open to this subscription in {offer.region}"
        small = (one for one in self.list_quotas(offer) if one.limit < offer.cpus)
        return next((f"the quota {one.text}" for one in small), "")


def read_limits(arm: Arm, regions: Iterable[str]) -> SubscriptionLimits:
    """Read the limits of these regions."""
    wanted = tuple(dict.fromkeys(regions))
    with ThreadPoolExecutor(max(1, min(4, len(wanted)))) as threads:
        found = threads.map(lambda region: _read_region(arm, region), wanted)
        return SubscriptionLimits(dict(zip(wanted, found, strict=True)))


def _read_region(arm: Arm, region: str) -> RegionLimits:
    compute = arm.subscription_path("/providers/Microsoft.Compute")
    usages = arm.list_all(
        UsageReply, f"{compute}/locations/{region}/usages", USAGES, permissions.READ_USAGES
    )
    sizes = arm.list_all(
        SkuReply,
        f"{compute}/skus",
        SKUS,
        permissions.READ_SKUS,
        filter=f"location eq '{region}'",
    )
    return RegionLimits(
        quotas={
            make_plain(one.name.value): AzureQuota(
                name=one.name.value, region=region, limit=one.limit, usage=one.current_value
            )
            for one in usages
        },
        sizes={one.name: one for one in sizes if one.resource_type == VM_RESOURCE},
    )


def make_plain(name: str) -> str:
    """Return a quota's name without punctuation: a size's family is not always spelled like it."""
    return _PUNCTUATION.sub("", name.lower())
