"""A simulated Azure on this machine: `labctl rehearse azure`.

`AzureRehearsal(scenario, building)` is a context manager; see docs/rehearsal.md and docs/azure.md.
Requests and replies are checked against the types of Microsoft's own SDK, where it is installed.

May import: courses and the layers below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from labctl.lazy import offer_names
from labctl.rehearsal.azure.scenario import AzureScenario

if TYPE_CHECKING:
    from labctl.rehearsal.azure.simulation import AzureRehearsal

__all__ = ["AzureRehearsal", "AzureScenario"]

__getattr__ = offer_names(__name__, {"AzureRehearsal": "simulation"})
