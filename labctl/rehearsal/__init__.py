"""A simulated AWS on this machine: `labctl rehearse aws`, and the test bed of the aws provider.

`Rehearsal(scenario, building)` is a context manager; see docs/rehearsal.md. Modules that need the
extra `labctl[rehearse]` (moto) are imported only when a rehearsal is created.

May import: courses and the layers below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from labctl.rehearsal.scenario import Scenario

if TYPE_CHECKING:
    from labctl.rehearsal.images import Building
    from labctl.rehearsal.simulation import Rehearsal

__all__ = ["Building", "Rehearsal", "Scenario"]


def __getattr__(name: str) -> Any:
    if name == "Building":
        from labctl.rehearsal.images import Building

        return Building
    if name == "Rehearsal":
        from labctl.rehearsal.simulation import Rehearsal

        return Rehearsal
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
