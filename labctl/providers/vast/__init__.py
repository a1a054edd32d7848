"""Servers from Vast.ai: virtual machines that many hosts rent out, at prices of their own.

label.py says how an instance records whose it is, launch.py how it is rented exactly once,
states.py what its statuses mean. Only destroying an instance ends its costs: one that is stopped,
or that was outbid, goes on to bill its disk. Vast.ai's containers are not used: runs are Docker
containers, and need an engine.
"""

from __future__ import annotations

import functools
from typing import ClassVar

from msgspec.structs import replace

from labctl.errors import BusyError, NotFoundError
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
from labctl.providers.http import find_key
from labctl.providers.vast import checks
from labctl.providers.vast.api import VAST, VastInstance
from labctl.providers.vast.catalog import PROVIDER, list_offers
from labctl.providers.vast.cloud import VastCloud
from labctl.providers.vast.first_boot import build_first_boot
from labctl.providers.vast.label import format_label, get_label
from labctl.providers.vast.launch import rent_once
from labctl.providers.vast.leftovers import list_leftovers, remove_leftover
from labctl.providers.vast.settings import VastSettings
from labctl.providers.vast.states import get_state, is_stopping, parse_server

__all__ = ["VastProvider", "VastSettings"]


class VastProvider:
    """A Provider that is also Stoppable, FirstBoot, SlowFirstBoot, EndsBilling, CreatesByList,
    Reclaimable and CredentialSource.
    """

    name: ClassVar[str] = PROVIDER
    settings_type: ClassVar[type[Value]] = VastSettings
    # docs.vast.ai, Billing: a stopped instance bills its disk, and an instance bills its GPU while
    # it is active. Whether a power-off inside a VM ends that is not documented.
    ends_billing: ClassVar[frozenset[str]] = frozenset()
    creates_by_list: ClassVar[bool] = True
    no_notice: ClassVar[str] = "Vast.ai gives no notices"
    # A host that has not rented out a VM before downloads its image, of 10 GB and more, first.
    running_deadline_s: ClassVar[float] = 1200.0
    # sshd starts before Vast.ai runs the script of the first boot.
    host_key_deadline_s: ClassVar[float] = 300.0

    def __init__(self, settings: VastSettings, context: ProviderContext) -> None:
        self.settings = settings
        self.settle_s: float = settings.settle_s
        self.context = context

    @functools.cached_property
    def _cloud(self) -> VastCloud:
        return VastCloud(self.context.cache_dir)

    def get_account(self) -> ProviderAccount:
        return ProviderAccount(id=self._cloud.get_account_id())

    @property
    def has_credentials(self) -> bool:
        return bool(find_key(VAST))

    def check_credentials(self) -> Check:
        return checks.check_credentials(self._cloud, "vast credentials")

    def check(self, need: Need | None = None) -> list[Check]:
        return checks.run_checks(self._cloud, need, self.offers)

    def offers(self, need: Need) -> list[Offer]:
        return list_offers(self._cloud, self.settings, need)

    def create(self, offer: Offer, request: CreateServerRequest) -> Server:
        instance = rent_once(self._cloud, self.settings, self.context.owner, offer, request)
        server = self._parse(instance)
        endpoint = replace(server.endpoint, identity=request.identity)
        # What was just rented may not show yet what it consists of.
        return replace(
            server, offer=server.offer if instance.num_gpus else offer, endpoint=endpoint
        )

    def find(self, server_id: str) -> Server | None:
        instance = self._cloud.find_instance(server_id)
        return self._parse(instance) if instance is not None else None

    def servers(self) -> list[Server]:
        parsed = [self._parse(instance) for instance in self._cloud.list_instances()]
        return [server for server in parsed if server.state != "terminated"]

    def terminate(self, server_id: str) -> None:
        self._cloud.destroy(server_id)

    def leftovers(self) -> list[Resource]:
        return list_leftovers(self._cloud)

    def remove(self, resource: Resource) -> None:
        remove_leftover(self._cloud, resource)

    def build_first_boot(self, boot: Boot) -> str:
        return build_first_boot(self.context.data_dir / "templates", boot)

    def pin(self, server_id: str, host_key: str, next_host_key: str = "") -> None:
        """Write the trusted host keys into the label."""
        label = get_label(self._require(server_id))
        pinned = replace(label, host_key=host_key, next_host_key=next_host_key)
        self._cloud.set_label(server_id, format_label(pinned))

    def stop(self, server_id: str) -> None:
        """Stop an instance: its GPU is free for others, its disk stays and bills."""
        self._require(server_id)
        self._cloud.set_state(server_id, "stopped")

    def start(self, server_id: str) -> None:
        """Start a stopped instance, which waits if its GPU is rented to somebody else now."""
        if is_stopping(self._require(server_id)):
            raise BusyError(
                f"the instance {server_id} is still stopping", hint="try again in a moment"
            )
        self._cloud.set_state(server_id, "running")

    def reclaim(self, server_id: str, notice_s: float) -> bool:
        if notice_s:
            return False
        self._require(server_id)
        self._cloud.destroy(server_id)
        return True

    def _parse(self, instance: VastInstance) -> Server:
        return parse_server(instance, get_label(instance), self._cloud.get_account_id())

    def _require(self, server_id: str) -> VastInstance:
        instance = self._cloud.find_instance(server_id)
        if instance is None or get_state(instance) == "terminated":
            raise NotFoundError(f"Vast.ai has no instance {server_id}", hint="labctl status")
        return instance
