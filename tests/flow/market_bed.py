"""Several in-memory clouds that a lab may get its server from, loaded as a new process would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from lab_world import LAB_ID, DiskCloud, Machine, Recorded, Wires

from labctl.config import Paths, find_paths
from labctl.events import Reporter
from labctl.lab import Lab
from labctl.model import Endpoint, Need, Offer, Server
from labctl.servers.connections import Connections
from labctl.servers.context import LabContext
from labctl.servers.host_keys import ensure_key_pair
from labctl.state import State
from labctl.transports import Transport


class MemberCloud(DiskCloud):
    """A cloud that is one object for all contexts of a test: its class has the name of the cloud.

    `gpu` is the GPU of its machines, and `list_offers` replaces its offers.
    """

    has_credentials: bool = True
    only: ClassVar[dict[str, MemberCloud]] = {}

    def __new__(cls, *_: Any) -> MemberCloud:
        if cls.name not in cls.only:
            cls.only[cls.name] = super().__new__(cls)
        return cls.only[cls.name]

    def __init__(self, *words: Any) -> None:
        if len(words) == 1:
            super().__init__(words[0])
            self.settle_s = 0.2
            self.list_offers: Callable[[Need], list[Offer]] | None = None

    def offers(self, need: Need) -> list[Offer]:
        return self.list_offers(need) if self.list_offers else super().offers(need)


class Alpha(MemberCloud):
    name: ClassVar[str] = "alpha"


class Beta(MemberCloud):
    name: ClassVar[str] = "beta"


class MarketWires(Wires):
    """Each cloud has a machine of its own."""

    def __init__(self, places: Paths, machines: dict[str, Machine], clouds: dict[str, Any]) -> None:
        Connections.__init__(self, places.ssh_dir, places.user_ssh_config)
        self.machines, self.clouds = machines, clouds

    def _make_transport(self, config: Path, server_id: str, endpoint: Endpoint) -> Transport:
        for name, cloud in self.clouds.items():
            if server_id in cloud.machines or server_id in cloud.ended:
                return self.machines[name].transport()
        raise AssertionError(f"nobody has {server_id}")


@dataclass
class MarketWorld:
    """A user's home with a lab, and the clouds alpha and beta, each with one machine."""

    home: Path
    alpha: Alpha
    beta: Beta
    machines: dict[str, Machine]
    reporters: list[Recorded] = field(default_factory=list)

    @property
    def places(self) -> Paths:
        return find_paths({"HOME": str(self.home)})

    @property
    def clouds(self) -> dict[str, Any]:
        return {"alpha": self.alpha, "beta": self.beta}

    @property
    def state(self) -> State:
        return State(self.places.database)

    @property
    def reporter(self) -> Recorded:
        return self.reporters[-1]

    def write(self, server: str) -> None:
        """Write a lab.yaml with this server section."""
        lines = ["lab: digits", f"server: {server}", "image: small:1", "run: 'true'"]
        (self.home / "lab" / "lab.yaml").write_text("\n".join(lines) + "\n")

    def load(self, reporter: Reporter | None = None, **overrides: str) -> Lab:
        """Load the lab as a new command would, with typed options."""
        self.reporters.append(Recorded())
        lab = Lab.load(
            self.home / "lab",
            overrides=overrides,
            reporter=reporter or self.reporter,
            environ={"HOME": str(self.home)},
        )
        wires = MarketWires(self.places, self.machines, self.clouds)
        return Lab(msgspec.structs.replace(lab.context, shared_connections=wires))

    def context(self, reporter: Reporter | None = None, **overrides: str) -> LabContext:
        return self.load(reporter, **overrides).context

    def up(self, **overrides: str) -> Server:
        lab = self.load(**overrides)
        lab.require_approval()
        return lab.up().server

    def list_servers(self) -> list[str]:
        """List the machines that exist at all clouds: `alpha small`."""
        every = [*self.alpha.machines.values(), *self.beta.machines.values()]
        return sorted(f"{server.provider} {server.offer.type}" for server in every)


def make_market(directory: Path) -> MarketWorld:
    home = directory / "home"
    (home / "lab" / ".labctl").mkdir(parents=True)
    (home / "lab" / ".labctl" / "lab.json").write_text(f'{{"id": "{LAB_ID}"}}')
    MemberCloud.only.clear()
    machines = {}
    for name in ("alpha", "beta"):
        (directory / name).mkdir()
        machines[name] = Machine(directory / name)
    key = ensure_key_pair(directory / "host").rpartition(" ")[0]
    alpha, beta = Alpha(key), Beta(key)
    alpha.price, beta.price = 0.5, 0.4
    market = MarketWorld(home, alpha, beta, machines)
    market.write("{provider: auto}")
    return market
