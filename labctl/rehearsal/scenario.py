"""The settings of a rehearsal: a scenario file, switches that override it, and changes at run time.

By default, everything succeeds at once. Actions are AWS's own names, `RunInstances` or
`scheduler:CreateSchedule`, with `*` and `?` as in a shell.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from labctl.config.document import Node, parse, quote, read_bytes
from labctl.config.reader import Parsed, read
from labctl.errors import ConfigError, Problem, UsageError
from labctl.model import Value

Boot = Literal["cloud-init", "sshd", "none"]
Market = Literal["*", "spot", "on-demand"]

ALWAYS = 1_000_000_000
_SECONDS = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)(ms|s|m|h|d)?")
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, None: 1.0}


def parse_seconds(text: str) -> float:
    """Parse `0s`, `1.5s`, `250ms`, `2m` or `1h` into seconds."""
    match = _SECONDS.fullmatch(text)
    if match is None:
        raise ValueError(f"{quote(text)} is not a time: write 250ms, 1.5s, 2m or 1h")
    return float(match[1]) * _UNITS_S[match[2]]


Seconds = Annotated[float, Parsed(parse_seconds)]


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


class Throttle(Value, frozen=True):
    """A token bucket: `burst` calls at once, then `rate` a second; others are throttled."""

    action: str = "*"
    rate: float = 1.0
    burst: int = 1


class Loss(Value, frozen=True):
    """A loss: after `skip` calls, the next `count` calls lose their response, or are dropped.

    The connection stays open for `hold`, or until the caller is gone, and is then closed.
    """

    action: str = "*"
    count: int = 1
    skip: int = 0
    hold: Seconds = 0.0


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
    boot: Boot = "cloud-init"
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


def load_scenario(path: Path | None, switches: Iterable[str] = ()) -> Scenario:
    """Load the scenario of a file (None is an empty one), with `key=value` overrides.

    Keys are dotted (`delays.boot=2s`); values are as in the file, including lists and mappings.
    ConfigError has every problem. UsageError for an override that is not KEY=VALUE.
    """
    problems: list[Problem] = []
    tree = Node(value={})
    if path is not None:
        data = read_bytes(path, "scenario", hint="labctl rehearse aws --help")
        tree = parse(data, path.name, problems) or tree
    return _override(tree, switches, problems)


def override_scenario(scenario: Scenario, switches: Iterable[str]) -> Scenario:
    """Return the scenario with `key=value` overrides."""
    return _override(_build_node(msgspec.to_builtins(scenario)), switches, [])


def _override(tree: Node, switches: Iterable[str], problems: list[Problem]) -> Scenario:
    for switch in switches:
        key, equals, text = switch.partition("=")
        if not equals or not key:
            raise UsageError(f"{quote(switch)} is not KEY=VALUE", hint="--set delays.boot=2s")
        origin = f"--set {key}"
        value = parse(text.encode(), origin, problems) or Node(value=None, origin=origin)
        tree = _set_key(tree, key.split("."), value)
    scenario = read(tree, Scenario, "", problems)
    if problems:
        raise ConfigError(
            "the scenario is invalid", tuple(problems), hint="labctl rehearse aws --help"
        )
    assert isinstance(scenario, Scenario)
    return scenario


def _build_node(value: Any) -> Node:
    """Turn msgspec's builtins of a scenario into the nodes of a document."""
    if isinstance(value, dict):
        return Node(value={str(key): _build_node(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return Node(value=[_build_node(item) for item in value])
    if isinstance(value, bool):
        return Node(value="true" if value else "false")
    return Node(value=str(value))


def _set_key(tree: Node, keys: list[str], value: Node) -> Node:
    """Return `tree` with `value` at the dotted key."""
    entries = dict(tree.value) if isinstance(tree.value, dict) else {}
    first, *rest = keys
    inner = entries.get(first) or Node(value={}, line=value.line, origin=value.origin)
    entries[first] = _set_key(inner, rest, value) if rest else value
    return Node(value=entries, line=tree.line, origin=tree.origin)
