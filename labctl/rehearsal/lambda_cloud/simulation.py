"""A rehearsal: a simulated Lambda on this machine, as a context manager."""

from __future__ import annotations

from labctl.rehearsal.core.fleet import AfterPowerOff
from labctl.rehearsal.core.simulation import CloudRehearsal
from labctl.rehearsal.lambda_cloud.api import KEY, LambdaApi, LambdaRecord
from labctl.rehearsal.lambda_cloud.scenario import LambdaScenario


class LambdaRehearsal(CloudRehearsal[LambdaScenario, LambdaRecord]):
    """A rehearsed Lambda; see CloudRehearsal. `key` is the one that it accepts."""

    # Lambda documents that billing ends with the termination, and nothing about a power-off.
    after_power_off: AfterPowerOff = "running"
    key = KEY

    @property
    def environment(self) -> dict[str, str]:
        return {"LAMBDA_ENDPOINT_URL": self.url, "LAMBDA_API_KEY": self.key}

    def build_api(self) -> LambdaApi:
        self.api = LambdaApi(self)
        return self.api
