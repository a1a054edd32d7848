"""A simulated AWS on this machine: `labctl rehearse aws`, and the test bed of the aws provider.

`Rehearsal(scenario, building)` is a context manager; see docs/rehearsal.md. Modules that need the
extra `labctl[rehearse]` (moto) are imported only when a rehearsal is created.

May import: courses and the layers below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from labctl.lazy import offer_names
from labctl.rehearsal.aws.scenario import Scenario

if TYPE_CHECKING:
    from labctl.rehearsal.aws.simulation import Rehearsal

__all__ = ["Rehearsal", "Scenario"]

__getattr__ = offer_names(__name__, {"Rehearsal": "simulation"})
