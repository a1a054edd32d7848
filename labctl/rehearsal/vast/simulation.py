"""A rehearsal: a simulated Vast.ai on this machine, as a context manager."""

from __future__ import annotations

from labctl.errors import NotFoundError
from labctl.rehearsal.core.fleet import AfterPowerOff
from labctl.rehearsal.core.simulation import CloudRehearsal
from labctl.rehearsal.vast.api import KEY, VastApi
from labctl.rehearsal.vast.instances import RehearsedVm
from labctl.rehearsal.vast.scenario import VastScenario


class VastRehearsal(CloudRehearsal[VastScenario, RehearsedVm]):
    """A rehearsed Vast.ai; see CloudRehearsal. `key` is the one that it accepts."""

    # Vast.ai does not document what becomes of a VM that powers itself off: here it still bills.
    after_power_off: AfterPowerOff = "running"
    key = KEY

    @property
    def environment(self) -> dict[str, str]:
        return {"VAST_URL": self.url, "VAST_API_KEY": self.key}

    def build_api(self) -> VastApi:
        self.api = VastApi(self)
        return self.api

    def reclaim(self, instance_id: str, notice_s: float = 120.0) -> None:
        """Outbid an interruptible instance after `notice_s`, without a notice.

        It stops, and its disk stays. NotFoundError if there is no such interruptible instance.
        """
        instance = self.find_instance(instance_id)
        if not instance.is_spot:
            raise NotFoundError(f"this rehearsal has no interruptible instance {instance_id!r}")
        self.clock.run_after(notice_s, lambda: self.fleet.stop(instance, "reclaim"))
