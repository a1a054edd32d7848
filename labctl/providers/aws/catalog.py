"""AWS's machine types and prices as values, and their cache on disk."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path
from typing import TypeVar

import msgspec

from labctl.decoding import decode_json
from labctl.model import Value

VERSION = 2
TYPES_FRESH_S = 7 * 86_400.0
PRICES_FRESH_S = 15 * 60.0
SCORES_FRESH_S = 3_600.0
FORGET_S = 30 * 86_400.0


class Hardware(Value, frozen=True):
    """One instance type. GPU memory is per GPU; `part` is below 1 if it has a fraction of a GPU.

    `cluster`: placement groups with the strategy `cluster` accept it. `efa`: it can have an Elastic
    Fabric Adapter.
    """

    type: str
    cpus: int
    memory_bytes: int
    arch: str
    gpu_name: str = ""
    gpu_maker: str = ""
    gpu_count: int = 0
    gpu_memory_bytes: int = 0
    part: float = 1.0
    spot: bool = True
    on_demand: bool = True
    cluster: bool = False
    efa: bool = False


class Catalog(Value, frozen=True):
    """The types of one region, and the zones that have each."""

    version: int
    made_at: float
    hardware: tuple[Hardware, ...]
    zones: dict[str, tuple[str, ...]]


class SpotPrice(Value, frozen=True):
    """USD per hour: now, and the week's lowest and highest."""

    now: float
    low: float
    high: float


class Prices(Value, frozen=True):
    """USD per hour in one region: `spot` by type and zone, `on_demand` by type."""

    version: int
    made_at: float
    spot: dict[str, dict[str, SpotPrice]]
    on_demand: dict[str, float]


class Market(Value, frozen=True):
    region: str
    catalog: Catalog
    prices: Prices


class Scores(Value, frozen=True):
    """AWS's spot placement scores, 1 to 10, by type and zone; empty if AWS gave none."""

    version: int
    made_at: float
    by_type: dict[str, dict[str, int]]


Cached = TypeVar("Cached", Catalog, Prices, Scores)


class CatalogCache:
    """A cache in a directory whose files may be deleted or damaged at any time.

    With None as the directory nothing is cached.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory

    def read(self, name: str, kind: type[Cached], fresh_s: float) -> Cached | None:
        """Read a value that is younger than `fresh_s`; None otherwise."""
        if self._directory is None:
            return None
        try:
            value = decode_json((self._directory / name).read_bytes(), kind)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return None
        age_s = time.time() - value.made_at
        return value if value.version == VERSION and 0 <= age_s < fresh_s else None

    def write(self, name: str, value: Value) -> None:
        """Store a value, and delete files older than FORGET_S."""
        if self._directory is None:
            return
        # A value that cannot be written is fetched again next time.
        with contextlib.suppress(OSError):
            self._directory.mkdir(parents=True, exist_ok=True)
            self._delete_old_files()
            descriptor, draft = tempfile.mkstemp(dir=self._directory, prefix=".")
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.encode(value))
            Path(draft).replace(self._directory / name)

    def _delete_old_files(self) -> None:
        assert self._directory is not None
        for path in self._directory.iterdir():
            if time.time() - path.stat().st_mtime > FORGET_S:
                path.unlink(missing_ok=True)
