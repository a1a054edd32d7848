"""Servers from Amazon EC2: the cheapest that fits, spot or on demand.

What exists stands in tags (tags.py); what may be asked for stands in a cache for a while
(catalog.py). A server's id is `<instance id>.<region>`, any other resource's `<id>.<region>`.
AWS's own library is imported where a call is made, and not for an answer from the cache.
"""

from __future__ import annotations

import functools
from typing import ClassVar

from labctl.config.directories import environment
from labctl.model import (
    Boot,
    Check,
    CreateRequest,
    GpuNeed,
    Need,
    Offer,
    ProviderAccount,
    Resource,
    Server,
    Value,
)
from labctl.providers import Room, Surroundings
from labctl.providers.aws import account, baking, deadline, disks, gate, instances, leftovers, tags
from labctl.providers.aws.checks import checks, room
from labctl.providers.aws.clients import Clients
from labctl.providers.aws.launch import Launcher
from labctl.providers.aws.offers import offers
from labctl.providers.aws.settings import AwsSettings
from labctl.providers.aws.userdata import user_data

__all__ = ["AwsProvider", "AwsSettings"]


class AwsProvider:
    """A Provider that is also Stoppable, FirstBoot, Gate, Deadline, EndsBilling, Keep,
    Reclaim, Quotas, Bake, and has a Console."""

    name: ClassVar[str] = "aws"
    no_notice: ClassVar[str] = "only AWS itself, or its Fault Injection Service, gives spot notices"
    settings_type: ClassVar[type[Value]] = AwsSettings
    # Instances are launched with InstanceInitiatedShutdownBehavior=terminate.
    ends_billing: ClassVar[frozenset[str]] = frozenset({"shutdown", "timer"})

    def __init__(self, settings: AwsSettings, surroundings: Surroundings) -> None:
        self.settings = settings
        self.settle_s: float = settings.settle_s
        self.surroundings = surroundings
        self.clients = Clients(settings.profile)

    def get_account(self) -> ProviderAccount:
        """Asked of AWS once for each set of credentials; it needs no permission."""
        environ = environment()
        region = account.home_region(self.settings.profile, environ)
        profile = account.profile_name(self.settings.profile, environ)
        return ProviderAccount(id=self.clients.account_id(region), profile=profile)

    def check(self, need: Need | None = None) -> list[Check]:
        """With a need: its quotas. Without: those of the smallest machine with a GPU."""
        wanted = need or Need(gpu=GpuNeed(kind="any", count=1))
        return checks(self.clients, self.settings, self._configured, wanted, self.offers)

    def offers(self, need: Need) -> list[Offer]:
        around = self.surroundings
        cached = around.cache_dir / "aws" if around.cache_dir else None
        mark = account.fingerprint(self.settings.profile, environment())
        return offers(self.clients, self.settings, need, self._configured, cached, mark)

    def create(self, offer: Offer, request: CreateRequest) -> Server:
        return self._launcher.create(offer, request)

    def find(self, server_id: str) -> Server | None:
        found = instances.one(self.clients, server_id)
        region = server_id.rpartition(".")[2]
        return tags.server_of(found, region, self.settings.user) if found else None

    def servers(self) -> list[Server]:
        return instances.every(self.clients, self._regions(), self.settings.user)

    def terminate(self, server_id: str) -> None:
        instances.terminate(self.clients, server_id)

    def leftovers(self) -> list[Resource]:
        return leftovers.leftovers(self.clients, self._regions(), lambda: self.get_account().id)

    def remove(self, resource: Resource) -> None:
        """BusyError while something still uses it, such as a machine that is just ending."""
        leftovers.remove(self.clients, resource)

    def first_boot(self, boot: Boot) -> str:
        templates = self.surroundings.data_dir / "templates" / "cloud-init"
        return user_data(templates, boot, self.settings.user)

    def pin(self, server_id: str, host_key: str, next_host_key: str = "") -> None:
        instances.pin(self.clients, server_id, host_key, next_host_key)

    def stop(self, server_id: str) -> None:
        instances.stop(self.clients, server_id)

    def start(self, server_id: str) -> None:
        instances.start(self.clients, server_id)

    def reclaim(self, server_id: str, notice_s: float) -> bool:
        """The system is told to shut down, as it is at the end of AWS's own notice."""
        if notice_s:
            return False
        instances.present(self.clients, server_id)
        instances.terminate(self.clients, server_id)
        return True

    def console(self, server_id: str) -> str:
        return instances.console(self.clients, server_id)

    def admit(self, server_id: str) -> str:
        return gate.admit(self.clients, self.settings, self._owner, server_id)

    def room(self, offer: Offer) -> Room:
        return room(self.clients, offer)

    def bake(self, server_id: str, name: str, tags: dict[str, str]) -> str:
        return baking.bake(self.clients, server_id, name, tags)

    def baked(self, image_id: str) -> str:
        return baking.baked(self.clients, image_id)

    @classmethod
    def booting(cls, settings: AwsSettings, image_id: str) -> AwsSettings:
        return baking.booting(settings, image_id)

    @property
    def deadline_lacks(self) -> str:
        return deadline.lacks(self.settings.scheduler_role)

    def set_deadline(self, server_id: str, at: float) -> None:
        deadline.set_deadline(self.clients, self.settings.scheduler_role, server_id, at)

    @property
    def keeps_itself(self) -> bool:
        return bool(self.settings.instance_profile)

    def keep_disk(self, server_id: str, expires_at: float) -> list[Resource]:
        return disks.keep(self.clients, server_id, expires_at)

    def release_disk(self, server_id: str) -> None:
        disks.release(self.clients, server_id)

    def attach_kept(self, resource: Resource, server_id: str) -> str:
        return disks.attach(self.clients, resource, server_id)

    @property
    def _owner(self) -> str:
        """By which rules of a group are told apart: a keeper's are not the laptop's."""
        return "@".join(filter(None, [self.surroundings.owner, self.surroundings.place]))

    @functools.cached_property
    def _launcher(self) -> Launcher:
        return Launcher(self.clients, self.settings, self._owner)

    @functools.cached_property
    def _configured(self) -> tuple[str, ...]:
        home = account.home_region(self.settings.profile, environment())
        return self.settings.regions or (home,)

    def _regions(self) -> tuple[str, ...]:
        """Where to look for what there is; offers come from the configured ones alone."""
        if not self.surroundings.everywhere:
            return tuple(dict.fromkeys((*self._configured, *self.surroundings.regions)))
        return tuple(instances.enabled_regions(self.clients, self._configured[0]))
