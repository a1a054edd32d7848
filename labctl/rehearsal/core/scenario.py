"""The settings that rehearsals share, and how they are loaded: a scenario file, then switches.

By default, everything succeeds at once. Actions are the cloud's own names, with `*` and `?` as in a
shell.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from labctl.config.document import Node, parse, quote, read_bytes
from labctl.config.reader import Parsed, read
from labctl.errors import ConfigError, Problem, UsageError
from labctl.model import Value

BootMode = Literal["cloud-init", "sshd", "none"]

ALWAYS = 1_000_000_000
_SECONDS = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)(ms|s|m|h|d)?")
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, None: 1.0}
HELP = "labctl rehearse --help"


def parse_seconds(text: str) -> float:
    """Parse `0s`, `1.5s`, `250ms`, `2m` or `1h` into seconds."""
    match = _SECONDS.fullmatch(text)
    if match is None:
        raise ValueError(f"{quote(text)} is not a time: write 250ms, 1.5s, 2m or 1h")
    return float(match[1]) * _UNITS_S[match[2]]


Seconds = Annotated[float, Parsed(parse_seconds)]


class Throttle(Value, frozen=True):
    """A token bucket: `burst` calls at once, then `rate` a second; others are throttled."""

    action: str = "*"
    rate: float = 1.0
    burst: int = 1


class OneTimeFault(Value, frozen=True):
    """After `skip` calls, the next `count` calls have the fault."""

    action: str = "*"
    count: int = 1
    skip: int = 0


class Loss(OneTimeFault, frozen=True):
    """A loss: these calls lose their response, or are dropped.

    The connection stays open for `hold`, or until the caller is gone, and is then closed.
    """

    hold: Seconds = 0.0


class CallFailure(OneTimeFault, frozen=True):
    """A failure of the cloud itself: these calls have no effect, and their reply is this status."""

    status: int = 500


class CloudDelays(Value, frozen=True):
    """The delays of a cloud.

    `api`: before every response; `boot`: from the creation to the machine's start; `visible`: until
    a new instance is listed; `terminate`: from the request until the instance has ended; `forget`:
    until an ended instance is no longer listed.
    """

    api: Seconds = 0.0
    boot: Seconds = 0.0
    visible: Seconds = 0.0
    terminate: Seconds = 0.0
    forget: Seconds = 0.0


class CloudCapacity(Value, frozen=True):
    """A capacity: `left` such instances can run at once; all others are unlimited.

    The type and the region are patterns.
    """

    type: str = "*"
    region: str = "*"
    left: int = 0


class CloudScenario(Value, frozen=True):
    """The settings of every cloud in `core.application`; each cloud's own scenario adds some.

    `image` is the base of machines instead of the lab server's image. `prices` replaces those of
    these instance types, in USD per hour. `quota` is how many instances the account may have at
    once; `balance_usd` its credit. `denied` actions lack the permission; `expired` credentials are
    refused. `failed` actions have no effect, `dropped` ones neither, `lost` ones have theirs.
    """

    regions: tuple[str, ...] = ()
    boot: BootMode = "cloud-init"
    image: str = ""
    prices: dict[str, float] = msgspec.field(default_factory=dict)
    delays: CloudDelays = CloudDelays()
    capacity: tuple[CloudCapacity, ...] = ()
    quota: int = ALWAYS
    balance_usd: float = msgspec.field(default=100.0, name="balance")
    throttle: tuple[Throttle, ...] = ()
    denied: tuple[str, ...] = ()
    expired: bool = False
    failed: tuple[CallFailure, ...] = ()
    lost: tuple[Loss, ...] = ()
    dropped: tuple[Loss, ...] = ()


Kind = TypeVar("Kind", bound=Value)


def load_scenario(kind: type[Kind], path: Path | None, switches: Iterable[str] = ()) -> Kind:
    """Load the scenario of a file (None is an empty one), with `key=value` overrides.

    Keys are dotted (`delays.boot=2s`); values are as in the file, including lists and mappings.
    ConfigError has every problem. UsageError for an override that is not KEY=VALUE.
    """
    problems: list[Problem] = []
    tree = Node(value={})
    if path is not None:
        data = read_bytes(path, "scenario", hint=HELP)
        tree = parse(data, path.name, problems) or tree
    return _override(kind, tree, switches, problems)


def override_scenario(scenario: Kind, switches: Iterable[str]) -> Kind:
    """Return the scenario with `key=value` overrides."""
    return _override(type(scenario), _build_node(msgspec.to_builtins(scenario)), switches, [])


def _override(
    kind: type[Kind], tree: Node, switches: Iterable[str], problems: list[Problem]
) -> Kind:
    for switch in switches:
        key, equals, text = switch.partition("=")
        if not equals or not key:
            raise UsageError(f"{quote(switch)} is not KEY=VALUE", hint="--set delays.boot=2s")
        origin = f"--set {key}"
        value = parse(text.encode(), origin, problems) or Node(value=None, origin=origin)
        tree = _set_key(tree, key.split("."), value)
    scenario = read(tree, kind, "", problems)
    if problems:
        raise ConfigError("the scenario is invalid", tuple(problems), hint=HELP)
    assert isinstance(scenario, kind)
    return scenario


def _build_node(value: Any) -> Node:
    """Turn msgspec's builtins of a scenario into the nodes of a document.

    A setting that is None is left out: that is its default, and a document has no value for it.
    """
    if isinstance(value, dict):
        present = {str(key): item for key, item in value.items() if item is not None}
        return Node(value={key: _build_node(item) for key, item in present.items()})
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
