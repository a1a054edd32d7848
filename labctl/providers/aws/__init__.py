"""Servers from Amazon EC2: the cheapest that fits, spot or on demand.

Tags record what exists (tags.py); types and prices are cached for a while (catalog.py). A server's
id is `<instance id>.<region>`, any other resource's `<id>.<region>`. boto3 is imported where a
call is made, and not for a result from the cache.
"""

from __future__ import annotations

import functools
from typing import ClassVar

from labctl.config.directories import copy_environment
from labctl.errors import assign_subject
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
from labctl.providers.aws import (
    account,
    baking,
    deadline,
    disks,
    firewall,
    instances,
    leftovers,
    placement,
    tags,
)
from labctl.providers.aws.checks import check_credentials, compute_room, run_checks
from labctl.providers.aws.clients import Clients
from labctl.providers.aws.errors import POLICY_PAGE
from labctl.providers.aws.launch import Launcher
from labctl.providers.aws.offers import offers
from labctl.providers.aws.public_prices import list_priced_offers
from labctl.providers.aws.settings import AwsSettings
from labctl.providers.user_data import build_user_data

__all__ = ["AwsProvider", "AwsSettings"]

# AWS's limit on user data, counted before base64.
USER_DATA_BYTES = 16 * 1024


class AwsProvider:
    """A Provider that is also Stoppable, FirstBoot, Firewall, Deadline, EndsBilling, Keep,
    Reclaimable, QuotaSource, Bake, ConnectsGangs, ConsoleSource, CredentialSource, ClockSource,
    CatalogOffers and OpensBuckets.
    """

    name: ClassVar[str] = "aws"
    no_notice: ClassVar[str] = "only AWS itself, or its Fault Injection Service, gives spot notices"
    settings_type: ClassVar[type[Value]] = AwsSettings
    # Instances are launched with InstanceInitiatedShutdownBehavior=terminate.
    ends_billing: ClassVar[frozenset[str]] = frozenset({"shutdown", "timer"})

    def __init__(self, settings: AwsSettings, context: ProviderContext) -> None:
        self.settings = settings
        self.settle_s: float = settings.settle_s
        self.context = context
        self.clients = Clients(settings.profile)

    def get_account(self) -> ProviderAccount:
        """Return the account: one call of AWS per set of credentials, which needs no permission."""
        environ = copy_environment()
        region = account.resolve_home_region(self.settings.profile, environ)
        profile = account.resolve_profile_name(self.settings.profile, environ)
        return ProviderAccount(id=self.clients.get_account_id(region), profile=profile)

    def check(self, need: Need | None = None) -> list[Check]:
        """Check the quotas of the need, or without one those of the smallest GPU machine."""
        need = need or Need(gpu=GpuNeed(kind="any", count=1))
        return run_checks(self.clients, self.settings, self._configured, need, self._list_offers)

    @property
    def has_credentials(self) -> bool:
        return account.has_credentials(self.settings.profile, copy_environment())

    def check_credentials(self) -> Check:
        region = account.resolve_home_region(self.settings.profile, copy_environment())
        return check_credentials(self.clients, region, "aws credentials")

    @property
    def clock_url(self) -> str:
        return self.settings.address_from.replace("https:", "http:", 1)

    @property
    def s3_profile(self) -> str:
        return self.settings.profile

    @property
    def missing_bucket_setup(self) -> str:
        if self.settings.instance_profile:
            return ""
        return f"server.aws.instance_profile is not set (see {POLICY_PAGE})"

    def _list_offers(self, need: Need) -> list[Offer]:
        with assign_subject(self.context.subject):
            return self.offers(need)

    def offers(self, need: Need) -> list[Offer]:
        cache_dir = self.context.cache_dir
        cache = cache_dir / "aws" if cache_dir else None
        fingerprint = account.fingerprint(self.settings.profile, copy_environment())
        return offers(self.clients, self.settings, need, self._configured, cache, fingerprint)

    def list_catalog_offers(self, need: Need) -> list[Offer]:
        return list_priced_offers(self.settings, self._configured, need, self.context.cache_dir)

    def create(self, offer: Offer, request: CreateServerRequest) -> Server:
        return self._launcher.create(offer, request)

    def describe_gang(self, offer: Offer) -> str:
        return placement.describe_gang(offer)

    def find(self, server_id: str) -> Server | None:
        instance = instances.find_instance(self.clients, server_id)
        region = server_id.rpartition(".")[2]
        return tags.parse_server(instance, region, self.settings.user) if instance else None

    def servers(self) -> list[Server]:
        return instances.list_servers(self.clients, self._list_regions(), self.settings.user)

    def terminate(self, server_id: str) -> None:
        instances.terminate(self.clients, server_id)

    def leftovers(self) -> list[Resource]:
        regions = self._list_regions()
        return leftovers.leftovers(self.clients, regions, lambda: self.get_account().id)

    def remove(self, resource: Resource) -> None:
        """Remove a resource; BusyError while something uses it, such as an ending machine."""
        leftovers.remove(self.clients, resource)

    def build_first_boot(self, boot: Boot) -> str:
        templates = self.context.data_dir / "templates" / "cloud-init"
        return build_user_data(templates, boot, self.settings.user, "AWS", USER_DATA_BYTES)

    def pin(self, server_id: str, host_key: str, next_host_key: str = "") -> None:
        instances.pin(self.clients, server_id, host_key, next_host_key)

    def stop(self, server_id: str) -> None:
        instances.stop(self.clients, server_id)

    def start(self, server_id: str) -> None:
        instances.start(self.clients, server_id)

    def reclaim(self, server_id: str, notice_s: float) -> bool:
        """Terminate the instance, which shuts its system down, as after AWS's own notice."""
        if notice_s:
            return False
        instances.require_instance(self.clients, server_id)
        instances.terminate(self.clients, server_id)
        return True

    def read_console(self, server_id: str) -> str:
        return instances.read_console(self.clients, server_id)

    def admit(self, server_id: str) -> str:
        return firewall.admit(self.clients, self.settings, self._owner, server_id)

    def compute_room(self, offer: Offer) -> QuotaRoom:
        return compute_room(self.clients, offer)

    def bake(self, server_id: str, name: str, tags: dict[str, str]) -> str:
        return baking.bake(self.clients, server_id, name, tags)

    def get_image_state(self, image_id: str) -> str:
        return baking.get_image_state(self.clients, image_id)

    @classmethod
    def with_image(cls, settings: AwsSettings, image_id: str) -> AwsSettings:
        return baking.with_image(settings, image_id)

    def estimate_image_usd_per_month(self) -> float:
        return baking.estimate_usd_per_month(self.settings)

    @property
    def missing_deadline_setup(self) -> str:
        return deadline.describe_missing_setup(self.settings.scheduler_role)

    def set_deadline(self, server_id: str, at: float) -> None:
        deadline.set_deadline(self.clients, self.settings.scheduler_role, server_id, at)

    @property
    def can_keep_itself(self) -> bool:
        return bool(self.settings.instance_profile)

    def keep_disk(self, server_id: str, expires_at: float) -> list[Resource]:
        return disks.keep(self.clients, server_id, expires_at)

    def release_disk(self, server_id: str) -> None:
        disks.release(self.clients, server_id)

    def attach_kept_disk(self, resource: Resource, server_id: str) -> str:
        return disks.attach(self.clients, resource, server_id)

    @property
    def _owner(self) -> str:
        """The owner that a security group's rules name: a keeper's differs from a laptop's."""
        return "@".join(filter(None, [self.context.owner, self.context.place]))

    @functools.cached_property
    def _launcher(self) -> Launcher:
        return Launcher(self.clients, self.settings, self._owner)

    @functools.cached_property
    def _configured(self) -> tuple[str, ...]:
        home = account.resolve_home_region(self.settings.profile, copy_environment())
        return self.settings.regions or (home,)

    def _list_regions(self) -> tuple[str, ...]:
        """List the regions to search for resources; offers come only from the configured ones."""
        if not self.context.everywhere:
            return tuple(dict.fromkeys((*self._configured, *self.context.regions)))
        return tuple(instances.list_enabled_regions(self.clients, self._configured[0]))
