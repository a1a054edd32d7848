"""A rehearsal: a simulated RunPod on this machine, as a context manager."""

from __future__ import annotations

import msgspec

from labctl.lazy import lazy_imports
from labctl.providers.local import engine
from labctl.rehearsal.core.fleet import AfterPowerOff
from labctl.rehearsal.core.machines import Machines, sweep
from labctl.rehearsal.core.simulation import CloudRehearsal
from labctl.rehearsal.runpod.api import KEY, RunPodApi
from labctl.rehearsal.runpod.containers import PodMachines, ensure_image
from labctl.rehearsal.runpod.pods import RehearsedPod
from labctl.rehearsal.runpod.scenario import RunPodScenario

with lazy_imports(__name__):
    import docker

# The public port of pods that are records only; nobody listens there.
NO_PORT = 9


class RunPodRehearsal(CloudRehearsal[RunPodScenario, RehearsedPod]):
    """A rehearsed RunPod; see CloudRehearsal. `key` is the one that it accepts."""

    # RunPod shows a container that has exited by itself as EXITED, like one that was stopped.
    after_power_off: AfterPowerOff = "stopped"
    key = KEY

    @property
    def environment(self) -> dict[str, str]:
        return {"RUNPOD_ENDPOINT_URL": self.url, "RUNPOD_API_KEY": self.key}

    def build_api(self) -> RunPodApi:
        self.api = RunPodApi(self)
        return self.api

    def find_port(self, pod_id: str) -> int:
        """Return the public port that leads to a pod's port 22; 0 if it has none now."""
        if isinstance(self._machines, PodMachines):
            return self._machines.ports.get(pod_id, 0)
        return NO_PORT

    def _create_machines(self) -> Machines:
        with engine.connect() as client:
            sweep(client)
            building = msgspec.structs.replace(self._building, stands_on=self.scenario.image)
            image = ensure_image(client, building)
        client = docker.from_env(timeout=engine.TIMEOUT_S, max_pool_size=32)
        return PodMachines(client, image, self._port)
