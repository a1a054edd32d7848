"""A simulated Google Compute Engine on this machine: `labctl rehearse gcp`.

`GcpRehearsal(scenario, building)` is a context manager; see docs/rehearsal.md and docs/gcp.md.
Requests and replies are checked against Google's own description of the API, if the package
google-api-python-client is there.

May import: courses and the layers below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from labctl.lazy import offer_names
from labctl.rehearsal.gcp.scenario import GcpScenario

if TYPE_CHECKING:
    from labctl.rehearsal.gcp.simulation import GcpRehearsal

__all__ = ["GcpRehearsal", "GcpScenario"]

__getattr__ = offer_names(__name__, {"GcpRehearsal": "simulation"})
