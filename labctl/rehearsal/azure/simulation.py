"""A rehearsal: a simulated Azure on this machine, as a context manager."""

from __future__ import annotations

import time
from wsgiref.types import WSGIApplication

from labctl.rehearsal.azure.account import AzureAccount
from labctl.rehearsal.azure.api import AzureApi
from labctl.rehearsal.azure.description import SdkValidator, has_sdk
from labctl.rehearsal.azure.metadata import AzureMetadataApp
from labctl.rehearsal.azure.resources import AzureMachine
from labctl.rehearsal.azure.scenario import AzureScenario
from labctl.rehearsal.core.fleet import AfterPowerOff
from labctl.rehearsal.core.listener import LOOPBACK
from labctl.rehearsal.core.simulation import CloudRehearsal

# The least that Azure gives a spot machine (learn.microsoft.com/azure/virtual-machines/linux/
# scheduled-events, Event scheduling).
NOTICE_S = 30.0


class AzureRehearsal(CloudRehearsal[AzureScenario, AzureMachine]):
    """`with AzureRehearsal(AzureScenario(boot="none")) as rehearsal:`; see CloudRehearsal."""

    # A machine that powers itself off is `stopped`, and billed until it is deallocated.
    after_power_off: AfterPowerOff = "stopped"
    conflicting_variables = ("AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET", "AZURE_TENANT_ID")

    @property
    def environment(self) -> dict[str, str]:
        return {
            # What azure-identity reads of a managed identity, the one kind without TLS.
            "IDENTITY_ENDPOINT": f"{self.url}/token",
            "IDENTITY_HEADER": self.api.secret,
            "AZURE_SUBSCRIPTION_ID": self.scenario.subscription,
            "LABCTL_SERVER_AZURE_REGIONS": ",".join(self.scenario.regions),
            "LABCTL_SERVER_AZURE_ENDPOINT_URL": self.url,
            "LABCTL_SERVER_AZURE_ADDRESS_FROM": f"{self.url}/checkip",
            "LABCTL_SERVER_AZURE_PRICES_FROM": f"{self.url}/prices",
        }

    @property
    def has_description(self) -> bool:
        """Whether requests and replies are checked against the types of Microsoft's SDK."""
        return has_sdk()

    @property
    def caller(self) -> str:
        """The address from which machines see a caller on this machine."""
        if self.scenario.address:
            return self.scenario.address
        return self._machines.gateway if self._machines is not None else LOOPBACK

    def build_api(self) -> AzureApi:
        self.account = AzureAccount(self.fleet, self.clock, lambda: self.scenario)
        self.api = AzureApi(self.account, self.url, lambda: self.caller)
        if self.has_description:
            self.api.validator = SdkValidator()
        else:
            self._notify("requests are not checked: azure-mgmt-compute is not installed")
        return self.api

    def build_metadata(self, instance: AzureMachine) -> WSGIApplication:
        def find_eviction() -> float | None:
            at = instance.notice_at
            return at if at is not None and time.time() >= at - NOTICE_S else None

        return AzureMetadataApp(instance.id, find_eviction)

    def reclaim(self, instance_id: str, notice_s: float = NOTICE_S) -> None:
        """Evict a machine, after a notice unless `notice_s` is 0."""
        super().reclaim(instance_id, notice_s)
