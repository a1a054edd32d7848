"""Servers from RunPod: pods, which are containers with GPUs, by the hour.

tags.py says how a pod records whose it is, launch.py how it is created exactly once. No Docker
Engine runs in a pod, so its runs are plain processes. RunPod has no timer and, in version 2 of its
API, no spot market. Terminating a pod ends its costs; a stopped one goes on to bill its disk.
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
from labctl.providers.runpod import checks
from labctl.providers.runpod.api import RUNPOD, Pod
from labctl.providers.runpod.catalog import list_offers, list_priced_offers
from labctl.providers.runpod.cloud import RunPodCloud
from labctl.providers.runpod.first_boot import build_first_boot
from labctl.providers.runpod.launch import create_once
from labctl.providers.runpod.leftovers import list_leftovers, remove_leftover
from labctl.providers.runpod.settings import RunPodSettings
from labctl.providers.runpod.tags import is_live, make_pinned_name, parse_server, read_record

__all__ = ["RunPodProvider", "RunPodSettings"]


class RunPodProvider:
    """A Provider that is also Stoppable, FirstBoot, EndsBilling, CreatesByList, Reclaimable,
    CredentialSource, CatalogOffers and RunsWithoutEngine.
    """

    name: ClassVar[str] = "runpod"
    settings_type: ClassVar[type[Value]] = RunPodSettings
    # A pod bills until it is stopped or terminated through the API, whatever runs in it. The key
    # that RunPod gives a pod may stop it, but that is tried at best: nothing may rely on it.
    ends_billing: ClassVar[frozenset[str]] = frozenset()
    creates_by_list: ClassVar[bool] = True
    no_notice: ClassVar[str] = "RunPod gives no notices"
    no_engine: ClassVar[str] = "a RunPod pod is a container, without a Docker Engine inside"

    def __init__(self, settings: RunPodSettings, context: ProviderContext) -> None:
        self.settings = settings
        self.settle_s: float = settings.settle_s
        self.context = context

    @functools.cached_property
    def _cloud(self) -> RunPodCloud:
        return RunPodCloud(self.context.cache_dir)

    def get_account(self) -> ProviderAccount:
        return ProviderAccount(id=self._cloud.get_account_id())

    @property
    def has_credentials(self) -> bool:
        return bool(find_key(RUNPOD))

    def check_credentials(self) -> Check:
        return checks.check_credentials(self._cloud, "runpod credentials")

    def check(self, need: Need | None = None) -> list[Check]:
        return checks.run_checks(self._cloud, need, self.offers)

    def offers(self, need: Need) -> list[Offer]:
        return list_offers(self._cloud, self.settings, need)

    def list_catalog_offers(self, need: Need) -> list[Offer]:
        return list_priced_offers(self.settings, need, self.context.cache_dir)

    def create(self, offer: Offer, request: CreateServerRequest) -> Server:
        pod = create_once(self._cloud, self.settings, self.context.owner, offer, request)
        server = self._parse(pod)
        assert server is not None, "RunPod returns the environment of a pod"
        return replace(server, endpoint=replace(server.endpoint, identity=request.identity))

    def find(self, server_id: str) -> Server | None:
        pod = self._cloud.find_pod(server_id)
        return self._parse(pod) if pod is not None else None

    def servers(self) -> list[Server]:
        parsed = [self._parse(pod) for pod in self._cloud.list_pods() if is_live(pod)]
        return [server for server in parsed if server is not None]

    def terminate(self, server_id: str) -> None:
        self._cloud.delete_pod(server_id)

    def leftovers(self) -> list[Resource]:
        return list_leftovers(self._cloud)

    def remove(self, resource: Resource) -> None:
        remove_leftover(self._cloud, resource)

    def build_first_boot(self, boot: Boot) -> str:
        return build_first_boot(self.context.data_dir / "templates", boot)

    def pin(self, server_id: str, host_key: str, next_host_key: str = "") -> None:
        """Write the trusted host keys into the name: new variables may restart the pod."""
        server = self._require(server_id)
        name = make_pinned_name(server.lab, host_key, next_host_key)
        self._cloud.rename_pod(server_id, name)

    def stop(self, server_id: str) -> None:
        """Stop a pod; its container's own disk is lost, the volume stays."""
        try:
            self._cloud.act(server_id, "stop")
        except BusyError:
            if self._require(server_id).state != "stopped":
                raise

    def start(self, server_id: str) -> None:
        """Start a stopped pod, which gets its GPUs again only if they are still free."""
        try:
            self._cloud.act(server_id, "start")
        except BusyError:
            if self._require(server_id).state not in ("starting", "running"):
                raise

    def reclaim(self, server_id: str, notice_s: float) -> bool:
        if notice_s:
            return False
        self._require(server_id)
        self._cloud.delete_pod(server_id)
        return True

    def _parse(self, pod: Pod) -> Server | None:
        """Return a pod as a Server; None if labctl did not create it."""
        record = read_record(pod)
        return parse_server(pod, record, self._cloud.get_account_id()) if record else None

    def _require(self, server_id: str) -> Server:
        server = self.find(server_id)
        if server is None or server.state in ("ending", "terminated"):
            raise NotFoundError(f"RunPod has no pod {server_id}", hint="labctl status")
        return server
