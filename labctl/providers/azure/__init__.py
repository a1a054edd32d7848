"""Servers from Azure: the cheapest machine that fits, spot or on demand.

Tags record what exists (tags.py), all of it in one resource group; prices come from Microsoft's
Retail Prices API, which needs no account. The SDK is imported where a call is made.
"""

from __future__ import annotations

import functools
from typing import ClassVar

from labctl.config import copy_environment
from labctl.errors import LabError, assign_subject
from labctl.model import (
    Boot,
    Check,
    CreateServerRequest,
    GpuNeed,
    Need,
    Offer,
    ProviderAccount,
    Resource,
    Server,
    Value,
)
from labctl.providers import ProviderContext, QuotaRoom
from labctl.providers.azure import (
    account,
    checks,
    leftovers,
    machines,
    network,
    prices,
    tags,
    timer,
)
from labctl.providers.azure.arm import Arm
from labctl.providers.azure.launch import USER_DATA_BYTES, AzureLauncher
from labctl.providers.azure.quotas import SubscriptionLimits, read_limits
from labctl.providers.azure.settings import AzureSettings
from labctl.providers.offer_filter import select_offers
from labctl.providers.user_data import build_user_data

__all__ = ["AzureProvider", "AzureSettings"]


class AzureProvider:
    """A Provider that is also Stoppable, FirstBoot, Firewall, Deadline, EndsBilling, Reclaimable,
    ReclaimNoticeSource, QuotaSource, ConnectsGangs, ConsoleSource, CatalogOffers and
    CredentialSource.
    """

    name: ClassVar[str] = tags.PROVIDER
    no_notice: ClassVar[str] = "only Azure itself gives notice of an eviction"
    settings_type: ClassVar[type[Value]] = AzureSettings
    # A machine that powers itself off keeps its hardware and is billed as before
    # (learn.microsoft.com/azure/virtual-machines/states-billing). The timer deallocates it.
    ends_billing: ClassVar[frozenset[str]] = frozenset({"timer"})
    notice_service: ClassVar[str] = "azure"

    def __init__(self, settings: AzureSettings, context: ProviderContext) -> None:
        self.settings = settings
        self.settle_s: float = settings.settle_s
        self.context = context
        self.arm = Arm(settings)

    def get_account(self) -> ProviderAccount:
        """Return the subscription, which settings or the Azure CLI name; asks nobody."""
        return ProviderAccount(id=self.arm.subscription)

    def check(self, need: Need | None = None) -> list[Check]:
        """Check the quotas of the need, or without one those of the smallest GPU machine."""
        need = need or Need(gpu=GpuNeed(kind="any", count=1))
        return checks.run_checks(self.arm, self.settings, need, self._list_offers)

    @property
    def has_credentials(self) -> bool:
        return account.has_credentials(copy_environment())

    def check_credentials(self) -> Check:
        return checks.check_credentials(self.arm, "azure credentials")

    def _list_offers(self, need: Need) -> list[Offer]:
        with assign_subject(self.context.subject):
            return self.offers(need)

    def offers(self, need: Need) -> list[Offer]:
        regions = self.settings.regions
        catalogs = prices.load_prices(self.settings.prices_from, regions, self.context.cache_dir)
        limits = self._read_limits()
        return select_offers(
            f"Azure in {', '.join(regions)}",
            need,
            prices.list_priced_offers(catalogs),
            find_lack=limits.find_lack if limits else lambda offer: "",
        )

    def list_catalog_offers(self, need: Need) -> list[Offer]:
        """Prices need no account; without credentials, no quota rules anything out."""
        return self.offers(need)

    def create(self, offer: Offer, request: CreateServerRequest) -> Server:
        return self._launcher.create(offer, request)

    def describe_gang(self, offer: Offer) -> str:
        return "connected by a virtual network, each server can reach every port of the others"

    def find(self, server_id: str) -> Server | None:
        return machines.find_server(self.arm, server_id, self.settings.user)

    def servers(self) -> list[Server]:
        return machines.list_servers(self.arm, self.settings.user)

    def terminate(self, server_id: str) -> None:
        machines.delete_machine(self.arm, server_id)

    def leftovers(self) -> list[Resource]:
        return leftovers.list_leftovers(self.arm)

    def remove(self, resource: Resource) -> None:
        leftovers.remove(self.arm, resource)

    def build_first_boot(self, boot: Boot) -> str:
        templates = self.context.data_dir / "templates" / "cloud-init"
        return build_user_data(templates, boot, self.settings.user, "Azure", USER_DATA_BYTES)

    def pin(self, server_id: str, host_key: str, next_host_key: str = "") -> None:
        machines.pin(self.arm, server_id, host_key, next_host_key)

    def stop(self, server_id: str) -> None:
        machines.stop(self.arm, server_id)

    def start(self, server_id: str) -> None:
        machines.start(self.arm, server_id)

    @functools.cached_property
    def missing_deadline_setup(self) -> str:
        return timer.explain_missing_setup(self.arm)

    def set_deadline(self, server_id: str, at: float) -> None:
        """Have Azure deallocate the server; its disk and its address are charged until `down`."""
        timer.set_timer(self.arm, server_id, at)

    def reclaim(self, server_id: str, notice_s: float) -> bool:
        """Delete the machine, as an eviction does after Azure's own notice."""
        if notice_s:
            return False
        machines.require_machine(self.arm, server_id)
        machines.delete_machine(self.arm, server_id)
        return True

    def read_console(self, server_id: str) -> str:
        return machines.read_console(self.arm, server_id)

    def admit(self, server_id: str) -> str:
        record = tags.parse_record(machines.require_machine(self.arm, server_id).tags)
        if record is None:
            return ""
        return network.admit(self.arm, self.settings, network.find_group(record), self._owner)

    def compute_room(self, offer: Offer) -> QuotaRoom:
        return checks.compute_room(self.arm, offer)

    def _read_limits(self) -> SubscriptionLimits | None:
        """Read what the subscription may use; None without credentials or the permission."""
        if not self.has_credentials:
            return None
        try:
            return read_limits(self.arm, self.settings.regions)
        except LabError:
            # The request itself will say what is wrong.
            return None

    @property
    def _owner(self) -> str:
        """The owner whose rule admits him: a keeper's differs from a laptop's."""
        return "@".join(filter(None, [self.context.owner, self.context.place]))

    @functools.cached_property
    def _launcher(self) -> AzureLauncher:
        return AzureLauncher(self.arm, self.settings, self._owner)
