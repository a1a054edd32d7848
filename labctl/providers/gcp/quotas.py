"""The project's quotas: of each region, and of all regions together."""

from __future__ import annotations

from collections.abc import Iterable

from labctl.model import Offer, Value
from labctl.providers.gcp import permissions
from labctl.providers.gcp.clients import GcpClients
from labctl.providers.gcp.hardware import QuotaUse, list_quota_uses
from labctl.providers.gcp.replies import GceProject, GceQuota, GceRegion

PREEMPTIBLE = "PREEMPTIBLE_"


class FoundQuota(Value, frozen=True):
    """A quota that limits a machine, which takes `amount` of it."""

    metric: str
    region: str
    limit: float
    usage: float
    amount: float

    @property
    def name(self) -> str:
        return f"{self.metric} in {self.region}" if self.region else self.metric

    @property
    def room(self) -> int:
        """How many such machines the quota allows at once, those running now included."""
        return int(self.limit // self.amount) if self.amount else 0


class QuotaTable:
    """Limits and usage by region ("" for all regions) and metric."""

    def __init__(self, quotas: dict[tuple[str, str], GceQuota]) -> None:
        self._quotas = quotas

    def list_limits(self, offer: Offer) -> list[FoundQuota]:
        """List the quotas that limit an offer, those that Google does not name left out.

        Spot machines use the preemptible quota of a region; without one they use the standard
        quota (cloud.google.com/compute/resource-usage).
        """
        uses = (self._choose(use, offer.spot) for use in list_quota_uses(offer))
        return [
            FoundQuota(
                metric=use.metric,
                region=use.region,
                limit=quota.limit,
                usage=quota.usage,
                amount=use.amount,
            )
            for use in uses
            if (quota := self._quotas.get((use.region, use.metric)))
        ]

    def find_lack(self, offer: Offer) -> str:
        """Return the name of a quota that does not allow one such machine; "" if all do."""
        return next((one.name for one in self.list_limits(offer) if one.limit < one.amount), "")

    def _choose(self, use: QuotaUse, spot: bool) -> QuotaUse:
        metric = PREEMPTIBLE + _strip_family(use.metric)
        granted = self._quotas.get((use.region, metric))
        if spot and use.region and granted is not None and granted.limit > 0:
            return QuotaUse(metric=metric, amount=use.amount, region=use.region)
        return use


def read_quotas(clients: GcpClients) -> QuotaTable:
    """Read the quotas of all regions."""
    project = clients.read(GceProject, "projects", "get", permissions.READ_PROJECT)
    regions = clients.list_all(GceRegion, "regions", "list", permissions.LIST_REGIONS)
    table = dict(_key("", project.quotas))
    for region in regions:
        table.update(_key(region.name, region.quotas))
    return QuotaTable(table)


def _key(region: str, quotas: Iterable[GceQuota]) -> Iterable[tuple[tuple[str, str], GceQuota]]:
    return [((region, quota.metric), quota) for quota in quotas]


def _strip_family(metric: str) -> str:
    """Return the metric of spot machines' vCPUs, which is one for all families."""
    return "CPUS" if metric.endswith("_CPUS") else metric
