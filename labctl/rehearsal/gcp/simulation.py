"""A rehearsal: a simulated Google Cloud on this machine, as a context manager."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from tempfile import mkdtemp
from wsgiref.types import WSGIApplication

from labctl.rehearsal.core.fleet import AfterPowerOff
from labctl.rehearsal.core.listener import LOOPBACK
from labctl.rehearsal.core.simulation import CloudRehearsal
from labctl.rehearsal.gcp.api import GcpApi
from labctl.rehearsal.gcp.description import DiscoveryValidator, find_document
from labctl.rehearsal.gcp.identity import ServiceAccount
from labctl.rehearsal.gcp.metadata import GceMetadataApp
from labctl.rehearsal.gcp.project import Project
from labctl.rehearsal.gcp.resources import GceMachine
from labctl.rehearsal.gcp.scenario import GcpScenario

# What Google gives a spot machine: cloud.google.com/compute/docs/instances/preemptible.
NOTICE_S = 30.0


class GcpRehearsal(CloudRehearsal[GcpScenario, GceMachine]):
    """`with GcpRehearsal(GcpScenario(boot="none")) as rehearsal:`; see CloudRehearsal."""

    # A machine that powers itself off is TERMINATED, and its disk stays.
    after_power_off: AfterPowerOff = "stopped"
    conflicting_variables = ("CLOUDSDK_CORE_PROJECT",)

    @property
    def environment(self) -> dict[str, str]:
        scenario = self.scenario
        return {
            "GOOGLE_APPLICATION_CREDENTIALS": str(self._identity.path),
            "GOOGLE_CLOUD_PROJECT": scenario.project,
            "CLOUDSDK_COMPUTE_REGION": scenario.regions[0],
            "LABCTL_SERVER_GCP_ENDPOINT_URL": self.url,
            "LABCTL_SERVER_GCP_ADDRESS_FROM": f"{self.url}/checkip",
            "LABCTL_SERVER_GCP_PRICES_FROM": f"{self.url}/prices",
        }

    @property
    def has_description(self) -> bool:
        """Whether requests and replies are checked against Google's description."""
        return find_document() is not None

    @property
    def caller(self) -> str:
        """The address from which machines see a caller on this machine."""
        if self.scenario.address:
            return self.scenario.address
        return self._machines.gateway if self._machines is not None else LOOPBACK

    def build_api(self) -> GcpApi:
        self._directory = Path(mkdtemp(prefix="labctl-rehearsal-gcp-"))
        self._identity = ServiceAccount(self._directory, self.scenario.project, self.url)
        self.project = Project(self.fleet, self.clock, lambda: self.scenario)
        document = find_document()
        if document is None:
            self._notify("requests are not checked: google-api-python-client is not installed")
        api = GcpApi(self.project, self._identity, lambda: self.caller)
        if document is not None:
            names = {f"compute.{operation.name}" for operation in api.list_operations()}
            api.validator = DiscoveryValidator.load(document, names)
        return api

    def build_metadata(self, instance: GceMachine) -> WSGIApplication:
        def look_up(path: str) -> str | None:
            at = instance.notice_at
            is_preempted = at is not None and time.time() >= at - NOTICE_S
            return {
                "instance/preempted": "TRUE" if is_preempted else "FALSE",
                "instance/scheduling/preemptible": "TRUE" if instance.is_spot else "FALSE",
                "instance/name": instance.id,
                "instance/zone": f"projects/1/zones/{instance.zone}",
            }.get(path)

        return GceMetadataApp(look_up)

    def reclaim(self, instance_id: str, notice_s: float = NOTICE_S) -> None:
        """Preempt a machine, after a notice unless `notice_s` is 0."""
        super().reclaim(instance_id, notice_s)

    def close(self) -> None:
        super().close()
        if hasattr(self, "_directory"):
            shutil.rmtree(self._directory, ignore_errors=True)
