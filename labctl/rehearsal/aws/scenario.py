"""The settings of a rehearsed AWS.

Actions are AWS's own names, `RunInstances` or `scheduler:CreateSchedule`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from labctl.model import Value
from labctl.rehearsal.core.scenario import ALWAYS, BootMode, Loss, Seconds, Throttle

Market = Literal["*", "spot", "on-demand"]


class Delays(Value, frozen=True):
    """The delays of the cloud.

    `api`: before every response; `boot`: from RunInstances to the machine's start; `visible`: until
    describe calls show a new instance; `state`: by which describe calls lag; `terminate`: in the
    state shutting-down; `forget`: until a terminated instance is no longer listed.
    """

    api: Seconds = 0.0
    boot: Seconds = 0.0
    visible: Seconds = 0.0
    state: Seconds = 0.0
    terminate: Seconds = 0.0
    forget: Seconds = 3600.0


class Capacity(Value, frozen=True):
    """A capacity: `left` such machines are available; all others are unlimited."""

    type: str = "*"
    zone: str = "*"
    market: Market = "*"
    left: int = 0


class VcpuQuotas(Value, frozen=True):
    """The account's limits in vCPUs, each for on-demand and for spot machines."""

    standard: int = 512
    g: int = 512
    p: int = 512
    spot_standard: int = 512
    spot_g: int = 512
    spot_p: int = 512
    spot_p5: int = 512


class SpotReclaim(Value, frozen=True):
    """A reclaim of spot instances, `after` their start, with a `notice` before it (0s: none).

    A rebalance recommendation comes `rebalance` before the notice (0s: none). At most `count`
    machines are reclaimed. The type and zone are patterns.
    """

    after: Seconds
    notice: Seconds = 120.0
    rebalance: Seconds = 0.0
    type: str = "*"
    zone: str = "*"
    count: int = ALWAYS


class Spot(Value, frozen=True):
    """The spot market: `discount` off the on-demand price on average, `swing` around it.

    `prices` are fixed prices by `type` or `type/zone`, `scores` are placement scores by zone.
    """

    discount: float = 0.6
    swing: float = 0.15
    prices: dict[str, float] = msgspec.field(default_factory=dict)
    scores: dict[str, int] = msgspec.field(default_factory=dict)
    reclaims: tuple[SpotReclaim, ...] = ()


class Scenario(Value, frozen=True):
    """All settings of a rehearsal; docs/rehearsal.md explains each.

    `image` is the base of machines instead of the lab server's image; `types` are the instance
    types offered (() for all); `images` are further machine images by their SSM parameter.
    """

    regions: tuple[str, ...] = ("us-east-1", "us-west-2")
    seed: int = 1
    boot: BootMode = "cloud-init"
    image: str = ""
    types: tuple[str, ...] = ()
    delays: Delays = Delays()
    capacity: tuple[Capacity, ...] = ()
    quotas: VcpuQuotas = VcpuQuotas()
    throttle: tuple[Throttle, ...] = ()
    denied: tuple[str, ...] = ()
    expired: bool = False
    lost: tuple[Loss, ...] = ()
    dropped: tuple[Loss, ...] = ()
    spot: Spot = Spot()
    on_demand: dict[str, float] = msgspec.field(default_factory=dict)
    images: tuple[str, ...] = ()
    address: str = ""

    def __post_init__(self) -> None:
        if not self.regions:
            raise ValueError("at least one region is required")
