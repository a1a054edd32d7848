"""The settings of a rehearsal of Google Cloud."""

from __future__ import annotations

from labctl.model import Value
from labctl.rehearsal.core.scenario import CloudScenario, Seconds


class GcpQuota(Value, frozen=True):
    """A limit of the project: of one region, or of all regions together with `region` ""."""

    metric: str
    limit: float
    region: str = ""


class GcpScenario(CloudScenario, frozen=True):
    """All settings of a rehearsal of Google Cloud; docs/rehearsal.md explains each.

    A capacity's `region` is a zone here. `operation` is how long each operation takes. `quotas`
    replace limits, which are large otherwise. `run_limit` replaces the time after which a machine
    with maxRunDuration ends. `lacking` are the permissions that the caller does not have for
    projects.testIamPermissions. `address` is the caller's own, as labctl finds it.
    """

    regions: tuple[str, ...] = ("us-central1", "us-east1")
    project: str = "rehearsal-project"
    operation: Seconds = 0.0
    quotas: tuple[GcpQuota, ...] = ()
    run_limit: Seconds | None = None
    lacking: tuple[str, ...] = ()
    address: str = ""
