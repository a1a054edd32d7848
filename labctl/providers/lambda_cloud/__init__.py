"""Servers from Lambda: one GPU instance by the hour, in any region that has capacity.

tags.py says how an instance records whose it is, launch.py how it is created exactly once. Lambda
has no timer, no spot market and no stopped state; only terminating an instance ends its costs.
"""

from __future__ import annotations

import functools
import time
from typing import ClassVar

from msgspec.structs import replace

from labctl.errors import NotFoundError
from labctl.model import (
    Boot,
    Check,
    CreateServerRequest,
    Need,
    Offer,
    ProviderAccount,
    Resource,
    Server,
    Value,
)
from labctl.providers import ProviderContext
from labctl.providers.catalog_offers import list_catalog_offers
from labctl.providers.http import find_key
from labctl.providers.lambda_cloud import checks
from labctl.providers.lambda_cloud.api import LAMBDA, LambdaInstance
from labctl.providers.lambda_cloud.catalog import CATALOG
from labctl.providers.lambda_cloud.cloud import LambdaCloud
from labctl.providers.lambda_cloud.launch import launch_once
from labctl.providers.lambda_cloud.leftovers import list_leftovers, remove_leftover
from labctl.providers.lambda_cloud.settings import LambdaSettings
from labctl.providers.lambda_cloud.tags import is_ours, make_name, parse_offer, parse_server
from labctl.providers.offer_filter import select_offers
from labctl.providers.user_data import build_user_data

__all__ = ["LambdaProvider", "LambdaSettings"]

USER_DATA_BYTES = 1_000_000


class LambdaProvider:
    """A Provider that is also FirstBoot, EndsBilling, CreatesByList, Reclaimable, CatalogOffers and
    CredentialSource."""

    name: ClassVar[str] = "lambda"
    settings_type: ClassVar[type[Value]] = LambdaSettings
    # Lambda bills from launch to termination (docs.lambda.ai, Billing), whatever the system does.
    ends_billing: ClassVar[frozenset[str]] = frozenset()
    creates_by_list: ClassVar[bool] = True
    no_notice: ClassVar[str] = "Lambda has no spot instances, and gives no notices"

    def __init__(self, settings: LambdaSettings, context: ProviderContext) -> None:
        self.settings = settings
        self.settle_s: float = settings.settle_s
        self.context = context

    @functools.cached_property
    def _cloud(self) -> LambdaCloud:
        return LambdaCloud(self.context.cache_dir)

    def get_account(self) -> ProviderAccount:
        return ProviderAccount(id=self._cloud.get_account_id())

    @property
    def has_credentials(self) -> bool:
        return bool(find_key(LAMBDA))

    def check_credentials(self) -> Check:
        return checks.check_credentials(self._cloud, "lambda credentials")

    def check(self, need: Need | None = None) -> list[Check]:
        return checks.run_checks(self._cloud, need, self.offers)

    def offers(self, need: Need) -> list[Offer]:
        """List the types that fit, once for each region that has capacity now."""
        now = time.time()
        listed: list[Offer] = []
        for item in self._cloud.list_types():
            regions = [region.name for region in item.regions_with_capacity_available]
            usable = [name for name in regions if self._is_usable(name)]
            kind = item.instance_type
            listed += [parse_offer(kind, name, now) for name in usable or [""]]
        return select_offers("Lambda", need, listed, lambda offer: offer.region != "")

    def list_catalog_offers(self, need: Need) -> list[Offer]:
        cache_dir = self.context.cache_dir
        return list_catalog_offers(
            CATALOG, need, cache_dir, lambda offer: self._is_usable(offer.region)
        )

    def _is_usable(self, region: str) -> bool:
        return not self.settings.regions or region in self.settings.regions

    def create(self, offer: Offer, request: CreateServerRequest) -> Server:
        instance = launch_once(self._cloud, self.settings, self.context.owner, offer, request)
        server = parse_server(instance, self.settings.user, self._cloud.get_account_id())
        # What was just launched shows neither its price nor its GPU yet.
        endpoint = replace(server.endpoint, identity=request.identity)
        return replace(server, offer=offer, endpoint=endpoint)

    def find(self, server_id: str) -> Server | None:
        instance = self._cloud.find_instance(server_id)
        return self._parse(instance) if instance is not None and is_ours(instance) else None

    def servers(self) -> list[Server]:
        listed = [self._parse(instance) for instance in self._cloud.list_instances()]
        return [server for server in listed if server.state != "terminated"]

    def terminate(self, server_id: str) -> None:
        self._cloud.terminate(server_id)

    def leftovers(self) -> list[Resource]:
        return list_leftovers(self._cloud)

    def remove(self, resource: Resource) -> None:
        remove_leftover(self._cloud, resource)

    def build_first_boot(self, boot: Boot) -> str:
        templates = self.context.data_dir / "templates" / "cloud-init"
        return build_user_data(templates, boot, self.settings.user, "Lambda", USER_DATA_BYTES)

    def pin(self, server_id: str, host_key: str, next_host_key: str = "") -> None:
        """Write the trusted host keys into the name: the tags cannot be changed."""
        self._cloud.rename(
            server_id, make_name(self._require(server_id).lab, host_key, next_host_key)
        )

    def reclaim(self, server_id: str, notice_s: float) -> bool:
        if notice_s:
            return False
        self._require(server_id)
        self._cloud.terminate(server_id)
        return True

    def _parse(self, instance: LambdaInstance) -> Server:
        return parse_server(instance, self.settings.user, self._cloud.get_account_id())

    def _require(self, server_id: str) -> Server:
        server = self.find(server_id)
        if server is None or server.state in ("ending", "terminated"):
            raise NotFoundError(f"Lambda has no instance {server_id}", hint="labctl status")
        return server
