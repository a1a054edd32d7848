"""What a group of measurements gets: a directory, the sizes, the peers and the image."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers import Peer


@dataclass(frozen=True)
class Sizes:
    """The sizes of all measurements. The targets apply to the full sizes."""

    rounds: int
    servers: int
    files: int
    big_mib: int
    forward_mib: int
    soak_s: float
    # servers or seats at a simulated cloud
    fleet: int
    # students in the ledger of a class
    students: int
    # whether the lab of `first-line` is the sample project; building its image takes minutes
    has_training: bool = True

    @property
    def few(self) -> int:
        """The number of rounds of slow measurements."""
        return max(1, self.rounds // 3)


FULL = Sizes(
    rounds=15,
    servers=20,
    files=10_000,
    big_mib=1024,
    forward_mib=512,
    soak_s=300.0,
    fleet=30,
    students=300,
)
QUICK = Sizes(
    rounds=3,
    servers=4,
    files=1000,
    big_mib=64,
    forward_mib=64,
    # `pull --follow` pulls every 15 s, and only files that have not changed for 2 s
    soak_s=20.0,
    fleet=4,
    students=60,
    has_training=False,
)


@dataclass(frozen=True)
class Settings:
    """Settings of one run. `home` is a new directory, in which each group makes its own."""

    home: Path
    sizes: Sizes
    peers: dict[str, Peer]
    image: str
    # whether SFTP's first push of all files is measured too, which takes minutes
    slow_peers: bool
