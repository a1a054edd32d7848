"""A trial of a sweep while its run is on a server."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from labctl.lifecycle.sweeps.metric import StepSeries
from labctl.lifecycle.sweeps.trial_servers import TrialServer
from labctl.lifecycle.sweeps.trials import Placement, Trial


@dataclass
class ActiveTrial:
    """A trial that has a place, and what this process knows of it."""

    trial: Trial
    placement: Placement
    server: TrialServer
    series: StepSeries
    is_confirmed: bool = False
    curves_at_s: float = field(default_factory=time.monotonic)

    @property
    def number(self) -> int:
        return self.trial.number
