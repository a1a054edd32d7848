"""A simulated RunPod on this machine: `labctl rehearse runpod`, and the test bed of its provider.

`RunPodRehearsal(RunPodScenario(), building)` is a context manager; docs/runpod.md says what it
knows of RunPod. Its pods are containers on this machine, without an engine inside.

May import: courses and the layers below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from labctl.lazy import offer_names
from labctl.rehearsal.runpod.scenario import RunPodScenario

if TYPE_CHECKING:
    from labctl.rehearsal.runpod.simulation import RunPodRehearsal

__all__ = ["RunPodRehearsal", "RunPodScenario"]

__getattr__ = offer_names(__name__, {"RunPodRehearsal": "simulation"})
