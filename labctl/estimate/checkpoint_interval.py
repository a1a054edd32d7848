"""How often to save a checkpoint on a server that may be reclaimed."""

from __future__ import annotations

import math

from labctl.estimate.compute import Workload
from labctl.estimate.constants import CHECKPOINT_BYTES_PER_S
from labctl.estimate.memory import checkpoint_bytes
from labctl.estimate.plan import ModelPlan
from labctl.model import Value


class CheckpointInterval(Value, frozen=True):
    """The seconds of training between two checkpoints, and the share of the time that they cost.

    `lost_share` counts writing, and the work that is repeated after a reclaim: half an interval on
    average. `is_assumed` is whether the time to write was computed and not given.
    """

    seconds: float
    checkpoint_s: float
    reclaim_every_s: float
    lost_share: float
    is_assumed: bool

    @property
    def is_useful(self) -> bool:
        """Whether training gets anywhere: the formula needs short writes and long lives."""
        return self.lost_share < 1


def compute_interval(plan: ModelPlan, amount: Workload) -> CheckpointInterval | None:
    """Compute the interval by Young's formula: sqrt(2 x checkpoint time x mean time to failure).

    Source: J. W. Young, "A first order approximation to the optimum checkpoint interval",
    Communications of the ACM 17(9), 1974, doi:10.1145/361147.361115. It holds if a checkpoint takes
    much less time than passes between reclaims. None if it is not known how often those happen.
    """
    written_s = amount.checkpoint_s or checkpoint_bytes(plan) / CHECKPOINT_BYTES_PER_S
    if not amount.reclaim_every_s or not written_s:
        return None
    seconds = math.sqrt(2 * written_s * amount.reclaim_every_s)
    return CheckpointInterval(
        seconds=seconds,
        checkpoint_s=written_s,
        reclaim_every_s=amount.reclaim_every_s,
        lost_share=written_s / seconds + seconds / (2 * amount.reclaim_every_s),
        is_assumed=not amount.checkpoint_s,
    )
