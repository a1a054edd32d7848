"""A simulated Vast.ai on this machine: `labctl rehearse vast`, and the test bed of its provider.

`VastRehearsal(VastScenario(), building)` is a context manager; docs/vast.md says what it knows of
Vast.ai. It checks requests and replies against Vast.ai's official description, which is not part of
labctl: the scenario names its file.

May import: courses and the layers below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from labctl.lazy import offer_names
from labctl.rehearsal.vast.scenario import VastScenario

if TYPE_CHECKING:
    from labctl.rehearsal.vast.simulation import VastRehearsal

__all__ = ["VastRehearsal", "VastScenario"]

__getattr__ = offer_names(__name__, {"VastRehearsal": "simulation"})
