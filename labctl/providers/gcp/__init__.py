"""Servers from Google Compute Engine: the cheapest that fits, spot or on demand.

Labels and an instance's metadata record what exists (labels.py); machines and prices come from
gpuhunt's catalog, which needs no credentials. The SDK is imported where a call is made.
"""

from __future__ import annotations

import functools
import time
from pathlib import Path
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
from labctl.providers.gcp import (
    account,
    checks,
    disks,
    instances,
    labels,
    leftovers,
    network,
    offers,
)
from labctl.providers.gcp.clients import GcpClients
from labctl.providers.gcp.launch import USER_DATA_BYTES, GcpLauncher
from labctl.providers.gcp.quotas import QuotaTable, read_quotas
from labctl.providers.gcp.settings import GcpSettings
from labctl.providers.user_data import build_user_data

__all__ = ["GcpProvider", "GcpSettings"]

BOOTHOOKS = ("gce-boothook.sh.j2",)


class GcpProvider:
    """A Provider that is also Stoppable, FirstBoot, Firewall, FixedTimer, EndsBilling, Keep,
    Reclaimable, ReclaimNoticeSource, QuotaSource, ConnectsGangs, ConsoleSource, CredentialSource,
    CatalogOffers and Explains.
    """

    name: ClassVar[str] = labels.PROVIDER
    no_notice: ClassVar[str] = "only Google itself gives preemption notices"
    settings_type: ClassVar[type[Value]] = GcpSettings
    # A machine that powers itself off is TERMINATED: Google charges its disk alone, which
    # `leftovers` shows with its price. The timer deletes both.
    ends_billing: ClassVar[frozenset[str]] = frozenset({"shutdown", "timer"})
    fixed_timer: ClassVar[bool] = True
    notice_service: ClassVar[str] = "gce"

    def __init__(self, settings: GcpSettings, context: ProviderContext) -> None:
        self.settings = settings
        self.settle_s: float = settings.settle_s
        self.context = context
        self.clients = GcpClients(settings)

    def get_account(self) -> ProviderAccount:
        """Return the project, which gcloud's configuration names; asks nobody."""
        return ProviderAccount(id=self.clients.project)

    def check(self, need: Need | None = None) -> list[Check]:
        """Check the quotas of the need, or without one those of the smallest GPU machine."""
        need = need or Need(gpu=GpuNeed(kind="any", count=1))
        return checks.run_checks(
            self.clients, self.settings, need, self._list_offers, self._cache_dir, time.time()
        )

    @property
    def has_credentials(self) -> bool:
        return account.find_credential_file(copy_environment()) is not None

    def check_credentials(self) -> Check:
        return checks.check_credentials(self.clients, "gcp credentials")

    def _list_offers(self, need: Need) -> list[Offer]:
        with assign_subject(self.context.subject):
            return self.offers(need)

    def offers(self, need: Need) -> list[Offer]:
        return offers.select_offers(
            need,
            offers.load_prices(self.settings, self._cache_dir),
            self.settings.regions or (account.resolve_region(copy_environment()),),
            self._read_quotas(),
            any_driver=bool(self.settings.image),
        )

    def list_catalog_offers(self, need: Need) -> list[Offer]:
        """The catalog has all prices anyway; without credentials, no quota rules anything out."""
        return self.offers(need)

    def create(self, offer: Offer, request: CreateServerRequest) -> Server:
        return self._launcher.create(offer, request)

    def describe_gang(self, offer: Offer) -> str:
        return "connected by the project's network, each server can reach every port of the others"

    def find(self, server_id: str) -> Server | None:
        instance = instances.find_instance(self.clients, server_id)
        if instance is None:
            return None
        return labels.parse_server(instance, self.clients.project, self.settings.user)

    def servers(self) -> list[Server]:
        return instances.list_servers(self.clients, self.settings.user)

    def terminate(self, server_id: str) -> None:
        instances.delete_instance(self.clients, server_id)

    def leftovers(self) -> list[Resource]:
        return leftovers.list_leftovers(self.clients)

    def remove(self, resource: Resource) -> None:
        """Remove a resource; BusyError while something uses it, such as an ending machine."""
        self._launcher.forget_rules()
        leftovers.remove(self.clients, resource)

    def build_first_boot(self, boot: Boot) -> str:
        return build_user_data(
            self.context.data_dir / "templates" / "cloud-init",
            boot,
            self.settings.user,
            "Google",
            USER_DATA_BYTES,
            BOOTHOOKS,
        )

    def pin(self, server_id: str, host_key: str, next_host_key: str = "") -> None:
        instances.pin(self.clients, server_id, host_key, next_host_key)

    def stop(self, server_id: str) -> None:
        instances.stop(self.clients, server_id)

    def start(self, server_id: str) -> None:
        instances.start(self.clients, server_id)

    def reclaim(self, server_id: str, notice_s: float) -> bool:
        """Delete the instance, which shuts its system down, as after Google's own notice."""
        if notice_s:
            return False
        instances.require_instance(self.clients, server_id)
        instances.delete_instance(self.clients, server_id)
        return True

    def read_console(self, server_id: str) -> str:
        return instances.read_console(self.clients, server_id)

    def explain_end(self, server_id: str) -> str:
        return instances.explain_end(self.clients, server_id)

    def admit(self, server_id: str) -> str:
        instance = instances.require_instance(self.clients, server_id)
        record = labels.parse_record(instance)
        group = network.find_group(record) if record else None
        return network.admit(self.clients, self.settings, group, self._owner) if group else ""

    def compute_room(self, offer: Offer) -> QuotaRoom:
        return checks.compute_room(self.clients, offer)

    @property
    def can_keep_itself(self) -> bool:
        """A server has no service account, so it cannot change anything in the project."""
        return False

    def keep_disk(self, server_id: str, expires_at: float) -> list[Resource]:
        return disks.keep(self.clients, server_id, expires_at)

    def release_disk(self, server_id: str) -> None:
        disks.release(self.clients, server_id)

    def attach_kept_disk(self, resource: Resource, server_id: str) -> str:
        return disks.attach(self.clients, resource, server_id)

    def _read_quotas(self) -> QuotaTable | None:
        """Read the quotas; None without credentials or without the permission."""
        if not self.has_credentials:
            return None
        try:
            return read_quotas(self.clients)
        except LabError:
            # The request itself will say what is wrong.
            return None

    @property
    def _owner(self) -> str:
        """The owner whose firewall rule admits him: a keeper's differs from a laptop's."""
        return "@".join(filter(None, [self.context.owner, self.context.place]))

    @property
    def _cache_dir(self) -> Path | None:
        return self.context.cache_dir

    @functools.cached_property
    def _launcher(self) -> GcpLauncher:
        return GcpLauncher(self.clients, self.settings, self._owner)
